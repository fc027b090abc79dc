"""Calls of the judge that fail: passages are unjudged in every figure, and asked about again."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from contexts import make_context
from watching import Watching, counted

from ctxguard.core.types import Passage
from ctxguard.measure.metrics import Metric
from ctxguard.measure.rows import FAILED
from ctxguard.monitor.estimation.live import Window
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.sampling.sampler import JudgingRates
from ctxguard.monitor.service import Monitor
from ctxguard.monitor.store import State
from tests.stored import all_judged

POOL = [f"p{rank}" for rank in range(8)]
RATES = JudgingRates(0.3, 0.2, 0.5, 0.3, 4)
SEEDS = range(20)

Fails = Callable[[str, str], bool]
"""Whether the first call about a passage of a query fails."""


def raised(passage: Passage) -> Judgment:
    raise TimeoutError("no answer")


CAUSES: Mapping[str, Callable[[Passage], Any]] = {
    "refused": lambda passage: None,
    "misplaced": lambda passage: Judgment("another", 1),
    "out of range": lambda passage: Judgment(passage.passage_id, 99),
    "below zero": lambda passage: Judgment(passage.passage_id, -1),
    "no number": lambda passage: Judgment(passage.passage_id, "2"),  # type: ignore[arg-type]
    "repeated": lambda passage: Judgment(passage.passage_id, 1),
    "raised": raised,
}
OF_CALLS = {"repeated", "raised"}
"""These cost all passages of a call their grades."""


def is_relevant(query: str, passage_id: str) -> bool:
    return random.Random(f"{query} {passage_id}").random() < 0.4


class Failing:
    """Knows the truth, and fails on some passages for as long as it is not healthy."""

    name, version, max_grade, exact = "failing", "1", 1, True

    def __init__(self, fails: Fails, causes: Sequence[str] = tuple(CAUSES)) -> None:
        self.fails, self.causes = fails, causes
        self.is_healthy = False
        self.asked: list[tuple[str, str]] = []
        self.failed: set[tuple[str, str]] = set()

    def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment | None]:
        about = [(query, one.passage_id) for one in passages]
        self.asked += about
        failed = [] if self.is_healthy else [each for each in about if self.fails(*each)]
        causes = {
            name: random.Random(f"cause {query} {name}").choice(self.causes) for _, name in failed
        }
        self.failed.update(about if OF_CALLS & {*causes.values()} else failed)
        given = [
            CAUSES[causes[one.passage_id]](one)
            if one.passage_id in causes
            else Judgment(one.passage_id, int(is_relevant(query, one.passage_id)))
            for one in passages
        ]
        return given * 2 if "repeated" in causes.values() else given


def seldom(share: float, seed: object = 0) -> Fails:
    return lambda query, name: random.Random(f"{seed} {query} {name}").random() < share


def watching(judge: object, n: int = 60) -> Watching:
    live = Watching(judge, rates=RATES)  # type: ignore[arg-type]
    live.watch(*[make_context(POOL, 3, request_id=f"r{i}", query=f"q{i}") for i in range(n)])
    return live


def next_run(live: Watching) -> Monitor:
    """Judge what waits by a monitor that begins, as the next run of a command does."""
    monitor = Monitor(live.store, live.monitor.judge, min_n=2, clock=lambda: live.now)
    while monitor.step():
        pass
    return monitor


@pytest.mark.parametrize("cause", CAUSES)
def test_next_run_asks_what_failed(cause: str) -> None:
    """Exactly that; then every figure is that of a judge that never failed."""
    judge = Failing(seldom(0.05 if cause in OF_CALLS else 0.3), [cause])
    live = watching(judge)
    report = live.monitor.report()
    rows = all_judged(live.store, live.monitor.series)
    n_failed = int((rows.passages["judge_grade"] == FAILED).sum())
    assert report.failed_passages == counted(report, "invalid_grades") == n_failed > 0
    assert {one.value for one in report.estimates[Window.ALL_RETAINED].values()} == {None}
    first, judge.is_healthy = set(judge.asked), True
    judge.asked.clear()
    again = next_run(live)
    asked = set(judge.asked)
    assert len(judge.asked) == len(asked) >= n_failed
    # Whole pools are judged once it is certain that nothing served is relevant.
    assert asked & first <= judge.failed
    assert len(asked & first) >= n_failed - len(asked - first)
    never = watching(Failing(lambda *_: False))
    assert again.report().estimates == never.monitor.report().estimates
    assert (again.report().failed_requests, again.report().failed_passages) == (0, 0)
    assert next_run(live).judge.asked == judge.asked  # type: ignore[attr-defined]


@pytest.mark.parametrize("fails", [is_relevant, lambda *about: not is_relevant(*about)])
def test_failures_that_depend_on_the_grade(fails: Fails) -> None:
    """No figure is made of what is left."""
    live = watching(Failing(fails, ["refused"]))
    found = live.monitor.report()
    assert {one.value for one in found.estimates[Window.ALL_RETAINED].values()} == {None}
    about = found.populations[Window.ALL_RETAINED]
    assert about.failed > 0.5 * about.judged


def test_few_failures_leave_their_requests_out() -> None:
    """Fewer than one request in fifty lacks a grade: the others stand for it."""
    failing = {("q3", "p0"), ("q9", "p2")}
    live = watching(Failing(lambda *about: about in failing, ["refused"]), n=120)
    whole = watching(Failing(lambda *_: False), n=120)
    found, true = (one.monitor.report().estimates[Window.ALL_RETAINED] for one in (live, whole))
    assert live.monitor.report().failed_requests == 2
    for metric in (Metric.PRECISION, Metric.SERVED_MRR, Metric.UDCG):
        assert found[metric].n == true[metric].n - 2
        assert found[metric].value == pytest.approx(true[metric].value, abs=0.02)


def test_figures_hold_the_truth_over_seeds() -> None:
    """Runs follow each other until all is judged: no figure of any run misses the truth."""
    n_shown = n_held = 0
    for seed in SEEDS:
        judge = Failing(seldom(0.3, seed))
        live = watching(judge, n=40)
        n_runs = 0
        truth = watching(Failing(lambda *_: False), n=40).monitor.report()
        while live.store.n_failed(live.monitor.series)[1] or live.store.states()[State.PENDING]:
            n_runs += 1
            judge.fails = seldom(0.3, f"{seed} {n_runs}")
            report = next_run(live).report()
            for metric, one in report.estimates[Window.ALL_RETAINED].items():
                if one.value is not None:
                    true = truth.estimates[Window.ALL_RETAINED][metric].value
                    assert true is not None
                    assert one.bounds is not None
                    n_shown += 1
                    n_held += one.bounds[0] <= true <= one.bounds[1]
        assert n_runs < 40
    assert n_shown > 100
    assert n_held == n_shown


def test_round_returns_to_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A monitor that goes on asks again by itself, and seldom."""
    from ctxguard.monitor.judging import worker

    judge = Failing(seldom(0.3), ["refused"])
    live = watching(judge)
    n_failed = live.monitor.report().failed_passages
    asked = len(judge.asked)
    for _ in range(5):
        live.monitor.step()
    assert len(judge.asked) == asked
    now = worker.time.monotonic() + 2.0 * worker._ROUND_SECONDS[1]
    monkeypatch.setattr(worker.time, "monotonic", lambda: now)
    judge.is_healthy = True
    while live.monitor.step():
        pass
    assert live.monitor.report().failed_passages == 0
    assert len(judge.asked) - asked >= n_failed
