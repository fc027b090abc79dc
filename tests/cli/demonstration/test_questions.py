"""The questions that the demonstration shows: one that gains, a typical one, one that loses."""

import numpy as np
import pytest

from calibration.data.dataset import Dataset, Query
from calibration.report.before_after import BeforeAfter
from ctxguard.cli import demo
from ctxguard.cli._console import Output
from ctxguard.cli.demonstration import loop
from ctxguard.cli.demonstration.loop import ShownQuestion
from ctxguard.core.context import Context
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Hit, Passage, ScoreKind
from ctxguard.guard import ContextGuard
from ctxguard.measure.metrics import Metric

LABELS = {"answer": 2, "lure": -1}


def context(*passage_ids: str) -> Context:
    hits = [Hit(name, 1.0 - rank / 10, name, name) for rank, name in enumerate(passage_ids)]
    guard = ContextGuard(
        lambda query, *, depth: hits[:depth], policy=RatioPolicy(k=5), score_kind=ScoreKind.RATIO
    )
    return guard.retrieve("a question")


def question(name: str, before: list[str], after: list[str]) -> ShownQuestion:
    passages = [tuple([Passage(name, name, name) for name in names]) for names in (before, after)]
    return ShownQuestion(Query(name, f"question {name}"), *passages, LABELS)


def test_answers_and_losers_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Answers and what misleads are counted and a question that lost is shown."""
    gains = question("gains", ["lure", "answer", "more"], ["answer"])
    loses = question("loses", ["answer", "lure"], ["lure", "answer"])
    counted = BeforeAfter(
        answered=(np.array([True, True, False]), np.array([True, False, True])),
        misleading=(3, 1),
        irrelevant=(4, 2),
        gain=np.array([1.0, -0.2, 0.1]),
    )
    shown = {"gains": gains, "loses": loses}

    demo._show_questions(Output(), counted, shown)

    said = " ".join(capsys.readouterr().out.split())
    assert "the answer 1 keep it, 1 gain it, 1 lose it" in said
    assert "misleading 3 before, 1 after" in said
    assert "not relevant 4 before, 2 after" in said
    assert "gains: question gains today 3 ✗ lure, ✓ answer, 1 other guard 1 ✓ answer" in said
    assert "loses: question loses today 2 ✓ answer, ✗ lure guard 2 ✗ lure, ✓ answer" in said


def test_true_mrr_is_over_all() -> None:
    dataset = Dataset("demo", (Query("q", "a question"),), {"q": {"answer": 2, "help": 1}})
    served = [context("answer", "help"), context("lure")]
    unanswerable = Dataset("demo", (Query("q", "a question"),), {"q": {}})

    truth = loop._truth(served, dataset, {"a question": "q"})

    assert truth[Metric.SERVED_MRR] == 0.5
    assert loop._truth(served[1:], unanswerable, {"a question": "q"})[Metric.SERVED_MRR] == 0.0
