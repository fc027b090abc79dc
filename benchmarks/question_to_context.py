"""From the text of a question to its context: ctxguard beside what people would put together.

    python -m benchmarks.question_to_context --sizes 5k 10k 100k --check

Three systems hold the same generated passages and vectors, in one process on one thread, and answer
the same questions in turns; encoding the question is part of it, by the same model's weights:

- ``ctxguard``: the guard as installed (encoder, hybrid search, all signals, the first 10 kept);
- ``txtai``: a hybrid database whose vectors come from sentence-transformers, if it is installed;
- ``by hand``: sentence-transformers, bm25s and faiss, reciprocal ranks, the first 10 joined.

``search`` is ctxguard's share without encoding, with the question's states given. No question is
asked twice in a round, so that no cache of questions helps.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import faiss
import numpy as np

from benchmarks._search_data import QUERIES, Corpus, prepare
from benchmarks._search_peers.embedded import (
    DirectDense,
    DirectLexical,
    GivenVectors,
    passages_of,
)
from benchmarks._timing import environment
from benchmarks.search import size_of
from ctxguard import ContextGuard, Mode, RatioPolicy
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder
from ctxguard.retrieval.models.files import bundled_model
from ctxguard.retrieval.protocols import Float32Array, QueryStates

SUMMARY = "Time the way from a question's text to its context, encoding included."
K = 10
_PACKAGES = ("ctxguard-rag", "txtai", "sentence-transformers", "torch", "bm25s", "faiss-cpu")
_WARM_UP = 10

Answer = Callable[[str], str]


class RealQuestions(GivenVectors):
    """Given vectors and generated pieces of the passages, and the model's own of a question."""

    def __init__(self, vectors: Float32Array) -> None:
        super().__init__(vectors)
        self.model = SentenceTransformerEmbedder(remembered=0)

    def encode_query(self, text: str) -> Float32Array:
        return self.query(text).vector

    def query(self, text: str) -> QueryStates:
        return self.model.query(text)


def systems(corpus: Corpus) -> tuple[dict[str, Answer], Answer]:
    """Build each system; and ctxguard's search with the states of the questions given."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    texts, vectors = corpus.texts(), np.array(corpus.vectors)
    model = SentenceTransformer(str(bundled_model()), device="cpu")
    lexical, dense = DirectLexical(texts), DirectDense(vectors)
    tokens = RealQuestions(vectors)
    retriever = HybridRetriever.build(passages_of(corpus), embedder=tokens)
    guard = ContextGuard(retriever, policy=RatioPolicy(k=K), mode=Mode.ENFORCE)
    states = {question: tokens.query(question) for question in corpus.queries}

    def ours(question: str) -> str:
        return guard.retrieve(question).text

    def by_hand(question: str) -> str:
        vector = model.encode(question, show_progress_bar=False)
        score: dict[int, float] = {}
        for rows in (lexical.search(question), dense.search(vector)):
            for rank, row in enumerate(rows, start=1):
                score[row] = score.get(row, 0.0) + 1.0 / (60.0 + rank)
        return "\n\n".join(
            [texts[row] for row in sorted(score, key=score.__getitem__)[: -K - 1 : -1]]
        )

    def search(question: str) -> str:
        return str(retriever.retrieve(question, depth=100, query_vector=states[question]))

    found: dict[str, Answer] = {"ctxguard": ours, "by hand": by_hand}
    if find_spec("txtai") is not None:
        found["txtai"] = txtai(texts, vectors, model)
    return found, search


def txtai(texts: Sequence[str], vectors: Float32Array, model: Any) -> Answer:
    """Build txtai's database of the same passages."""
    from txtai import Embeddings

    given = iter(range(len(texts)))

    def vectors_of(batch: list[str]) -> Float32Array:
        if len(batch) == 1:
            return np.asarray(model.encode(batch, show_progress_bar=False))
        return vectors[[next(given) for _ in batch]]

    database = Embeddings(
        method="external", transform=vectors_of, hybrid=True, content=True, backend="faiss"
    )
    database.index((row, text, None) for row, text in enumerate(texts))

    def answer(question: str) -> str:
        return "\n\n".join([found["text"] for found in database.search(question, K)])

    return answer


def measure(corpus: Corpus) -> dict[str, float]:
    """Time every system over the same questions, in turns; medians, in milliseconds."""
    peers, search = systems(corpus)
    asked: dict[str, Answer] = {**peers, "search": search}
    taken: dict[str, list[float]] = {name: [] for name in asked}
    questions = corpus.queries
    for number in range(_WARM_UP + len(questions)):
        question = questions[number % len(questions)]
        for name, answer in asked.items():
            started = time.perf_counter()
            answer(question)
            if number >= _WARM_UP:
                taken[name].append((time.perf_counter() - started) * 1e3)
    return {name: round(statistics.median(each), 3) for name, each in taken.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit status is 1 where a peer is ahead and ``--check`` is given."""
    parser = argparse.ArgumentParser(prog="benchmarks.question_to_context", description=SUMMARY)
    parser.add_argument("--sizes", nargs="+", default=["5k", "10k", "100k"])
    parser.add_argument("--questions", type=int, default=QUERIES)
    parser.add_argument("--data", type=Path, default=Path("build/search"), help="kept data")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a peer is ahead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args(arguments)
    sizes: dict[str, dict[str, float]] = {}
    for size in options.sizes:
        corpus = prepare(size_of(size), options.data, n_queries=options.questions)
        sizes[size] = found = measure(corpus)
        shown = ", ".join(f"{name} {each:.2f}" for name, each in found.items())
        sys.stdout.write(f"{size} passages, ms at the median: {shown}\n")
    if options.json is not None:
        report: dict[str, Any] = {"environment": environment(_PACKAGES, 1), "sizes": sizes}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    behind = [
        size
        for size, each in sizes.items()
        if each["ctxguard"] > min(each.get("txtai", math.inf), each["by hand"])
    ]
    return 1 if options.check and behind else 0


if __name__ == "__main__":
    sys.exit(main())
