"""From judged samples to alarms: what counts against a promise, and what happens when it rings."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from watching import Watching

from ctxguard.core.context import Context
from ctxguard.core.corpus_sketch import CorpusSketch
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Mode, Route, ScoreKind
from ctxguard.monitor.alarms import AlarmKind, AlarmState, Severity
from ctxguard.monitor.export.prometheus import MonitorCollector
from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.sampling.inclusion import JudgingRates
from ctxguard.profile.schema import Profile, RouteProfile
from tests.profiles import CERTIFICATE, profile_with

MakeContext = Callable[..., Context]
POOL = [f"p{rank}" for rank in range(10)]
LOST = {f"lost {n}": {"p4": 1} for n in range(400)}
FOUND = {f"found {n}": {"p0": 1} for n in range(400)}
"""The only relevant passage of a query: never served, and always."""

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
        LabelJudge(LOST | FOUND),
        rates=JudgingRates(baseline_rate=1.0) if rates is None else rates,
        url=url,
        alarms=AlarmState(PROFILE),
        profile_path=path,
        switch_to_safe=path is not None,
    )


def served(
    make_context: MakeContext,
    n: int,
    profile_id: str | None = PROFILE.profile_id,
    *,
    query: str = "lost {}",
) -> list[Context]:
    return [
        replace(
            make_context(POOL, 3, request_id=f"{query} r{i}", query=query.format(i)),
            profile_id=profile_id,
        )
        for i in range(n)
    ]


def kinds(live: Watching) -> list[AlarmKind]:
    return [alarm.kind for alarm in live.monitor.alarms.active()]


def test_a_broken_promise_rings_once_the_day_is_over_and_asks_for_labels(
    make_context: MakeContext,
) -> None:
    live = watching()
    live.watch(*served(make_context, 60))
    live.monitor.maintain()
    assert kinds(live) == []
    live.end_day()
    assert kinds(live) == [AlarmKind.RECALL_LOSS]
    reasons = dict(live.store.label_queue())
    assert set(reasons.values()) == {"recall_loss"}
    assert 0 < len(reasons) <= 30


def test_a_day_is_compared_once_none_of_its_samples_waits(make_context: MakeContext) -> None:
    live = watching()
    live.serve(*served(make_context, 80))
    live.monitor.step(60)
    live.end_day()
    assert kinds(live) == []
    live.monitor.step(60)
    live.monitor.maintain()
    assert kinds(live) == [AlarmKind.RECALL_LOSS]


def test_the_first_hours_of_a_day_alone_raise_no_alarm(make_context: MakeContext) -> None:
    live = watching()
    live.watch(*served(make_context, 60))
    live.now += 80_000.0
    live.watch(*served(make_context, 400, query="found {}"))
    for _ in range(2):
        live.end_day()
    assert kinds(live) == []


def test_what_other_monitors_judged_counts(make_context: MakeContext) -> None:
    one = watching()
    one.watch(*served(make_context, 30))
    other = Watching(LabelJudge(LOST | FOUND), store=one.store, alarms=AlarmState(PROFILE))
    other.end_day()
    assert kinds(other) == [AlarmKind.RECALL_LOSS]


def test_requests_that_are_sampled_seldom_count_for_those_that_were_not(
    make_context: MakeContext,
) -> None:
    """From traffic to /metrics: a rate limit samples the good, busy hours a tenth as often."""
    # 40 of 140 judged requests have a loss: 4% or 29% of the traffic, promised are 12%.
    for quiet_rate, active in ((1.0, None), (0.1, 1.0)):
        live = watching()
        registry = CollectorRegistry()
        MonitorCollector(live.monitor, registry)
        live.watch(*served(make_context, 40), probability=quiet_rate)
        live.watch(*served(make_context, 100, query="found {}"), probability=0.1)
        live.end_day()
        labels = {"kind": "recall_loss", "severity": "alarm", "route": "external"}
        labels["reference"] = "promise"
        assert registry.get_sample_value("ctxguard_alarm_active", labels) == active


def test_the_samples_to_label_are_those_of_the_route_with_the_largest_losses(
    make_context: MakeContext,
) -> None:
    live = watching()
    live.watch(*served(make_context, 40, query="found {}"))
    live.watch(*served(make_context, 60))
    live.end_day()
    requested = [sample_id for sample_id, _ in live.store.label_queue()]
    assert len(requested) == 30
    assert min(requested) > 40


def test_the_profile_file_is_switched_to_its_safe_policy(
    make_context: MakeContext, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    live = watching(path=path)
    live.watch(*served(make_context, 60))
    live.end_day()
    assert Profile.load(path).routes[Route.EXTERNAL].policy == RatioPolicy(k=10)


@pytest.mark.parametrize("profile_id", [None, "another"])
def test_what_another_profile_served_does_not_count(
    make_context: MakeContext, profile_id: str | None
) -> None:
    live = watching()
    live.watch(*served(make_context, 60, profile_id))
    live.end_day()
    assert kinds(live) == []


def test_what_was_served_in_shadow_does_not_count(make_context: MakeContext) -> None:
    live = watching()
    live.watch(*[replace(one, mode=Mode.SHADOW) for one in served(make_context, 60)])
    live.end_day()
    assert kinds(live) == []


def test_pools_judged_because_nothing_was_served_do_not_count(make_context: MakeContext) -> None:
    live = watching(
        rates=JudgingRates(baseline_rate=0.0, full_pool_rate=0.0, full_pool_rate_if_no_hit=1.0)
    )
    live.watch(*served(make_context, 60))
    live.end_day()
    assert AlarmKind.RECALL_LOSS not in kinds(live)


def test_alarms_outlive_the_monitor(make_context: MakeContext) -> None:
    live = watching()
    live.watch(*served(make_context, 60))
    live.end_day()

    again = Watching(LabelJudge(LOST | FOUND), store=live.store, alarms=AlarmState(PROFILE))
    again.monitor.restore_alarms()
    assert again.monitor.alarms.active() == live.monitor.alarms.active() != ()


def test_a_changed_corpus_warns_once_until_it_is_the_former_again() -> None:
    former, present = CorpusSketch.of(range(100)), [CorpusSketch.of(range(200))]
    live = Watching(
        LabelJudge(LOST | FOUND),
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
