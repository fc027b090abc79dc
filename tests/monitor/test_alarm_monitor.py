"""From judged samples to alarms: what counts against a promise, and what happens when it rings."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from contexts import make_context
from watching import DAY_SECONDS, Watching

from ctxguard.core.context import Context
from ctxguard.core.corpus_sketch import CorpusSketch
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Mode, Route, ScoreKind
from ctxguard.monitor.alarms import AlarmKind
from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.judging.budget import BudgetLimits
from ctxguard.monitor.judging.counts import JudgingOutcome
from ctxguard.monitor.sampling.sampler import JudgingRates
from ctxguard.profile.schema import RouteProfile
from tests.profiles import CERTIFICATE, profile_with

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
    }
)
PROFILE_ID = PROFILE.profile_id


def watching(*, rates: JudgingRates | None = None, **settings: Any) -> Watching:
    return Watching(
        LabelJudge(LOST | FOUND),
        rates=JudgingRates(baseline_rate=1.0) if rates is None else rates,
        profile=PROFILE,
        **settings,
    )


def of_profile(request_id: str, query: str) -> Context:
    context = make_context(POOL, 3, request_id=request_id, query=query)
    return replace(context, profile_id=PROFILE_ID)


def served(n: int, *, query: str = "lost {}") -> list[Context]:
    return [of_profile(f"{query} r{i}", query.format(i)) for i in range(n)]


def kinds(live: Watching) -> list[AlarmKind]:
    return [alarm.kind for alarm in live.monitor.alarms.report().active]


def test_day_is_compared_once_complete() -> None:
    live = watching()
    live.serve(*served(80))
    live.monitor.step(60)
    live.monitor.maintain()
    assert kinds(live) == []
    live.end_day()
    assert kinds(live) == []
    live.monitor.step(60)
    live.monitor.maintain()
    assert kinds(live) == [AlarmKind.RECALL_LOSS]


def test_first_hours_raise_no_alarm() -> None:
    live = watching()
    live.watch(*served(60))
    live.now += 80_000.0
    live.watch(*served(400, query="found {}"))
    for _ in range(2):
        live.end_day()
    assert kinds(live) == []


def test_what_other_monitors_judged_counts() -> None:
    one = watching()
    one.watch(*served(30))
    other = Watching(LabelJudge(LOST | FOUND), store=one.store, profile=PROFILE)
    other.end_day()
    assert kinds(other) == [AlarmKind.RECALL_LOSS]


def scraped(live: Watching) -> float | None:
    """Whether the scrape shows a broken promise on recall."""
    labels = {"kind": "recall_loss", "route": "external"}
    return live.registry.get_sample_value(
        "ctxguard_alarm_active", {**labels, "reference": "promise"}
    )


@pytest.mark.parametrize(("busy_loss", "active"), [(0.02, None), (0.5, 1.0)])
def test_rate_limit_neither_breaks_nor_hides(busy_loss: float, active: float | None) -> None:
    """Quiet, bad hours are sampled wholly, busy, good ones a tenth as often; promised is 0.12."""
    live = watching(max_per_second=4.0)
    luck = random.Random(4)
    for second in range(60):
        is_busy = second // 10 % 2 == 1
        for number in range(40 if is_busy else 4):
            is_lost = luck.random() < (busy_loss if is_busy else 0.6)
            query = f"{'lost' if is_lost else 'found'} {luck.randrange(400)}"
            context = of_profile(f"{second}-{number}", query)
            if probability := live.sampler.draw(context.request_id):
                live.sampler.offer(context, probability, live.now)
        live.now += 1.0
    live.watch()
    [rows] = live.store.judged_pages(live.monitor.series, until=live.now, profile_id=PROFILE_ID)
    assert busy_loss > 0.1 or np.nanmean(rows.requests["recall_loss"]) > 0.2
    live.end_day()
    assert scraped(live) == active


@pytest.mark.parametrize(("late_loss", "active"), [(0.0, None), (0.6, 1.0)])
def test_budget_neither_breaks_nor_hides(late_loss: float, active: float | None) -> None:
    """What comes early is judged wholly, what comes later in part, as the budget allows."""
    live = watching(budget=BudgetLimits(calls_per_day=1_500))
    luck = random.Random(5)
    for part, (n, loss) in enumerate([(40, 0.4), (400, late_loss)]):
        queries = [f"{'lost' if luck.random() < loss else 'found'} {i % 400}" for i in range(n)]
        live.monitor._budget._measured = None
        live.watch(*[of_profile(f"{part}-{i}", query) for i, query in enumerate(queries)])
    outcomes = live.monitor.report().outcomes
    assert outcomes[JudgingOutcome.SKIPPED] > 100
    live.now += DAY_SECONDS
    live.watch()
    live.end_day()
    assert scraped(live) == active


UNHIT_ONLY = JudgingRates(baseline_rate=0.0, full_pool_rate=0.0, full_pool_rate_if_no_hit=1.0)
"""Pools are judged only because nothing relevant was served."""


@pytest.mark.parametrize(
    ("changed", "rates"),
    [
        ({"profile_id": None}, None),
        ({"profile_id": "another"}, None),
        ({"mode": Mode.SHADOW}, None),
        ({}, UNHIT_ONLY),
    ],
)
def test_unserved_does_not_count(changed: dict[str, Any], rates: JudgingRates | None) -> None:
    live = watching(rates=rates)
    live.watch(*[replace(one, **changed) for one in served(60)])
    live.end_day()
    assert AlarmKind.RECALL_LOSS not in kinds(live)


def test_changed_corpus_warns_once() -> None:
    former, present = CorpusSketch.of(range(100)), [CorpusSketch.of(range(200))]
    live = Watching(
        LabelJudge(LOST | FOUND),
        profile=PROFILE.model_copy(update={"corpus": former}),
        corpus_sketch=lambda: present[-1],
    )
    for _ in range(2):
        live.monitor.maintain()
        (alarm,) = live.monitor.alarms.report().active
        assert alarm.kind is AlarmKind.CORPUS_CHANGED
        assert (alarm.value, alarm.message[:21]) == (0.5, "50% of the corpus has")
    assert live.monitor.alarms.report().raised[AlarmKind.CORPUS_CHANGED] == 1
    present.append(CorpusSketch.of(range(101)))
    live.monitor.maintain()
    assert kinds(live) == []


def test_judge_outage_warns_until_it_ends() -> None:
    live = watching()
    judge = live.monitor.judge
    broken = lambda *_: (_ for _ in ()).throw(OSError("down"))  # noqa: E731
    judge.judge = broken
    live.watch(*served(2))
    assert kinds(live) == [AlarmKind.JUDGE_DOWN]
    del judge.judge
    live.watch()
    assert kinds(live) == []
