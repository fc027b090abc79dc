"""LiteLLM, by each of its providers that takes a URL and speaks the rerank protocol."""

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest
from cases import CASES, DEFAULT, QUERY, Case, check, each_case

litellm = pytest.importorskip("litellm")

PROVIDERS = {
    "cohere": {},
    "jina_ai": {},
    "hosted_vllm": {},
    # It reads a document as a text; Cohere, Jina and vLLM send an object.
    "infinity": {"return_documents": False},
}


def rerank(
    url: str, documents: Sequence[str], top_n: int, *, provider: str
) -> list[tuple[int, float]]:
    number = {} if top_n == DEFAULT else {"top_n": top_n}
    found = litellm.rerank(
        model=f"{provider}/m",
        query=QUERY,
        documents=list(documents),
        api_base=url,
        api_key="unused",
        **number,
        **PROVIDERS[provider],
    )
    for each in found.results:
        if "document" in each:
            assert each["document"]["text"] == documents[each["index"]]
    return [(each["index"], each["relevance_score"]) for each in found.results]


def arerank(url: str, documents: Sequence[str], top_n: int) -> list[tuple[int, float]]:
    async def ask() -> list[tuple[int, float]]:
        found = await litellm.arerank(
            model="cohere/m",
            query=QUERY,
            documents=list(documents),
            api_base=url,
            api_key="unused",
            top_n=None if top_n == DEFAULT else top_n,
        )
        return [(each["index"], each["relevance_score"]) for each in found.results]

    return asyncio.run(ask())


@pytest.mark.parametrize("provider", PROVIDERS)
@each_case
def test_every_score_is_its_documents(provider: str, case: Case, plain: str, guarded: str) -> None:
    check(partial(rerank, provider=provider), case, plain, guarded)


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_asynchronous_calls_too(case: Case, plain: str, guarded: str) -> None:
    check(arerank, case, plain, guarded)
