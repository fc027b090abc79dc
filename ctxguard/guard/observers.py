"""Defines a guard's observers, its sampler and its tracing, whose errors never fail a request.

If an observer raises, ``ctxguard_observer_failures_total`` counts it and the request continues.
Pure: protocols alone.
"""

from typing import Protocol

from ctxguard.core.context import Context


class RequestSampler(Protocol):
    """Selects requests before retrieval, and receives the selected ones once answered."""

    def draw(self, request_id: str, /) -> float:
        """Return the probability of selection if the request was selected, else 0.0."""
        ...

    def offer(self, context: Context, probability: float, time_seconds: float, /) -> object:
        """Receive an answered request; the probability is 0.0 if it was sampled by hand."""
        ...


class RequestSpan(Protocol):
    """The span of one request."""

    @property
    def request_id(self) -> str | None:
        """The request's id if its caller gave none, so that its sample links to its trace."""
        ...

    def retrieved(self) -> None:
        """Note that the candidates have arrived and the decision follows."""
        ...

    def answered(self, context: Context, probability: float, /) -> None:
        """End the span of an answered request; the probability is 0.0 if it was not sampled."""
        ...

    def failed(self, error: BaseException, /) -> None:
        """End the span of a request that ended in an error."""
        ...


class Tracing(Protocol):
    """Begins a span for each request."""

    def begin(self, query: str, depth: int, request_id: str | None, /) -> RequestSpan:
        """Begin the span of one request, whose query has not been checked yet."""
        ...
