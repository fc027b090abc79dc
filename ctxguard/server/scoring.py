"""Runs scorers, local or remote, with a deadline and a circuit breaker.

Runs a local reranker on threads, or calls a remote scorer; counts open circuits.
"""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np

from ctxguard.core.types import FloatArray
from ctxguard.errors import OverloadedError, StageError, StageRefusedError
from ctxguard.guard.telemetry import Telemetry
from ctxguard.resilience.stage import Stage
from ctxguard.retrieval.hybrid.search import RERANK
from ctxguard.retrieval.protocols import Reranker

_LOCAL_WORKERS = 2
"""How many local requests run at once: a cross-encoder spreads one over all processors."""


class Scorer(Protocol):
    """Scores documents for a query; ``ctxguard.endpoints.rerank.RerankClient`` is one."""

    @property
    def fingerprint(self) -> str:
        """Identify the meaning of the scores; a profile applies only to an equal fingerprint."""
        ...

    async def ascore(
        self,
        query: str,
        documents: Sequence[str],
        *,
        model: str | None = None,
        max_tokens_per_doc: int | None = None,
    ) -> FloatArray:
        """Score each document, shape (n,), higher is better; NaN without a score.

        ``model`` and ``max_tokens_per_doc`` are the request's; None for the scorer's own.
        Cancelling ends the call.
        """
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...


class LocalScorer:
    """A cross-encoder in this process, loaded and warmed up, on its own threads.

    A call that misses the deadline is abandoned, and its thread replaced.
    """

    def __init__(self, reranker: Reranker, deadline_seconds: float, max_waiting: int) -> None:
        reranker.score("warm up", ["warm up"])
        self.fingerprint = reranker.fingerprint
        self._reranker = reranker
        self._deadline_seconds = deadline_seconds
        # The circuit is that of `BoundedScorer`.
        self._stage = Stage(RERANK, workers=_LOCAL_WORKERS, waiting=max_waiting, breaks=False)

    async def ascore(self, query: str, documents: Sequence[str], **_: object) -> FloatArray:
        """See `Scorer`; the model and the limit are the cross-encoder's own."""
        work = partial(self._reranker.score, query, documents)
        call = self._stage.submit(work, self._deadline_seconds)
        return await call.aresult()

    async def aclose(self) -> None:
        """Close nothing: the threads end with the process."""


class BoundedScorer:
    """A scorer with a limit on the requests that wait for it, a circuit breaker, and a deadline.

    The deadline is None for a scorer that keeps its own.
    """

    def __init__(
        self,
        scorer: Scorer,
        deadline_seconds: float | None,
        max_in_flight: int,
        telemetry: Telemetry,
    ) -> None:
        self._scorer = scorer
        self._deadline_seconds = deadline_seconds
        self._max_in_flight = max_in_flight
        self._in_flight = 0
        self._stage = Stage(RERANK)
        self._stage.watch(telemetry.circuit_changed)
        # Names that it does not know are the callers' fault, and must not leave it out for others.
        self._named = Stage(RERANK, breaks=False)

    @property
    def is_open(self) -> bool:
        """Whether the scorer is skipped because of repeated recent failures."""
        return self._stage.is_open

    async def scores(
        self, query: str, documents: Sequence[str], model: str | None, max_tokens: int | None
    ) -> FloatArray:
        """Score each document, shape (n,), some not finite; see `Scorer.ascore`.

        Raises:
            UnansweredError: it is late, or was not called because its circuit is open.
            OverloadedError: too many calls are in progress.
            StageError: not one usable score for each document came back.
            Exception: any error of the scorer.
        """
        if self._in_flight >= self._max_in_flight:
            raise OverloadedError(
                RERANK, f"{self._in_flight:,} requests are waiting for the reranker"
            )
        self._in_flight += 1
        try:
            stage = self._stage if model is None else self._named
            return await stage.await_ending(
                partial(self._checked, query, documents, model, max_tokens), self._deadline_seconds
            )
        finally:
            self._in_flight -= 1

    async def _checked(
        self, query: str, documents: Sequence[str], model: str | None, max_tokens: int | None
    ) -> FloatArray:
        returned = await self._scorer.ascore(
            query, documents, model=model, max_tokens_per_doc=max_tokens
        )
        # Checked inside the stage, so that garbage counts against the circuit.
        try:
            scores = np.asarray(returned, dtype=np.float64)
        except (TypeError, ValueError):
            raise StageError(RERANK, "the scores are not numbers") from None
        if scores.shape != (len(documents),):
            raise StageError(RERANK, f"{scores.shape} scores for {len(documents)} documents")
        if not np.isfinite(scores).any():
            if not any(map(str.strip, documents)):
                raise StageRefusedError(RERANK, "every document is blank")
            raise StageError(RERANK, "no score is a finite number")
        return scores
