"""Measure what a profile loses on a corpus that changes after its calibration.

    python -m benchmarks.corpus_drift --data DIR … --repeats 5 --json corpus_drift.json

Each folder is a BEIR folder; the queries of all its splits are used together, at most ``--queries``
of them, drawn at random. A random part of the
corpus is indexed and calibrated by ``calibrate`` on a random half of the queries. Then the corpus
changes in steps. At each step three choices are measured on the other half of the queries: the
profile of the beginning, a profile calibrated anew at that point, and the retriever's first five.

``added``: random passages are added, the relevant ones of some queries among them. ``replaced``: as
many are deleted as are added. ``around``: all relevant passages are there from the beginning, and
others are added. The share of change is that of ``CorpusSketch.changed_share``.

At every point the queries are those with a relevant passage in the corpus of that point, and those
that nothing in the whole collection answers; labels of absent passages are left out. A query's
figures are averaged over the repeats that measured it, and collections have the same weight in the
mean; intervals are 95% paired bootstraps over queries.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._collection import all_splits, default_cache, encoded_queries, indexed
from benchmarks.policies import environment, gain
from calibration.calibrate import calibrate
from calibration.calibrate_route import Settings
from calibration.data.dataset import Dataset, split_by_query
from calibration.evaluate import per_query
from calibration.pool_labels import label
from calibration.replay import Pools, replay
from calibration.settings import Objective
from ctxguard.core.corpus_sketch import CorpusSketch, passage_digest
from ctxguard.core.fusion import Fusion
from ctxguard.core.policies import Policy, RatioPolicy
from ctxguard.core.types import DEFAULT_K, FloatArray, Passage, Route
from ctxguard.errors import CalibrationError
from ctxguard.profile.schema import Profile
from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index.passages import searchable_text
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder
from ctxguard.retrieval.protocols import Embedder, Float32Array, Progress, QueryStates

SUMMARY = "Measure what a profile loses on a corpus that changes after its calibration."
Change = Literal["added", "replaced", "around"]
_Label = TypeVar("_Label")
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
BEGINNING = 0.3
"""Share of the corpus at the beginning, so that 70% of the whole corpus is new at the end."""

METRICS = ("recall", "harm", "udcg_strict", "kept")
CHOICES = ("kept profile", "calibrated anew", "first k")
PAIRS = (("calibrated anew", "kept profile"), ("kept profile", "first k"))


class KnownVectors:
    """An embedder whose texts were all encoded before.

    Args:
        embedder: The one that encoded them.
        vectors: By text.
    """

    def __init__(self, embedder: Embedder, vectors: Mapping[str, Float32Array]) -> None:
        self.name, self.dimension = embedder.name, embedder.dimension
        self.fingerprint = embedder.fingerprint
        self._vectors = vectors

    def encode_query(self, text: str) -> Float32Array:
        """One vector, shape (dimension,)."""
        return self._vectors[text]

    def encode_passages(
        self,
        texts: Sequence[str],
        progress: Progress | None = None,  # noqa: ARG002
    ) -> Float32Array:
        """One vector per text, shape (n, dimension)."""
        return np.stack([self._vectors[text] for text in texts])


class KnownTerms:
    """The English analyser, which splits no text twice."""

    name, fingerprint, scripts = ENGLISH.name, ENGLISH.fingerprint, ENGLISH.scripts

    def __init__(self) -> None:
        self._terms: dict[str, list[str]] = {}

    def analyse(self, text: str) -> list[str]:
        """The terms of a text."""
        if text not in self._terms:
            self._terms[text] = ENGLISH.analyse(text)
        return self._terms[text]


@dataclass(frozen=True)
class HybridOnly:
    """A retriever of which `calibrate` sees the hybrid route alone."""

    inner: HybridRetriever
    routes = (Route.HYBRID,)

    def on_route(self, route: Route) -> HybridRetriever:
        """The route's view."""
        return self.inner.on_route(route)

    def with_fusion(self, fusion: Fusion) -> "HybridOnly":
        """The same under another fusion."""
        return HybridOnly(self.inner.with_fusion(fusion))

    def fingerprint(self) -> Mapping[str, str]:
        """The retriever's."""
        return self.inner.fingerprint()

    def encode_query(self, query: str) -> Float32Array | QueryStates:
        """The retriever's."""
        return self.inner.encode_query(query)


@dataclass(frozen=True)
class Drifting:
    """A collection, any part of whose corpus can be indexed.

    Attributes:
        dataset: The queries of all splits.
        passages: The whole corpus, by id.
        embedder: Knows the vectors of all of it.
        analyser: Of all parts.
    """

    dataset: Dataset
    passages: Mapping[str, Passage]
    embedder: Embedder
    analyser: KnownTerms

    @classmethod
    def of(
        cls, folder: Path, cache: Path, embedder: SentenceTransformerEmbedder, most: int
    ) -> "Drifting":
        """Read a BEIR folder, at most so many of its queries; vectors are kept in the cache."""
        dataset, whole = all_splits(folder), indexed(folder, cache, embedder)
        index = whole.generation
        vectors_of_all = index.dense.vectors_at(np.arange(len(index.passages)))
        known = {
            searchable_text(passage): vector
            for passage, vector in zip(index.passages, vectors_of_all, strict=True)
        }
        vectors = encoded_queries(dataset, cache, embedder)
        known |= {query.text: vectors[query.query_id] for query in dataset.queries}
        passages = {passage.passage_id: passage for passage in index.passages}
        if len(dataset) > most:
            dataset, _ = split_by_query(dataset, (most / len(dataset), 1.0 - most / len(dataset)))
        return cls(dataset, passages, KnownVectors(embedder, known), KnownTerms())

    def at(self, passage_ids: Sequence[str]) -> tuple[HybridRetriever, Dataset, CorpusSketch]:
        """The retriever, the labels and the sketch of a part of the corpus."""
        part = [self.passages[passage_id] for passage_id in passage_ids]
        sketch = CorpusSketch.of(map(passage_digest, part))
        retriever = HybridRetriever.build(part, embedder=self.embedder, analyser=self.analyser)
        return retriever, labels_within(self.dataset, set(passage_ids)), sketch

    def parts(self, change: Change, seed: int) -> dict[float, list[str]]:
        """The passage ids of each step, by share of change; steps that the corpus allows."""
        ids = sorted(self.passages)
        order = [ids[row] for row in np.random.default_rng(seed).permutation(len(ids))]
        n = int(BEGINNING * len(order))
        if change == "around":
            found = {
                passage_id
                for query in self.dataset.queries
                for passage_id in self.dataset.relevant(query.query_id)
            }
            order.sort(key=lambda passage_id: passage_id not in found)
            n = max(n, len(found))
        if change == "replaced":
            gone = {share: round(share * n) for share in SHARES}
            return {share: order[gone[share] : gone[share] + n] for share in SHARES}
        ends = {share: round(n / (1.0 - share)) for share in SHARES}
        return {share: order[:end] for share, end in ends.items() if end <= len(order)}


def labels_within(dataset: Dataset, passage_ids: set[str]) -> Dataset:
    """The labels of these passages, and the queries that they or no passage at all answer."""
    within = replace(
        dataset,
        qrels=_of_passages(dataset.qrels, passage_ids),
        distractors=_of_passages(dataset.distractors, passage_ids),
    )
    asked = {*within.answerable} | (
        {query.query_id for query in dataset.queries} - {*dataset.answerable}
    )
    return within.subset(asked)


def _of_passages(
    table: Mapping[str, Mapping[str, _Label]], passage_ids: set[str]
) -> dict[str, dict[str, _Label]]:
    return {
        query_id: {name: label for name, label in labels.items() if name in passage_ids}
        for query_id, labels in table.items()
    }


@dataclass
class Measured:
    """One collection under one kind of change.

    Attributes:
        observed: Mean share of change by the sketches, by step.
        values: By step, choice and metric: shape (repeats, n_q), NaN where not measured.
    """

    observed: dict[float, float]
    values: dict[float, dict[str, dict[str, FloatArray]]]

    def by_query(
        self, share: float, choice: str, metric: str, less: str | None = None
    ) -> FloatArray:
        """The mean over repeats of each query that was measured, less that of another choice."""
        of = self.values[share]
        values = of[choice][metric] - (of[less][metric] if less is not None else 0.0)
        defined = ~np.isnan(values)
        n = defined.sum(axis=0)
        means: FloatArray = np.where(defined, values, 0.0).sum(axis=0)[n > 0] / n[n > 0]
        return means


def measure(
    collection: Drifting, change: Change, repeats: int, seed: int, objective: Objective
) -> Measured:
    """Every step of one collection under one kind of change."""
    row_of = {query.query_id: row for row, query in enumerate(collection.dataset.queries)}
    measured = Measured({}, {})
    observed: dict[float, list[float]] = {}
    for repeat in range(repeats):
        kept: tuple[Profile, CorpusSketch] | None = None
        fit_half, _ = split_by_query(collection.dataset, (0.5, 0.5), seed=seed + repeat)
        fit_ids = {query.query_id for query in fit_half.queries}
        for share, passage_ids in collection.parts(change, seed + repeat).items():
            retriever, dataset, sketch = collection.at(passage_ids)
            ids = [query.query_id for query in dataset.queries]
            anew = profile_of(retriever, dataset.subset(fit_ids.intersection(ids)), seed, objective)
            kept = (anew, sketch) if kept is None else kept
            observed.setdefault(share, []).append(kept[1].changed_share(sketch))
            rows, figures = outcomes(
                retriever, dataset.subset(set(ids) - fit_ids), kept[0], anew, row_of
            )
            of = measured.values.setdefault(
                share,
                {
                    choice: {metric: np.full((repeats, len(row_of)), np.nan) for metric in METRICS}
                    for choice in CHOICES
                },
            )
            for choice, metrics in figures.items():
                for metric, values in metrics.items():
                    of[choice][metric][repeat, rows] = values
    measured.observed = {share: float(np.mean(own)) for share, own in observed.items()}
    return measured


def profile_of(
    retriever: HybridRetriever, dataset: Dataset, seed: int, objective: Objective
) -> Profile:
    """What ``calibrate`` chooses on all of these queries."""
    settings = Settings(objective=objective, held_out=0.0, seed=seed)
    return calibrate(HybridOnly(retriever), dataset, settings).profile


def outcomes(
    retriever: HybridRetriever,
    dataset: Dataset,
    kept: Profile,
    anew: Profile,
    row_of: Mapping[str, int],
) -> tuple[list[int], dict[str, dict[str, FloatArray]]]:
    """The rows of the queries, and every metric of each choice for them."""
    before, after = pools_of(retriever, dataset, kept), pools_of(retriever, dataset, anew)
    chosen: dict[str, tuple[Pools, Policy]] = {
        "kept profile": (before, kept.routes[Route.HYBRID].policy),
        "calibrated anew": (after, anew.routes[Route.HYBRID].policy),
        "first k": (before, RatioPolicy(k=DEFAULT_K)),
    }
    figures = {}
    for choice, (pools, policy) in chosen.items():
        values = per_query(pools, label(pools, dataset), policy).values
        figures[choice] = {metric: values[metric] for metric in METRICS}
    return [row_of[query_id] for query_id in before.query_ids], figures


def pools_of(retriever: HybridRetriever, dataset: Dataset, profile: Profile) -> Pools:
    """The candidates of every query under a profile's fusion."""
    view = retriever.with_fusion(profile.fusion).on_route(Route.HYBRID)
    return replay(view, dataset.queries, depth=profile.provenance.depth)


def rows_of(sets: Mapping[str, Measured], seed: int) -> list[dict[str, Any]]:
    """One row for each share of change: means over collections, and differences by query."""
    rows = []
    for share in SHARES:
        own = [measured for measured in sets.values() if share in measured.values]
        if not own:
            continue
        row: dict[str, Any] = {
            "share": share,
            "sets": len(own),
            "observed": float(np.mean([measured.observed[share] for measured in own])),
            "means": {
                choice: {
                    metric: float(
                        np.mean([one.by_query(share, choice, metric).mean() for one in own])
                    )
                    for metric in METRICS
                }
                for choice in CHOICES
            },
        }
        for choice, less in PAIRS:
            row[f"{choice} less {less}"] = {
                metric: vars(gain([one.by_query(share, choice, metric, less) for one in own], seed))
                for metric in METRICS
            }
        rows.append(row)
    return rows


def table_of(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """One kind of change as a person reads it."""
    table = Table(title=title, title_justify="left")
    for column in ("changed", "sets", "recall", "harm", "strict UDCG", "kept"):
        table.add_column(column, justify="right")
    for choice, less in PAIRS:
        for metric in ("recall", "harm", "UDCG"):
            table.add_column(f"{metric}: {choice} − {less}", justify="right")
    for row in rows:
        means = row["means"]["kept profile"]
        cells = [f"{means[metric]:.3f}" for metric in METRICS]
        for choice, less in PAIRS:
            pair = row[f"{choice} less {less}"]
            cells += [_shown(pair[metric]) for metric in METRICS[:3]]
        table.add_row(f"{row['share']:.2f}", str(row["sets"]), *cells)
    return table


def _shown(difference: Mapping[str, float]) -> str:
    return f"{difference['mean']:+.3f} [{difference['lower']:+.3f}, {difference['upper']:+.3f}]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.corpus_drift", description=SUMMARY)
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="DIR")
    parser.add_argument("--repeats", type=int, default=5, help="random parts (default 5)")
    parser.add_argument(
        "--queries", type=int, default=300, help="most queries of a collection (default 300)"
    )
    parser.add_argument("--cache", type=Path, default=default_cache(), metavar="DIR")
    parser.add_argument("--objective", choices=get_args(Objective), default="keep-recall")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    if options.repeats < 1 or options.queries < 2:
        parser.error("--repeats must be at least 1, --queries at least 2")
    console = Console(width=200)
    embedder = SentenceTransformerEmbedder()
    start = time.perf_counter()
    measured: dict[Change, dict[str, Measured]] = {change: {} for change in get_args(Change)}
    for folder in options.data:
        collection = Drifting.of(folder, options.cache, embedder, options.queries)
        for change, sets in measured.items():
            try:
                sets[collection.dataset.name] = measure(
                    collection, change, options.repeats, options.seed, options.objective
                )
            except CalibrationError as error:
                parser.error(f"{folder}: {error}")
            console.print(
                f"[dim]{folder.name}, {change}: {time.perf_counter() - start:.0f} s[/dim]"
            )
    results: dict[str, Any] = {
        "objective": options.objective,
        "repeats": options.repeats,
        "queries": options.queries,
        "seed": options.seed,
        "environment": environment(),
        "mean": {},
        "sets": {},
    }
    for change, sets in measured.items():
        rows = results["mean"][change] = rows_of(sets, options.seed)
        console.print(table_of(f"{change}, mean over {len(sets)} collections", rows))
        results["sets"][change] = {
            name: rows_of({name: own}, options.seed) for name, own in sets.items()
        }
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
