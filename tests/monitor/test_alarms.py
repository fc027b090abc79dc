"""The alarms: what is watched, when it rings, and what stays on the board."""

import json
import math
import os
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxguard.errors import ConfigurationError, DataError
from ctxguard.metrics import Utilities
from ctxguard.monitor.alarms import (
    Alarm,
    AlarmBoard,
    AlarmKind,
    JudgedSample,
    LossWatch,
    Quantity,
    Severity,
    Signals,
    loss_watches,
    where_labels_tell_most,
)
from ctxguard.policy import RatioPolicy
from ctxguard.profile import Evidence, Interval, Profile, RouteProfile, SegmentProfile
from ctxguard.types import Route, ScoreKind
from tests.profiles import CERTIFICATE, profile_with

HELD_OUT = Evidence(
    queries=250, metrics={"harm": Interval(value=0.3, lower=0.25, upper=0.36, n=250)}
)
ROUTE_PROFILE = RouteProfile(
    policy=RatioPolicy(k=3, min_ratio=0.8),
    score_kind=ScoreKind.RATIO,
    certificate=CERTIFICATE,
    chosen_on=Evidence(queries=500, metrics={}),
    held_out=HELD_OUT,
    reference={"top_score": tuple(float(at) for at in range(11))},
    safe_policy=RatioPolicy(k=10),
)


def profile_of(**changes: object) -> Profile:
    return profile_with({Route.HYBRID: ROUTE_PROFILE.model_copy(update=changes)})


PROFILE = profile_of()
WATCH = LossWatch.of(Route.HYBRID, Quantity.RECALL_LOSS, target=0.12)


def board_of(profile: Profile = PROFILE, *, drift: bool = False) -> AlarmBoard:
    return AlarmBoard(profile, drift=drift)


def lose(
    board: AlarmBoard, loss: float | None, times: int, *, harm: float | None = None, at: float = 1.0
) -> list[Alarm]:
    return [
        alarm
        for _ in range(times)
        for alarm in board.judged(Route.HYBRID, recall_loss=loss, harm=harm, time_seconds=at)
    ]


def watched(profile: Profile) -> dict[Quantity, LossWatch]:
    return {watch.quantity: watch for watch in loss_watches(profile)}


class TestWhatIsWatched:
    def test_recall_loss_is_watched_against_the_certificates_alpha(self) -> None:
        watch = watched(PROFILE)[Quantity.RECALL_LOSS]
        assert (watch.target, watch.bound, watch.source) == (0.12, 1.0, "certificate")

    def test_harm_is_watched_against_the_certificates_beta(self) -> None:
        promised = profile_of(certificate=CERTIFICATE.model_copy(update={"beta": 0.4}))
        watch = watched(promised)[Quantity.HARM]
        assert (watch.target, watch.source) == (0.4, "certificate")

    def test_without_a_promised_harm_it_is_the_upper_end_of_the_held_out_interval(self) -> None:
        watch = watched(PROFILE)[Quantity.HARM]
        assert (watch.target, watch.source) == (0.36, "held-out evidence")

    def test_without_either_harm_is_not_watched(self) -> None:
        assert set(watched(profile_of(held_out=None))) == {Quantity.RECALL_LOSS}

    def test_without_a_certificate_recall_loss_is_not_watched(self) -> None:
        assert set(watched(profile_of(certificate=None))) == {Quantity.HARM}

    def test_harm_is_bounded_by_a_full_context_of_the_worst_passages(self) -> None:
        worst = 1.0 + 1.0 / math.log2(3) + 0.5
        assert watched(PROFILE)[Quantity.HARM].bound == pytest.approx(worst)

    def test_the_largest_context_of_any_segment_counts(self) -> None:
        segment = SegmentProfile(policy=RatioPolicy(k=5), certificate=CERTIFICATE)
        larger = watched(profile_of(segments={"de": segment}))[Quantity.HARM]
        assert larger.bound > watched(PROFILE)[Quantity.HARM].bound

    def test_harm_that_nothing_can_do_is_not_watched(self) -> None:
        harmless = Utilities(hard_negative=0.0, distractor=0.0, irrelevant=0.0)
        profile = PROFILE.model_copy(update={"utilities": harmless})
        assert set(watched(profile)) == {Quantity.RECALL_LOSS}

    def test_a_promise_that_no_loss_can_break_is_not_watched(self) -> None:
        vacuous = CERTIFICATE.model_copy(update={"alpha": 1.0, "beta": 50.0})
        assert watched(profile_of(certificate=vacuous)) == {}

    def test_a_promise_of_no_loss_at_all_rings_at_losses_that_come_in_a_row(self) -> None:
        watch = LossWatch.of(Route.HYBRID, Quantity.RECALL_LOSS, target=0.0)
        once = watch.after(1.0)
        assert not once.ringing
        for _ in range(20):
            once = once.after(1.0)
        assert once.ringing

    @pytest.mark.parametrize(
        ("target", "bound"), [(-0.1, 1.0), (1.0, 1.0), (0.1, 0.0), (math.nan, 1.0), (0.1, math.inf)]
    )
    def test_a_target_outside_its_bound_is_refused(self, target: float, bound: float) -> None:
        with pytest.raises(ConfigurationError, match=r"harm"):
            LossWatch.of(Route.HYBRID, Quantity.HARM, target=target, bound=bound)


class TestLossWatch:
    @given(
        st.sampled_from(Quantity),
        st.floats(0.0, 0.999),
        st.floats(0.1, 20.0),
        st.lists(st.floats(0.0, 1.0), max_size=30),
    )
    def test_it_goes_on_from_its_state_as_if_nothing_had_happened(
        self, quantity: Quantity, share: float, bound: float, losses: list[float]
    ) -> None:
        fresh = LossWatch.of(Route.HYBRID, quantity, target=share * bound, bound=bound)
        watch = fresh
        for loss in losses:
            watch = watch.after(loss * bound)
        assert fresh.resumed(json.loads(json.dumps(watch.state()))) == watch
        assert watch.restarted() == fresh

    def test_the_unit_of_the_loss_does_not_matter(self) -> None:
        small, large = (
            LossWatch.of(Route.HYBRID, Quantity.HARM, target=0.25 * bound, bound=bound)
            for bound in (1.0, 4.0)
        )
        for loss in (0.5, 0.0, 1.0):
            small, large = small.after(loss), large.after(4.0 * loss)
        assert small.ecusum == large.ecusum
        assert large.run_mean == pytest.approx(4.0 * small.run_mean)

    def test_a_loss_above_its_bound_counts_as_the_bound(self) -> None:
        watch = LossWatch.of(Route.HYBRID, Quantity.HARM, target=0.5, bound=2.0)
        assert watch.after(7.0).ecusum == watch.after(2.0).ecusum

    def test_the_mean_is_taken_since_about_when_the_losses_rose(self) -> None:
        watch = WATCH
        for loss in [0.0] * 300 + [0.5] * 40:
            watch = watch.after(loss)
        assert (watch.run_n, watch.run_mean) == (40, 0.5)

    def test_before_any_loss_there_is_no_mean(self) -> None:
        assert WATCH.run_mean is None

    @pytest.mark.parametrize("loss", [-0.1, math.nan, math.inf])
    def test_a_loss_that_is_none_is_refused(self, loss: float) -> None:
        with pytest.raises(ConfigurationError, match="recall_loss"):
            WATCH.after(loss)


class TestRinging:
    def test_a_recall_loss_that_doubles_rings_with_what_was_seen_and_promised(self) -> None:
        rng, board = random.Random(1), board_of()
        quiet = [lose(board, float(rng.random() < 0.10), 1) for _ in range(1_000)]
        assert not any(quiet)
        alarms: list[Alarm] = []
        n = 0
        while not alarms:
            alarms, n = lose(board, float(rng.random() < 0.20), 1, at=1e9), n + 1
        assert n <= 600
        (alarm,) = alarms
        assert alarm.kind is AlarmKind.RECALL_LOSS
        assert alarm.severity is Severity.ALARM
        assert (alarm.route, alarm.target, alarm.time_seconds) == (Route.HYBRID, 0.12, 1e9)
        assert alarm.profile_id == PROFILE.profile_id
        assert alarm.value is not None
        assert 0.12 < alarm.value < 0.3

    def test_the_message_tells_an_operator_what_to_do(self) -> None:
        (alarm,) = lose(board_of(), 0.5, 60)
        assert alarm.message == (
            f"Route hybrid: judged recall loss against the retriever's first 10 was about 0.5 over "
            f"the last {alarm.n} judged requests; the certificate promises at most 0.12. "
            "Recalibrate on judged traffic; meanwhile the safe policy, the retriever's first 10, "
            "gives up the least recall. If the judge was changed of late, look there first."
        )

    def test_without_a_safe_policy_it_says_so(self) -> None:
        (alarm,) = lose(board_of(profile_of(safe_policy=None)), 0.5, 60)
        assert "this profile names no safe policy" in alarm.message

    def test_harm_says_where_its_target_is_from_and_that_no_policy_is_safe(self) -> None:
        alarms = lose(board_of(), None, 200, harm=1.5)
        assert [alarm.kind for alarm in alarms] == [AlarmKind.HARM]
        assert "for want of a promise, gave at most 0.36" in alarms[0].message
        assert "No safe policy helps against harm" in alarms[0].message

    def test_an_undefined_loss_is_no_loss(self) -> None:
        board = board_of()
        assert lose(board, None, 500) == []
        assert [watch.ecusum.n for watch in board.report().losses] == [0, 0]

    def test_a_route_without_a_promise_never_rings(self) -> None:
        judged = board_of().judged(Route.DENSE, recall_loss=1.0, harm=5.0, time_seconds=1.0)
        assert judged == []

    def test_a_recall_loss_above_one_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="recall_loss"):
            lose(board_of(), 1.5, 1)


class TestBoard:
    def test_an_active_alarm_is_raised_once_and_then_counted(self) -> None:
        board = board_of()
        assert len(lose(board, 1.0, 100)) == 1
        report = board.report()
        assert report.raised[AlarmKind.RECALL_LOSS] == 1
        (active,) = report.active
        assert active.repeats >= 3

    def test_it_stays_up_though_the_losses_end(self) -> None:
        board = board_of()
        lose(board, 1.0, 50)
        lose(board, 0.0, 1_000)
        assert [alarm.kind for alarm in board.active()] == [AlarmKind.RECALL_LOSS]

    def test_acknowledged_it_comes_down_and_its_watch_starts_from_nothing(self) -> None:
        board = board_of()
        assert len(lose(board, 1.0, 12)) == 1
        assert board.acknowledge(AlarmKind.RECALL_LOSS, Route.HYBRID)
        assert board.active() == ()
        assert board.report().losses[0].ecusum.n == 0
        assert not board.acknowledge(AlarmKind.RECALL_LOSS, Route.HYBRID)

    def test_a_promise_that_is_still_broken_rings_again_after_that(self) -> None:
        board = board_of()
        assert len(lose(board, 1.0, 12)) == 1
        board.acknowledge(AlarmKind.RECALL_LOSS, Route.HYBRID)
        assert len(lose(board, 1.0, 50)) == 1
        assert board.report().raised[AlarmKind.RECALL_LOSS] == 2

    def test_what_others_find_is_put_up_once(self) -> None:
        down = Alarm(AlarmKind.JUDGE_DOWN, Severity.ALARM, "no verdict for an hour", 1.0)
        board = board_of()
        assert board.raise_(down)
        assert not board.raise_(down)
        assert board.active() == (down,)
        assert board.acknowledge(AlarmKind.JUDGE_DOWN)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_a_forked_child_starts_afresh_and_is_not_locked_out(self) -> None:
        board = board_of()
        lose(board, 1.0, 50)
        # Held over the fork, as a scrape might hold it.
        with board._lock:
            child = os.fork()
            if child == 0:
                os._exit(len(board.active()))
        _, status = os.waitpid(child, 0)
        assert status == 0
        assert len(board.active()) == 1

    def test_threads_lose_no_loss(self) -> None:
        board = board_of()
        threads = [threading.Thread(target=lose, args=(board, 0.0, 200)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert board.report().losses[0].ecusum.n == 800


class TestRestarting:
    @given(st.lists(st.floats(0.0, 1.0), max_size=60), st.integers(0, 60))
    @settings(deadline=None)
    def test_a_board_restored_rings_as_if_it_had_never_stopped(
        self, losses: list[float], stopped_at: int
    ) -> None:
        through, stopped = board_of(), board_of()
        for loss in losses[:stopped_at]:
            lose(through, loss, 1, harm=loss)
            lose(stopped, loss, 1, harm=loss)
        resumed = board_of()
        assert resumed.restore(stopped.state())
        for loss in losses[stopped_at:]:
            assert lose(through, loss, 1, harm=loss) == lose(resumed, loss, 1, harm=loss)
        assert resumed.report() == through.report()

    def test_a_restored_board_goes_on_with_its_signals_too(self) -> None:
        stopped = board_of(drift=True)
        for _ in range(30):
            stopped.signals(Route.HYBRID, Signals(5.0, None, 2), time_seconds=1.0)
        resumed = board_of(drift=True)
        resumed.restore(stopped.state())
        assert json.loads(resumed.state()) == json.loads(stopped.state())

    def test_another_profile_starts_afresh(self) -> None:
        board = board_of()
        lose(board, 1.0, 50)
        other = board_of(profile_of(why="calibrated again"))
        assert not other.restore(board.state())
        assert other.active() == ()
        assert other.report().losses[0].ecusum.n == 0

    def test_the_switch_to_the_safe_policy_does_not_take_the_alarm_down(self) -> None:
        board = board_of()
        lose(board, 1.0, 50)
        safe = board_of(PROFILE.safe())
        assert safe.restore(board.state())
        assert safe.active() == board.active()
        assert safe.report().raised[AlarmKind.RECALL_LOSS] == 1

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda text: text[:-20],
            lambda text: "[]",
            lambda text: "[" * 100_000,
            lambda text: text.replace('"recall_loss"', '"recal_loss"'),
            lambda text: text.replace('"run_n"', '"ran"'),
            lambda text: text.replace('"logs": [', '"logs": [1.0, '),
            lambda text: text.replace('"active": [', '"active": [7, '),
        ],
        ids=["cut", "list", "deep", "unknown quantity", "missing", "too many bets", "no alarm"],
    )
    def test_a_damaged_state_is_refused_and_changes_nothing(self, spoil: object) -> None:
        board = board_of()
        lose(board, 1.0, 3)
        before = board.state()
        other = board_of()
        lose(other, 1.0, 50)
        with pytest.raises(DataError, match="start afresh"):
            board.restore(spoil(other.state()))  # type: ignore[operator]
        assert board.state() == before

    def test_the_state_of_a_newer_release_is_refused_by_its_number(self) -> None:
        newer = board_of().state().replace('"format": 1', '"format": 2')
        with pytest.raises(DataError, match=r"format 2; this release reads 1"):
            board_of().restore(newer)


samples = st.builds(
    JudgedSample,
    sample_id=st.sampled_from([f"s{i}" for i in range(20)]),
    route=st.sampled_from([Route.HYBRID, Route.LEXICAL, Route.DENSE]),
    loss=st.floats(0.0, 2.0),
    served=st.integers(0, 10),
    disagreement=st.none() | st.floats(0.0, 1.0),
)


class TestWhereLabelsTellMost:
    def test_the_largest_losses_come_first_then_disagreement_then_the_least_to_read(self) -> None:
        found = where_labels_tell_most(
            [
                JudgedSample("short", Route.HYBRID, 1.0, 2),
                JudgedSample("disputed", Route.HYBRID, 1.0, 5, disagreement=0.5),
                JudgedSample("small", Route.HYBRID, 0.2, 1, disagreement=1.0),
                JudgedSample("long", Route.HYBRID, 1.0, 5),
            ],
            4,
        )
        assert found == ["disputed", "short", "long", "small"]

    def test_the_routes_take_turns(self) -> None:
        many = [JudgedSample(f"h{i}", Route.HYBRID, 1.0, 3) for i in range(5)]
        found = where_labels_tell_most([*many, JudgedSample("l", Route.LEXICAL, 0.1, 3)], 3)
        assert found == ["h0", "l", "h1"]

    @given(st.lists(samples, max_size=40), st.integers(0, 30))
    def test_as_many_different_ones_as_there_are_are_chosen(
        self, judged: list[JudgedSample], n: int
    ) -> None:
        found = where_labels_tell_most(judged, n)
        ids = {sample.sample_id for sample in judged}
        assert len(found) == len(set(found)) == min(n, len(ids))
        assert set(found) <= ids

    @given(st.lists(samples, max_size=20, unique_by=lambda sample: sample.sample_id))
    def test_the_order_of_the_samples_does_not_matter(self, judged: list[JudgedSample]) -> None:
        assert where_labels_tell_most(judged, 5) == where_labels_tell_most(judged[::-1], 5)

    def test_a_negative_number_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="-1"):
            where_labels_tell_most([], -1)
