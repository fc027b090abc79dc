"""The early warning: what needs no label, against calibration and against its own past."""

import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.errors import ConfigurationError, MissingExtraError
from ctxguard.monitor.alarms import (
    AlarmBoard,
    AlarmKind,
    DriftWatch,
    Reference,
    Severity,
    Signal,
    Signals,
)
from ctxguard.monitor.alarms.drift import COMPARED_REQUESTS, REMEMBERED, drift_watches
from ctxguard.policy import RatioPolicy
from ctxguard.profile import Evidence, Profile, RouteProfile
from ctxguard.types import Route, ScoreKind
from tests.profiles import profile_with

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
    def test_they_are_the_best_score_and_its_lead_in_any_order(self) -> None:
        assert Signals.of([1.0, 4.0, 2.5], kept=2) == Signals(4.0, 1.5, 2)

    def test_garbage_is_passed_over(self) -> None:
        assert Signals.of([None, float("nan"), 1e38, 3.0], kept=1) == Signals(3.0, None, 1)

    def test_without_candidates_there_is_no_score_and_the_context_is_empty(self) -> None:
        signals = Signals.of([], kept=0)
        assert signals == Signals(None, None, 0)
        assert signals.values()[Signal.EMPTY] == 1.0

    def test_the_names_are_those_that_calibration_writes(self) -> None:
        assert {"top_score", "lead", "kept"} <= {signal.value for signal in Signal}


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
            DriftWatch(Reference(deciles))


class TestAgainstItsOwnPast:
    def test_a_shift_is_warned_of_with_both_means(self) -> None:
        rng = np.random.default_rng(1)
        watch = DriftWatch(reference_of(rng.normal(0.0, 1.0, 500)), share=0.25)
        values = [*rng.normal(0.0, 1.0, 1_500), *rng.normal(0.5, 1.0, 1_000)]
        found = [(n, warned) for n, value in enumerate(values) if (warned := watch.after(value))]
        n, warned = found[0]
        assert 1_500 < n < 2_100
        assert not warned.at_start
        assert warned.before == pytest.approx(0.5, abs=0.05)
        assert warned.value > 0.6

    def test_in_control_it_seldom_warns(self) -> None:
        rng = np.random.default_rng(2)
        warned = 0
        for _ in range(60):
            watch = DriftWatch(reference_of(rng.normal(0.0, 1.0, 500)), share=0.25)
            warned += any(watch.after(value) for value in rng.normal(0.0, 1.0, 3_000))
        assert warned <= 2

    def test_a_rate_of_empty_contexts_needs_no_reference(self) -> None:
        rng = np.random.default_rng(3)
        watch = DriftWatch()
        assert not any(watch.after(value) for value in (rng.random(1_000) < 0.02).astype(float))
        assert any(watch.after(value) for value in (rng.random(500) < 0.3).astype(float))

    def test_garbage_is_no_value(self) -> None:
        watch = DriftWatch()
        assert watch.after(float("nan")) is None
        assert watch.n == 0


class TestAgainstCalibration:
    def test_another_distribution_from_the_first_request_is_warned_of_once(self) -> None:
        rng = np.random.default_rng(4)
        watch = DriftWatch(reference_of(rng.normal(0.0, 1.0, 400)))
        found = [(n, watch.after(value)) for n, value in enumerate(rng.normal(0.6, 1.0, 2_000), 1)]
        warnings = [(n, warned) for n, warned in found if warned is not None and warned.at_start]
        ((n, warned),) = warnings
        assert n == warned.n == COMPARED_REQUESTS
        assert warned.value > warned.before == watch.allowed_distance

    def test_the_distribution_of_calibration_is_seldom_warned_of(self) -> None:
        rng = np.random.default_rng(5)
        far = 0
        for _ in range(200):
            watch = DriftWatch(reference_of(rng.gamma(2.0, 1.0, 150)), share=0.25)
            for value in rng.gamma(2.0, 1.0, COMPARED_REQUESTS):
                watch.after(value)
            assert watch.distance is not None
            assert watch.allowed_distance is not None
            far += watch.distance > watch.allowed_distance
        assert far <= 1

    def test_counts_that_repeat_are_compared_exactly(self) -> None:
        rng = np.random.default_rng(6)
        watch = DriftWatch(reference_of(1.0 + rng.binomial(4, 0.4, 2_000)))
        for value in 1.0 + rng.binomial(4, 0.4, COMPARED_REQUESTS):
            watch.after(value)
        assert watch.distance is not None
        assert watch.distance < 0.06

    def test_where_nobody_knows_how_exact_the_deciles_are_nothing_is_compared(self) -> None:
        watch = DriftWatch(Reference(tuple(DECILES.tolist())))
        assert not any(watch.after(2.0) for _ in range(COMPARED_REQUESTS))
        assert watch.distance is None


class TestRestart:
    def test_the_window_is_rebuilt_and_still_notices_a_shift(self) -> None:
        rng = np.random.default_rng(7)
        reference = reference_of(rng.normal(0.0, 1.0, 500))
        watch = DriftWatch(reference)
        for value in rng.normal(0.0, 1.0, 2_000):
            watch.after(value)
        state = json.loads(json.dumps(watch.state()))
        assert len(state["recent"]) == REMEMBERED
        resumed = DriftWatch(reference)
        resumed.resume(state)
        assert resumed.state() == watch.state()
        assert any(resumed.after(value) for value in rng.normal(1.0, 1.0, 400))

    def test_what_was_warned_of_is_forgotten(self) -> None:
        watch = DriftWatch()
        for value in [0.0] * 200 + [1.0] * 200:
            if watch.after(value):
                break
        assert watch.state()["recent"] == []


class TestOnTheBoard:
    def test_a_shift_is_a_warning_that_claims_no_loss(self) -> None:
        rng = np.random.default_rng(8)
        board = AlarmBoard(profile_of(route_of(rng)))
        warnings = []
        for mean in [10.0] * 1_000 + [12.0] * 500:
            signals = Signals(float(rng.normal(mean, 1.0)), None, 1 + int(rng.binomial(4, 0.4)))
            warnings += board.signals(Route.HYBRID, signals, time_seconds=7.0)
        (warning,) = warnings
        assert (warning.kind, warning.severity) == (AlarmKind.DRIFT, Severity.WARNING)
        assert (warning.route, warning.signal) == (Route.HYBRID, "top_score")
        assert "top_score has moved" in warning.message
        assert "only labels and judged requests tell" in warning.message

    def test_how_far_live_traffic_lies_from_calibration_is_reported(self) -> None:
        rng = np.random.default_rng(9)
        board = AlarmBoard(profile_of(route_of(rng)))
        for _ in range(COMPARED_REQUESTS):
            board.signals(Route.HYBRID, Signals(15.0, None, 2), time_seconds=1.0)
        distance, allowed = board.report().distances[Route.HYBRID, Signal.TOP_SCORE]
        assert distance > 0.8
        assert allowed < 0.2
        messages = [alarm.message for alarm in board.active() if alarm.signal == "top_score"]
        assert "was distributed otherwise over the first 500 requests" in messages[0]

    def test_a_signal_without_reference_is_not_watched(self) -> None:
        watches = drift_watches(route_of(np.random.default_rng(10)))
        assert set(watches) == {Signal.TOP_SCORE, Signal.KEPT, Signal.EMPTY}

    def test_a_route_that_was_not_calibrated_gives_no_warning(self) -> None:
        board = AlarmBoard(profile_of(route_of(np.random.default_rng(11))))
        assert board.signals(Route.DENSE, Signals(1.0, 1.0, 1), time_seconds=1.0) == []

    def test_without_river_it_says_which_extra_brings_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "river.drift", None)
        profile = profile_of(route_of(np.random.default_rng(12)))
        with pytest.raises(MissingExtraError, match=r"ctxguard\[monitor\]"):
            AlarmBoard(profile)
        assert AlarmBoard(profile, drift=False).active() == ()
