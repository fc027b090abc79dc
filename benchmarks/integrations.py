"""What the guard costs in a framework, beside what the framework does there itself.

    pip install ".[langchain,llamaindex]"
    python -m benchmarks.integrations --json integrations.json --check

LangChain: a guarded retriever over its in-memory vector store of fake embeddings, beside
``similarity_search_with_score`` of that store and LangChain's own retriever over it; and over that
search's results ready-made, since a search leaves the processor's caches full. LlamaIndex:
the guard as a postprocessor, beside ``SimilarityPostprocessor``. Beside both a retriever and a
postprocessor that do nothing but return the first five: what the framework itself takes to call
one. All are called in turns, in one process and one thread, whose processor time is taken; the
guard runs with metrics in a registry.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from benchmarks._timing import Timing, environment, interleaved
from ctxguard.core.policies import RatioPolicy
from ctxguard.guard import ContextGuard
from ctxguard.request.telemetry import Telemetry

SUMMARY = "What the guard costs in a framework, beside what the framework does there itself."
DOCUMENTS = 50
K = 5
MIN_RATIO = 0.6
DIMENSION = 32
QUERY = "word3 word5"

SEARCH = "LangChain: similarity_search_with_score"
PLAIN_RETRIEVER = "LangChain: the store's own retriever"
FIRST_RETRIEVER = "LangChain: a retriever of the first five of that search"
GUARDED_RETRIEVER = "LangChain: GuardedRetriever"
READY_RETRIEVER = "LangChain: GuardedRetriever, the search's results ready-made"
SIMILARITY = "LlamaIndex: SimilarityPostprocessor"
FIRST_POSTPROCESSOR = "LlamaIndex: a postprocessor that returns the first five"
GUARD_POSTPROCESSOR = "LlamaIndex: GuardPostprocessor"

MOST_OVER_SEARCH = 80.0
MOST_TIMES_SIMILARITY = 2.5

PACKAGES = ("ctxguard-rag", "langchain-core", "llama-index-core", "pydantic")


def make_guard(retriever: Any = None) -> ContextGuard:
    """A guard as in service: its own registry, the best five with 0.6 of the best score."""
    return ContextGuard(
        retriever,
        policy=RatioPolicy(k=K, min_ratio=MIN_RATIO),
        depth=DOCUMENTS,
        score_kind="cosine",
        telemetry=Telemetry(CollectorRegistry()),
    )


def langchain_cases() -> dict[str, Callable[[], object]]:
    """Searching and guarding the same store."""
    from langchain_core.documents import Document
    from langchain_core.embeddings import DeterministicFakeEmbedding
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.vectorstores import InMemoryVectorStore

    from ctxguard.integrations.langchain import GuardedRetriever, WrappedVectorStore

    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=DIMENSION))
    store.add_documents(
        [
            Document(" ".join([f"word{at}"] * 100), id=f"d{at}", metadata={"tenant": "a"})
            for at in range(DOCUMENTS)
        ]
    )

    class FirstFive(BaseRetriever):  # type: ignore[misc]
        """Searches as the guarded retriever does, and decides nothing."""

        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:  # noqa: ARG002
            pairs = store.similarity_search_with_score(query, k=DOCUMENTS)
            return [document for document, _ in pairs[:K]]

    class Ready:
        """A store whose results are always the same."""

        pairs = store.similarity_search_with_score(QUERY, k=DOCUMENTS)

        def similarity_search_with_score(self, query: str, *, k: int) -> Any:  # noqa: ARG002
            return self.pairs[:k]

    def over(store: Any) -> GuardedRetriever:
        return GuardedRetriever(guard=make_guard(WrappedVectorStore(store, score_kind="cosine")))

    first, guarded, ready = FirstFive(), over(store), over(Ready())
    plain = store.as_retriever(search_kwargs={"k": DOCUMENTS})
    assert 0 < len(guarded.invoke(QUERY)) <= K
    return {
        GUARDED_RETRIEVER: lambda: guarded.invoke(QUERY),
        READY_RETRIEVER: lambda: ready.invoke(QUERY),
        PLAIN_RETRIEVER: lambda: plain.invoke(QUERY),
        FIRST_RETRIEVER: lambda: first.invoke(QUERY),
        SEARCH: lambda: store.similarity_search_with_score(QUERY, k=DOCUMENTS),
    }


def llama_index_cases() -> dict[str, Callable[[], object]]:
    """Both postprocessors on the same nodes."""
    from llama_index.core.postprocessor import SimilarityPostprocessor
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import NodeWithScore, TextNode

    from ctxguard.integrations.llamaindex import GuardPostprocessor

    nodes = [
        NodeWithScore(
            node=TextNode(text=" ".join([f"word{at}"] * 100), id_=f"n{at}"),
            score=1.0 - at / DOCUMENTS,
        )
        for at in range(DOCUMENTS)
    ]

    class FirstFive(BaseNodePostprocessor):  # type: ignore[misc]
        """Decides nothing."""

        def _postprocess_nodes(self, nodes: list[Any], query_bundle: Any = None) -> list[Any]:  # noqa: ARG002
            return nodes[:K]

    first = FirstFive()
    similarity = SimilarityPostprocessor(similarity_cutoff=MIN_RATIO)
    guard = GuardPostprocessor(guard=make_guard())
    assert len(guard.postprocess_nodes(nodes, query_str=QUERY)) == K
    return {
        GUARD_POSTPROCESSOR: lambda: guard.postprocess_nodes(nodes, query_str=QUERY),
        SIMILARITY: lambda: similarity.postprocess_nodes(nodes, query_str=QUERY),
        FIRST_POSTPROCESSOR: lambda: first.postprocess_nodes(nodes, query_str=QUERY),
    }


@dataclass(frozen=True)
class Bar:
    """A promise: ``measured`` is at most ``limit``."""

    promise: str
    measured: float
    limit: float


def bars(timings: dict[str, Timing]) -> list[Bar]:
    """The promises on medians."""
    p50 = {name: timing.p50 for name, timing in timings.items()}
    return [
        Bar(
            f"{GUARDED_RETRIEVER}: µs over similarity_search_with_score at p50",
            p50[GUARDED_RETRIEVER] - p50[SEARCH],
            MOST_OVER_SEARCH,
        ),
        Bar(
            f"{GUARD_POSTPROCESSOR}: to SimilarityPostprocessor at p50",
            p50[GUARD_POSTPROCESSOR] / p50[SIMILARITY],
            MOST_TIMES_SIMILARITY,
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit status is 1 where a bar that was checked is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.integrations", description=SUMMARY)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=300, help="in each round (default 300)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.calls) < 1:
        parser.error("--rounds and --calls must be positive")
    timings = interleaved(
        langchain_cases() | llama_index_cases(),
        rounds=options.rounds,
        calls=options.calls,
        seconds=1.0,
        clock=time.thread_time_ns,
    )
    table = Table(title=f"{DOCUMENTS} documents, µs per call", title_justify="left")
    for column in ("case", "p50", "p99", "min", "p50 by round"):
        table.add_column(column, justify="left" if column == "case" else "right", no_wrap=True)
    for name, timing in timings.items():
        table.add_row(
            name,
            f"{timing.p50:.1f}",
            f"{timing.p99:.1f}",
            f"{timing.minimum:.1f}",
            f"{timing.lowest_p50:.1f} to {timing.highest_p50:.1f}",
        )
    console = Console(width=120)
    console.print(table)
    measured = bars(timings)
    for bar in measured:
        state = "met" if bar.measured <= bar.limit else "MISSED"
        console.print(f"{state}: {bar.promise}: {bar.measured:.2f}, at most {bar.limit:g}")
    if options.json is not None:
        figures = {
            "environment": environment(PACKAGES),
            "timings": {name: asdict(timing) for name, timing in timings.items()},
            "bars": [asdict(bar) for bar in measured],
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return int(options.check and any(bar.measured > bar.limit for bar in measured))


if __name__ == "__main__":
    sys.exit(main())
