"""The state of the alarms: what is monitored, what raises an alarm, what stays active."""

import math
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Route, ScoreKind
from ctxguard.errors import DataError
from ctxguard.measure.interval import Interval
from ctxguard.measure.rows import FAILED, NO, PASSAGE, REQUEST, ROUTES, Rows
from ctxguard.measure.worth import STRICT, Utilities
from ctxguard.monitor.alarms import (
    Alarm,
    AlarmKind,
    AlarmState,
    LossMonitor,
    PromisedLoss,
    ReferenceKind,
)
from ctxguard.monitor.alarms.decision import promises
from ctxguard.monitor.alarms.ecusum import WEEK, Day
from ctxguard.profile.schema import Profile, RouteEvidence, RouteProfile, RouteVerdict
from tests.profiles import CERTIFICATE, profile_with

EVIDENCE = RouteEvidence(
    queries=250,
    metrics={"harm": Interval(value=0.3, lower=0.25, upper=0.36, n=250)},
    most_recall_loss=0.2,
)
ROUTE_PROFILE = RouteProfile(
    policy=RatioPolicy(k=3, min_ratio=0.8),
    score_kind=ScoreKind.RATIO,
    certificate=CERTIFICATE,
    verdict=RouteVerdict(
        decision="enforce", n=250, serving_k=5, tolerance=0.01, max_loss=0.05, shown_by="folds"
    ),
    evidence=EVIDENCE,
    safe_policy=RatioPolicy(k=10),
)


def profile_of(**changes: object) -> Profile:
    made = profile_with({Route.HYBRID: ROUTE_PROFILE.model_copy(update=changes)})
    return made.model_copy(update={"utilities": STRICT})


PROFILE = profile_of()
PROFILE_ID = PROFILE.profile_id
PROMISE = PromisedLoss(Route.HYBRID, AlarmKind.RECALL_LOSS, 0.12)
MONITOR = LossMonitor.of_exact_judge(PROMISE)
QUESTIONS = count()


def state_of(profile: Profile = PROFILE, *, exact: bool = True) -> AlarmState:
    return AlarmState(profile, exact=exact)


def requests(
    losses: Sequence[float | None],
    harm: float | None = None,
    route: Route = Route.HYBRID,
    **columns: float,
) -> Rows:
    """Requests of different questions that were served a passage each, and their losses."""
    n = len(losses)
    found, passages = np.zeros(n, REQUEST), np.zeros(n, PASSAGE)
    own = {
        "question": [next(QUESTIONS) for _ in losses],
        "route": ROUTES.index(route),
        "n_passages": 1,
        "n_served": 1,
        "probability": 0.5,
        "recall_loss": np.array(losses, np.float64),
        "loss_probability": 0.2,
    }
    for name, values in (own | columns).items():
        found[name] = values
    passages["rank"] = passages["size"] = 1
    passages["judge_grade"], passages["worth"] = (FAILED, 0.0) if harm is None else (NO, -harm)
    return Rows.of(found, passages)


def lose(
    state: AlarmState, loss: float | None, times: int, *, harm: float | None = None, at: float = 1.0
) -> list[Alarm]:
    """A day of requests of different questions, each with the same loss."""
    return state.add_day(requests([loss] * times, harm), at)[0]


def day(mean: float, rng: random.Random, n: int = 200, **columns: float) -> Rows:
    return requests([float(rng.random() < mean) for _ in range(n)], **columns)


def learn(state: AlarmState) -> None:
    """A week with a mean loss of 0.12, after which the baseline is known."""
    for _ in range(WEEK):
        state.add_day(requests([float(n % 8 == 0) for n in range(100)]), 1.0)


def losses_of(losses: Sequence[float]) -> Day:
    return Day.of(np.array(losses), np.ones(len(losses)), np.arange(len(losses)))


def monitor_of(state: AlarmState, reference: ReferenceKind) -> LossMonitor:
    (found,) = [
        one
        for one in state.report().losses
        if (one.quantity, one.reference) == (AlarmKind.RECALL_LOSS, reference)
    ]
    return found


def promises_of(profile: Profile) -> dict[AlarmKind, PromisedLoss]:
    return {promise.quantity: promise for promise in promises(profile)}


VACUOUS = CERTIFICATE.model_copy(update={"alpha": 1.0})
HARMLESS = Utilities(hard_negative=0.0, distractor=0.0, irrelevant=0.0, unjudged=0.0)
RECALL_OF = {AlarmKind.RECALL_LOSS: (0.12, "certificate")}
HARM_OF = {AlarmKind.HARM: (0.36, "evidence of calibration")}


class TestWhatIsMonitored:
    @pytest.mark.parametrize(
        ("profile", "promised"),
        [
            (PROFILE, RECALL_OF | HARM_OF),
            (profile_of(evidence=None), RECALL_OF),
            (
                profile_of(certificate=None),
                HARM_OF | {AlarmKind.RECALL_LOSS: (0.2, "evidence of calibration")},
            ),
            (PROFILE.model_copy(update={"utilities": HARMLESS}), RECALL_OF),
            (profile_of(certificate=VACUOUS), HARM_OF),
        ],
        ids=["alpha and evidence", "no evidence", "no certificate", "harmless", "vacuous"],
    )
    def test_profiles_breakable_promises_are_monitored(
        self, profile: Profile, promised: dict[AlarmKind, tuple[float, str]]
    ) -> None:
        found = promises_of(profile).items()
        assert {name: (one.at_most, one.source) for name, one in found} == promised

    def test_harm_is_bounded_by_worst_context(self) -> None:
        worst = 1.0 + 1.0 / math.log2(3) + 0.5
        assert promises_of(PROFILE)[AlarmKind.HARM].bound == pytest.approx(worst)

    def test_lossless_promise_breaks_by_successive_losses(self) -> None:
        """A promise of no loss at all is broken by losses in a row."""
        monitor = LossMonitor.of_exact_judge(replace(PROMISE, at_most=0.0))
        assert not monitor.after(losses_of([1.0])).is_alarm
        assert monitor.after(losses_of([1.0] * 20)).is_alarm


class TestLossMonitor:
    def test_unit_of_loss_is_irrelevant(self) -> None:
        """The unit of the loss does not matter and its bound is the most it counts."""
        small, large = (
            LossMonitor.of_exact_judge(
                PromisedLoss(Route.HYBRID, AlarmKind.HARM, 0.25 * bound, bound)
            )
            for bound in (1.0, 4.0)
        )
        losses = np.array([0.5, 0.0, 1.0])
        small, large = small.after(losses_of(losses)), large.after(losses_of(4.0 * losses))
        assert small.ecusum == large.ecusum
        assert large.run_mean == pytest.approx(4.0 * small.run_mean)
        beyond, bound = large.after(losses_of([7.0])), large.after(losses_of([4.0]))
        assert beyond.ecusum == bound.ecusum

    def test_mean_starts_when_losses_rose(self) -> None:
        monitor = MONITOR
        assert monitor.run_mean is None
        for losses in ([0.0] * 300, [0.5] * 20, [0.5] * 20):
            monitor = monitor.after(losses_of(losses))
        assert (monitor.run.n, monitor.run_mean) == (40, 0.5)


class TestRaising:
    def test_doubled_recall_loss_raises_with_figures(self) -> None:
        rng, state = random.Random(1), state_of()
        assert not any(state.add_day(day(0.10, rng), 1.0)[0] for _ in range(10))
        alarms, days = list[Alarm](), 0
        while not alarms:
            alarms, days = state.add_day(day(0.20, rng), 1e9)[0], days + 1
        assert days <= 3
        (alarm,) = alarms
        assert alarm.kind is AlarmKind.RECALL_LOSS
        assert (alarm.route, alarm.target, alarm.time_seconds) == (Route.HYBRID, 0.12, 1e9)
        assert alarm.profile_id == PROFILE.profile_id
        assert alarm.value is not None
        assert 0.12 < alarm.value < 0.3

    def test_message_says_what_to_do(self) -> None:
        (alarm,) = lose(state_of(), 0.5, 60)
        assert alarm.message == (
            f"Route hybrid: judged recall loss against the retriever's first 5 was about 0.5 over "
            f"the last {alarm.n} judged requests; the certificate promises at most 0.12. "
            "Recalibrate on judged traffic; meanwhile the safe policy, the retriever's first 10, "
            "loses the least recall. If the judge was changed recently, check it first."
        )

    def test_harm_names_target_without_safe_policy(self) -> None:
        (lost,) = lose(state_of(profile_of(safe_policy=None)), 0.5, 60)
        assert "this profile has no safe policy" in lost.message
        alarms = lose(state_of(), None, 200, harm=1.5)
        assert [alarm.kind for alarm in alarms] == [AlarmKind.HARM]
        assert "the evidence of calibration is at most 0.36" in alarms[0].message
        assert "no safe policy helps, since more passages do more harm" in alarms[0].message

    def test_route_without_promise_stays_silent(self) -> None:
        judged = state_of().add_day(requests([1.0] * 100, 5.0, Route.DENSE), 1.0)
        assert judged == ([], [])

    @pytest.mark.parametrize("alike", [{"question": -1}, {"session": 7}])
    def test_repeated_loss_breaks_no_promise(self, alike: dict[str, int]) -> None:
        """A question asked, or a session of, forty times in four hundred."""
        rng, state = random.Random(2), state_of()
        viral = requests([1.0] * 40, **alike)
        assert state.add_day(Rows.joined([viral, day(0.10, rng, 360)]), 1.0)[0] == []

    def test_losses_count_by_traffic(self) -> None:
        rng = random.Random(3)
        seldom = day(0.08, rng, 400, loss_probability=0.1)
        both = Rows.joined([seldom, day(0.40, rng, 400, loss_probability=1.0)])
        weighed, counted = state_of(), state_of()
        assert not any(weighed.add_day(both, 1.0)[0] for _ in range(3))
        both.requests["loss_probability"] = 1.0
        assert any(counted.add_day(both, 1.0)[0] for _ in range(3))

    @pytest.mark.parametrize("loss", [None, 1.5, -1.0, math.nan, math.inf])
    def test_undefined_losses_are_left_out(self, loss: float | None) -> None:
        state = state_of()
        assert lose(state, loss, 100) == []
        assert state.report().losses[0].n == 0
        no_probability = requests([1.0] * 100, loss_probability=math.nan)
        assert state.add_day(no_probability, 1.0)[0] == []


class TestActiveAlarms:
    def test_ends_once_kept_is_certain(self) -> None:
        """It ends when it is as certain that the promise is kept."""
        state = state_of()
        (alarm,) = lose(state, 1.0, 50)
        lose(state, 0.0, 20)
        assert state.report().active == (alarm,)
        ended = [state.add_day(requests([0.0] * 100), 2.0)[1] for _ in range(4)]
        assert [alarm] in ended
        assert state.report().active == ()
        assert lose(state, 1.0, 50) != []

    def test_neither_ends_nor_rings_at_promise(self) -> None:
        """It neither ends nor rings again while the loss stays at what is promised."""
        rng, state = random.Random(3), state_of()
        lose(state, 1.0, 50)
        for _ in range(50):
            assert state.add_day(day(0.13, rng), 2.0) == ([], [])
        assert state.report().raised[AlarmKind.RECALL_LOSS] == 1
        assert [alarm.kind for alarm in state.report().active] == [AlarmKind.RECALL_LOSS]

    def test_baseline_adds_nothing_to_promise_alarm(self) -> None:
        state = state_of(exact=False)
        learn(state)
        state.correct(promises_of(PROFILE)[AlarmKind.RECALL_LOSS], 0.02, 80)
        (alarm,) = lose(state, 1.0, 100)
        assert alarm.reference is ReferenceKind.CORRECTED

    def test_baseline_excludes_what_raised_it(self) -> None:
        state = state_of(exact=False)
        learn(state)
        target = monitor_of(state, ReferenceKind.BASELINE).target
        lose(state, 1.0, 4_000)
        assert monitor_of(state, ReferenceKind.BASELINE).target == target

    def test_similar_target_keeps_the_evidence(self) -> None:
        state = state_of(exact=False)
        recall = promises_of(PROFILE)[AlarmKind.RECALL_LOSS]
        state.correct(recall, 0.30, 80)
        lose(state, 1.0, 5)
        state.correct(recall, 0.31, 81)
        kept = monitor_of(state, ReferenceKind.CORRECTED)
        assert (kept.target, kept.n) == (0.30, 5)
        state.correct(recall, 0.25, 160)
        renewed = monitor_of(state, ReferenceKind.CORRECTED)
        assert (renewed.target, renewed.n, renewed.e_value) == (0.25, 0, None)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_forked_child_starts_afresh(self) -> None:
        state = state_of()
        lose(state, 1.0, 50)
        child = os.fork()
        if child == 0:
            os._exit(len(state.report().active))
        _, status = os.waitpid(child, 0)
        assert status == 0
        assert len(state.report().active) == 1


class TestRestarting:
    @given(st.lists(st.floats(0.0, 1.0), max_size=20), st.integers(0, 20))
    @settings(deadline=None, max_examples=50)
    def test_restored_state_never_stopped(self, losses: list[float], stopped_at: int) -> None:
        through, stopped = state_of(), state_of()
        for loss in losses[:stopped_at]:
            lose(through, loss, 10, harm=loss)
            lose(stopped, loss, 10, harm=loss)
        resumed = state_of()
        assert resumed.restore(stopped.to_json())
        for loss in losses[stopped_at:]:
            assert lose(through, loss, 10, harm=loss) == lose(resumed, loss, 10, harm=loss)
        assert resumed.report() == through.report()

    @pytest.mark.parametrize(
        ("part", "damaged"),
        [
            ('"recall_loss"', '"recal_loss"'),
            ('"run"', '"ran"'),
            ('"log_e_values": [', '"log_e_values": [1.0, '),
            ('"active": [', '"active": [7, '),
            ('"target": 0.12,', '"target": 1.2,'),
            (": 0,", ": 1e999,"),
            ("{", "[" * 100_000),
            ("}", ""),
            ('"format": 7', '"format": 8'),
        ],
    )
    def test_damaged_state_is_refused_unchanged(self, part: str, damaged: str) -> None:
        state = state_of()
        lose(state, 1.0, 3)
        before = state.to_json()
        other = state_of()
        lose(other, 1.0, 50)
        says = "format 8; this release reads 7" if "format" in part else "start again"
        with pytest.raises(DataError, match=says):
            state.restore(other.to_json().replace(part, damaged))
        assert state.to_json() == before
