"""The early warning: what needs no label, against calibration and against its own past."""

import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Route, ScoreKind
from ctxguard.errors import ConfigurationError, MissingExtraError
from ctxguard.monitor.alarms import (
    AlarmKind,
    AlarmState,
    DriftDetector,
    Reference,
    Severity,
    Signal,
    Signals,
)
from ctxguard.monitor.alarms.drift import COMPARED_REQUESTS, REMEMBERED, drift_detectors
from ctxguard.profile.schema import Evidence, Profile, RouteProfile
from tests.profiles import profile_with, sufficiency_with

DECILES = np.linspace(0.0, 1.0, 11)


def reference_of(values: np.ndarray, n: int | None = None) -> Reference:
    return Reference(tuple(np.quantile(values, DECILES).tolist()), n or len(values))


def route_of(rng: np.random.Generator) -> RouteProfile:
    return RouteProfile(
        policy=RatioPolicy(k=3),
        score_kind=ScoreKind.RATIO,
        chosen_on=Evidence(queries=400, metrics={}),
        reference={
            "top_score": reference_of(rng.normal(10.0, 1.0, 400)).deciles,
            "kept": reference_of(1.0 + rng.binomial(4, 0.4, 400)).deciles,
        },
    )


def profile_of(route: RouteProfile) -> Profile:
    return profile_with({Route.HYBRID: route})


class TestSignals:
    def test_they_are_the_best_score_and_its_gap_in_any_order(self) -> None:
        assert Signals.of([1.0, 4.0, 2.5], kept=2) == Signals(4.0, 1.5, 2)

    def test_garbage_is_passed_over(self) -> None:
        assert Signals.of([None, float("nan"), 1e38, 3.0], kept=1) == Signals(3.0, None, 1)

    def test_without_candidates_there_is_no_score_and_the_context_is_empty(self) -> None:
        signals = Signals.of([], kept=0)
        assert signals == Signals(None, None, 0)
        assert signals.values()[Signal.EMPTY] == 1.0

    def test_the_names_are_those_that_calibration_writes(self) -> None:
        assert {"top_score", "score_gap", "kept"} <= {signal.value for signal in Signal}


class TestReference:
    def test_repeated_values_share_the_middle_of_their_range(self) -> None:
        counts = Reference((1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 3.0, 5.0))
        assert counts.position(1.0) == pytest.approx(0.2)
        assert counts.position(2.0) == pytest.approx(0.55)

    @given(
        st.lists(st.floats(-1e6, 1e6), min_size=11, max_size=11).map(sorted),
        st.floats(-2e6, 2e6),
        st.floats(-2e6, 2e6),
    )
    def test_a_position_lies_in_the_unit_interval_and_keeps_the_order(
        self, deciles: list[float], one: float, other: float
    ) -> None:
        reference = Reference(tuple(deciles))
        low, high = (reference.position(value) for value in sorted((one, other)))
        assert 0.0 <= low <= high <= 1.0

    @pytest.mark.parametrize("deciles", [(), (1.0,) * 10, tuple(range(10, -1, -1))])
    def test_what_is_not_eleven_ascending_deciles_is_refused(
        self, deciles: tuple[float, ...]
    ) -> None:
        with pytest.raises(ConfigurationError, match="11 ascending deciles"):
            DriftDetector(Reference(deciles))


class TestAgainstItsOwnPast:
    def test_a_shift_is_warned_of_with_both_means(self) -> None:
        rng = np.random.default_rng(1)
        detector = DriftDetector(reference_of(rng.normal(0.0, 1.0, 500)), share=0.25)
        values = [*rng.normal(0.0, 1.0, 1_500), *rng.normal(0.5, 1.0, 1_000)]
        found = [
            (n, warned) for n, value in enumerate(values) if (warned := detector.update(value))
        ]
        n, warned = found[0]
        assert 1_500 < n < 2_100
        assert not warned.at_start
        assert warned.before == pytest.approx(0.5, abs=0.05)
        assert warned.value > 0.6

    def test_in_control_it_seldom_warns(self) -> None:
        rng = np.random.default_rng(2)
        warned = 0
        for _ in range(60):
            detector = DriftDetector(reference_of(rng.normal(0.0, 1.0, 500)), share=0.25)
            warned += any(detector.update(value) for value in rng.normal(0.0, 1.0, 3_000))
        assert warned <= 2

    def test_a_rate_of_empty_contexts_needs_no_reference(self) -> None:
        rng = np.random.default_rng(3)
        detector = DriftDetector()
        assert not any(detector.update(value) for value in (rng.random(1_000) < 0.02).astype(float))
        assert any(detector.update(value) for value in (rng.random(500) < 0.3).astype(float))

    def test_garbage_is_no_value(self) -> None:
        detector = DriftDetector()
        assert detector.update(float("nan")) is None
        assert detector.n == 0


class TestAgainstCalibration:
    def test_another_distribution_from_the_first_request_is_warned_of_once(self) -> None:
        rng = np.random.default_rng(4)
        detector = DriftDetector(reference_of(rng.normal(0.0, 1.0, 400)))
        found = [
            (n, detector.update(value)) for n, value in enumerate(rng.normal(0.6, 1.0, 2_000), 1)
        ]
        warnings = [(n, warned) for n, warned in found if warned is not None and warned.at_start]
        ((n, warned),) = warnings
        assert n == warned.n == COMPARED_REQUESTS
        assert warned.value > warned.before == detector.allowed_distance

    def test_the_distribution_of_calibration_is_seldom_warned_of(self) -> None:
        rng = np.random.default_rng(5)
        far = 0
        for _ in range(200):
            detector = DriftDetector(reference_of(rng.gamma(2.0, 1.0, 150)), share=0.25)
            for value in rng.gamma(2.0, 1.0, COMPARED_REQUESTS):
                detector.update(value)
            assert detector.distance is not None
            assert detector.allowed_distance is not None
            far += detector.distance > detector.allowed_distance
        assert far <= 1

    def test_counts_that_repeat_are_compared_exactly(self) -> None:
        rng = np.random.default_rng(6)
        detector = DriftDetector(reference_of(1.0 + rng.binomial(4, 0.4, 2_000)))
        for value in 1.0 + rng.binomial(4, 0.4, COMPARED_REQUESTS):
            detector.update(value)
        assert detector.distance is not None
        assert detector.distance < 0.06

    def test_where_nobody_knows_how_exact_the_deciles_are_nothing_is_compared(self) -> None:
        detector = DriftDetector(Reference(tuple(DECILES.tolist())))
        assert not any(detector.update(2.0) for _ in range(COMPARED_REQUESTS))
        assert detector.distance is None


class TestRestart:
    def test_the_window_is_rebuilt_and_still_notices_a_shift(self) -> None:
        rng = np.random.default_rng(7)
        reference = reference_of(rng.normal(0.0, 1.0, 500))
        detector = DriftDetector(reference)
        for value in rng.normal(0.0, 1.0, 2_000):
            detector.update(value)
        state = json.loads(json.dumps(detector.state()))
        assert len(state["recent"]) == REMEMBERED
        resumed = DriftDetector(reference)
        resumed.resume(state)
        assert resumed.state() == detector.state()
        assert any(resumed.update(value) for value in rng.normal(1.0, 1.0, 400))

    def test_what_was_warned_of_is_forgotten(self) -> None:
        detector = DriftDetector()
        for value in [0.0] * 200 + [1.0] * 200:
            if detector.update(value):
                break
        assert detector.state()["recent"] == []


class TestInTheState:
    def test_a_shift_is_a_warning_that_claims_no_loss(self) -> None:
        rng = np.random.default_rng(8)
        state = AlarmState(profile_of(route_of(rng)))
        warnings = []
        for mean in [10.0] * 1_000 + [12.0] * 500:
            signals = Signals(float(rng.normal(mean, 1.0)), None, 1 + int(rng.binomial(4, 0.4)))
            warnings += state.add_signals(Route.HYBRID, signals, time_seconds=7.0)
        (warning,) = warnings
        assert (warning.kind, warning.severity) == (AlarmKind.DRIFT, Severity.WARNING)
        assert (warning.route, warning.signal) == (Route.HYBRID, "top_score")
        assert "top_score has changed" in warning.message
        assert "only labels and judged requests show" in warning.message

    def test_another_distribution_is_an_alarm_with_its_distance(self) -> None:
        rng = np.random.default_rng(9)
        state = AlarmState(profile_of(route_of(rng)))
        for _ in range(COMPARED_REQUESTS):
            state.add_signals(Route.HYBRID, Signals(15.0, None, 2), time_seconds=1.0)
        (alarm,) = [alarm for alarm in state.active() if alarm.signal == "top_score"]
        assert alarm.value > 0.8
        assert alarm.target < 0.2
        assert "was distributed otherwise over the first 500 requests" in alarm.message

    def test_a_signal_without_reference_has_no_detector(self) -> None:
        detectors = drift_detectors(route_of(np.random.default_rng(10)))
        assert set(detectors) == {Signal.TOP_SCORE, Signal.KEPT, Signal.EMPTY}

    def test_a_share_of_insufficient_contexts_that_rises_is_an_alarm(self) -> None:
        route = route_of(np.random.default_rng(13))
        assert Signal.INSUFFICIENT not in drift_detectors(route)
        sufficiency = sufficiency_with(threshold=0.2)
        state = AlarmState(profile_of(route.model_copy(update={"sufficiency": sufficiency})))
        random = np.random.default_rng(14)
        for share in (0.1, 0.5):
            assert "insufficient" not in [alarm.signal for alarm in state.active()]
            for insufficient in random.random(600) < share:
                signals = Signals.of([], kept=1, insufficient=bool(insufficient))
                state.add_signals(Route.HYBRID, signals, time_seconds=1.0)
        (alarm,) = [each for each in state.active() if each.signal == "insufficient"]
        assert "insufficient has changed: its share of requests went from 0." in alarm.message

    def test_without_a_threshold_insufficient_contexts_are_not_watched(self) -> None:
        route = route_of(np.random.default_rng(15))
        unsure = route.model_copy(update={"sufficiency": sufficiency_with(threshold=None)})
        assert Signal.INSUFFICIENT not in drift_detectors(unsure)

    def test_a_route_that_was_not_calibrated_gives_no_warning(self) -> None:
        state = AlarmState(profile_of(route_of(np.random.default_rng(11))))
        assert state.add_signals(Route.DENSE, Signals(1.0, 1.0, 1), time_seconds=1.0) == []

    def test_without_river_it_says_which_extra_brings_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "river.drift", None)
        profile = profile_of(route_of(np.random.default_rng(12)))
        with pytest.raises(MissingExtraError, match=r"ctxguard\[monitor\]"):
            AlarmState(profile)
        assert AlarmState(profile, drift=False).active() == ()
