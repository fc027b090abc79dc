"""The questions that the demonstration shows: one that gains, a typical one, one that loses."""

import pytest
from prometheus_client import CollectorRegistry

from calibration.data.dataset import Dataset, Query
from ctxguard.cli import demo
from ctxguard.cli._console import Output
from ctxguard.cli.demonstration import loop
from ctxguard.cli.demonstration.loop import BeforeAfter, typical
from ctxguard.core.context import Context
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Hit, ScoreKind
from ctxguard.guard import ContextGuard
from ctxguard.monitor.estimation.terms import Metric
from ctxguard.request.telemetry import Telemetry

LABELS = {"answer": 2, "lure": -1}


def context(*passage_ids: str) -> Context:
    hits = [Hit(name, 1.0 - rank / 10, name, name) for rank, name in enumerate(passage_ids)]
    guard = ContextGuard(
        lambda query, *, depth: hits[:depth],
        policy=RatioPolicy(k=5),
        score_kind=ScoreKind.RATIO,
        telemetry=Telemetry(CollectorRegistry()),
    )
    return guard.retrieve("a question")


def pair(name: str, before: list[str], after: list[str]) -> BeforeAfter:
    return BeforeAfter(Query(name, f"question {name}"), context(*before), context(*after), LABELS)


GAINS = pair("gains", ["lure", "answer"], ["answer"])
LOSES = pair("loses", ["answer", "lure"], ["lure", "answer"])
SAME = pair("same", ["answer"], ["answer"])


def test_the_typical_question_is_one_that_the_guard_changed() -> None:
    assert typical([LOSES, SAME, SAME, GAINS]) is GAINS
    assert typical([SAME]) is SAME


def test_a_question_that_the_guard_harmed_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    demo._show_questions(Output(), [LOSES, SAME, GAINS], refuted=True)

    shown = capsys.readouterr().out
    assert "1 better, 1 worse, 1 equal" in shown
    assert "best: question gains" in shown
    assert "worst: question loses" in shown
    assert "which these questions refute: it is not served" in " ".join(shown.split())
    assert "✗lure" in shown
    assert "✓answer" in shown


def test_the_true_mrr_is_over_all_requests_as_the_estimate_is() -> None:
    dataset = Dataset("demo", (Query("q", "a question"),), {"q": {"answer": 2, "help": 1}})
    served = [context("answer", "help"), context("lure")]
    unanswerable = Dataset("demo", (Query("q", "a question"),), {"q": {}})

    truth = loop._truth(served, dataset, {"a question": "q"})

    assert truth[Metric.MRR] == 0.5
    assert loop._truth(served[1:], unanswerable, {"a question": "q"})[Metric.MRR] == 0.0
