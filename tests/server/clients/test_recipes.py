"""The recipes of docs/rerank_clients.md, run as they are shown: each serves what was kept."""

import re
from pathlib import Path
from typing import Any

import pytest
from cases import CASES, MIN_RATIO, QUERY, Case, each_case, post, relevance, truth

from ctxguard.core.scores import relative_scores
from ctxguard.core.types import ScoreKind

PAGE = Path(__file__).resolve().parents[3] / "docs" / "rerank_clients.md"
RECIPES = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
DOCUMENTS = ["one (0.1)", "two (0.8)", "three (0.7)", "four (0.02)"]


def kept_of(documents: list[str]) -> list[str]:
    """The documents that the service's profile keeps, best first."""
    given = relevance(QUERY, documents)
    ratios = relative_scores(ScoreKind.PROBABILITY, given)
    pairs = [
        (score, document)
        for score, ratio, document in zip(given, ratios, documents, strict=True)
        if ratio >= MIN_RATIO
    ]
    return [document for _, document in sorted(pairs, reverse=True)]


@pytest.mark.parametrize(
    "code", RECIPES, ids=lambda code: re.findall(r"(?:from|import) ([\w.]+)", code)[-1]
)
def test_a_recipe_serves_what_was_kept(code: str, guarded: str) -> None:
    for package in re.findall(r"^(?:from|import) (\w+(?:\.\w+)*)", code, re.M):
        pytest.importorskip(package)
    assert len(code.splitlines()) <= 8
    names: dict[str, Any] = {"query": QUERY, "documents": DOCUMENTS}
    exec(code.replace("http://localhost:8765", guarded), names)  # noqa: S102
    assert names["kept"] == kept_of(DOCUMENTS) != DOCUMENTS


def test_each_client_has_a_recipe() -> None:
    assert len(RECIPES) == 7


def test_table_at_the_top_is_true(guarded: str) -> None:
    kept = kept_of(DOCUMENTS)

    def ask(**options: object) -> list[str]:
        url = f"{guarded}/v1/rerank"
        results = post(url, query=QUERY, documents=DOCUMENTS, **options)["results"]
        return [DOCUMENTS[each["index"]] for each in results]

    assert ask()[: len(kept)] == kept
    assert sorted(ask()) == sorted(ask(model="ctxguard:full")) == sorted(DOCUMENTS)
    assert ask(top_n=3) == ask(model="ctxguard:omit") == kept
    assert ask(model="ctxguard:full", top_n=3)[:2] == kept
    assert len(ask(model="ctxguard:full", top_n=3)) == 3


@each_case
def test_exactly_the_dropped_have_zero(guarded: str, case: Case) -> None:
    ratios = relative_scores(ScoreKind.PROBABILITY, relevance(QUERY, case.documents))
    scores = truth(guarded, case.documents)
    assert [score > 0.0 for score in scores] == [ratio >= MIN_RATIO for ratio in ratios]
    assert all(0.0 <= score <= 1.0 for score in scores)


def test_clients_cases_drop_and_keep_some(guarded: str) -> None:
    found = [truth(guarded, case.documents) for case in CASES]
    assert sum(0.0 in scores and any(scores) for scores in found) > len(CASES) / 2
