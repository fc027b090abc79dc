"""A circuit breaker whose lock is never held while the stage is called.

The states and their transitions are pybreaker's. Its own ``call`` holds one lock around the
guarded function, which would serialise requests, and reads the wall clock, which may be set; so
only outcomes are put through it here, and it is given the monotonic clock.
"""

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from enum import Enum, auto
from threading import Lock
from time import monotonic

import pybreaker

from ctxguard.hygiene import forget_frames

FAILURES = 3
"""Failures one after the other that open the circuit."""

RETRY_SECONDS = 1.0
"""From opening to the first probe; doubled with every probe that fails."""

MAX_RETRY_SECONDS = 10.0

Watcher = Callable[[str, bool], None]
"""Told a stage's name and whether it is left out now, when that changes."""


class Probe:
    """One call that finds out whether a stage has recovered."""


class Refused(Enum):
    """What `Breaker.admit` gives while the circuit is not closed and no probe is due."""

    OPEN = auto()


class _MonotonicStorage(pybreaker.CircuitMemoryStorage):
    """Keeps the moment of opening by a clock that nobody sets."""

    def __init__(self) -> None:
        super().__init__(pybreaker.STATE_CLOSED)
        self._opened_monotonic: float | None = None

    @property
    def opened_at(self) -> datetime | None:
        if self._opened_monotonic is None:
            return None
        return datetime.now(UTC) - timedelta(seconds=monotonic() - self._opened_monotonic)

    @opened_at.setter
    def opened_at(self, _: datetime) -> None:
        self._opened_monotonic = monotonic()


class _Changes(pybreaker.CircuitBreakerListener):
    """Tells the watchers when the circuit leaves the closed state and when it is back."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.watchers: list[Watcher] = []

    def state_change(
        self,
        cb: pybreaker.CircuitBreaker,  # noqa: ARG002  the library's names
        old_state: pybreaker.CircuitBreakerState | None,
        new_state: pybreaker.CircuitBreakerState,
    ) -> None:
        was_closed = old_state is None or old_state.name == pybreaker.STATE_CLOSED
        is_closed = new_state.name == pybreaker.STATE_CLOSED
        if was_closed != is_closed:
            for watcher in self.watchers:
                # Watching a stage must not fail it.
                with suppress(Exception):
                    watcher(self.stage, not is_closed)


class _FailureError(Exception):
    """Put through the library's breaker in the place of what a stage raised."""


class Breaker:
    """Closed, open after `FAILURES` failures in a row, and tried again with one call at a time."""

    def __init__(self, stage: str) -> None:
        self._changes = _Changes(stage)
        self.start_afresh()

    def start_afresh(self) -> None:
        """Close it and take new locks, as a forked child must: one may have been held."""
        self._lock = Lock()
        # Half open after its first success, closed after the second: leave to probe counts as
        # the first, so that the library, whose clock it is, says when that is due.
        self._states = pybreaker.CircuitBreaker(
            fail_max=FAILURES,
            reset_timeout=RETRY_SECONDS,
            success_threshold=2,
            state_storage=_MonotonicStorage(),
            listeners=[self._changes],
        )
        self._refused_until = 0.0
        self._probe: Probe | None = None
        self._probe_until = 0.0

    def is_closed(self) -> bool:
        """Whether the stage is asked as usual."""
        return self._states.current_state == pybreaker.STATE_CLOSED

    def watch(self, watcher: Watcher) -> None:
        """Have ``watcher`` told of every change; once, however often it is given."""
        with self._lock:
            if watcher not in self._changes.watchers:
                self._changes.watchers.append(watcher)

    def admit(self, seconds: float | None) -> Probe | Refused | None:
        """Whether the stage may be called: None while closed, and at times a probe.

        Args:
            seconds: After which a probe that has not returned has failed; None for
                `MAX_RETRY_SECONDS`, or one lost call would keep the stage out for ever.
        """
        if self.is_closed():
            return None
        if monotonic() < self._refused_until:
            # Nearly every request of an outage: none of them waits for another.
            return Refused.OPEN
        with self._lock:
            if self.is_closed():
                return None
            if self._probe is not None:
                if monotonic() < self._probe_until:
                    return Refused.OPEN
                self._fail_probe()
            try:
                self._states.call(_nothing)
            except pybreaker.CircuitBreakerError as error:
                forget_frames(error)
                return Refused.OPEN
            self._probe = Probe()
            self._probe_until = monotonic() + (MAX_RETRY_SECONDS if seconds is None else seconds)
            self._refused_until = self._probe_until
            return self._probe

    def succeeded(self, probe: Probe | None) -> None:
        """Note that a call returned what it should."""
        if probe is None and self._states.fail_counter == 0:
            return
        with self._lock:
            if probe is None:
                if self.is_closed():
                    self._states.call(_nothing)
            elif probe is self._probe:
                self._probe = None
                self._states.reset_timeout = RETRY_SECONDS
                self._states.call(_nothing)

    def failed(self, probe: Probe | None) -> None:
        """Note that a call did not."""
        with self._lock:
            if probe is None:
                # What a call from before the opening came to says nothing new.
                if self.is_closed():
                    self._put_failure()
            elif probe is self._probe:
                self._fail_probe()

    def recovered(self) -> None:
        """Note that a call answered which was made whatever the circuit said."""
        with self._lock:
            if not self.is_closed():
                self._probe = None
                self._states.reset_timeout = RETRY_SECONDS
                self._states.close()

    def _fail_probe(self) -> None:
        self._probe = None
        self._states.reset_timeout = min(2.0 * self._states.reset_timeout, MAX_RETRY_SECONDS)
        self._put_failure()

    def _put_failure(self) -> None:
        try:
            self._states.call(_fail)
        except (pybreaker.CircuitBreakerError, _FailureError) as error:
            forget_frames(error, of=(pybreaker.CircuitBreakerError, _FailureError))
        if not self.is_closed():
            self._refused_until = monotonic() + self._states.reset_timeout


def _nothing() -> None:
    """A call that succeeds."""


def _fail() -> None:
    raise _FailureError
