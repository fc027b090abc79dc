"""Combines several retrievers into one whose candidates carry the scores of each.

Calls the retrievers, each on threads of its own.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ctxguard._support.checks import check_positive
from ctxguard.core.metadata_filter import Where
from ctxguard.core.scores import is_contradicted
from ctxguard.core.types import Ranking, ScoreKind, ScoreKindName, StageFailure, member_of
from ctxguard.errors import ConfigurationError, CtxguardError, StageError, StageUnavailableError
from ctxguard.guard.wrapped_retriever import calls_of
from ctxguard.resilience.breaker import Watcher
from ctxguard.resilience.stage import Stage, StageCall, failure_of
from ctxguard.retrieval.hybrid.search import united

if TYPE_CHECKING:
    from ctxguard.retrieval.protocols import AnyRetriever, Retrieval

_Outcome = Ranking | BaseException


class SeparateLegs:
    """Several retrievers over one corpus, such as BM25 and vectors, whose scores stay separate.

    Candidates are united by passage id and ordered by reciprocal ranks, which carry only order.
    Each leg's own scores are in ``Ranking.legs``, where a calibrated model reads them; see
    `ctxguard.retrieval.hybrid.search.united`.

    The legs are searched at once. One that fails or is late is left out of the answer, which is
    then flagged ``degraded``. If a leg's order contradicts its scores, only the order counts and
    the answer is flagged ``scores_contradicted``.

    Args:
        legs: Two retrievers or more by name, each anything that ``ContextGuard`` takes.
        score_kinds: The kind of the scores of plain hits, by the leg's name.
        leg_seconds: Maximum duration of one leg. With a limit, a leg that failed repeatedly is not
            called for a while.

    Raises:
        ConfigurationError: fewer than two legs, one that is not a retriever, or ``score_kinds``
            names an unknown leg.
    """

    def __init__(
        self,
        legs: "Mapping[str, AnyRetriever]",
        *,
        score_kinds: Mapping[str, ScoreKind | ScoreKindName] | None = None,
        leg_seconds: float | None = None,
    ) -> None:
        if len(legs) < 2:
            raise ConfigurationError(f"give at least two legs by name, not {len(legs)}")
        kinds = score_kinds or {}
        for name in kinds:
            if name not in legs:
                raise ConfigurationError(
                    f"score_kinds names {name!r}; the legs are {', '.join(map(repr, legs))}"
                )
        self._kinds = {
            name: member_of(ScoreKind, kind, "score_kind") for name, kind in kinds.items()
        }
        check_positive(leg_seconds=leg_seconds)
        self._calls = {name: calls_of(leg) for name, leg in legs.items()}
        self._stages = {name: Stage(name, breaks=leg_seconds is not None) for name in legs}
        self._seconds = leg_seconds

    def watch_stages(self, watcher: Watcher) -> None:
        """Call ``watcher`` with a leg's name whenever its circuit opens or closes."""
        for stage in self._stages.values():
            stage.watch(watcher)

    def retrieve(self, query: str, *, depth: int, where: Where | None = None) -> Ranking:
        """Return the best ``depth`` candidates of all legs; each leg is asked for ``depth``.

        Raises:
            ConfigurationError: a leg cannot filter and ``where`` is given, has only an asynchronous
                call, or returned no ranking.
            QueryError: a leg refused the query.
            StageUnavailableError: every leg failed.
        """
        options = self._options(depth, where)
        waiting: dict[str, StageCall[Retrieval]] = {}
        found: dict[str, _Outcome] = {}
        for name, calls in self._calls.items():
            if calls.acall == calls.call:
                raise ConfigurationError(f"leg {name!r} is asynchronous: await aretrieve()")
            try:
                waiting[name] = self._submitted(name, query, options)
            except StageError as error:
                found[name] = error
        for name, call in waiting.items():
            try:
                found[name] = self._ranking(name, call.result())
            except Exception as error:
                found[name] = error
        return self._united(found, depth)

    async def aretrieve(self, query: str, *, depth: int, where: Where | None = None) -> Ranking:
        """Do what ``retrieve`` does; a leg without an asynchronous call runs on a thread."""
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

    def _submitted(
        self, name: str, query: str, options: Mapping[str, Any]
    ) -> "StageCall[Retrieval]":
        work: Any = partial(self._calls[name].call, query, **options)
        return self._stages[name].submit(work, self._seconds)

    async def _aretrieved(self, name: str, query: str, options: Mapping[str, Any]) -> Ranking:
        acall = self._calls[name].acall
        if acall is None:
            found = await self._submitted(name, query, options).aresult()
        else:
            call = partial(acall, query, **options)
            found = await self._stages[name].await_within(call, self._seconds)
        return self._ranking(name, found)

    def _ranking(self, name: str, found: "Retrieval") -> Ranking:
        ranking = found
        if not isinstance(ranking, Ranking):
            ranking = Ranking.from_hits(ranking, self._kinds.get(name))
        return replace(ranking, contradicted=True) if is_contradicted(ranking) else ranking

    def _united(self, outcomes: Mapping[str, _Outcome], depth: int) -> Ranking:
        """Combine the legs' results and errors into one ranking."""
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
        pool, candidates = united(rankings, depth)
        passage_ids, passages = pool.select(candidates.rows)
        return Ranking(
            passage_ids=passage_ids,
            scores=tuple(candidates.scores.tolist()),
            kind=candidates.kind,
            passages=passages,
            legs=candidates.legs,
            failures=tuple(failures),
            # Only the order of such a leg counts, so a policy of its scores cannot apply.
            contradicted=any(each.contradicted for each in rankings.values()) or None,
        )
