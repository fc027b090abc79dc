"""Breaks circuits: after repeated failures a stage is skipped, and retried from time to time.

Only outcomes pass through it. Its lock is never held while a stage is called, so that requests do
not wait for each other, and its clock is monotonic, so that setting the system's clock changes
nothing. Reads that clock, and calls its watchers.
"""

from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from time import monotonic

FAILURES = 3
"""Consecutive failures that open the circuit."""

RETRY_SECONDS = 1.0
"""Seconds from opening to the first probe; each probe that fails doubles them."""

MAX_RETRY_SECONDS = 3.0
"""The longest pause between two probes: a stage that recovers is tried again within this time."""

Watcher = Callable[[str, bool], None]
"""Called with a stage's name and whether its circuit is open, whenever that changes."""


Probe = object
"""One call that tests whether a stage has recovered."""

REFUSED = Probe()
"""The result of `Breaker.admit` while the circuit is open and no probe is due."""

FORCED = Probe()
"""A call made although the circuit was open: success closes it, failure changes nothing."""


class Breaker:
    """Counts failures in a row; opens at `FAILURES` and closes when a probe succeeds.

    Args:
        stage: The stage's name, for watchers.
        opens: False for a breaker that never opens.

    Attributes:
        is_closed: Whether the stage may be called as usual.
        failures: Number of consecutive failures while it is closed.
    """

    def __init__(self, stage: str, *, opens: bool = True) -> None:
        self._stage = stage
        self.opens = opens
        self._watchers: list[Watcher] = []
        self._reset_after_fork()

    def _reset_after_fork(self) -> None:
        self._lock = Lock()
        self.is_closed = True
        self.failures = 0
        self._retry_seconds = RETRY_SECONDS
        # Nothing is admitted before this moment; used only while the circuit is open.
        self._refused_until = 0.0
        self._probe: Probe | None = None

    def watch(self, watcher: Watcher) -> None:
        """Call ``watcher`` on every change; a watcher added twice is called once."""
        with self._lock:
            if watcher not in self._watchers:
                self._watchers.append(watcher)

    def admit(self, seconds: float | None) -> Probe | None:
        """Return None while the circuit is closed, a probe when one is due, else `REFUSED`.

        A probe counts as failed after ``seconds``, by default after `MAX_RETRY_SECONDS`, so that
        one that never returns is given up too.
        """
        with self._lock:
            if self.is_closed:
                return None
            if monotonic() < self._refused_until:
                return REFUSED
            if self._probe is not None:
                # The probe has used up its time.
                self._fail_probe()
                return REFUSED
            self._probe = Probe()
            self._refused_until = monotonic() + (MAX_RETRY_SECONDS if seconds is None else seconds)
            return self._probe

    def succeeded(self, probe: Probe | None) -> None:
        """Note that a call answered; ``probe`` is None if it was admitted while closed."""
        with self._lock:
            if probe is None:
                self.failures = 0
            elif probe in (self._probe, FORCED):
                self._probe = None
                self.failures = 0
                self._retry_seconds = RETRY_SECONDS
                self._set_closed(True)

    def failed(self, probe: Probe | None) -> None:
        """Note that a call failed or was late; ``probe`` is as in `succeeded`."""
        with self._lock:
            if probe is not None:
                if probe is self._probe:
                    self._fail_probe()
            elif self.is_closed and self.opens:
                # Once it is open, the outcome of an earlier call adds nothing new.
                self.failures += 1
                if self.failures == FAILURES:
                    self._refused_until = monotonic() + self._retry_seconds
                    self._set_closed(False)

    def _fail_probe(self) -> None:
        self._probe = None
        self._retry_seconds = min(2.0 * self._retry_seconds, MAX_RETRY_SECONDS)
        self._refused_until = monotonic() + self._retry_seconds

    def _set_closed(self, is_closed: bool) -> None:
        if is_closed is self.is_closed:
            return
        self.is_closed = is_closed
        for watcher in self._watchers:
            # A watcher must not make the stage fail.
            with suppress(Exception):
                watcher(self._stage, not is_closed)
