"""What people graded is judged again: by a new judge, and now and then by the same one."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from contexts import make_context
from people import label
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from stub_judges import ErringJudge
from watching import DAY_SECONDS, Watching

from ctxguard.core.context import Context
from ctxguard.measure.metrics import Metric
from ctxguard.monitor.estimation.live import Window
from ctxguard.monitor.export.prometheus import MonitorCollector
from ctxguard.monitor.judging.budget import NO_LIMITS, BudgetLimits
from ctxguard.monitor.judging.canaries import PER_DAY, Canaries
from ctxguard.monitor.service import Monitor
from ctxguard.monitor.store import LabelRow
from tests.stored import request_of

POOL = [f"p{rank}" for rank in range(12)]
SERVED = 5


def is_relevant(query: str, passage_id: str) -> bool:
    """The truth: about half of what is served."""
    rank = int(passage_id[1:])
    return random.Random(f"{query} {passage_id}").random() < 0.7 - 0.08 * rank


def erring(version: str, sensitivity: float, specificity: float) -> ErringJudge:
    judge = ErringJudge(is_relevant, (sensitivity, specificity), f"{version} ")
    judge.version = version
    return judge


def contexts(numbers: range) -> Iterator[Context]:
    for n in numbers:
        yield make_context(POOL, SERVED, query=f"q{n}", request_id=f"q{n}")


def ask_people(live: Watching, passages: int) -> None:
    series = live.monitor.series
    label(live.store, series, passages, lambda row: int(is_relevant(row.query, row.passage_id)))
    live.monitor.report()


def with_judge(live: Watching, judge: ErringJudge, budget: BudgetLimits = NO_LIMITS) -> Watching:
    """Another monitor of the same store and clock, as after a restart."""
    live.monitor = Monitor(
        live.store,
        judge,
        min_n=live.monitor.min_n,
        clock=lambda: live.now,
        window_seconds=30 * DAY_SECONDS,
        budget=budget,
    )
    return live


def graded_by_people(n: int, passages: int, **settings: Any) -> tuple[Watching, ErringJudge]:
    """A monitor whose judge has judged n requests, of which people graded some passages."""
    judge = erring("1", 0.9, 0.95)
    live = with_judge(Watching(judge, **settings), judge)
    live.watch(*contexts(range(n)))
    ask_people(live, passages)
    return live, judge


def scraped(live: Watching) -> dict[tuple[str, ...], float]:
    registry = CollectorRegistry()
    MonitorCollector(live.monitor, registry, all_metrics=True)
    live.monitor.report()
    return {
        (one.name, *[one.labels[name] for name in sorted(one.labels) if name != "judge"]): one.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for one in family.samples
    }


def precision_of(figures: Mapping[tuple[str, ...], float]) -> tuple[float, float]:
    """The interval that is shown of the precision of the last month."""
    place = Metric.PRECISION.value, Window.RECENT.value
    return figures["ctxguard_estimate_lower", *place], figures["ctxguard_estimate_upper", *place]


def watch_days(live: Watching, n: int) -> None:
    for _ in range(n):
        live.now += DAY_SECONDS
        while live.monitor.step():
            pass


def test_labels_count_under_next_judge(any_store_url: str) -> None:
    live, _ = graded_by_people(150, 150, url=any_store_url, min_n=30)
    live.now += DAY_SECONDS
    later = range(150, 250)
    with_judge(live, erring("2", 0.6, 0.95)).watch(*contexts(later))
    figures = scraped(live)
    assert figures["ctxguard_labelled_waiting_samples",] == 0
    assert ("ctxguard_estimate", "precision", "recent") not in figures
    assert live.monitor.report().populations[Window.ALL_RETAINED].judged == len(later)
    live.writer.stop()
    live.store.close()


def test_silently_changed_judge_is_found() -> None:
    live, judge = graded_by_people(200, 200, min_n=30)
    watch_days(live, 10)
    figures = scraped(live)
    assert figures["ctxguard_canary_grades_total", "yes"] > 10 * PER_DAY * SERVED
    assert figures["ctxguard_canary_grades_total", "no"] == 0
    assert figures["ctxguard_judge_changed",] == 0
    assert precision_of(figures)
    judge.rates = 0.6, 0.9
    live.watch(*contexts(range(200, 250)))
    watch_days(live, 14)
    figures = scraped(live)
    assert figures["ctxguard_canary_grades_total", "no"] > 0
    assert figures["ctxguard_judge_changed",] == 1
    for damaged in ("7", '{"day": "never"}', "{"):
        live.store.set_state(f"canaries {live.monitor.series}", damaged)
        watch_days(live, 1)
        assert live.monitor.report().judge_changed, "it was found"
    # With another version it begins anew, and the labels count again.
    with_judge(live, erring("1 revised", 0.6, 0.9)).watch(*contexts(range(250, 300)))
    figures = scraped(live)
    assert figures["ctxguard_judge_changed",] == 0


def test_judging_again_keeps_the_budget() -> None:
    """Judging again keeps within the budget and leaves room for fresh samples."""
    live, _ = graded_by_people(200, 150)
    waiting = len(live.store.labelled("erring 2"))
    live.serve(*contexts(range(200, 400)))
    second = erring("2", 0.6, 0.9)
    with_judge(live, second, budget=BudgetLimits(calls_per_day=300))
    live.now += DAY_SECONDS
    while live.monitor.step(10):
        pass
    assert 200 < second.n_judged <= 300
    left = scraped(live)["ctxguard_labelled_waiting_samples",]
    assert waiting > left > 0
    assert live.monitor.report().populations[Window.ALL_RETAINED].judged > 0


def test_failing_sample_holds_no_others() -> None:
    """A sample on which the judge fails does not keep the others from being judged again."""
    live, _ = graded_by_people(100, 60)
    second = erring("2", 0.9, 0.95)
    some = min(live.store.labelled("erring 2"))
    second.fails_on = request_of(live.store, some)
    with_judge(live, second)
    for _ in range(3):
        live.monitor.step()
    assert [one for one, done in live.store.labelled("erring 2").items() if not done] == [some]


def test_later_labels_count_too() -> None:
    live, _ = graded_by_people(100, 60)
    with_judge(live, erring("2", 0.9, 0.95))
    live.monitor.step()
    before = len(live.store.graded("erring 2").requests)
    live.monitor.report()
    assert len(live.store.graded("erring 2").requests) > before == 0
    sample = min(live.store.labelled("erring 2"))
    request = request_of(live.store, sample)
    live.store.add_labels([LabelRow(request, POOL[-1], 1, None, "bob", 5.0)])
    live.monitor.report()
    [newest] = [one for one in live.store.to_grade("erring 1") if one == sample]
    assert newest == sample, "the former series is made again when its judge is back"
    assert sample not in live.store.to_grade("erring 2")


def rings_after(rng: np.random.Generator, waver: float, changed: float, most: int) -> int | None:
    """Canaries of 6 passages until a judge seems to have changed; None if it never does.

    Args:
        rng: The chance.
        waver: Share of its grades that a judge reverses by itself, each time anew.
        changed: Share of them that it reverses for good before the first canary.
        most: Canaries.
    """
    found = Canaries()
    for place in range(most):
        now = rng.random(6) < changed
        for day in (-1, place // PER_DAY, place // PER_DAY + 1):
            said = (now if day >= 0 else np.zeros(6, np.bool_)) ^ (rng.random(6) < waver)
            if day < 0:
                first = said.tolist()
            else:
                found = found.after(place, first, said.tolist(), day)
        if found.has_changed:
            return place
    return None


@pytest.mark.parametrize(("waver", "changed"), [(0.0, 0.0), (0.1, 0.0), (0.05, 0.01)])
def test_wavering_judge_does_not_ring(waver: float, changed: float) -> None:
    rng = np.random.default_rng(5)
    rung = [rings_after(rng, waver, changed, 600) for _ in range(10)]
    assert sum(one is not None for one in rung) <= 1


@pytest.mark.parametrize(("waver", "days"), [(0.0, 9), (0.05, 12)])
def test_change_is_seen_within_days(waver: float, days: int) -> None:
    rng = np.random.default_rng(6)
    rung = [rings_after(rng, waver, 0.15, 200) for _ in range(20)]
    assert None not in rung
    assert 2 <= np.median([one / PER_DAY for one in rung if one is not None]) < days
