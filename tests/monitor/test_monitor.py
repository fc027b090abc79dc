"""The monitor: from sampled requests to estimates, and what becomes of a sample that fails."""

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from ctxguard.context import Context
from ctxguard.errors import ConfigurationError
from ctxguard.monitor.estimates import Metric
from ctxguard.monitor.judges import Judgment, LabelJudge
from ctxguard.monitor.judging import JudgingRates
from ctxguard.monitor.monitor import Monitor, Outcome, Window
from ctxguard.monitor.sampler import Sampler
from ctxguard.types import Mode, Passage

MakeContext = Callable[..., Context]
EVERYTHING = JudgingRates(dropped=1.0)


class ScriptedJudge:
    """Answers what it is told to, and remembers what it was asked."""

    name = "scripted"
    version = "1"
    max_grade = 1

    def __init__(
        self, answer: Callable[[Sequence[Passage]], Sequence[Judgment | None]] | None = None
    ) -> None:
        self.asked: list[str] = []
        self._answer = answer

    def judge(self, query: str, passages: Sequence[Passage]) -> Sequence[Judgment | None]:
        self.asked += [passage.passage_id for passage in passages]
        if self._answer is not None:
            return self._answer(passages)
        return [Judgment(passage.passage_id, 0) for passage in passages]


def watch(monitor: Monitor, *contexts: Context, forced: bool = False) -> None:
    for context in contexts:
        monitor.sampler.offer(context, 0.0, forced=forced)
    while monitor.step():
        pass


POOL = [f"p{rank}" for rank in range(10)]


def test_estimates_of_a_wholly_judged_stream_are_its_exact_means(
    make_context: MakeContext,
) -> None:
    qrels = {"one": {"p0": 1, "p7": 1}, "two": {"p1": 1}, "three": {"p9": 1}, "four": {}}
    monitor = Monitor(Sampler(1.0), LabelJudge(qrels), rates=EVERYTHING, min_n=2)
    watch(monitor, *[make_context(POOL, 3, query=query) for query in qrels])
    estimates = monitor.estimates()
    assert estimates[Metric.RECALL].value == 2 / 4
    assert estimates[Metric.RECALL_PER_REQUEST].value == pytest.approx((0.5 + 1.0 + 0.0) / 3)
    assert estimates[Metric.MRR].value == pytest.approx((1.0 + 0.5 + 0.0) / 3)
    assert estimates[Metric.PRECISION].value == pytest.approx(2 / 12)
    assert (estimates[Metric.MRR].n, estimates[Metric.UDCG].n) == (3, 4)
    assert monitor.estimates(Window.ALL_TIME) == estimates


def test_all_that_was_served_is_judged_and_of_the_rest_about_the_share_asked_for(
    make_context: MakeContext,
) -> None:
    judge = ScriptedJudge()
    rates = JudgingRates(dropped=0.3, pool=0.0, unanswered_pool=0.0)
    monitor = Monitor(Sampler(1.0), judge, rates=rates)
    watch(monitor, *[make_context(POOL, 2, request_id=f"r{i}") for i in range(500)])
    served = {"p0", "p1"}
    assert sum(passage_id in served for passage_id in judge.asked) == 1_000
    assert sum(passage_id not in served for passage_id in judge.asked) / 4_000 == pytest.approx(
        0.3, abs=0.03
    )


def test_judging_again_asks_about_the_same_passages(make_context: MakeContext) -> None:
    asked = []
    for _ in range(2):
        judge = ScriptedJudge()
        contexts = [make_context(POOL, 2, request_id=f"r{i}") for i in range(50)]
        watch(Monitor(Sampler(1.0, seed="s"), judge), *contexts)
        asked.append(judge.asked)
    assert asked[0] == asked[1]


def test_the_sampled_estimates_cover_the_truth(make_context: MakeContext) -> None:
    rng = random.Random(5)
    qrels = {}
    for i in range(600):
        relevant = {name for name in POOL if rng.random() < 0.5 / (1 + POOL.index(name))}
        qrels[f"q{i}"] = dict.fromkeys(relevant, 1)
    contexts = [make_context(POOL, 3, query=query, request_id=query) for query in qrels]
    whole = Monitor(Sampler(1.0), LabelJudge(qrels), rates=EVERYTHING)
    watch(whole, *contexts)
    partly = Monitor(Sampler(1.0, seed="4"), LabelJudge(qrels))
    watch(partly, *contexts)
    for metric in (Metric.RECALL, Metric.MRR):
        found, truth = partly.estimates()[metric], whole.estimates()[metric].value
        assert found.lower <= truth <= found.upper
    # What was served is always judged: these do not rest on a sample of the dropped.
    for metric in (Metric.UDCG, Metric.PRECISION):
        assert partly.estimates()[metric] == whole.estimates()[metric]


def test_ranks_are_the_decisions_whatever_the_order_of_presentation(
    make_context: MakeContext,
) -> None:
    monitor = Monitor(Sampler(1.0), LabelJudge({"q": {"p0": 1}}), rates=EVERYTHING, min_n=2)
    context = make_context(POOL, 3)
    edges = replace(context, passages=context.passages[::-1])
    watch(monitor, edges, edges)
    assert monitor.estimates()[Metric.MRR].value == 1.0


def test_in_shadow_mode_it_is_the_served_passages_that_are_watched(
    make_context: MakeContext,
) -> None:
    monitor = Monitor(Sampler(1.0), LabelJudge({"q": {"p1": 1}}), rates=EVERYTHING, min_n=2)
    decided = make_context(POOL, 1)
    served = make_context(POOL, 3).passages
    watch(monitor, *[replace(decided, passages=served, mode=Mode.SHADOW)] * 2)
    assert monitor.estimates()[Metric.RECALL].value == 1.0
    assert monitor.estimates()[Metric.MRR].value == 0.5


def test_an_empty_context_counts_as_zero_where_its_pool_holds_a_relevant_passage(
    make_context: MakeContext,
) -> None:
    monitor = Monitor(Sampler(1.0), LabelJudge({"q": {"p1": 1}}), rates=EVERYTHING, min_n=2)
    watch(monitor, make_context(POOL, 0), make_context(POOL, 0))
    assert monitor.estimates()[Metric.MRR].value == 0.0
    assert monitor.estimates()[Metric.PRECISION].value is None


def test_without_data_every_metric_says_so() -> None:
    monitor = Monitor(Sampler(1.0), ScriptedJudge())
    for window in Window:
        assert all(found.value is None for found in monitor.estimates(window).values())
    assert monitor.report().age_seconds is None


def test_requests_leave_the_window_and_stay_in_all_time(make_context: MakeContext) -> None:
    now = [0.0]
    monitor = Monitor(
        Sampler(1.0), ScriptedJudge(), window_seconds=60.0, clock=lambda: now[0], min_n=2
    )
    watch(monitor, make_context(POOL, 2))
    now[0] = 30.0
    watch(monitor, make_context(POOL, 2))
    assert monitor.estimates()[Metric.PRECISION].n == 2
    now[0] = 62.0
    assert monitor.estimates()[Metric.PRECISION].n == 1
    assert monitor.report().age_seconds == 32.0
    now[0] = 1_000.0
    assert monitor.estimates()[Metric.PRECISION].n == 0
    assert monitor.estimates(Window.ALL_TIME)[Metric.PRECISION].n == 2


def test_forced_samples_are_left_out(make_context: MakeContext) -> None:
    judge = ScriptedJudge()
    monitor = Monitor(Sampler(0.0), judge)
    watch(monitor, make_context(POOL, 2), forced=True)
    assert monitor.report().outcomes[Outcome.FORCED] == 1
    assert judge.asked == []


BROKEN_ANSWERS = {
    "nothing": lambda passages: [None] * len(passages),
    "too few": lambda passages: [Judgment(passages[0].passage_id, 1)],
    "out of range": lambda passages: [Judgment(p.passage_id, 4) for p in passages],
    "below zero": lambda passages: [Judgment(p.passage_id, -1) for p in passages],
    "no number": lambda passages: [Judgment(p.passage_id, "high") for p in passages],
    "misplaced": lambda passages: [Judgment(p.passage_id, 1) for p in passages[::-1]],
}


@pytest.mark.parametrize("answer", BROKEN_ANSWERS.values(), ids=BROKEN_ANSWERS)
def test_an_invalid_verdict_is_counted_and_never_imputed(
    make_context: MakeContext, answer: Callable[[Sequence[Passage]], Sequence[Judgment | None]]
) -> None:
    monitor = Monitor(Sampler(1.0), ScriptedJudge(answer), rates=EVERYTHING, min_n=2)
    watch(monitor, *[make_context(POOL, 2)] * 3)
    report = monitor.report()
    assert report.outcomes[Outcome.INCOMPLETE] == 3
    assert report.verdicts == report.invalid_verdicts == 6
    assert report.sums[Metric.UDCG].n == 0


def test_dropped_passages_with_a_verdict_stand_for_those_without(
    make_context: MakeContext,
) -> None:
    def half(passages: Sequence[Passage]) -> list[Judgment | None]:
        named = [Judgment(p.passage_id, int(p.passage_id in {"p0", "p2"})) for p in passages]
        return [None if v.passage_id in {"p6", "p7", "p8", "p9"} else v for v in named]

    monitor = Monitor(Sampler(1.0), ScriptedJudge(half), rates=EVERYTHING, min_n=2)
    watch(monitor, *[make_context(POOL, 2)] * 2)
    assert monitor.estimates()[Metric.RECALL].value == pytest.approx(1 / (1 + 2))
    assert monitor.report().sums[Metric.RECALL_PER_REQUEST].n == 0


def test_a_dropped_passage_that_cannot_be_read_is_without_a_verdict(
    make_context: MakeContext,
) -> None:
    class Torn:
        def __getitem__(self, position: int) -> Passage:
            if position == 4:
                raise OSError("gone")
            return Passage(POOL[position], "")

    context = make_context(POOL, 2)
    ranking = replace(context.decision.ranking, passages=Torn())
    torn = replace(context, decision=replace(context.decision, ranking=ranking))
    monitor = Monitor(Sampler(1.0), ScriptedJudge(), rates=EVERYTHING)
    watch(monitor, torn)
    report = monitor.report()
    assert report.outcomes[Outcome.JUDGED] == 1
    assert (report.verdicts, report.invalid_verdicts) == (10, 1)


def test_a_judge_that_raises_loses_the_sample_and_is_logged_once(
    make_context: MakeContext, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(passages: Sequence[Passage]) -> list[Judgment | None]:
        raise TimeoutError("the judge is down")

    monitor = Monitor(Sampler(1.0), ScriptedJudge(fail))
    with caplog.at_level(logging.WARNING):
        watch(monitor, *[make_context(POOL, 2)] * 3)
    assert monitor.report().outcomes[Outcome.JUDGE_FAILED] == 3
    assert len(caplog.records) == 1


def test_what_was_drained_is_judged_or_left_out_for_a_stated_reason(
    make_context: MakeContext,
) -> None:
    qrels = {"known": {"p0": 1}}
    monitor = Monitor(Sampler(1.0), LabelJudge(qrels))
    watch(monitor, make_context(POOL, 2, query="known"), make_context(POOL, 2, query="unknown"))
    watch(monitor, make_context(POOL, 2, query="known"), forced=True)
    outcomes = monitor.report().outcomes
    assert sum(outcomes.values()) == monitor.sampler.accounts().drained == 3
    assert (outcomes[Outcome.JUDGED], outcomes[Outcome.INCOMPLETE]) == (1, 1)


def test_the_background_thread_judges_and_ends_when_told(make_context: MakeContext) -> None:
    monitor = Monitor(Sampler(1.0), ScriptedJudge())
    monitor.start(interval_seconds=0.005)
    monitor.start()
    for _ in range(20):
        monitor.sampler.offer(make_context(POOL, 2), 0.0)
    deadline = time.monotonic() + 10.0
    while monitor.report().outcomes[Outcome.JUDGED] < 20 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert monitor.stop()
    assert monitor.stop()
    assert monitor.report().outcomes[Outcome.JUDGED] == 20


def test_a_judge_that_hangs_holds_up_neither_requests_nor_the_end(
    make_context: MakeContext,
) -> None:
    asked, released = threading.Event(), threading.Event()

    def hang(passages: Sequence[Passage]) -> list[Judgment | None]:
        asked.set()
        released.wait(20.0)
        return [None] * len(passages)

    monitor = Monitor(Sampler(1.0), ScriptedJudge(hang))
    monitor.sampler.offer(make_context(POOL, 2), 0.0)
    monitor.start(interval_seconds=0.005)
    assert asked.wait(10.0)
    assert monitor.sampler.offer(make_context(POOL, 2), 0.0)
    assert monitor.report().age_seconds is None
    assert not monitor.stop(timeout_seconds=0.05)
    released.set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_counts_for_itself_alone(make_context: MakeContext) -> None:
    monitor = Monitor(Sampler(1.0), ScriptedJudge())
    watch(monitor, make_context(POOL, 2))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        watch(monitor, make_context(POOL, 2), make_context(POOL, 2))
        os.write(writing, str(monitor.report().outcomes[Outcome.JUDGED]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 10) == b"2"
    os.close(reading)
    os.close(writing)
    assert monitor.report().outcomes[Outcome.JUDGED] == 1


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="window_seconds"):
        Monitor(Sampler(1.0), ScriptedJudge(), window_seconds=0.0)
    with pytest.raises(ConfigurationError, match=r"dropped 1\.5"):
        JudgingRates(dropped=1.5)
    with pytest.raises(ConfigurationError, match="at least"):
        JudgingRates(pool=0.9)
