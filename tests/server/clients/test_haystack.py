"""Haystack's Cohere and Jina rankers."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from cases import DEFAULT, QUERY, Ask, Case, check, each_case, truth

pytest.importorskip("haystack")
cohere_rankers = pytest.importorskip("haystack_integrations.components.rankers.cohere")
jina_rankers = pytest.importorskip("haystack_integrations.components.rankers.jina")


def _secret() -> Any:
    from haystack.utils import Secret

    return Secret.from_token("unused")


def _given(documents: Sequence[str]) -> list[Any]:
    from haystack import Document

    return [Document(id=str(at), content=text) for at, text in enumerate(documents)]


def _pairs(found: Any, documents: Sequence[str]) -> list[tuple[int, float]]:
    assert all(each.content == documents[int(each.id)] for each in found["documents"])
    return [(int(each.id), each.score) for each in found["documents"]]


def _number(top_n: int) -> dict[str, int]:
    return {} if top_n == DEFAULT else {"top_k": top_n}


def cohere(url: str, documents: Sequence[str], top_n: int) -> list[tuple[int, float]]:
    ranker = cohere_rankers.CohereRanker(api_key=_secret(), api_base_url=url, **_number(top_n))
    return _pairs(ranker.run(QUERY, _given(documents)), documents)


def cohere_async(url: str, documents: Sequence[str], top_n: int) -> list[tuple[int, float]]:
    ranker = cohere_rankers.CohereRanker(api_key=_secret(), api_base_url=url)
    asked = ranker.run_async(QUERY, _given(documents), **_number(top_n))
    return _pairs(asyncio.run(asked), documents)


def jina(url: str, documents: Sequence[str], top_n: int) -> list[tuple[int, float]]:
    ranker = jina_rankers.JinaRanker(
        api_key=_secret(), base_url=f"{url}/v1/rerank", **_number(top_n)
    )
    return _pairs(ranker.run(QUERY, _given(documents)), documents)


@pytest.mark.parametrize("ask", [cohere, cohere_async, jina])
@each_case
def test_every_score_is_its_documents(ask: Ask, case: Case, plain: str, guarded: str) -> None:
    check(ask, case, plain, guarded)


@each_case
def test_a_threshold_above_zero_leaves_out_what_is_dropped(case: Case, guarded: str) -> None:
    ranker = jina_rankers.JinaRanker(
        api_key=_secret(), base_url=f"{guarded}/v1/rerank", score_threshold=1e-6
    )
    found = _pairs(ranker.run(QUERY, _given(case.documents)), case.documents)
    kept = [at for at, score in enumerate(truth(guarded, case.documents)) if score > 0.0]
    assert sorted(at for at, _ in found) == kept
