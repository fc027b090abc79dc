"""What people filter with today, each over a stub retriever that only hands results over.

Every peer gets its results ready-made and its scores given, its quicker settings, and no network,
tracing or telemetry. ``ImportError`` where it is not installed.
"""

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
    """ContextualCompressionRetriever with scores given.

    Args:
        pool: The input.
        keep: The filter as plain Python, which its compressor calls.
    """
    from langchain_classic.retrievers import ContextualCompressionRetriever
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

    one = stub(pool.lexical)
    compression = ContextualCompressionRetriever(base_retriever=one, base_compressor=GivenScores())
    found = [document.metadata["id"] for document in compression.invoke("query")]
    assert found == [pool.ids[pool.lexical.rows[at]] for at in keep(pool.lexical.scores)]
    return {
        "LangChain ContextualCompressionRetriever, scores given": Case(
            lambda: compression.invoke("query"), lambda: one.invoke("query")
        ),
    }


def llama_index(pool: Pool) -> dict[str, Case]:
    """SimilarityPostprocessor over nodes that are at hand."""
    from llama_index.core.postprocessor import SimilarityPostprocessor
    from llama_index.core.schema import NodeWithScore, TextNode

    nodes = [
        NodeWithScore(node=TextNode(text=pool.texts[row], id_=pool.ids[row]), score=score)
        for row, score in zip(pool.lexical.rows, pool.lexical.scores, strict=True)
    ]
    # Its cut-off is absolute.
    cut = SimilarityPostprocessor(similarity_cutoff=pool.min_ratio * max(pool.lexical.scores))
    return {"LlamaIndex SimilarityPostprocessor": Case(lambda: cut.postprocess_nodes(nodes))}
