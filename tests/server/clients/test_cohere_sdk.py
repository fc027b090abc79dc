"""Cohere's own SDK, the first and the second version of its client, plain and asynchronous."""

import asyncio
from collections.abc import Sequence

import pytest
from cases import DEFAULT, QUERY, Ask, Case, check, each_case

cohere = pytest.importorskip("cohere")


def _options(documents: Sequence[str], top_n: int) -> dict[str, object]:
    options = {"model": "m", "query": QUERY, "documents": list(documents)}
    return options if top_n == DEFAULT else {**options, "top_n": top_n}


def first(url: str, documents: Sequence[str], top_n: int) -> list[tuple[int, float]]:
    client = cohere.Client("unused", base_url=url)
    found = client.rerank(**_options(documents, top_n), return_documents=True)
    assert all(each.document.text == documents[each.index] for each in found.results)
    return [(each.index, each.relevance_score) for each in found.results]


def second(url: str, documents: Sequence[str], top_n: int) -> list[tuple[int, float]]:
    found = cohere.ClientV2("unused", base_url=url).rerank(**_options(documents, top_n))
    return [(each.index, each.relevance_score) for each in found.results]


def second_async(url: str, documents: Sequence[str], top_n: int) -> list[tuple[int, float]]:
    async def ask() -> list[tuple[int, float]]:
        async with cohere.AsyncClientV2("unused", base_url=url) as client:
            found = await client.rerank(**_options(documents, top_n))
        return [(each.index, each.relevance_score) for each in found.results]

    return asyncio.run(ask())


@pytest.mark.parametrize("ask", [first, second, second_async])
@each_case
def test_every_score_is_its_documents(ask: Ask, case: Case, plain: str, guarded: str) -> None:
    check(ask, case, plain, guarded)
