"""Results of judging on their way to the store: many in one transaction, none delayed for long.

A quick judge's results are gathered, a slow judge's written one by one. While the store cannot be
written they are held: verdicts were paid for. A result that a process has not written when it dies
is lost: its sample waits again once its lease ends, and is judged then.
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ctxguard._support.error_text import describe_error
from ctxguard.core.types import Route
from ctxguard.monitor.estimation.terms import JudgedRequest
from ctxguard.monitor.judging.counters import JudgedAs
from ctxguard.monitor.judging.sample_judge import SampleVerdicts
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import Finished, SampleStore

_log = logging.getLogger(__name__)

MAX_HELD = 100
"""Results that wait for one transaction."""
HELD_SECONDS = 0.25
"""How long the first of them may wait, also while the judge hangs on the next sample."""
_SLOW_SECONDS = 0.05
"""A judge that takes this long gains nothing by waiting: a transaction takes a few milliseconds."""


@dataclass(frozen=True, slots=True)
class Result:
    """How the judging of one claimed sample ended.

    Attributes:
        outcome: Whether it was judged, and why not.
        finished: What the store keeps of it.
        record: None where it could not be read.
        verdicts: None where it was not judged.
    """

    outcome: JudgedAs
    finished: Finished
    record: SampleRecord | None = None
    verdicts: SampleVerdicts | None = None

    @property
    def request(self) -> JudgedRequest | None:
        """None where it was not judged, or a served passage got no valid verdict."""
        return None if self.verdicts is None else self.verdicts.request

    @property
    def route(self) -> Route | None:
        """The stages that answered; None where it could not be read."""
        return None if self.record is None else self.record.route


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """What the store did with one result.

    Attributes:
        result: As it was added.
        accepted: False where the sample was no longer this monitor's: its lease had ended.
        error: Why the store could not write it; None where it could.
    """

    result: Result
    accepted: bool
    error: Exception | None


class ResultBuffer:
    """Gathers results, and writes them.

    A forked child needs one of its own: its parent writes what its parent holds.

    Args:
        store: Where results are written.
        series: The judge's.
    """

    def __init__(self, store: SampleStore, series: str) -> None:
        self._store = store
        self._series = series
        self._lock = threading.Lock()
        self._held: list[Result] = []
        self._held_since = 0.0
        self._written: list[WriteOutcome] = []
        self._timer: threading.Timer | None = None

    def add(self, result: Result, took_seconds: float) -> None:
        """Hold one result; write all that are held once they are many, or the judge is slow.

        Args:
            result: Of one sample.
            took_seconds: How long judging the sample took.

        Raises:
            StoreError: they cannot be written now, and are held until the next ``write``.
        """
        with self._lock:
            now = time.monotonic()
            if not self._held:
                self._held_since = now
            self._held.append(result)
            is_due = (
                took_seconds >= _SLOW_SECONDS
                or len(self._held) >= MAX_HELD
                or now - self._held_since >= HELD_SECONDS
            )
            if not is_due and self._timer is None:
                self._timer = threading.Timer(HELD_SECONDS, self._write_on_timer)
                self._timer.daemon = True
                self._timer.start()
        if is_due:
            self.write()

    def write(self) -> None:
        """Write what is held.

        Raises:
            StoreError: as ``add``.
        """
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._held:
                self._written += self._write(self._held)
                self._held = []

    def take_written(self) -> list[WriteOutcome]:
        """What was written since the last call, in the order in which it was added."""
        with self._lock:
            written, self._written = self._written, []
        return written

    def _write_on_timer(self) -> None:
        """On the timer's thread, while the judge is still at work on another sample."""
        try:
            self.write()
        except Exception as error:
            _log.warning("verdicts could not be written: %s", describe_error(error))

    def _write(self, held: Sequence[Result]) -> list[WriteOutcome]:
        done = self._store.finish(self._series, [result.finished for result in held])
        return [
            WriteOutcome(
                result,
                result.finished.sample_id in done.accepted,
                done.refused.get(result.finished.sample_id),
            )
            for result in held
        ]
