"""LangChain's Cohere reranker, as it comes and with what it sends set by hand."""

from collections.abc import Sequence

import pytest
from cases import DEFAULT, QUERY, Ask, Case, check, each_case

langchain_cohere = pytest.importorskip("langchain_cohere")


def compress(url: str, documents: Sequence[str], top_n: int) -> list[tuple[int, float]]:
    from langchain_core.documents import Document

    number = {} if top_n == DEFAULT else {"top_n": top_n}
    reranker = langchain_cohere.CohereRerank(
        model="m", base_url=url, cohere_api_key="unused", **number
    )
    given = [Document(text, metadata={"at": at}) for at, text in enumerate(documents)]
    found = reranker.compress_documents(given, QUERY)
    assert all(each.page_content == documents[each.metadata["at"]] for each in found)
    return [(each.metadata["at"], each.metadata["relevance_score"]) for each in found]


def rerank_all(url: str, documents: Sequence[str], top_n: int) -> list[tuple[int, float]]:
    """Without a number, whatever the case says, and with a limit on tokens."""
    reranker = langchain_cohere.CohereRerank(model="m", base_url=url, cohere_api_key="unused")
    found = reranker.rerank(list(documents), QUERY, top_n=None, max_tokens_per_doc=512)
    return [(each["index"], each["relevance_score"]) for each in found]


@pytest.mark.parametrize("ask", [compress, rerank_all])
@each_case
def test_every_score_is_its_documents(ask: Ask, case: Case, plain: str, guarded: str) -> None:
    check(ask, case, plain, guarded)
