"""A BEIR folder as the benchmarks of policies see it: indexed, replayed and labelled once.

The index and the query vectors are kept in a cache folder by the digest of the corpus and of the
queries; pools under a fusion weight are kept in memory.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._text import text_features
from calibration.data.dataset import Dataset
from calibration.data.readers import read_beir, read_corpus, splits
from calibration.fit import fit_fusion, pool_features
from calibration.pool_labels import IntArray, PoolLabels, label
from calibration.replay import Pools, replay
from ctxguard._support.cache_folder import cache_folder
from ctxguard.core.fusion import Fusion
from ctxguard.core.types import DEFAULT_DEPTH, FloatArray, Route
from ctxguard.errors import DataError
from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index import storage
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder


def default_cache() -> Path:
    """Where indexes and vectors of collections are kept."""
    return cache_folder() / "benchmarks"


@dataclass(frozen=True)
class View:
    """Some queries of a collection under one fusion: what a policy is fitted on or applied to.

    Attributes:
        pools: The candidates, best fused score first.
        labels: What is known of them.
        signals: Shape (n_q, depth, n_signals), NaN beyond a pool's end.
        text: Shape (n_q, depth, n_features), the cheap text features; NaN beyond a pool's end.
    """

    pools: Pools
    labels: PoolLabels
    signals: FloatArray
    text: FloatArray

    def rows(self, rows: IntArray) -> "View":
        """The same of some of the queries."""
        ids = [self.pools.query_ids[row] for row in rows]
        return View(
            self.pools.subset(ids), self.labels.rows(rows), self.signals[rows], self.text[rows]
        )

    def of(self, query_ids: Sequence[str]) -> "View":
        """The same of the queries with these ids; those that could not be replayed are left out."""
        wanted = set(query_ids)
        found = [row for row, name in enumerate(self.pools.query_ids) if name in wanted]
        return self.rows(np.array(found, dtype=np.int64))


class Collection:
    """One folder's labelled queries over its own corpus, by the hybrid route.

    Args:
        folder: A BEIR folder; the queries of all its splits are taken together.
        cache: Where the index and the query vectors are kept.
        embedder: The model of the dense leg.
        depth: Candidates per query.
    """

    def __init__(
        self,
        folder: Path,
        cache: Path,
        embedder: SentenceTransformerEmbedder,
        depth: int = DEFAULT_DEPTH,
    ) -> None:
        self.name = folder.resolve().name
        self.dataset = all_splits(folder)
        self.depth = depth
        self._views: dict[float, View] = {}
        self._retriever = indexed(folder, cache, embedder)
        self._vectors = encoded_queries(self.dataset, self._retriever, cache, embedder)

    @cached_property
    def _for_fusion(self) -> tuple[Pools, PoolLabels]:
        """Candidates in which both legs are whole, as calibration fits its fusion on."""
        pools = replay(
            self._retriever.with_fusion(Fusion()).on_route(Route.HYBRID),
            self.dataset.queries,
            depth=2 * self.depth,
            vectors=self._vectors,
        )
        return pools, label(pools, self.dataset)

    def fitted_fusion(self, query_ids: Sequence[str]) -> Fusion:
        """The convex fusion that calibration would fit on these queries."""
        pools, labels = self._for_fusion
        row_of = {query_id: row for row, query_id in enumerate(pools.query_ids)}
        rows = [row_of[query_id] for query_id in query_ids if query_id in row_of]
        own = pools.subset(query_ids)
        return fit_fusion(own, labels.rows(np.array(rows, dtype=np.int64)))

    def under(self, fusion: Fusion) -> View:
        """All queries under a convex fusion."""
        if fusion.weight not in self._views:
            pools = replay(
                self._retriever.with_fusion(fusion).on_route(Route.HYBRID),
                self.dataset.queries,
                depth=self.depth,
                vectors=self._vectors,
            )
            query_texts = {query.query_id: query.text for query in self.dataset.queries}
            self._views[fusion.weight] = View(
                pools,
                label(pools, self.dataset),
                pool_features(pools),
                text_features(pools, query_texts, self._retriever.passage),
            )
        return self._views[fusion.weight]


def all_splits(folder: Path) -> Dataset:
    """The queries of every split together.

    Raises:
        DataError: a query id is in two splits.
    """
    parts = [read_beir(folder, split) for split in splits(folder)]
    queries = [query for part in parts for query in part.queries]
    if len({query.query_id for query in queries}) != len(queries):
        raise DataError("a query id is in two splits; rename or remove one", path=folder)
    return replace(
        parts[0],
        name=folder.resolve().name,
        queries=tuple(queries),
        qrels={q: grades for part in parts for q, grades in part.qrels.items()},
        distractors={q: kinds for part in parts for q, kinds in part.distractors.items()},
        pools={},
    )


def indexed(folder: Path, cache: Path, embedder: SentenceTransformerEmbedder) -> HybridRetriever:
    """The index of a folder's whole corpus, from the cache if it is there."""
    with (folder / "corpus.jsonl").open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    made_by = (embedder.fingerprint(), ENGLISH.fingerprint, storage.SCHEMA_VERSION)
    digest.update("\0".join(map(str, made_by)).encode())
    saved = cache / f"index-{digest.hexdigest()[:16]}"
    if saved.exists():
        return HybridRetriever.load(saved, embedder=embedder)
    retriever = HybridRetriever.build(read_corpus(folder), embedder=embedder)
    saved.parent.mkdir(parents=True, exist_ok=True)
    retriever.save(saved)
    return retriever


def encoded_queries(
    dataset: Dataset,
    retriever: HybridRetriever,
    cache: Path,
    embedder: SentenceTransformerEmbedder,
) -> dict[str, Any]:
    """The vector of every query by its id, from the cache if it is there."""
    texts = sorted({query.text for query in dataset.queries})
    digest = hashlib.sha256("\0".join([embedder.fingerprint(), *texts]).encode())
    file = cache / f"queries-{digest.hexdigest()[:16]}.npy"
    if file.exists():
        vectors = np.load(file, allow_pickle=False)
    else:
        vectors = np.stack([retriever.encode_query(text) for text in texts])
        temporary = file.with_suffix(".part.npy")
        np.save(temporary, vectors)
        temporary.replace(file)
    row_of = {text: row for row, text in enumerate(texts)}
    return {query.query_id: vectors[row_of[query.text]] for query in dataset.queries}
