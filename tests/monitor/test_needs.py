"""What an estimate still needs counts down as people grade, and never goes up."""

import random

import pytest
from contexts import make_context
from people import label as label_all
from stub_judges import ErringJudge
from watching import DAY_SECONDS, Watching

from ctxguard.measure.metrics import Metric
from ctxguard.monitor.labels.files import RowToLabel
from ctxguard.monitor.sampling.sampler import JudgingRates

POOL = [f"p{rank}" for rank in range(10)]


def truth(query: str, name: str) -> bool:
    return random.Random(f"{query} {name}").random() < 0.9 / (1 + int(name[1:]))


def needs(live: Watching) -> dict[Metric, int]:
    """How many more grades each metric needs that is shown without an estimate; else 0."""
    found = live.monitor.report()
    shown = {metric: found.estimates[window][metric] for metric, window in found.shown.items()}
    return {
        metric: (one.grades_needed or 0) if one.value is None else 0
        for metric, one in shown.items()
        if one.value is not None or one.grades is not None
    }


@pytest.mark.parametrize("seed", range(3))
def test_needs_never_go_up_within_a_month(seed: int) -> None:
    """Traffic, changing weights and a few grades each day: after every grading, at most as many."""
    luck = random.Random(seed)
    rates = JudgingRates(dropped_rate=luck.choice([0.3, 1.0]))
    live = Watching(ErringJudge(truth, luck=str(seed)), rates=rates, min_n=30)

    def grade(row: RowToLabel) -> int:
        return int(truth(row.query, row.passage_id))

    before: dict[Metric, int] = {}
    begin: dict[Metric, int] = {}
    for day in range(30):
        for number in range(luck.randint(2, 12)):
            name = f"{day} {number}"
            context = make_context(POOL, luck.randint(0, 5), request_id=name, query=name)
            live.watch(context, probability=luck.choice([1.0, 0.2]))
        waiting = needs(live)
        label_all(live.store, live.monitor.series, luck.randint(0, 12), grade)
        after = needs(live)
        for metric, n in after.items():
            assert n <= waiting.get(metric, n), (day, metric)
            assert n <= before.get(metric, n), (day, metric)
            begin.setdefault(metric, n)
        before = {**before, **after}
        live.now += DAY_SECONDS
    assert before.keys() >= {Metric.PRECISION, Metric.SERVED_MRR, Metric.POOLED_RECALL, Metric.UDCG}
    assert all(n < begin[metric] for metric, n in before.items())
