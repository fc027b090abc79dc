"""LlamaIndex's Cohere and Jina rerankers."""

from collections.abc import Sequence
from typing import Any

import pytest
from cases import DEFAULT, QUERY, Ask, Case, check, each_case

pytest.importorskip("llama_index.core")
cohere_rerank = pytest.importorskip("llama_index.postprocessor.cohere_rerank")
jina_rerank = pytest.importorskip("llama_index.postprocessor.jinaai_rerank")


def _pairs(reranker: Any, documents: Sequence[str]) -> list[tuple[int, float]]:
    from llama_index.core.schema import NodeWithScore, TextNode

    nodes = [
        NodeWithScore(node=TextNode(id_=str(at), text=text), score=0.0)
        for at, text in enumerate(documents)
    ]
    found = reranker.postprocess_nodes(nodes, query_str=QUERY)
    assert all(each.node.text == documents[int(each.node.node_id)] for each in found)
    return [(int(each.node.node_id), each.score) for each in found]


def _number(top_n: int) -> dict[str, int]:
    return {} if top_n == DEFAULT else {"top_n": top_n}


def cohere(url: str, documents: Sequence[str], top_n: int) -> list[tuple[int, float]]:
    reranker = cohere_rerank.CohereRerank(api_key="unused", base_url=url, **_number(top_n))
    return _pairs(reranker, documents)


def jina(url: str, documents: Sequence[str], top_n: int) -> list[tuple[int, float]]:
    reranker = jina_rerank.JinaRerank(api_key="unused", base_url=f"{url}/v1", **_number(top_n))
    return _pairs(reranker, documents)


@pytest.mark.parametrize("ask", [cohere, jina])
@each_case
def test_every_score_is_its_documents(ask: Ask, case: Case, plain: str, guarded: str) -> None:
    check(ask, case, plain, guarded)
