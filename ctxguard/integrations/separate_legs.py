"""Several retrievers as one, whose candidates bear the scores of each."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ctxguard.core.decision import candidate_order
from ctxguard.core.fusion import Fusion, fuse
from ctxguard.core.metadata_filter import Where
from ctxguard.core.types import (
    FloatArray,
    Leg,
    Passage,
    Ranking,
    ScoreKind,
    ScoreKindName,
    StageFailure,
    member_of,
)
from ctxguard.errors import ConfigurationError, CtxguardError, StageError, StageUnavailableError
from ctxguard.request.wrapped_retriever import calls_of, ranking_of
from ctxguard.resilience import Stage, StageCall, Watcher, failure_of
from ctxguard.resilience.deadlines import check_seconds

if TYPE_CHECKING:
    from ctxguard.retrieval.protocols import AnyRetriever, Retrieval

_Outcome = Ranking | BaseException


class SeparateLegs:
    """Several retrievers over one corpus, such as BM25 and vectors, whose scores stay apart.

    Candidates are united by passage id and ordered by reciprocal ranks, which carry order only.
    Each leg's own scores are in ``Ranking.legs``, where a calibrated model reads them; of a leg
    without scores they are minus the logarithm of the rank. A candidate that a leg did not return
    has there the lowest score that the leg returned, which its own does not exceed; on the scale
    ``ratio`` it has 0, no match. A leg whose scores cannot be of its kind gives ranks only.

    The legs are searched at once. One that fails or is late is left out of the answer, which is
    then flagged ``degraded``.

    Args:
        legs: Two retrievers or more by name, each anything that ``ContextGuard`` takes.
        score_kinds: What the scores of plain hits mean, by the leg's name.
        leg_seconds: The longest that one leg may take; None for no limit. With a limit, a leg that
            failed repeatedly is not called for a while.

    Raises:
        ConfigurationError: fewer than two legs, one that is no retriever, or ``score_kinds`` names
            none of them.
    """

    def __init__(
        self,
        legs: "Mapping[str, AnyRetriever]",
        *,
        score_kinds: Mapping[str, ScoreKind | ScoreKindName] | None = None,
        leg_seconds: float | None = None,
    ) -> None:
        if len(legs) < 2:
            raise ConfigurationError(f"there must be two legs or more, by name, not {len(legs)}")
        kinds = score_kinds or {}
        for name in kinds:
            if name not in legs:
                raise ConfigurationError(
                    f"score_kinds names {name!r}; the legs are {', '.join(map(repr, legs))}"
                )
        self._kinds = {
            name: member_of(ScoreKind, kind, "score_kind") for name, kind in kinds.items()
        }
        check_seconds("leg_seconds", leg_seconds)
        self._calls = {name: calls_of(leg) for name, leg in legs.items()}
        self._stages = {name: Stage(name, breaks=leg_seconds is not None) for name in legs}
        self._seconds = leg_seconds

    def watch_stages(self, watcher: Watcher) -> None:
        """Call ``watcher`` with a leg's name whenever its circuit opens or closes."""
        for stage in self._stages.values():
            stage.watch(watcher)

    def retrieve(self, query: str, *, depth: int, where: Where | None = None) -> Ranking:
        """The best ``depth`` of the candidates of all legs, each asked for as many.

        Raises:
            ConfigurationError: a leg cannot filter and ``where`` is given, has only an asynchronous
                call, or returned no ranking.
            QueryError: a leg refused the query.
            StageUnavailableError: every leg failed.
        """
        options = self._options(depth, where)
        started: dict[str, StageCall[Retrieval] | StageError] = {}
        for name, calls in self._calls.items():
            if calls.acall == calls.call:
                raise ConfigurationError(f"leg {name!r} is asynchronous: await aretrieve()")
            started[name] = self._started(name, query, options)
        return self._united(
            {name: self._outcome(name, call) for name, call in started.items()}, depth
        )

    async def aretrieve(self, query: str, *, depth: int, where: Where | None = None) -> Ranking:
        """`retrieve`, awaited. A leg without an asynchronous call runs on a thread."""
        options = self._options(depth, where)
        found = await asyncio.gather(
            *[self._aretrieved(name, query, options) for name in self._calls],
            return_exceptions=True,
        )
        return self._united(dict(zip(self._calls, found, strict=True)), depth)

    def _options(self, depth: int, where: Where | None) -> dict[str, Any]:
        if where is None:
            return {"depth": depth}
        for name, calls in self._calls.items():
            if not calls.can_filter:
                raise ConfigurationError(
                    f"leg {name!r} cannot filter: give its retrieve (and aretrieve) a keyword "
                    "`where`"
                )
        return {"depth": depth, "where": where}

    def _started(
        self, name: str, query: str, options: Mapping[str, Any]
    ) -> "StageCall[Retrieval] | StageError":
        work: Any = partial(self._calls[name].call, query, **options)
        try:
            return self._stages[name].submit(work, self._seconds)
        except StageError as error:
            return error

    def _outcome(self, name: str, call: "StageCall[Retrieval] | StageError") -> _Outcome:
        if isinstance(call, StageError):
            return call
        try:
            return ranking_of(call.result(), self._kinds.get(name))
        except Exception as error:
            return error

    async def _aretrieved(self, name: str, query: str, options: Mapping[str, Any]) -> Ranking:
        acall, stage = self._calls[name].acall, self._stages[name]
        if acall is None:
            work: Any = partial(self._calls[name].call, query, **options)
            found = await stage.submit(work, self._seconds).aresult()
        elif self._seconds is None:
            found = await acall(query, **options)
        else:
            found = await stage.await_within(partial(acall, query, **options), self._seconds)
        return ranking_of(found, self._kinds.get(name))

    def _united(self, outcomes: Mapping[str, _Outcome], depth: int) -> Ranking:
        """One ranking from what the legs returned or raised."""
        rankings: dict[str, Ranking] = {}
        failures: list[StageFailure] = []
        for name, outcome in outcomes.items():
            if isinstance(outcome, Ranking):
                rankings[name] = outcome
            elif not isinstance(outcome, Exception) or (
                isinstance(outcome, CtxguardError) and not isinstance(outcome, StageError)
            ):
                raise outcome  # the caller's fault, or no error: another leg does not mend it
            else:
                failures.append(failure_of(name, outcome))
        if not rankings:
            raise StageUnavailableError(
                "legs", "; ".join(f"{failure.stage}: {failure.cause}" for failure in failures)
            )
        return united(rankings, tuple(failures), depth)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Passages by their position in the ranking of one leg that returned them."""

    places: Sequence[tuple[Ranking, int]]

    def __getitem__(self, position: int, /) -> Passage:
        ranking, at = self.places[position]
        return ranking.passages[at]


def united(
    rankings: Mapping[str, Ranking],
    failures: tuple[StageFailure, ...],
    depth: int,
    fusion: Fusion | None = None,
) -> Ranking:
    """The best ``depth`` candidates of several legs, with each leg's scores.

    Args:
        rankings: What each leg returned.
        failures: The legs that are missing.
        depth: The most candidates.
        fusion: How they are ordered; None for reciprocal ranks. ``convex`` is for legs ``lexical``
            and ``dense``.
    """
    fusion = Fusion() if fusion is None else fusion
    orders = {name: candidate_order(ranking) for name, ranking in rankings.items()}
    rows: dict[str, int] = {}
    places: list[tuple[Ranking, int]] = []
    for name, ranking in rankings.items():
        for at in orders[name][0]:
            if rows.setdefault(ranking.passage_ids[at], len(rows)) == len(places):
                places.append((ranking, at))
    fused = np.zeros(len(rows))
    legs: dict[str, Leg] = {}
    for name, ranking in rankings.items():
        order, _, problem = orders[name]
        found = np.array([rows[ranking.passage_ids[at]] for at in order], dtype=np.intp)
        ranks = np.arange(1.0, len(order) + 1.0)
        fused[found] += 1.0 / (fusion.constant + ranks)
        if problem is None:
            own: FloatArray = (
                -np.log(ranks)
                if ranking.kind is ScoreKind.RANK
                else np.array([ranking.scores[at] for at in order], dtype=np.float64)
            )
            leg = _leg(own, found, ranking.kind, len(rows))
            if leg is not None:
                legs[name] = leg
    kind = ScoreKind.RANK
    if fusion.method == "convex" and len(legs) == len(rankings):
        fused, kind = fuse(legs, fusion), fusion.kind
    ids = list(rows)
    best = sorted(range(len(ids)), key=lambda row: (-fused[row], ids[row]))[:depth]
    return Ranking(
        passage_ids=tuple([ids[row] for row in best]),
        scores=tuple(fused[best].tolist()),
        kind=kind,
        passages=_Candidates([places[row] for row in best]),
        legs={name: Leg(leg.scores[best], leg.kind) for name, leg in legs.items()},
        failures=failures,
    )


def _leg(own: FloatArray, found: Any, kind: ScoreKind, n: int) -> Leg | None:
    """One leg's scores for all ``n`` candidates; None if it returned none that tells a lowest."""
    if kind is not ScoreKind.RATIO and not own.size:
        return None
    absent = 0.0 if kind is ScoreKind.RATIO else float(own.min())
    scores = np.full(n, absent)
    scores[found] = own
    return Leg(scores, ScoreKind.LOGIT if kind is ScoreKind.RANK else kind)
