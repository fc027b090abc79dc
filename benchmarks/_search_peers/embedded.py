"""ctxguard's embedded retriever, and its two engines called directly.

    python -m benchmarks._search_peers.embedded CORPUS ENGINE SIGNALS FOLDER THREADS

builds and saves an index and prints the seconds that each took.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Literal

import bm25s
import faiss
import numpy as np

from benchmarks._search_data import DIMENSION, Corpus
from benchmarks._search_peers.base import DEPTH, K, Legs, SearchPeer, Surroundings
from benchmarks._search_tokens import GivenTokens, query_states
from ctxguard.core.types import Passage, Route
from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index.dense import EXACT_LIMIT, RESCORE_FACTOR, build_codes
from ctxguard.retrieval.index.hybrid_index import SignalLevel
from ctxguard.retrieval.index.lexical import LexicalEngine
from ctxguard.retrieval.protocols import Float32Array

_FEW = 1_100
"""Passages enough for codes."""


class GivenVectors(GivenTokens):
    """An embedder of vectors that are at hand, with generated word pieces."""

    name = "given vectors"
    dimension = DIMENSION

    def __init__(self, vectors: Float32Array) -> None:
        self._vectors = vectors
        self._n_given = 0

    def encode_query(self, text: str) -> Float32Array:
        raise RuntimeError(f"the vector of {text!r} was not given")

    def encode_passages(self, texts: Sequence[str]) -> Float32Array:
        self._n_given += len(texts)
        return self._vectors[self._n_given - len(texts) : self._n_given]

    def fingerprint(self) -> str:
        return "given"


def passages_of(corpus: Corpus) -> list[Passage]:
    """The corpus with ids in the order of its rows."""
    return [Passage(f"p{row:08d}", text) for row, text in enumerate(corpus.texts())]


class Embedded(SearchPeer):
    """`HybridRetriever`, built by one process and opened from its folder by the one that asks."""

    packages: ClassVar = ("bm25s", "rank-bm25", "faiss-cpu", "numpy")
    reference: ClassVar[Literal["united", "fused"] | None] = "united"

    def __init__(self, lexical: LexicalEngine, signals: SignalLevel) -> None:
        self.setting = f"{lexical}; signals {signals}; exact to {EXACT_LIMIT:,} passages"
        self._lexical, self._signals = lexical, signals
        # Signals order as no exact search does.
        self.reference = "united" if signals == "none" else None  # type: ignore[misc]
        # Compiled loops are a library's share of the memory, not an index's.
        few = [Passage(f"p{row}", f"word{row} word") for row in range(_FEW)]
        random = np.random.default_rng(0).normal(size=(_FEW, DIMENSION)).astype(np.float32)
        (given,) = query_states(["word"], random[:1])
        for exact_limit in (0, EXACT_LIMIT):
            retriever = HybridRetriever.build(
                few, embedder=GivenVectors(random), exact_limit=exact_limit, signals=signals
            )
            for route in retriever.routes:
                retriever.on_route(route).retrieve("word", query_vector=given)

    def build(self, corpus: Corpus, around: Surroundings) -> dict[str, float]:
        folder = around.folder / "index"
        task = (corpus.folder, self._lexical, self._signals, folder, around.build_threads)
        # What building leaves behind in a process is not part of the index.
        built = subprocess.run(  # noqa: S603  this module, with arguments made here
            [sys.executable, "-m", __name__, *map(str, task)], check=True, stdout=subprocess.PIPE
        )
        seconds: dict[str, float] = json.loads(built.stdout)
        started = perf_counter()
        embedder = GivenVectors(np.zeros((0, DIMENSION), np.float32))
        self._hybrid = HybridRetriever.load(folder, embedder=embedder)
        self._routes = [self._hybrid.on_route(route) for route in (Route.LEXICAL, Route.DENSE)]
        self._queries = corpus.queries
        self._given = query_states(corpus.queries, corpus.query_vectors)
        files = [*folder.rglob("vectors.npy"), *folder.rglob("weights.*.npy")]
        self._floor_bytes = sum(file.stat().st_size for file in files)
        return seconds | {"load": perf_counter() - started}

    def search(self, at: int) -> list[int]:
        return self._best(self._hybrid, at)[:K]

    def legs(self, at: int) -> Legs:
        lexical, dense = (self._best(route, at) for route in self._routes)
        return lexical, dense

    def floor_bytes(self) -> int:
        return self._floor_bytes

    def _best(self, retriever: HybridRetriever, at: int) -> list[int]:
        ranking = retriever.retrieve(self._queries[at], depth=DEPTH, query_vector=self._given[at])
        return [int(passage_id[1:]) for passage_id in ranking.passage_ids]


class DirectDense:
    """faiss with the dense leg's parameters: flat, or codes and then the best codes' vectors."""

    def __init__(self, vectors: Float32Array) -> None:
        if len(vectors) <= EXACT_LIMIT:
            self._index: Any = faiss.IndexFlatIP(DIMENSION)
            self._index.add(vectors)
        else:
            self._codes = build_codes(vectors)
            self._index = faiss.IndexRefineFlat(self._codes, faiss.swig_ptr(vectors))
            self._index.k_factor = RESCORE_FACTOR

    def search(self, vector: Float32Array) -> list[int]:
        """The nearest rows to one vector."""
        rows: list[int] = self._index.search(vector[np.newaxis, :], DEPTH)[1][0].tolist()
        return rows


class DirectLexical:
    """bm25s with the lexical leg's parameters and analyser."""

    def __init__(self, texts: Iterable[str]) -> None:
        backend = "numba" if find_spec("numba") else "numpy"
        self._words = bm25s.BM25(k1=1.5, b=0.75, method="lucene", backend=backend)
        self._words.index([ENGLISH.analyse(text) for text in texts], show_progress=False)

    def search(self, query: str) -> list[int]:
        """The best rows for a query."""
        found = self._words.retrieve(
            [ENGLISH.analyse(query)], k=DEPTH, n_threads=1, show_progress=False
        )
        rows: list[int] = found.documents[0].tolist()
        return rows


class Direct(SearchPeer):
    """bm25s and faiss with ctxguard's parameters, one after the other; nothing fuses them."""

    packages: ClassVar = ("bm25s", "faiss-cpu", "numpy")
    reference: ClassVar[Literal["united", "fused"] | None] = None
    setting = "bm25s (by numba if installed), then faiss, as ctxguard sets them; no fusion"

    def build(self, corpus: Corpus, around: Surroundings) -> dict[str, float]:
        started = perf_counter()
        self._lexical = DirectLexical(corpus.texts())
        words = perf_counter()
        faiss.omp_set_num_threads(around.build_threads)
        self._dense = DirectDense(np.array(corpus.vectors))
        faiss.omp_set_num_threads(around.threads)
        self._queries, self._vectors = corpus.queries, corpus.query_vectors
        return {"bm25": words - started, "dense": perf_counter() - words}

    def search(self, at: int) -> list[int]:
        self._lexical.search(self._queries[at])
        return self._dense.search(self._vectors[at])[:K]

    def legs(self, at: int) -> Legs:
        return self._lexical.search(self._queries[at]), self._dense.search(self._vectors[at])


def main(
    corpus: str, lexical: LexicalEngine, signals: SignalLevel, folder: str, build_threads: str
) -> None:
    """Build an index of the corpus and save it."""
    faiss.omp_set_num_threads(int(build_threads))
    given = Corpus(Path(corpus))
    started = perf_counter()
    built = HybridRetriever.build(
        passages_of(given), embedder=GivenVectors(given.vectors), lexical=lexical, signals=signals
    )
    indexed = perf_counter()
    built.save(folder)
    seconds = {"index": indexed - started, "save": perf_counter() - indexed}
    sys.stdout.write(json.dumps(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
