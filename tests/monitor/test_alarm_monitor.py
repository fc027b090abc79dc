"""From judged samples to alarms: what counts against a promise, and what happens when it rings."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from watching import Watching

from ctxguard.core.context import Context
from ctxguard.core.corpus_sketch import CorpusSketch
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Mode, Route, ScoreKind
from ctxguard.monitor.alarms import AlarmKind, AlarmState, Severity
from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.sampling.inclusion import JudgingRates
from ctxguard.profile.schema import Profile, RouteProfile
from tests.profiles import CERTIFICATE, profile_with

MakeContext = Callable[..., Context]
POOL = [f"p{rank}" for rank in range(10)]
LOST = {"q": {"p4": 1}, "found": {"p0": 1}}
"""Of the first query, the only relevant passage is never served."""

PROFILE = profile_with(
    {
        Route.EXTERNAL: RouteProfile(
            policy=RatioPolicy(k=3),
            score_kind=ScoreKind.RATIO,
            certificate=CERTIFICATE,
            safe_policy=RatioPolicy(k=10),
        )
    },
)


def watching(
    *, rates: JudgingRates | None = None, url: str = "sqlite://", path: Path | None = None
) -> Watching:
    return Watching(
        LabelJudge(LOST),
        rates=JudgingRates(baseline_rate=1.0) if rates is None else rates,
        url=url,
        alarms=AlarmState(PROFILE),
        switch_path=path,
    )


def served(
    make_context: MakeContext, n: int, profile_id: str | None = PROFILE.profile_id
) -> list[Context]:
    return [
        replace(make_context(POOL, 3, request_id=f"r{i}"), profile_id=profile_id) for i in range(n)
    ]


def kinds(live: Watching) -> list[AlarmKind]:
    return [alarm.kind for alarm in live.monitor.alarms.active()]


def test_a_broken_promise_rings_and_asks_for_labels(make_context: MakeContext) -> None:
    live = watching()
    live.watch(*served(make_context, 60))
    assert kinds(live) == [AlarmKind.RECALL_LOSS]
    reasons = dict(live.store.label_queue())
    assert set(reasons.values()) == {"recall_loss"}
    assert 0 < len(reasons) <= 30


def test_the_samples_to_label_are_those_of_the_route_with_the_largest_losses(
    make_context: MakeContext,
) -> None:
    live = watching()
    found = [replace(one, query="found") for one in served(make_context, 40)]
    live.watch(*found)
    live.watch(*served(make_context, 60))
    (alarm,) = live.monitor.alarms.active()
    requested = [sample_id for sample_id, _ in live.store.label_queue()]
    assert len(requested) == 30
    assert min(requested[: alarm.n]) > 40 >= max(requested[alarm.n :])
    assert live.monitor._alarms._samples_to_label(replace(alarm, route=Route.DENSE)) == []


def test_the_profile_file_is_switched_to_its_safe_policy(
    make_context: MakeContext, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    live = watching(path=path)
    live.watch(*served(make_context, 60))
    assert Profile.load(path).routes[Route.EXTERNAL].policy == RatioPolicy(k=10)


@pytest.mark.parametrize("profile_id", [None, "another"])
def test_what_another_profile_served_does_not_count(
    make_context: MakeContext, profile_id: str | None
) -> None:
    live = watching()
    live.watch(*served(make_context, 60, profile_id))
    assert kinds(live) == []


def test_what_was_served_in_shadow_does_not_count(make_context: MakeContext) -> None:
    live = watching()
    live.watch(*[replace(one, mode=Mode.SHADOW) for one in served(make_context, 60)])
    assert kinds(live) == []


def test_pools_judged_because_nothing_was_served_do_not_count(make_context: MakeContext) -> None:
    live = watching(
        rates=JudgingRates(baseline_rate=0.0, full_pool_rate=0.0, full_pool_rate_if_no_hit=1.0)
    )
    live.watch(*served(make_context, 60))
    assert AlarmKind.RECALL_LOSS not in kinds(live)


def test_alarms_outlive_the_monitor(make_context: MakeContext) -> None:
    live = watching()
    live.watch(*served(make_context, 60))
    live.monitor.maintain()

    again = Watching(LabelJudge(LOST), store=live.store, alarms=AlarmState(PROFILE))
    again.monitor.restore_alarms()
    assert again.monitor.alarms.active() == live.monitor.alarms.active() != ()


def test_a_changed_corpus_warns_once_until_it_is_the_former_again() -> None:
    former, present = CorpusSketch.of(range(100)), [CorpusSketch.of(range(200))]
    live = Watching(
        LabelJudge(LOST),
        alarms=AlarmState(PROFILE.model_copy(update={"corpus": former})),
        corpus_sketch=lambda: present[-1],
    )
    for _ in range(2):
        live.monitor.maintain()
        (alarm,) = live.monitor.alarms.active()
        assert (alarm.kind, alarm.severity) == (AlarmKind.CORPUS_CHANGED, Severity.WARNING)
        assert (alarm.value, alarm.message[:21]) == (0.5, "50% of the corpus has")
    assert live.monitor.alarms.report().raised[AlarmKind.CORPUS_CHANGED] == 1
    present.append(CorpusSketch.of(range(101)))
    live.monitor.maintain()
    assert kinds(live) == []


def test_a_judge_that_is_down_warns_until_it_is_back(make_context: MakeContext) -> None:
    live = watching()
    judge = live.monitor.judge
    broken = lambda *_: (_ for _ in ()).throw(OSError("down"))  # noqa: E731
    judge.judge = broken
    live.watch(*served(make_context, 2))
    assert kinds(live) == [AlarmKind.JUDGE_DOWN]
    del judge.judge
    live.watch()
    assert kinds(live) == []
