"""The questions that the demonstration shows: one that gains, a typical one, one that loses."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from calibration.report.before_after import BeforeAfter
from ctxguard.cli import demo
from ctxguard.cli._console import Output
from ctxguard.core.types import Passage, Route


def option(order: list[int], n_kept: int) -> SimpleNamespace:
    """The contexts of two questions: the first ones of the same order."""
    return SimpleNamespace(order=np.array([order] * 2), kept=np.arange(3) < [[n_kept]] * 2)


def test_answers_and_losers_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Answers and what misleads are counted and a question that lost is shown."""
    pools = SimpleNamespace(
        query_ids=("gains", "loses"),
        passage_ids=(("lure", "answer", "more"),) * 2,
        misleading=np.array([[True, False, False]] * 2),
        relevant=np.array([[False, True, False]] * 2),
    )
    queries = [SimpleNamespace(query_id=name, text=f"question {name}") for name in pools.query_ids]
    outcome = SimpleNamespace(
        route=SimpleNamespace(measured=pools),
        today=option([0, 1, 2], 3),
        chosen=option([1, 0, 2], 1),
    )
    calibration: Any = SimpleNamespace(
        dataset=SimpleNamespace(queries=queries), outcomes={Route.HYBRID: outcome}
    )
    retriever: Any = SimpleNamespace(
        passage=lambda name: Passage(name, name, f"a.b.{name} (class)")
    )
    counted = BeforeAfter(
        answered=(np.array([True, False]), np.array([True, True])),
        misleading=(3, 1),
        irrelevant=(4, 2),
        gain=np.array([1.0, -0.2]),
    )

    Output().result({}, demo._questions_shown(retriever, calibration, counted))

    said = " ".join(capsys.readouterr().out.split())
    assert "the answer 1 keep it, 1 gain it, 0 lose it" in said
    assert "misleading 3 before, 1 after" in said
    assert "not relevant 4 before, 2 after" in said
    assert "question loses today 3 ✗ b.lure, ✓ b.answer, 1 other guard 1 ✓ b.answer" in said
