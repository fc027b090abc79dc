"""A BEIR folder as the benchmarks see it: indexed, replayed and labelled.

The index is kept in a cache folder by the digest of the corpus.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from calibration.data.dataset import Dataset
from calibration.data.readers import read_beir, read_corpus, splits
from calibration.pools import LabelledPools, label
from calibration.replay import replay
from ctxguard._support.cache_folder import cache_folder
from ctxguard.cli.demonstration.corpus import passages as demo_passages
from ctxguard.cli.demonstration.labelled_questions import questions
from ctxguard.core.fusion import Fusion
from ctxguard.core.types import DEFAULT_DEPTH, Passage, Route
from ctxguard.errors import DataError
from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index import storage
from ctxguard.retrieval.index.passages import passage_line
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder
from ctxguard.retrieval.signals import Ranker

RANKERS = Path(__file__).with_name("rankers")
"""For each collection that the package's ranker was trained on, one trained on all the others."""

DEMO = Path("demo")
"""In place of a folder: the demonstration's corpus and questions."""


def default_cache() -> Path:
    """Where indexes of collections are kept."""
    return cache_folder() / "benchmarks"


class Collection:
    """One set of labelled queries over its own corpus, by the hybrid route.

    The ranker has never seen the set: it is the package's, or where that was trained on the set,
    one that was trained on all the others.

    Args:
        folder: A BEIR folder; the queries of all its splits are taken together. ``demo`` for the
            demonstration's questions.
        cache: Where the index is kept.
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
        self.retriever = indexed(folder, cache, embedder, ranker or unseen_ranker(self.name))

    def under(self, fusion: Fusion) -> LabelledPools:
        """The labelled candidates of all queries under a fusion."""
        retriever = self.retriever.with_fusion(fusion).on_route(Route.HYBRID)
        pools = replay(retriever, self.dataset.queries, depth=self.depth)
        return label(pools, self.dataset)


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
    if name not in shipped.trained_on:
        return shipped
    return Ranker.of_json((RANKERS / f"{name}.json").read_text(encoding="utf-8"))


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
