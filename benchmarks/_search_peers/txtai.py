"""txtai: a hybrid Embeddings database, contents in SQLite, vectors in faiss as it chooses."""

from pathlib import Path
from time import perf_counter
from typing import ClassVar, Literal

import faiss
import numpy as np
from txtai import Embeddings

from benchmarks._search_data import Corpus
from benchmarks._search_peers.base import K, SearchPeer, Surroundings
from ctxguard.retrieval.protocols import Float32Array


class Txtai(SearchPeer):
    """Its answers hold the texts, as those of all others do or can.

    Its SQLite connection serves one thread at a time, so that clients are processes.
    """

    packages: ClassVar = ("txtai", "faiss-cpu")
    clients: ClassVar[Literal["threads", "processes"]] = "processes"
    setting = "Embeddings(hybrid, content); IVF chosen by txtai"

    _folder: Path

    def build(self, corpus: Corpus, around: Surroundings) -> dict[str, float]:
        texts = corpus.texts()
        given = dict(zip(corpus.queries, corpus.query_vectors, strict=True))
        # Passages come in the order of their rows, a batch at a time.
        passed = 0

        def vectors_of(batch: list[str]) -> Float32Array:
            nonlocal passed
            if batch[0] in given:
                return np.stack([given[query] for query in batch])
            passed += len(batch)
            return np.array(corpus.vectors[passed - len(batch) : passed])

        started = perf_counter()
        faiss.omp_set_num_threads(around.build_threads)
        self._embeddings = Embeddings(
            method="external", transform=vectors_of, hybrid=True, content=True, backend="faiss"
        )
        self._embeddings.index((row, text, None) for row, text in enumerate(texts))
        faiss.omp_set_num_threads(around.threads)
        indexed = perf_counter()
        self._folder = around.folder / "txtai"
        self._embeddings.save(str(self._folder))
        self._queries, self._vectors_of = corpus.queries, vectors_of
        saved = perf_counter()
        self._embeddings.close()
        self.reopen()
        return {"index": indexed - started, "save": saved - indexed, "load": perf_counter() - saved}

    def search(self, at: int) -> list[int]:
        return [int(found["id"]) for found in self._embeddings.search(self._queries[at], K)]

    def reopen(self) -> None:
        self._embeddings = Embeddings()
        self._embeddings.load(str(self._folder), config={"transform": self._vectors_of})
