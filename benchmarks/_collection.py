"""A BEIR folder as the benchmarks of policies see it: indexed, replayed and labelled once.

The index and the query vectors are kept in a cache folder by the digest of the corpus and of the
queries; pools under a fusion are kept in memory.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from calibration.data.dataset import Dataset
from calibration.data.readers import read_beir, read_corpus, splits
from calibration.fit import fit_fusion
from calibration.pool_labels import IntArray, PoolLabels, label
from calibration.replay import Pools, replay
from ctxguard._support.cache_folder import cache_folder
from ctxguard.cli.demonstration.corpus import passages as demo_passages
from ctxguard.cli.demonstration.labelled_questions import questions
from ctxguard.core.fusion import Fusion
from ctxguard.core.types import DEFAULT_DEPTH, FloatArray, Passage, Route
from ctxguard.errors import DataError
from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index import storage
from ctxguard.retrieval.index.passages import passage_line
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder
from ctxguard.retrieval.signals.ranker import Ranker

RANKERS = Path(__file__).with_name("rankers")
"""For each collection that the package's ranker was trained on, one trained on all the others."""

DEMO = Path("demo")
"""In place of a folder: the demonstration's corpus and questions."""


def default_cache() -> Path:
    """Where indexes and vectors of collections are kept."""
    return cache_folder() / "benchmarks"


@dataclass(frozen=True)
class View:
    """Some queries of a collection under one fusion: what a policy is fitted on or applied to.

    Attributes:
        pools: The candidates, best fused score first.
        labels: What is known of them.
    """

    pools: Pools
    labels: PoolLabels

    def rows(self, rows: IntArray) -> "View":
        """The same of some of the queries."""
        ids = [self.pools.query_ids[row] for row in rows]
        return View(self.pools.subset(ids), self.labels.rows(rows))

    def of(self, query_ids: Sequence[str]) -> "View":
        """The same of the queries with these ids; those that could not be replayed are left out."""
        wanted = set(query_ids)
        found = [row for row, name in enumerate(self.pools.query_ids) if name in wanted]
        return self.rows(np.array(found, dtype=np.int64))


class Collection:
    """One set of labelled queries over its own corpus, by the hybrid route.

    The ranker has never seen the set: it is the package's, or where that was trained on the set,
    one that was trained on all the others.

    Args:
        folder: A BEIR folder; the queries of all its splits are taken together. ``demo`` for the
            demonstration's questions.
        cache: Where the index and the query vectors are kept.
        embedder: The model of the dense leg.
        depth: Candidates per query.
        ranker: Ranks in place of the one that has not seen the set.
    """

    def __init__(
        self,
        folder: Path,
        cache: Path,
        embedder: SentenceTransformerEmbedder,
        depth: int = DEFAULT_DEPTH,
        ranker: Ranker | None = None,
    ) -> None:
        self.dataset = all_splits(folder)
        self.name = folder.resolve().name
        self.depth = depth
        self._views: dict[tuple[Fusion, bool], View] = {}
        self.retriever = indexed(folder, cache, embedder, ranker or unseen_ranker(self.name))
        self._vectors = encoded_queries(self.dataset, cache, embedder)

    @cached_property
    def _for_fusion(self) -> tuple[Pools, PoolLabels]:
        """Candidates in which both legs are whole, as calibration fits its fusion on."""
        pools = self._replayed(Fusion(), 2 * self.depth)
        return pools, label(pools, self.dataset)

    def fitted_fusion(self, query_ids: Sequence[str]) -> Fusion:
        """The convex fusion that calibration fits on these queries where there are no signals."""
        pools, labels = self._for_fusion
        row_of = {query_id: row for row, query_id in enumerate(pools.query_ids)}
        rows = [row_of[query_id] for query_id in query_ids if query_id in row_of]
        own = pools.subset(query_ids)
        return fit_fusion(own, labels.rows(np.array(rows, dtype=np.int64)))

    def under(self, fusion: Fusion) -> View:
        """All queries under a fusion."""
        return self._view((fusion, True), lambda: self._replayed(fusion, self.depth))

    def by_reciprocal_rank(self, *, with_signals: bool) -> View:
        """All queries in the order of reciprocal ranks, with the signals or without."""

        def pools() -> Pools:
            plain = self._replayed(Fusion(), self.depth)
            if not with_signals:
                return plain
            return replace(plain, signals=signals_of(self.under(Fusion("ranker")).pools, plain))

        return self._view((Fusion(), with_signals), pools)

    def _view(self, key: tuple[Fusion, bool], make: Callable[[], Pools]) -> View:
        if key not in self._views:
            pools = make()
            self._views[key] = View(pools, label(pools, self.dataset))
        return self._views[key]

    def _replayed(self, fusion: Fusion, depth: int) -> Pools:
        return replay(
            self.retriever.with_fusion(fusion).on_route(Route.HYBRID),
            self.dataset.queries,
            depth=depth,
            # The ranker needs the vectors of a query's tokens as well.
            vectors=None if fusion.method == "ranker" else self._vectors,
        )


def signals_of(ranked: Pools, pools: Pools) -> dict[str, FloatArray]:
    """The signals of the same candidates in the order of other pools."""
    signals = {name: np.full(values.shape, np.nan) for name, values in ranked.signals.items()}
    for row, (theirs, ours) in enumerate(zip(ranked.passage_ids, pools.passage_ids, strict=True)):
        column = {passage_id: at for at, passage_id in enumerate(theirs)}
        order = [column[passage_id] for passage_id in ours]
        for name, values in ranked.signals.items():
            signals[name][row, : len(order)] = values[row, order]
    return signals


def all_splits(folder: Path) -> Dataset:
    """The queries of every split together.

    Raises:
        DataError: a query id is in two splits.
    """
    if folder == DEMO:
        return questions()
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
    )


def unseen_ranker(name: str) -> Ranker:
    """A ranker that was not trained on a collection."""
    shipped = Ranker.default()
    return Ranker.load(RANKERS / f"{name}.json") if name in shipped.trained_on else shipped


def indexed(
    folder: Path, cache: Path, embedder: SentenceTransformerEmbedder, ranker: Ranker | None = None
) -> HybridRetriever:
    """The index of a folder's whole corpus, from the cache if it is there."""
    return indexed_passages(
        list(demo_passages() if folder == DEMO else read_corpus(folder)), cache, embedder, ranker
    )


def indexed_passages(
    passages: Sequence[Passage],
    cache: Path,
    embedder: SentenceTransformerEmbedder,
    ranker: Ranker | None = None,
) -> HybridRetriever:
    """The index of some passages, from the cache if it is there."""
    digest = hashlib.sha256()
    for passage in passages:
        digest.update(passage_line(passage))
    made_by = (embedder.fingerprint(), ENGLISH.fingerprint, storage.SCHEMA_VERSION, "full")
    digest.update("\0".join(map(str, made_by)).encode())
    saved = cache / f"index-{digest.hexdigest()[:16]}"
    if saved.exists():
        return HybridRetriever.load(saved, embedder=embedder, ranker=ranker)
    retriever = HybridRetriever.build(passages, embedder=embedder, ranker=ranker)
    saved.parent.mkdir(parents=True, exist_ok=True)
    retriever.save(saved)
    return retriever


def encoded_queries(
    dataset: Dataset, cache: Path, embedder: SentenceTransformerEmbedder
) -> dict[str, Any]:
    """The vector of every query by its id, from the cache if it is there."""
    texts = sorted({query.text for query in dataset.queries})
    digest = hashlib.sha256("\0".join([embedder.fingerprint(), *texts]).encode())
    file = cache / f"queries-{digest.hexdigest()[:16]}.npy"
    if file.exists():
        vectors = np.load(file, allow_pickle=False)
    else:
        vectors = np.stack([embedder.encode_query(text) for text in texts])
        temporary = file.with_suffix(".part.npy")
        np.save(temporary, vectors)
        temporary.replace(file)
    row_of = {text: row for row, text in enumerate(texts)}
    return {query.query_id: vectors[row_of[query.text]] for query in dataset.queries}
