"""Wraps a guard as a LlamaIndex node postprocessor. Calls the guard, and touches nothing else."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from ctxguard._support.extras import require
from ctxguard.core.metadata_filter import Where
from ctxguard.core.types import Flag, Passage, Ranking, ScoreKind, ScoreKindName
from ctxguard.errors import QueryError
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.integrations.documents import (
    METADATA_KEY,
    columns_of,
    filtered,
    ranking_of_documents,
    served,
    titled,
)

require("llama_index.core", "llamaindex")

from llama_index.core.bridge.pydantic import Field
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode


class GuardPostprocessor(BaseNodePostprocessor):  # type: ignore[misc]
    """A ``ContextGuard`` as a LlamaIndex node postprocessor: it filters retrieved nodes.

    Nodes without a score are of kind ``rank``. Each node that is returned is a copy, with the
    decision in ``node.metadata["ctxguard"]`` (`ctxguard.integrations.documents.served`). The key is
    hidden from models and embeddings.

    Attributes:
        guard: What decides; it needs no retriever. Its ``score_kind`` says what the nodes' scores
            mean.
        where: Which nodes may be returned, by their metadata. A node that it forbids is an error:
            the vector store's own filter must leave it out.
    """

    guard: ContextGuard = Field(exclude=True)
    where: Where | None = Field(default=None, exclude=True)

    @classmethod
    def class_name(cls) -> str:
        """Return the name under which LlamaIndex registers it."""
        return "GuardPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if query_bundle is None:
            raise QueryError("the guard needs the query: pass query_str or query_bundle")
        ranking = ranking_of_nodes(nodes, self.guard.score_kind)
        context = filtered(self.guard, query_bundle.query_str, ranking, where=self.where)
        is_cut = Flag.TRUNCATED in context.flags
        return [
            _node_with(nodes[position], decision, passage.text if is_cut else None)
            for passage, position, decision in served(context)
        ]

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        # Microseconds: the default's thread would cost more.
        return self._postprocess_nodes(nodes, query_bundle)


def ranking_of_nodes(
    nodes: Sequence[NodeWithScore], score_kind: ScoreKind | ScoreKindName | None
) -> Ranking:
    """Make a ranking from nodes, best first, for a retriever to pass to ``calibrate``.

    As in ``lambda query, *, depth: ranking_of_nodes(index.as_retriever(similarity_top_k=depth)
    .retrieve(query), "cosine")``. See `ctxguard.integrations.documents.ranking_of_documents`.
    """
    read = attrgetter("node.id_"), attrgetter("score")
    ids, scores = columns_of(nodes, "a list of NodeWithScore", *read)
    return ranking_of_documents(nodes, ids, scores, score_kind, _passage)


def _passage(passage_id: str, found: NodeWithScore) -> Passage:
    node = found.node
    # Its own get_content() renders the metadata first, and then leaves it out.
    text = node.text if type(node) is TextNode else node.get_content()
    return titled(passage_id, text, node.metadata)


def _node_with(found: NodeWithScore, decision: dict[str, Any], cut: str | None) -> NodeWithScore:
    """Copy a node, as it may be the index's own, with its decision and its cut text."""
    node: Any = found.node
    node = node.model_copy(
        update={
            "metadata": {**node.metadata, METADATA_KEY: decision},
            "excluded_embed_metadata_keys": [*node.excluded_embed_metadata_keys, METADATA_KEY],
            "excluded_llm_metadata_keys": [*node.excluded_llm_metadata_keys, METADATA_KEY],
        }
    )
    if cut is not None:
        node.set_content(cut)
    score = None if decision["score"] is None else found.score
    return found.model_copy(update={"node": node, "score": score})
