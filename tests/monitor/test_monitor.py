"""The monitor: from sampled requests to estimates, and what becomes of a sample that fails."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from contexts import make_context
from watching import Watching, counted

from ctxguard.core.types import Mode, Passage
from ctxguard.errors import ConfigurationError
from ctxguard.measure.metrics import Metric, udcg
from ctxguard.monitor.estimation.live import Window
from ctxguard.monitor.judges import Judgment, LabelJudge
from ctxguard.monitor.judging.budget import BudgetLimits
from ctxguard.monitor.sampling.record import Privacy
from ctxguard.monitor.sampling.sampler import JudgingRates
from ctxguard.monitor.service import JudgingOutcome
from ctxguard.monitor.store import State
from tests.stored import all_judged
from tests.timing import PATIENCE_SECONDS, until

EVERYTHING = JudgingRates(dropped_rate=1.0)
ONLY_SERVED = JudgingRates(0, 0, 0, 0)


class ScriptedJudge:
    """Answers what it is told to, and remembers what it was asked."""

    name = "scripted"
    version = "1"
    max_grade = 1
    exact = True

    def __init__(
        self, answer: Callable[[Sequence[Passage]], Sequence[Judgment | None]] | None = None
    ) -> None:
        self.asked: list[str] = []
        self.answer = answer

    def judge(self, query: str, passages: Sequence[Passage]) -> Sequence[Judgment | None]:
        self.asked += [passage.passage_id for passage in passages]
        if self.answer is not None:
            return self.answer(passages)
        return [Judgment(passage.passage_id, 0) for passage in passages]


POOL = [f"p{rank}" for rank in range(10)]


def test_fully_judged_estimates_are_exact() -> None:
    qrels = {"one": {"p0": 1, "p7": 1}, "two": {"p1": 1}, "three": {"p9": 1}, "four": {}}
    live = Watching(LabelJudge(qrels), rates=EVERYTHING)
    live.watch(*[make_context(POOL, 3, query=query) for query in qrels])
    estimates = live.monitor.report().estimates[Window.RECENT]
    assert estimates[Metric.POOLED_RECALL].value == 2 / 4
    assert estimates[Metric.SERVED_MRR].value == pytest.approx((1.0 + 0.5 + 0.0 + 0.0) / 4)
    assert estimates[Metric.PRECISION].value == pytest.approx(2 / 12)
    assert (estimates[Metric.SERVED_MRR].n, estimates[Metric.UDCG].n) == (4, 4)
    assert live.monitor.report().estimates[Window.ALL_RETAINED] == estimates


def test_live_harm_equals_calibrations() -> None:
    """Three are served to each of four requests; two have labels to one, and none to another."""
    some = {"one": {"p0": 1, "p1": 0}, "none": {"p9": 1}}
    positives = {"one": {"p0": 1}, "none": {"p9": 1}}
    for qrels, of_one, of_none in (
        (some, [1.0, -0.02, -0.02], [-0.02] * 3),
        (positives, [1.0, -0.02, -0.02], [-0.02] * 3),
    ):
        live = Watching(LabelJudge(qrels), rates=EVERYTHING)
        queries = ["one", "none", "one", "none"]
        live.watch(*[make_context(POOL, 3, query=query) for query in queries])
        _, harms = udcg(np.array([of_one, of_none]))
        harm = live.monitor.report().estimates[Window.RECENT][Metric.HARM].value
        assert harm == pytest.approx(harms.mean(), rel=1e-6)


def test_judging_again_asks_the_same() -> None:
    asked = []
    for _ in range(2):
        judge = ScriptedJudge()
        contexts = [make_context(POOL, 2, request_id=f"r{i}") for i in range(50)]
        Watching(judge, seed="s").watch(*contexts)
        asked.append(judge.asked)
    assert asked[0] == asked[1]


def test_ranks_ignore_presentation_order() -> None:
    live = Watching(LabelJudge({"q": {"p0": 1}}), rates=EVERYTHING)
    context = make_context(POOL, 3)
    live.watch(*[replace(context, passages=context.passages[::-1])] * 2)
    assert live.monitor.report().estimates[Window.RECENT][Metric.SERVED_MRR].value == 1.0


def test_shadow_watches_the_served() -> None:
    live = Watching(LabelJudge({"q": {"p1": 1}}), rates=EVERYTHING)
    served = make_context(POOL, 3).passages
    live.watch(*[replace(make_context(POOL, 1), passages=served, mode=Mode.SHADOW)] * 2)
    found = live.monitor.report().estimates[Window.RECENT]
    assert (found[Metric.POOLED_RECALL].value, found[Metric.SERVED_MRR].value) == (1.0, 0.5)


def test_empty_context_has_no_rank() -> None:
    live = Watching(LabelJudge({"q": {"p1": 1}}), rates=EVERYTHING)
    live.watch(make_context(POOL, 0), make_context(POOL, 0))
    assert live.monitor.report().estimates[Window.RECENT][Metric.SERVED_MRR].value is None
    assert live.monitor.report().estimates[Window.RECENT][Metric.PRECISION].value is None


def test_expired_requests_stay_while_kept() -> None:
    live = Watching(ScriptedJudge(), window_seconds=60.0)
    live.watch(make_context(POOL, 2))
    live.now += 30.0
    live.watch(make_context(POOL, 2))
    assert live.monitor.report().estimates[Window.RECENT][Metric.PRECISION].n == 2
    live.now += 32.0
    assert live.monitor.report().estimates[Window.RECENT][Metric.PRECISION].n == 1
    assert live.monitor.report().age_seconds == 32.0
    live.now += 1_000.0
    assert live.monitor.report().estimates[Window.RECENT][Metric.PRECISION].n == 0
    assert live.monitor.report().estimates[Window.ALL_RETAINED][Metric.PRECISION].n == 2


def test_unreadable_dropped_passage_has_no_grade() -> None:
    class Torn:
        def __getitem__(self, position: int) -> Passage:
            if position == 4:
                raise OSError("gone")
            return Passage(POOL[position], f"text {position}")

    context = make_context(POOL, 2)
    ranking = replace(context.decision.ranking, passages=Torn())
    torn = replace(context, decision=replace(context.decision, ranking=ranking))
    live = Watching(ScriptedJudge(), rates=EVERYTHING)
    live.watch(torn)
    report = live.monitor.report()
    assert report.outcomes[JudgingOutcome.INCOMPLETE] == 1
    assert (counted(report, "grades"), counted(report, "invalid_grades")) == (10, 1)


def failing(passages: Sequence[Passage]) -> list[Judgment | None]:
    raise TimeoutError("the judge is down")


@pytest.mark.parametrize(("n", "asked"), [(1, 20), (3, 3 + 2 + 18)])
def test_judge_outage_waits_and_logs_once(
    n: int, asked: int, caplog: pytest.LogCaptureFixture
) -> None:
    """After five failures in a row a step asks about one sample: the judge is down."""
    live = Watching(ScriptedJudge(failing))
    with caplog.at_level(logging.WARNING):
        live.serve(*[make_context(POOL, 2)] * n)
        assert [live.monitor.step() for _ in range(20)] == [0] * 20
    assert live.monitor.report().outcomes[JudgingOutcome.JUDGE_FAILED] == asked
    assert live.monitor.report().waiting == n
    assert len(caplog.records) == 1
    assert "the judge is down" not in caplog.text
    live.monitor.judge.answer = None
    assert live.monitor.step() == n


def test_sample_on_which_the_judge_fails() -> None:
    """The others are judged, and it is asked about again in each round."""

    def fail_on_one(passages: Sequence[Passage]) -> list[Judgment | None]:
        if passages[0].passage_id == "poison":
            raise ValueError("cannot parse this")
        return [Judgment(passage.passage_id, 0) for passage in passages]

    live = Watching(ScriptedJudge(fail_on_one), rates=ONLY_SERVED)
    live.serve(make_context(["poison", "p1"], 1))
    for i in range(50):
        live.serve(make_context(POOL, 2, request_id=f"r{i}"))
        live.monitor.step()
    states = live.store.states()
    assert (states[State.INCOMPLETE], states[State.JUDGED]) == (1, 50)
    assert live.monitor.report().failed_passages == 1


def test_passed_over_samples_are_represented() -> None:
    live = Watching(ScriptedJudge(), budget=BudgetLimits(calls_per_hour=160), rates=ONLY_SERVED)
    live.serve(*[make_context(POOL, 2, request_id=f"r{i}") for i in range(400)])
    while live.monitor.step(20):
        pass
    report = live.monitor.report()
    judged, skipped = (
        report.outcomes[JudgingOutcome.JUDGED],
        report.outcomes[JudgingOutcome.SKIPPED],
    )
    assert counted(report, "grades") <= 160
    assert judged == pytest.approx(80, abs=20)
    assert judged + skipped == pytest.approx(400, abs=40)
    rows = all_judged(live.store, live.monitor.series)
    stood_for = (1.0 / rows.requests["probability"]).sum()
    assert stood_for == pytest.approx(judged + skipped, rel=0.25)


def test_looked_up_text_is_redacted() -> None:
    read: list[Passage] = []

    def judge_texts(passages: Sequence[Passage]) -> list[Judgment | None]:
        read.extend(passages)
        return [Judgment(passage.passage_id, 1) for passage in passages]

    live = Watching(
        ScriptedJudge(judge_texts),
        privacy=Privacy(passages="omitted"),
        lookup=lambda passage_id: Passage(
            passage_id, "ask joe@example.org", "of ann@example.org", {"owner": "bob@example.org"}
        ),
    )
    live.watch(make_context(POOL, 2))
    assert read[0] == Passage("p0", "ask [e-mail]", "of [e-mail]")


def fail(text: str) -> str:
    raise ValueError(text)


@pytest.mark.parametrize(
    "settings",
    [
        {"lookup": lambda passage_id: Passage(passage_id, "a text"), "redactor": fail},
        {},
        {"privacy": Privacy(query="omitted")},
    ],
    ids=["cannot be redacted", "not stored", "no query"],
)
def test_judge_sees_no_forbidden_text(settings: dict[str, Any]) -> None:
    """A judge that reads is asked about no text that it may not have."""
    judge = ScriptedJudge()
    live = Watching(judge, **{"privacy": Privacy(passages="omitted"), **settings})
    live.watch(make_context(POOL, 2))
    assert judge.asked == []
    assert live.monitor.report().outcomes[JudgingOutcome.INCOMPLETE] == 1


def test_thread_judges_until_told() -> None:
    live = Watching(ScriptedJudge())
    live.monitor.start(interval_seconds=0.005, refresh_seconds=0.01)
    live.monitor.start()
    live.serve(*[make_context(POOL, 2)] * 20)

    def all_are_judged() -> bool:
        latest = live.monitor.latest
        return latest is not None and latest.outcomes[JudgingOutcome.JUDGED] == 20

    until(all_are_judged)
    assert live.monitor.stop()
    assert live.monitor.stop()
    assert live.monitor.report().outcomes[JudgingOutcome.JUDGED] == 20


def test_hanging_judge_holds_nothing() -> None:
    asked, released = threading.Event(), threading.Event()

    def hang(passages: Sequence[Passage]) -> list[Judgment | None]:
        asked.set()
        released.wait(PATIENCE_SECONDS)
        return [None] * len(passages)

    live = Watching(ScriptedJudge(hang))
    live.serve(make_context(POOL, 2))
    live.monitor.start(interval_seconds=0.005)
    assert asked.wait(PATIENCE_SECONDS)
    live.serve(make_context(POOL, 2))
    assert live.monitor.report().age_seconds is None
    assert not live.monitor.stop(timeout_seconds=0.05)
    released.set()


def test_stepping_clock_repeats_nothing() -> None:
    """A clock that steps a day loses nothing and judges nothing twice."""
    judge = ScriptedJudge()
    live = Watching(judge, rates=ONLY_SERVED)
    for step_seconds in (0.0, 86_400.0, -172_800.0):
        live.now += step_seconds
        live.watch(*[make_context(POOL, 2)] * 5)
        live.monitor.maintain()
    assert live.monitor.report().outcomes[JudgingOutcome.JUDGED] == 15
    assert len(judge.asked) == 30


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="window_seconds"):
        Watching(ScriptedJudge(), window_seconds=0.0)
    with pytest.raises(ConfigurationError, match="min_n 1"):
        Watching(ScriptedJudge(), min_n=1)
    with pytest.raises(ConfigurationError, match=r"dropped_rate 1\.5"):
        JudgingRates(dropped_rate=1.5)
    with pytest.raises(ConfigurationError, match="at least"):
        JudgingRates(full_pool_rate=0.9, full_pool_rate_if_no_hit=0.5)
