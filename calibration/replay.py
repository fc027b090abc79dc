"""Replay: every labelled query through a retriever once, its candidates kept as columns.

Pools are cached on disk by what they depend on: the system's fingerprint, the queries and the
depth. Every later step reads pools and never the retriever again.
"""

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from calibration.labelling.datasets import Query, RunEntry
from ctxguard.errors import CalibrationError, ConfigurationError, CtxguardError, QueryError
from ctxguard.policy import candidate_order
from ctxguard.types import (
    DEFAULT_DEPTH,
    FloatArray,
    Hit,
    Leg,
    Passage,
    Ranking,
    Route,
    ScoreKind,
)

Progress = Callable[[int], None]

_FORMAT = 1


class Replayable(Protocol):
    """A retriever as calibration sees it."""

    def retrieve(self, query: str, *, depth: int = DEFAULT_DEPTH) -> Ranking: ...


class RecordedRun:
    """A run that was recorded elsewhere, such as a TREC file, in the place of a retriever.

    Args:
        run: Candidates by query id, best first, from ``read_trec_run``.
        queries: What the run answers; two queries with one text must have one ranking.
        kind: What the run's scores mean.
    """

    def __init__(
        self, run: Mapping[str, Sequence[RunEntry]], queries: Sequence[Query], kind: ScoreKind
    ) -> None:
        self._run = {query.text: run.get(query.query_id, ()) for query in queries}
        self._kind = kind

    def retrieve(self, query: str, *, depth: int = DEFAULT_DEPTH) -> Ranking:
        """The recorded candidates; none for a query that the run left out.

        Raises:
            QueryError: a query that was not among those given.
        """
        if query not in self._run:
            raise QueryError(f"the run holds no query with the text {query!r}")
        return Ranking.from_hits(
            [Hit(entry.passage_id, entry.score, rank=entry.rank) for entry in self._run[query]][
                :depth
            ],
            self._kind,
        )


@dataclass(frozen=True)
class Pools:
    """The candidates of every query on one route, best first, as padded columns.

    Attributes:
        route: The stages that answered.
        kind: What ``scores`` mean.
        query_ids: Length n_q.
        passage_ids: Length n_q, each as long as that query's pool.
        scores: Shape (n_q, depth), NaN beyond a pool's end.
        legs: Each stage's own scores, shape (n_q, depth), NaN where absent.
        leg_kinds: What each leg's scores mean.
        skipped: Queries that the retriever refused, or answered on another route or with
            another kind of score than most, with why.
    """

    route: Route
    kind: ScoreKind
    query_ids: tuple[str, ...]
    passage_ids: tuple[tuple[str, ...], ...]
    scores: FloatArray
    legs: Mapping[str, FloatArray]
    leg_kinds: Mapping[str, ScoreKind]
    skipped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.query_ids)

    @property
    def lengths(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Shape (n_q,): how many candidates each query has."""
        return np.array([len(ids) for ids in self.passage_ids], dtype=np.int64)

    def subset(self, query_ids: Sequence[str]) -> "Pools":
        """The pools of these queries, in this order; queries that were skipped are left out."""
        where = {query_id: row for row, query_id in enumerate(self.query_ids)}
        rows = [where[query_id] for query_id in query_ids if query_id in where]
        return Pools(
            route=self.route,
            kind=self.kind,
            query_ids=tuple(self.query_ids[row] for row in rows),
            passage_ids=tuple(self.passage_ids[row] for row in rows),
            scores=self.scores[rows],
            legs={name: scores[rows] for name, scores in self.legs.items()},
            leg_kinds=self.leg_kinds,
            skipped=self.skipped,
        )

    def rankings(self) -> Iterator[Ranking]:
        """Each pool as the ranking that it was recorded from, without its text.

        Its ranks are those of the pool, so that ties stay in the order that was recorded.
        """
        for row, ids in enumerate(self.passage_ids):
            n = len(ids)
            yield Ranking(
                passage_ids=ids,
                scores=tuple(self.scores[row, :n].tolist()),
                kind=self.kind,
                passages=_Textless(ids),
                route=self.route,
                ranks=range(1, n + 1),
                legs={
                    name: Leg(scores[row, :n], self.leg_kinds[name])
                    for name, scores in self.legs.items()
                },
            )


@dataclass(frozen=True, slots=True)
class _Textless:
    """Recorded pools hold ids, not text."""

    ids: Sequence[str]

    def __getitem__(self, position: int, /) -> Passage:
        return Passage(self.ids[position], "")


def replay(
    retriever: Replayable,
    queries: Sequence[Query],
    *,
    depth: int = DEFAULT_DEPTH,
    vectors: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    cache: Path | None = None,
) -> Pools:
    """Retrieve every query and keep its candidates in the order that ``decide`` would see.

    Args:
        retriever: What answers in production, on one route.
        queries: The labelled queries.
        depth: Candidates per query.
        vectors: Query vectors by query id, for a retriever that takes ``query_vector``.
        progress: Called with the number of queries done since the last call.
        cache: A folder in which pools are kept; None keeps nothing. Only a retriever with a
            ``fingerprint()`` is cached, since nothing else tells two systems apart.

    Raises:
        CalibrationError: no query could be replayed.
        ConfigurationError: the cache folder cannot be made.
    """
    if not queries:
        raise CalibrationError("there are no queries to replay")
    file = _cache_file(retriever, queries, depth, cache)
    if file is not None:
        _make_folder(file.parent)  # before the work, not after it
    if file is not None and (found := _load(file)) is not None:
        if progress is not None:
            progress(len(queries))
        return found
    pools = _replay(retriever, queries, depth, vectors, progress)
    if file is not None:
        _save(pools, file)
    return pools


def _replay(
    retriever: Replayable,
    queries: Sequence[Query],
    depth: int,
    vectors: Mapping[str, Any] | None,
    progress: Progress | None,
) -> Pools:
    answered: list[tuple[str, Ranking]] = []
    skipped: list[str] = []
    for query in queries:
        try:
            if vectors is None or query.query_id not in vectors:
                ranking = retriever.retrieve(query.text, depth=depth)
            else:
                ranking = cast(Any, retriever).retrieve(
                    query.text, depth=depth, query_vector=vectors[query.query_id]
                )
        except CtxguardError as error:
            skipped.append(f"{query.query_id}: {error}")
        else:
            answered.append((query.query_id, ranking))
        if progress is not None:
            progress(1)
    if not answered:
        raise CalibrationError(
            f"none of {len(queries)} queries could be replayed; the first: {skipped[0]}"
        )
    # The usual one, not the first one's: a stage may have been down for the first query.
    counts = Counter((ranking.route, ranking.kind) for _, ranking in answered)
    (route, kind), _ = counts.most_common(1)[0]
    same = []
    for query_id, ranking in answered:
        if (ranking.route, ranking.kind) == (route, kind):
            same.append((query_id, ranking))
        else:
            skipped.append(
                f"{query_id}: answered by {ranking.route.value} with {ranking.kind.value} scores, "
                f"not {route.value} with {kind.value}"
            )
    return _columns(same, route, kind, depth, tuple(skipped))


def _columns(
    answered: Sequence[tuple[str, Ranking]],
    route: Route,
    kind: ScoreKind,
    depth: int,
    skipped: tuple[str, ...],
) -> Pools:
    shape = (len(answered), depth)
    scores = np.full(shape, np.nan)
    leg_kinds = {name: leg.kind for _, ranking in answered for name, leg in ranking.legs.items()}
    legs = {name: np.full(shape, np.nan) for name in sorted(leg_kinds)}
    all_ids = []
    for row, (_, ranking) in enumerate(answered):
        order = list(candidate_order(ranking)[0])[:depth]
        n = len(order)
        scores[row, :n] = [cast(float, ranking.scores[position]) for position in order]
        for name, leg in ranking.legs.items():
            legs[name][row, :n] = leg.scores[order]
        all_ids.append(tuple(ranking.passage_ids[position] for position in order))
    return Pools(
        route=route,
        kind=kind,
        query_ids=tuple(query_id for query_id, _ in answered),
        passage_ids=tuple(all_ids),
        scores=scores,
        legs=legs,
        leg_kinds=leg_kinds,
        skipped=skipped,
    )


def _cache_file(
    retriever: Replayable, queries: Sequence[Query], depth: int, cache: Path | None
) -> Path | None:
    fingerprint = getattr(retriever, "fingerprint", None)
    if cache is None or not callable(fingerprint):
        return None
    route = getattr(retriever, "route", None)
    key = json.dumps(
        [
            _FORMAT,
            fingerprint(),
            None if route is None else str(route),
            depth,
            [(query.query_id, query.text) for query in queries],
        ],
        sort_keys=True,
    )
    return cache / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npz"


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the cache folder {folder} cannot be made ({error}); give another, or none"
        ) from error


def _save(pools: Pools, file: Path) -> None:
    """Write beside and rename: a reader never meets half a file."""
    about = {
        "route": pools.route.value,
        "kind": pools.kind.value,
        "query_ids": pools.query_ids,
        "passage_ids": pools.passage_ids,
        "leg_kinds": {name: kind.value for name, kind in pools.leg_kinds.items()},
        "skipped": pools.skipped,
    }
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, suffix=".npz")
    try:
        with os.fdopen(descriptor, "wb") as handle:
            arrays: dict[str, Any] = {f"leg_{name}": leg for name, leg in pools.legs.items()}
            arrays["about"] = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
            arrays["scores"] = pools.scores
            np.savez_compressed(handle, **arrays)
        Path(temporary).replace(file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _load(file: Path) -> Pools | None:
    """The cached pools; None where there are none, or they are damaged and must be made anew."""
    try:
        # Opened here, since a damaged archive would leave numpy's own handle open.
        with file.open("rb") as handle, np.load(handle, allow_pickle=False) as arrays:
            about = json.loads(arrays["about"].tobytes())
            leg_kinds = {name: ScoreKind(kind) for name, kind in about["leg_kinds"].items()}
            return Pools(
                route=Route(about["route"]),
                kind=ScoreKind(about["kind"]),
                query_ids=tuple(about["query_ids"]),
                passage_ids=tuple(tuple(ids) for ids in about["passage_ids"]),
                scores=arrays["scores"],
                legs={name: arrays[f"leg_{name}"] for name in leg_kinds},
                leg_kinds=leg_kinds,
                skipped=tuple(about["skipped"]),
            )
    except Exception:
        # A damaged archive raises whatever its damage leads to; no list of types holds it.
        return None
