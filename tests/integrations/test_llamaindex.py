"""LlamaIndex: the guard as a postprocessor of its own index and query engine."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from fault_rows import FaultRows, PassesAll, Row

pytest.importorskip("llama_index.core")

from llama_index.core import VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.llms import MockLLM
from llama_index.core.schema import ImageNode, MetadataMode, NodeWithScore, TextNode

from ctxguard import (
    Assembly,
    ConfigurationError,
    ContextGuard,
    FilterViolationError,
    Passage,
    QueryError,
    RatioPolicy,
    Where,
)
from ctxguard.integrations.llamaindex import GuardPostprocessor, ranking_of_nodes
from ctxguard.testing import RetrieverContract
from tests.doubles import WordHashEmbedder

_HASHES = WordHashEmbedder()


class WordHashes(BaseEmbedding):
    def _get_text_embedding(self, text: str) -> list[float]:
        return [0.01, *_HASHES.encode_passages([text])[0].tolist()]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


def index_of(passages: Sequence[Passage]) -> VectorStoreIndex:
    nodes = [
        TextNode(
            text=each.text,
            id_=each.passage_id,
            metadata=dict(each.metadata or {}),
            excluded_embed_metadata_keys=["tenant", "groups"],
        )
        for each in passages
    ]
    return VectorStoreIndex(nodes, embed_model=WordHashes())


class TestNodesOfAnIndex(RetrieverContract):
    """What ``calibrate`` is given for a LlamaIndex retriever."""

    can_filter = False

    def retriever(self, passages: Sequence[Passage]) -> Any:
        index = index_of(passages)
        return lambda query, *, depth: ranking_of_nodes(
            index.as_retriever(similarity_top_k=depth).retrieve(query), "cosine"
        )


def node(row: Row) -> NodeWithScore:
    if row.text is None:
        # A page whose text cannot be read.
        return NodeWithScore.model_construct(node=Unreadable(id_=row.id), score=row.score)
    return NodeWithScore.model_construct(node=TextNode(text=row.text, id_=row.id), score=row.score)


class Unreadable(TextNode):
    def get_content(self, metadata_mode: MetadataMode = MetadataMode.NONE) -> Any:
        return None


class TestFaultRows(FaultRows):
    """Through the postprocessor, whose engine returns what it likes."""

    def retriever(self, found: Sequence[Row], score_kind: str) -> Any:
        nodes = [node(row) for row in found]
        return lambda query, *, depth: ranking_of_nodes(nodes[:depth], score_kind)  # type: ignore[arg-type]


NODES = [
    NodeWithScore(
        node=TextNode(text=f"Text {at}.", id_=f"n{at}", metadata={"tenant": "a"}), score=s
    )
    for at, s in enumerate([0.9, 0.85, -0.9, 0.8])
]


def test_kept_is_copy_with_hidden_decision() -> None:
    guard = ContextGuard(policy=RatioPolicy(k=5, min_ratio=0.5), score_kind="cosine")
    kept = GuardPostprocessor(guard=guard).postprocess_nodes(NODES, query_str="q")
    assert [each.node_id for each in kept] == ["n0", "n1", "n3"]
    assert [each.score for each in kept] == [0.9, 0.85, 0.8]
    own = kept[2].metadata["ctxguard"]
    assert (own["rank"], own["score"], own["reason"]) == (3, 0.8, None)
    for mode in (MetadataMode.LLM, MetadataMode.EMBED):
        assert kept[0].get_content(mode) == NODES[0].get_content(mode)
    assert all("ctxguard" not in each.metadata for each in NODES)


def test_cut_text_is_cut_in_node() -> None:
    text = "The kettle boils. The kettle whistles loudly, and then it is quiet again."
    guard = ContextGuard(assembly=Assembly(max_passage_chars=30), score_kind="cosine")
    (cut,) = GuardPostprocessor(guard=guard).postprocess_nodes(
        [NodeWithScore(node=TextNode(text=text), score=0.5)], query_str="q"
    )
    assert cut.get_content() == "The kettle boils."


def test_scoreless_nodes_keep_type_and_order() -> None:
    image = ImageNode(text="A caption.", image="aGk=", id_="i")
    nodes = [NodeWithScore(node=image), NodeWithScore(node=TextNode(text="Text.", id_="t"))]
    kept = GuardPostprocessor(guard=ContextGuard()).postprocess_nodes(nodes, query_str="q")
    assert [type(each.node) for each in kept] == [ImageNode, TextNode]
    assert kept[0].score is None


def test_a_filter_is_checked() -> None:
    postprocessor = GuardPostprocessor(
        guard=ContextGuard(score_kind="cosine"), where=Where(tenant="a")
    )
    assert len(postprocessor.postprocess_nodes(NODES, query_str="q")) == 4
    other = NodeWithScore(node=TextNode(text="Text.", metadata={"tenant": "b"}), score=0.7)
    with pytest.raises(FilterViolationError):
        postprocessor.postprocess_nodes([*NODES, other], query_str="q")


def test_unworkable_inputs_are_named() -> None:
    postprocessor = GuardPostprocessor(guard=ContextGuard())
    with pytest.raises(QueryError, match="query_str"):
        postprocessor.postprocess_nodes(NODES)
    with pytest.raises(ConfigurationError, match="score_kind"):
        postprocessor.postprocess_nodes(NODES, query_str="q")
    for wrong in (None, "text", ["text"], [TextNode(text="Text.")]):
        with pytest.raises(ConfigurationError, match="NodeWithScore"):
            postprocessor.postprocess_nodes(wrong, query_str="q")


def test_query_engine_answers_from_the_kept() -> None:
    """Starts at an index of texts and ends at what the language model is told."""
    guard = ContextGuard(policy=RatioPolicy(k=5, min_ratio=0.9), score_kind="cosine")
    engine = index_of(RetrieverContract.PASSAGES).as_query_engine(
        llm=MockLLM(), similarity_top_k=10, node_postprocessors=[GuardPostprocessor(guard=guard)]
    )
    answer = engine.query("a red fox in its den")
    assert [each.node_id for each in answer.source_nodes] == ["fox"]
    assert "A red fox sleeps in its den." in str(answer)
    assert "ctxguard" not in str(answer)
    assert "kettle" not in str(answer)
    again = asyncio.run(engine.aquery("a red fox in its den"))
    assert [each.node_id for each in again.source_nodes] == ["fox"]


class TestPassesAll(PassesAll):
    def passed(self, guard: ContextGuard, found: Sequence[Row]) -> list[tuple[str, float]]:
        nodes = [node(row) for row in found]
        passed = GuardPostprocessor(guard=guard).postprocess_nodes(nodes, query_str="q")
        return [(each.node_id, each.score) for each in passed]
