"""What people filter and fuse with today, each over stub retrievers that only hand results over.

Every peer gets its results ready-made and its scores given, its quicker settings, and no network,
tracing or telemetry. ``ImportError`` where it is not installed.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks._timing import Call

Filter = Callable[[Sequence[float]], list[int]]


@dataclass(frozen=True)
class Results:
    """What a retriever hands over, best first.

    Attributes:
        rows: Of each result in ``Pool.ids`` and ``Pool.texts``.
        scores: Higher is better.
    """

    rows: list[int]
    scores: list[float]


@dataclass(frozen=True)
class Pool:
    """The input of one run, the same for everyone.

    Attributes:
        ids: Of every passage.
        texts: Of every passage.
        lexical: n results with scores like BM25's.
        dense: n others with scores like cosines; about a third of them is in both.
        k: The most results kept.
        min_ratio: The least share of the best score that is kept.
    """

    ids: list[str]
    texts: list[str]
    lexical: Results
    dense: Results
    k: int
    min_ratio: float


@dataclass(frozen=True)
class Case:
    """One timed call.

    Attributes:
        call: The whole of what a request would do, the stub retriever included.
        bare: The stub retriever by itself; None where the call has none.
    """

    call: Call
    bare: Call | None = None


def langchain(pool: Pool, keep: Filter) -> dict[str, Case]:
    """ContextualCompressionRetriever with scores given, and EnsembleRetriever.

    Args:
        pool: The input.
        keep: The filter as plain Python, which its compressor calls.
    """
    from langchain_classic.retrievers import ContextualCompressionRetriever, EnsembleRetriever
    from langchain_core.documents import BaseDocumentCompressor, Document
    from langchain_core.retrievers import BaseRetriever

    class Stub(BaseRetriever):  # type: ignore[misc]
        documents: list[Document]

        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:  # noqa: ARG002
            return list(self.documents)

    class GivenScores(BaseDocumentCompressor):  # type: ignore[misc]
        def compress_documents(
            self,
            documents: Sequence[Document],
            query: str,  # noqa: ARG002
            callbacks: Any = None,  # noqa: ARG002
        ) -> list[Document]:
            return [documents[at] for at in keep([each.metadata["score"] for each in documents])]

    def stub(results: Results) -> Stub:
        return Stub(
            documents=[
                Document(pool.texts[row], metadata={"id": pool.ids[row], "score": score})
                for row, score in zip(results.rows, results.scores, strict=True)
            ]
        )

    one, other = stub(pool.lexical), stub(pool.dense)
    compression = ContextualCompressionRetriever(base_retriever=one, base_compressor=GivenScores())
    ensemble = EnsembleRetriever(retrievers=[one, other], weights=[0.5, 0.5])
    found = [document.metadata["id"] for document in compression.invoke("query")]
    assert found == [pool.ids[pool.lexical.rows[at]] for at in keep(pool.lexical.scores)]
    return {
        "LangChain ContextualCompressionRetriever, scores given": Case(
            lambda: compression.invoke("query"), lambda: one.invoke("query")
        ),
        "LangChain EnsembleRetriever": Case(
            lambda: ensemble.invoke("query")[: pool.k],
            lambda: (one.invoke("query"), other.invoke("query")),
        ),
    }


def llama_index(pool: Pool) -> dict[str, Case]:
    """SimilarityPostprocessor, QueryFusionRetriever, and one after the other."""
    from llama_index.core.llms import MockLLM
    from llama_index.core.postprocessor import SimilarityPostprocessor
    from llama_index.core.retrievers import BaseRetriever, QueryFusionRetriever
    from llama_index.core.schema import NodeWithScore, TextNode

    class Stub(BaseRetriever):  # type: ignore[misc]
        def __init__(self, results: Results) -> None:
            self.scores = results.scores
            self.nodes = [TextNode(text=pool.texts[row], id_=pool.ids[row]) for row in results.rows]
            super().__init__()

        def _retrieve(self, query_bundle: Any) -> list[NodeWithScore]:  # noqa: ARG002
            # New ones every time, because fusion writes its scores into them.
            return [
                NodeWithScore(node=node, score=score)
                for node, score in zip(self.nodes, self.scores, strict=True)
            ]

    one, other = Stub(pool.lexical), Stub(pool.dense)
    fusion = QueryFusionRetriever(
        [one, other],
        llm=MockLLM(),
        mode="reciprocal_rerank",
        similarity_top_k=pool.k,
        num_queries=1,
        use_async=False,
    )
    # Its cut-off is absolute, so each is given the one that belongs to its input.
    cut = SimilarityPostprocessor(similarity_cutoff=pool.min_ratio * max(pool.lexical.scores))
    fused_cut = SimilarityPostprocessor(
        similarity_cutoff=pool.min_ratio * fusion.retrieve("query")[0].score
    )
    nodes = one.retrieve("query")
    return {
        "LlamaIndex SimilarityPostprocessor": Case(lambda: cut.postprocess_nodes(nodes)),
        "LlamaIndex QueryFusionRetriever": Case(
            lambda: fusion.retrieve("query"),
            lambda: (one.retrieve("query"), other.retrieve("query")),
        ),
        "LlamaIndex QueryFusionRetriever, SimilarityPostprocessor": Case(
            lambda: fused_cut.postprocess_nodes(fusion.retrieve("query")),
            lambda: (one.retrieve("query"), other.retrieve("query")),
        ),
    }


def haystack(pool: Pool, keep: Filter) -> dict[str, Case]:
    """A pipeline of two retrievers, a joiner and a ranker that filters.

    Args:
        pool: The input.
        keep: The filter as plain Python, which its ranker calls.
    """
    os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")
    from haystack import Document, Pipeline, component
    from haystack.components.joiners import DocumentJoiner

    @component
    class Stub:
        def __init__(self, results: Results) -> None:
            self.documents = [
                Document(id=pool.ids[row], content=pool.texts[row], score=score)
                for row, score in zip(results.rows, results.scores, strict=True)
            ]

        @component.output_types(documents=list[Document])  # type: ignore[untyped-decorator]
        def run(self, query: str) -> dict[str, list[Document]]:  # noqa: ARG002
            return {"documents": list(self.documents)}

    @component
    class Ranker:
        @component.output_types(documents=list[Document])  # type: ignore[untyped-decorator]
        def run(self, documents: list[Document]) -> dict[str, list[Document]]:
            kept = keep([document.score for document in documents])
            return {"documents": [documents[at] for at in kept]}

    one, other = Stub(pool.lexical), Stub(pool.dense)
    pipeline = Pipeline()
    pipeline.add_component("one", one)
    pipeline.add_component("other", other)
    pipeline.add_component("join", DocumentJoiner(join_mode="reciprocal_rank_fusion"))
    pipeline.add_component("rank", Ranker())
    pipeline.connect("one", "join")
    pipeline.connect("other", "join")
    pipeline.connect("join.documents", "rank.documents")
    question = {"one": {"query": "query"}, "other": {"query": "query"}}
    return {
        "Haystack pipeline: joiner, ranker": Case(
            lambda: pipeline.run(question),
            lambda: (one.run(query="query"), other.run(query="query")),
        )
    }
