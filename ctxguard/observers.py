"""What watches requests and can never fail one: the sampler and the counts.

An error of an observer is counted and goes no further.
"""

from contextlib import suppress
from typing import Protocol

from ctxguard.context import Context
from ctxguard.errors import CtxguardError, FilterViolationError, OverloadedError
from ctxguard.stages import cause_of
from ctxguard.telemetry import Telemetry
from ctxguard.types import Mode


class Sampler(Protocol):
    """What the guard asks of a sampler: a decision before retrieval, one append after."""

    def draw(self, request_id: str, /) -> float:
        """The probability with which the request was selected; 0.0 where it was not."""
        ...

    def offer(self, context: Context, probability: float, time_seconds: float, /) -> object:
        """Take a selected request; one of probability 0.0 was put in by hand."""
        ...


class Observers:
    """The observers of one guard; nothing here raises.

    Args:
        telemetry: Where requests are counted.
        sampler: Selects the traffic to be judged; None for none of it.
    """

    def __init__(self, telemetry: Telemetry, sampler: Sampler | None) -> None:
        self._telemetry = telemetry
        self._sampler = sampler

    def received(self, mode: Mode) -> None:
        """Count a request that begins."""
        try:
            self._telemetry.received(mode)
        except Exception:
            self._observer_failed("telemetry")

    def draw(self, request_id: str) -> float:
        """The probability with which the sampler selected a request; 0.0 where it did not."""
        if self._sampler is None:
            return 0.0
        try:
            probability = self._sampler.draw(request_id)
            # Compared here, where what is no number is the sampler's error and not the request's.
            return probability if probability > 0.0 else 0.0
        except Exception:
            self._observer_failed("sampler")
            return 0.0

    def offer(self, context: Context, probability: float, time_seconds: float) -> None:
        """Hand a selected request to the sampler, where there is one."""
        if self._sampler is None:
            return
        try:
            self._sampler.offer(context, probability, time_seconds)
        except Exception:
            self._observer_failed("sampler")

    def answered(
        self, context: Context, retrieve_seconds: float | None, guard_seconds: float
    ) -> None:
        """Count a request that was answered, and how long that took."""
        try:
            self._telemetry.answered(context, retrieve_seconds, guard_seconds)
        except Exception:
            self._observer_failed("telemetry")

    def failed(self, mode: Mode, error: Exception, failure: CtxguardError) -> None:
        """Count a request that failed, or was refused because too many came at once.

        Args:
            mode: The guard's.
            error: As it was raised.
            failure: The typed error that it became.
        """
        try:
            if isinstance(failure, OverloadedError):
                self._telemetry.shed(mode)
            else:
                self._telemetry.failed(mode, cause_of(error))
            if isinstance(failure, FilterViolationError):
                self._telemetry.filter_violated()
        except Exception:
            self._observer_failed("telemetry")

    def cancelled(self, mode: Mode) -> None:
        """Count a request that whoever asked has given up."""
        try:
            self._telemetry.failed(mode, "cancelled")
        except Exception:
            self._observer_failed("telemetry")

    def _observer_failed(self, observer: str) -> None:
        # Where even this count fails, nothing is left to say it with.
        with suppress(Exception):
            self._telemetry.observer_failed(observer)
