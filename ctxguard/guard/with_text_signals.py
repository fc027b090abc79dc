"""Adds the text family of signals to a wrapped retriever's rankings.

Calls the retriever, reads the passages, and runs the embedder.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

from ctxguard.core.types import Ranking, ScoreKind, ScoreKindName
from ctxguard.guard.wrapped_retriever import RetrieverAdapter

if TYPE_CHECKING:
    from ctxguard.retrieval.protocols import AnyRetriever
    from ctxguard.retrieval.text_signals import TextSignals


class WithTextSignals(RetrieverAdapter):
    """Wraps your own retriever, and adds signals from its candidates' texts to its scores.

    Pass it to ``calibrate`` and ``ContextGuard`` instead of the retriever. It reads every
    candidate's text on every request: 100 candidates of 200 words add about 1 ms if their texts are
    known, and 5 to 46 ms if they are new. If a text cannot be read, the request has no text
    signals; the guard then keeps the top k and flags ``missing_signals``.

    Args:
        retriever: Anything that ``ContextGuard`` accepts, except one that replaces its index.
        text_signals: Computes the signals.
        score_kind: The kind of the scores of plain hits; see ``ContextGuard``.

    Raises:
        ConfigurationError: it is not a retriever, or the kind of score is unknown.
    """

    retrieve: Callable[..., Any]
    """The retriever's call with signals added, plain or asynchronous; ``aretrieve`` exists if it
    has both."""

    def __init__(
        self,
        retriever: "AnyRetriever",
        text_signals: "TextSignals",
        *,
        score_kind: ScoreKind | ScoreKindName | None = None,
    ) -> None:
        super().__init__(retriever, score_kind=score_kind)
        self._text_signals = text_signals
        call, acall = self.calls.call, self.calls.acall
        if acall is None:
            self.retrieve = self._plain(call)
        elif acall == call:
            self.retrieve = self._awaited(acall)
        else:
            self.retrieve, self.aretrieve = self._plain(call), self._awaited(acall)

    def fingerprint(self) -> dict[str, str]:
        """Return the retriever's fingerprint and the text signals'; empty if it has none."""
        found = super().fingerprint()
        return found and {**found, "text_signals": self._text_signals.fingerprint}

    # The signature is that of the wrapped call, which tells a guard whether it takes a filter.

    def _plain(self, call: Callable[..., Any]) -> Callable[..., Ranking]:
        @wraps(call)
        def retrieve(query: str, **options: Any) -> Ranking:
            return self._with_signals(query, call(query, **options))

        return retrieve

    def _awaited(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Ranking]]:
        @wraps(call)
        async def retrieve(query: str, **options: Any) -> Ranking:
            return self._with_signals(query, await call(query, **options))

        return retrieve

    def _with_signals(self, query: str, retrieved: Any) -> Ranking:
        ranking = retrieved
        if not isinstance(ranking, Ranking):
            ranking = Ranking.from_hits(ranking, self.score_kind)
        try:
            passages = [ranking.passages[position] for position in range(len(ranking))]
            signals = self._text_signals.signals(query, passages)
        except Exception:  # reading a passage runs anyone's code; if one fails, none are comparable
            return ranking
        return replace(ranking, signals={**ranking.signals, **signals})
