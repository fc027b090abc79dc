"""Observers of requests (sampler, metrics and tracing) behind calls that never raise.

An observer that raises is counted in ``ctxguard_observer_failures_total``, and the request goes on.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, Protocol, TypeVar

from ctxguard.core.context import Context
from ctxguard.core.types import Mode
from ctxguard.errors import CtxguardError, FilterViolationError, OverloadedError
from ctxguard.request.telemetry import Telemetry
from ctxguard.resilience import cause_of

_P = ParamSpec("_P")
_T = TypeVar("_T")


class RequestSampler(Protocol):
    """Selects requests before retrieval, and takes the selected ones when answered."""

    def draw(self, request_id: str, /) -> float:
        """Return the probability with which the request was selected; 0.0 if it was not."""
        ...

    def offer(self, context: Context, probability: float, time_seconds: float, /) -> object:
        """Take an answered request.

        Args:
            context: The answer.
            probability: Its selection probability; 0.0 if it was sampled by hand.
            time_seconds: Time of the answer, in seconds since the epoch.
        """
        ...


class RequestSpan(Protocol):
    """The span of one request.

    Attributes:
        request_id: The request's id if its caller gave none, so that its sample links to its trace;
            None for a random id.
    """

    @property
    def request_id(self) -> str | None: ...

    def retrieved(self) -> None:
        """Note that the candidates have arrived and the decision follows."""
        ...

    def answered(self, context: Context, probability: float, /) -> None:
        """End the span of an answered request.

        Args:
            context: The answer.
            probability: The request's selection probability; 0.0 if it was not sampled.
        """
        ...

    def failed(self, error: BaseException, /) -> None:
        """End the span of a request that ended in an error."""
        ...


class Tracing(Protocol):
    """Begins a span for each request."""

    def begin(self, query: str, depth: int, request_id: str | None, /) -> RequestSpan:
        """Begin the span of one request.

        Args:
            query: The query as given, not yet checked.
            depth: Number of candidates that the retriever is asked for.
            request_id: The caller's id; None if it gave none.
        """
        ...


class Instrumentation:
    """The observers of one guard, behind calls that never raise.

    Args:
        telemetry: Where requests are counted.
        sampler: Selects the traffic to be judged; None disables sampling.
        tracing: Begins a span for each request; None disables tracing.

    Attributes:
        received: Counts a request that begins, by mode.
        answered: Counts an answered request and its duration; see `Telemetry.answered`.
        failed: Counts a request that ended in an error; see `_failed`.
        cancelled: Counts a request that its caller cancelled, by mode.
        draw: Returns the probability with which the sampler selected a request; 0.0 if it did not.
            None without a sampler.
        offer: Hands an answered request to the sampler; see `RequestSampler.offer`.
        begin_span: Begins the span of a request, None if that failed; see `Tracing.begin`. None
            without tracing.
        retrieved: Tells a request's span that the candidates have arrived.
        end_span: Ends the span of an answered request; see `RequestSpan.answered`.
        fail_span: Ends the span of a request that ended in an error.
    """

    def __init__(
        self, telemetry: Telemetry, sampler: RequestSampler | None, tracing: Tracing | None = None
    ) -> None:
        self._telemetry = telemetry
        self._sampler = sampler
        self.received = self._safely("telemetry", telemetry.received, None)
        self.answered = self._safely("telemetry", telemetry.answered, None)
        self.failed = self._safely("telemetry", self._failed, None)
        self.cancelled = self._safely("telemetry", self._cancelled, None)
        self.draw = None if sampler is None else self._safely("sampler", self._draw, 0.0)
        self.offer = self._safely("sampler", self._offer, None)
        self.begin_span = None if tracing is None else self._safely("tracing", tracing.begin, None)
        self.retrieved = self._safely("tracing", lambda span: span.retrieved(), None)
        self.end_span = self._safely("tracing", lambda span, *args: span.answered(*args), None)
        self.fail_span = self._safely("tracing", lambda span, error: span.failed(error), None)

    def _safely(self, observer: str, call: Callable[_P, _T], otherwise: _T) -> Callable[_P, _T]:
        """Wrap ``call``: count an error as the observer's and return ``otherwise`` instead."""

        def safe_call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            try:
                return call(*args, **kwargs)
            except Exception:
                # If even this count fails, nothing is left to report it with.
                with suppress(Exception):
                    self._telemetry.observer_failed(observer)
                return otherwise

        return safe_call

    def _failed(self, mode: Mode, error: Exception, failure: CtxguardError) -> None:
        """Count a request that failed, or was shed because too many came at once.

        Args:
            mode: The request's mode.
            error: The error as raised.
            failure: The typed error that replaced it.
        """
        if isinstance(failure, OverloadedError):
            self._telemetry.shed(mode)
        else:
            self._telemetry.failed(mode, cause_of(error))
        if isinstance(failure, FilterViolationError):
            self._telemetry.filter_violated()

    def _cancelled(self, mode: Mode) -> None:
        self._telemetry.failed(mode, "cancelled")

    def _draw(self, request_id: str) -> float:
        probability = 0.0 if self._sampler is None else self._sampler.draw(request_id)
        # Compared here, so that a result that is not a number counts as the sampler's error.
        return probability if probability > 0.0 else 0.0

    def _offer(self, context: Context, probability: float, time_seconds: float) -> None:
        if self._sampler is not None:
            self._sampler.offer(context, probability, time_seconds)
