"""The stages of a hybrid search under time limits and circuit breakers.

A stage that raises, hangs or gives garbage becomes a `StageFailure`; the others answer without it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

from ctxguard._support.error_text import drop_tracebacks
from ctxguard.core.types import FailureKind, Leg, ScoreKind, StageFailure
from ctxguard.errors import OverloadedError, StageUnavailableError
from ctxguard.resilience import Budget, Stage, StageCall, UnansweredError, failure_of
from ctxguard.retrieval.hybrid.search import (
    DENSE,
    LEXICAL,
    RERANK,
    Candidates,
    DenseHits,
    Search,
)
from ctxguard.retrieval.hybrid.signals import SIGNALS, with_signals
from ctxguard.retrieval.protocols import LexicalHits, Reranker
from ctxguard.retrieval.signals.ranker import Ranker

_P = ParamSpec("_P")
_T = TypeVar("_T")

_RERANK_WORKERS = 4


class StageFailed(NamedTuple):
    """A stage that did not answer.

    Attributes:
        failure: What the answer reports of it.
        probe: The call that tries the stage again, where this request started it; else None.
    """

    failure: StageFailure
    probe: StageCall[Any] | None


@dataclass(frozen=True, slots=True)
class LegStages:
    """The legs of one retriever, each with a thread pool and a circuit breaker of its own."""

    lexical: Stage = field(default_factory=partial(Stage, LEXICAL))
    dense: Stage = field(default_factory=partial(Stage, DENSE))


def rerank_stage() -> Stage:
    """The stage of one reranker. Few calls run at once: models are slow and hold a lock."""
    return Stage(RERANK, workers=_RERANK_WORKERS)


def search_legs(
    search: Search, legs: LegStages, budget: Budget | None
) -> tuple[Candidates, list[StageFailure]]:
    """Run the legs among the stages of a search.

    Returns:
        The candidates, and the legs that did not answer.

    Raises:
        StageUnavailableError: no leg answered.
        OverloadedError: no leg had a thread free.
    """
    lexical: LexicalHits | StageFailed | None = None
    dense: DenseHits | Candidates | StageFailed | None = None
    if LEXICAL not in search.stages:
        dense = _try(DENSE, legs.dense.call, search.dense, _left(budget, DENSE))
    elif DENSE not in search.stages:
        lexical = _try(LEXICAL, legs.lexical.call, search.lexical, _left(budget, LEXICAL))
    elif budget is not None and budget.limits_any(LEXICAL, DENSE):
        # Side by side, the dense leg in its pool.
        call = _try(DENSE, legs.dense.submit, search.dense, budget.left(DENSE))
        lexical = _try(LEXICAL, legs.lexical.call, search.lexical, budget.left(LEXICAL))
        dense = call if isinstance(call, StageFailed) else _try(DENSE, call.result)
    else:
        # On this thread: side by side would save an eighth of the time over a million passages,
        # and cost a third of the throughput with as many clients as cores.
        is_plain = search.allowed is None and legs.lexical.breaker.is_closed
        dense = _try(DENSE, legs.dense.call, search.both if is_plain else search.dense)
        if not isinstance(dense, Candidates):
            lexical = _try(LEXICAL, legs.lexical.call, search.lexical)
    if not isinstance(lexical, LexicalHits) and not isinstance(dense, DenseHits | Candidates):
        # An open circuit skips a leg only while the other answers: overload may have opened both.
        lexical = _retry_open_circuit(lexical, legs.lexical, search.lexical, budget)
        if not isinstance(lexical, LexicalHits):
            dense = _retry_open_circuit(dense, legs.dense, search.dense, budget)
    if isinstance(dense, Candidates):
        # One call of the dense stage searched both legs.
        legs.lexical.breaker.succeeded(None)
        return dense, []
    if isinstance(lexical, LexicalHits) and isinstance(dense, DenseHits):
        fused = _try(DENSE, search.fuse, lexical, dense)
        if isinstance(fused, Candidates):
            return fused, []
        dense = fused
    return _of_one_leg(lexical, dense)


def _of_one_leg(
    lexical: LexicalHits | StageFailed | None, dense: DenseHits | StageFailed | None
) -> tuple[Candidates, list[StageFailure]]:
    """The candidates of the leg that answered; returns and errors as for `search_legs`."""
    failures = [leg.failure for leg in (lexical, dense) if isinstance(leg, StageFailed)]
    if isinstance(lexical, LexicalHits):
        leg = Leg(lexical.scores, ScoreKind.RATIO)
        return Candidates(lexical.rows, leg.scores, leg.kind, {LEXICAL: leg}), failures
    if isinstance(dense, DenseHits):
        leg = Leg(dense.scores, ScoreKind.COSINE)
        return Candidates(dense.rows, leg.scores, leg.kind, {DENSE: leg}), failures
    is_overload = all(failure.kind is FailureKind.SATURATED for failure in failures)
    raise (OverloadedError if is_overload else StageUnavailableError)(
        " and ".join([failure.stage for failure in failures]),
        "; ".join([failure.cause for failure in failures]),
    )


def _try(
    stage: str, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
) -> _T | StageFailed:
    """What a call returns, or how it failed."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        probe = error.probe if isinstance(error, UnansweredError) else None
        failed = StageFailed(failure_of(stage, error), probe)
        drop_tracebacks(error)
        return failed


def _retry_open_circuit(
    outcome: _T | StageFailed, stage: Stage, work: Callable[[], _T], budget: Budget | None
) -> _T | StageFailed:
    """Retry a stage that was skipped only because its circuit was open.

    Returns:
        The outcome of the retry; any other outcome unchanged.
    """
    if not isinstance(outcome, StageFailed) or outcome.failure.kind is not FailureKind.CIRCUIT_OPEN:
        return outcome
    if outcome.probe is not None:
        return _try(stage.name, outcome.probe.result)
    return _try(stage.name, stage.call_ignoring_circuit, work, _left(budget, stage.name))


def rerank(
    search: Search,
    candidates: Candidates,
    reranker: Reranker,
    stage: Stage,
    budget: Budget | None,
) -> Candidates | StageFailure:
    """Rerank all of the candidates.

    Returns:
        The candidates in the reranker's order, or why it did not answer.
    """
    work = partial(search.logits, reranker, candidates.rows)
    logits = _try(RERANK, stage.call, work, _left(budget, RERANK))
    return logits.failure if isinstance(logits, StageFailed) else candidates.reranked(logits)


def add_signals(
    search: Search, candidates: Candidates, ranker: Ranker
) -> Candidates | StageFailure:
    """The candidates with their signals, in the order of the ranker, or why there are none."""
    found = _try(SIGNALS, with_signals, search, candidates, ranker)
    return found.failure if isinstance(found, StageFailed) else found


def _left(budget: Budget | None, stage: str) -> float | None:
    return None if budget is None else budget.left(stage)
