"""Finished samples on their way to the store: one transaction for many, none held back for long.

A quick judge's verdicts are gathered, a slow judge's written one by one. What a process that dies
has not written waits in the queue again once its lease ends, and is judged then.
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ctxguard.hygiene import describe_error
from ctxguard.monitor.estimates import JudgedRequest
from ctxguard.monitor.records import Record
from ctxguard.monitor.store import Finished, SampleStore
from ctxguard.monitor.tally import Outcome

_log = logging.getLogger(__name__)

MOST_HELD = 100
"""Finished samples that wait for one transaction."""
HELD_SECONDS = 0.25
"""How long the first of them may wait, also while the judge hangs on the next sample."""
_SLOW_SECONDS = 0.05
"""A judge that takes so long gains nothing: a transaction takes a few milliseconds."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of one claimed sample, and what else it tells once the store has taken it.

    Attributes:
        record: None where it could not be read.
        request: None where it was not judged, or a served passage got no valid verdict.
    """

    outcome: Outcome
    finished: Finished
    record: Record | None = None
    request: JudgedRequest | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """One sample that the store was told of.

    Attributes:
        accepted: Whether it was this monitor's to finish: its lease may have ended meanwhile.
        refused: What the store said of what it holds; None where that could be written.
    """

    ended: Ended
    accepted: bool
    refused: Exception | None


class Finishing:
    """Gathers what became of samples, and writes it.

    A forked child needs one of its own: what its parent holds is the parent's to write.

    Args:
        store: Where it goes.
        series: The judge's.
    """

    def __init__(self, store: SampleStore, series: str) -> None:
        self._store = store
        self._series = series
        self._lock = threading.Lock()
        self._held: list[Ended] = []
        self._held_since = 0.0
        self._written: list[Written] = []
        self._late: threading.Timer | None = None

    def add(self, ended: Ended, took_seconds: float) -> None:
        """Take in one sample's end; write those held once they are many, or the judge is slow.

        Args:
            ended: The sample.
            took_seconds: How long it was in hand.

        Raises:
            StoreError: they cannot be written now. They are no longer held: their samples wait
                again once their lease ends.
        """
        with self._lock:
            now = time.monotonic()
            if not self._held:
                self._held_since = now
            self._held.append(ended)
            is_due = (
                took_seconds >= _SLOW_SECONDS
                or len(self._held) >= MOST_HELD
                or now - self._held_since >= HELD_SECONDS
            )
            if not is_due and self._late is None:
                self._late = threading.Timer(HELD_SECONDS, self._write_late)
                self._late.daemon = True
                self._late.start()
        if is_due:
            self.write()

    def write(self) -> None:
        """Write what is held.

        Raises:
            StoreError: as ``add``.
        """
        with self._lock:
            if self._late is not None:
                self._late.cancel()
                self._late = None
            held, self._held = self._held, []
            if held:
                self._written += self._write(held)

    def take_written(self) -> list[Written]:
        """What was written since this was last asked, in the order in which it ended."""
        with self._lock:
            written, self._written = self._written, []
        return written

    def _write_late(self) -> None:
        """On the timer's thread, while the judge is still at work on another sample."""
        try:
            self.write()
        except Exception as error:
            _log.warning("verdicts could not be written: %s", describe_error(error))

    def _write(self, held: Sequence[Ended]) -> list[Written]:
        told = self._store.finish_each(self._series, [ended.finished for ended in held])
        return [
            Written(
                ended,
                ended.finished.sample_id in told.accepted,
                told.refused.get(ended.finished.sample_id),
            )
            for ended in held
        ]
