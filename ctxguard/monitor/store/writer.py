"""Writes sampled requests to a store: redacted, serialised, counted.

A background thread of each process that serves requests. An error here never reaches a request, and
every lost sample has a recorded reason: ``sampled = stored + pending + lost`` holds exactly
(DESIGN.md §7). Each of the four is counted by itself and reported with each batch, in the batch's
transaction; samples held by a killed process are unaccounted for. Touches the database and clocks,
calls the redactor, runs a thread until the process ends, and logs.
"""

import atexit
import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from ctxguard._support.checks import check_at_least, check_positive
from ctxguard._support.error_text import describe_error
from ctxguard._support.fork_safety import reset_in_children
from ctxguard.core.context import Context
from ctxguard.errors import StoreCorruptError, StoreFullError, StoreLockedError
from ctxguard.monitor.sampling.record import DEFAULT_PRIVACY, Privacy, SampleRecord, record_of
from ctxguard.monitor.sampling.sampler import (
    DEFAULT_RATES,
    HOUR_SECONDS,
    Accounts,
    JudgingRates,
    LostReason,
    Sampled,
    Sampler,
)
from ctxguard.monitor.store import Batch, Limits, SampleStore

_log = logging.getLogger(__name__)
_BATCH = 100
_GRACE_SECONDS = 0.5
_RETRY_SECONDS = (0.1, 5.0)
"""Seconds between attempts on a failing store: the first and the longest wait."""
_LOOKS = 20
_LOOK_SECONDS = 0.001
"""How often counts are reread while requests are being counted, and how many seconds apart."""
_Reported = tuple[Accounts, dict[int, int]]
"""All that a store knows of a process once it has a batch, except what it stored, which it counts
itself; and the number of samples in each hour."""


class SampleWriter:
    """Writes a sampler's requests to a store, as its only writer, on a thread of its own.

    In a forked child, a running writer begins again with a thread and samples of the child's own.

    Args:
        interval_seconds: How often the queue is emptied, > 0.
        exit_seconds: How long the end of the process may be delayed to write waiting samples,
            ≥ 0; those not written by then are counted as lost.
    """

    def __init__(
        self,
        sampler: Sampler,
        store: SampleStore,
        *,
        rates: JudgingRates = DEFAULT_RATES,
        privacy: Privacy = DEFAULT_PRIVACY,
        interval_seconds: float = 0.2,
        exit_seconds: float = 2.0,
    ) -> None:
        check_positive(interval_seconds=interval_seconds)
        check_at_least(0, exit_seconds=exit_seconds)
        self.sampler = sampler
        self.store = store
        self._rates = rates
        self._privacy = privacy
        self._interval_seconds = interval_seconds
        self._exit_seconds = exit_seconds
        self._running = False
        self._reset_after_fork()
        reset_in_children(self)
        atexit.register(self.stop)

    def _reset_after_fork(self) -> None:
        """Begin without samples and without a thread."""
        self._writing = threading.Lock()
        self._stored = 0
        self._sent: tuple[Batch, _Reported] | None = None
        """A batch that the store has not confirmed yet, and all that the store knows once it has
        it."""
        self._number = 0
        """Number of the batch sent last."""
        self._in_hand = 0
        """How many samples were taken from the queue and are neither stored nor lost."""
        self._reported: _Reported = Accounts(0, 0, 0, dict.fromkeys(LostReason, 0)), {}
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._deadline = math.inf
        self._last_failure = ""
        self._is_store_failing = False

    def _resume_after_fork(self) -> None:
        """Keep writing in a forked child, on a thread of its own."""
        if self._running:
            self._running = False
            self.start()

    def start(self) -> None:
        """Write on a background thread; a second call does nothing."""
        if self._running:
            return
        self._running = True
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(self._stopping,), name="ctxguard-samples", daemon=True
        )
        self._thread.start()

    def flush(self, timeout_seconds: float = math.inf) -> bool:
        """Write the waiting samples now; returns whether all of them were written in time."""
        return self._write(time.monotonic() + timeout_seconds)

    def stop(self) -> None:
        """Write the waiting samples within ``exit_seconds``, count the rest as lost, and end.

        Called automatically at the end of the process.
        """
        atexit.unregister(self.stop)
        self._deadline = time.monotonic() + self._exit_seconds
        thread, self._thread, self._running = self._thread, None, False
        self._stopping.set()
        if thread is None:
            self._close()
            return
        # The thread writes to the end itself: a store that hangs must not delay the process.
        # The grace lets it count what it could not write.
        thread.join(self._exit_seconds + _GRACE_SECONDS)
        if thread.is_alive():
            # Nobody will tell the store about the samples that this process still holds.
            self.sampler.close()

    def accounts(self) -> Accounts:
        """Return the counts of this process's samples."""
        for _ in range(_LOOKS):
            lost, pending = self.sampler.lost(), self._in_hand + self.sampler.waiting
            found = Accounts(self.sampler.sampled(), self._stored, pending, lost)
            if not found.unaccounted:
                break
            # A request is between being counted and being queued.
            time.sleep(_LOOK_SECONDS)
        return found

    def _run(self, stopping: threading.Event) -> None:
        while True:
            try:
                self._write(math.inf)
                self._tell()
            except Exception as error:
                _log.warning("writing samples failed: %s", describe_error(error))
            if stopping.wait(self._interval_seconds):
                break
        self._close()

    def _close(self) -> None:
        self._write(self._deadline)
        self.sampler.close()
        # By now an offer that was under way is counted, and may have been queued after all.
        self.accounts()
        self.sampler.close()
        if not self._writing.acquire(timeout=_GRACE_SECONDS):
            return  # whoever waits for the store is left behind
        try:
            if self._sent is not None:
                self._give_up(*self._sent)
            self._sent = self._next(())
            self._send(*self._sent)
        except Exception as error:
            _log.warning("the final counts could not be stored: %s", describe_error(error))
        finally:
            self._writing.release()

    def _give_up(self, batch: Batch, told: _Reported) -> None:
        """Report the samples of a batch as lost, unless it turns out that the store holds them.

        If the answer was lost, nobody knows: the batch's number lets the store decide.
        """
        n, reason = len(batch.samples), LostReason.STORE_FAILED
        self.sampler.lose(n, reason)
        # The store knows a batch by its hour and its number.
        counts, told_without = self._next((), batch.hour)
        if self.store.append(self.sampler.worker_id, replace(counts, number=batch.number)):
            self._reported = told_without
        else:
            self.sampler.lose(-n, reason)
            self._stored += n
            self._reported = told
        self._sent = None

    def _write(self, deadline: float) -> bool:
        """Write until no sample waits, or until ``deadline`` or the writer's own has passed.

        A batch that could not be written by then is kept for the next call.
        """
        # The thread that holds the lock may be waiting for a store that fails.
        patience = min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
        if not self._writing.acquire(timeout=patience):
            return False
        try:
            while True:
                if self._sent is None:
                    samples = self.sampler.drain(_BATCH)
                    if not samples:
                        return True
                    self._sent = self._next(samples)
                if not self._append(self._sent, deadline):
                    return False
                # Requests may come faster than they can be written.
                if time.monotonic() >= min(deadline, self._deadline):
                    return not self.sampler.waiting
        finally:
            self._writing.release()

    def _tell(self) -> None:
        """Store the counts, if they have changed."""
        with self._writing:
            if self._sent is None and replace(self.accounts(), stored=0) != self._reported[0]:
                self._sent = self._next(())
                self._append(self._sent, deadline=-math.inf)

    def _append(self, sent: tuple[Batch, _Reported], deadline: float) -> bool:
        """Store a batch, retrying until a deadline; returns whether it was stored."""
        wait, longest = _RETRY_SECONDS
        while True:
            try:
                self._send(*sent)
                if self._is_store_failing:
                    _log.warning("the store accepts samples again")
                self._is_store_failing, self._last_failure = False, ""
                return True
            except Exception as error:
                # Logged once until it works again: a dead store must not fill the log.
                if not self._is_store_failing:
                    _log.warning("samples wait for the store: %s", describe_error(error))
                self._is_store_failing = True
            left = min(deadline, self._deadline) - time.monotonic()
            if left <= 0.0:
                return False
            if self._stopping.is_set():
                time.sleep(min(_RETRY_SECONDS[0], left))
            else:
                self._stopping.wait(min(wait, left))
            wait = min(2.0 * wait, longest)

    def _next(self, samples: Sequence[Sampled], hour: int | None = None) -> tuple[Batch, _Reported]:
        """Make the next batch: samples of one hour, and the counts since the last batch."""
        self._in_hand = len(samples)
        written = tuple([own for sample in samples if (own := self._written(*sample))])
        self._number += 1
        found, (told, told_hours) = self.accounts(), self._reported
        hour = math.floor(time.time() / HOUR_SECONDS) if hour is None else hour
        earlier = {
            each: new
            for each, n in self.sampler.sampled_by_hour().items()
            if each != hour and (new := n - told_hours.get(each, 0))
        }
        more = {**earlier, hour: found.sampled - told.sampled - sum(earlier.values())}
        lost = {reason: n - told.lost[reason] for reason, n in found.lost.items()}
        pending = found.pending - self._in_hand
        hours = told_hours | {each: told_hours.get(each, 0) + n for each, n in more.items()}
        batch = Batch(
            written,
            more[hour],
            lost,
            pending=pending,
            hour=hour,
            earlier=earlier,
            number=self._number,
        )
        return batch, (replace(found, stored=0, pending=pending), hours)

    def _send(self, batch: Batch, told: _Reported) -> None:
        """Store a batch, unless the store holds it already."""
        self.store.append(self.sampler.worker_id, batch)
        self._stored += len(batch.samples)
        self._in_hand, self._reported, self._sent = 0, told, None

    def _written(
        self, context: Context, probability: float, time_seconds: float
    ) -> tuple[SampleRecord, bytes] | None:
        """Serialise a sample; None, and counted as lost, if that fails."""
        reason = LostReason.UNREADABLE
        try:
            record = record_of(
                context, probability, time_seconds, self._rates, seed=self.sampler.seed
            )
            reason = LostReason.REDACTION_FAILED
            record = self._privacy.apply(record)
            reason = LostReason.UNREADABLE
            return record, record.to_bytes()
        except Exception as error:
            self.sampler.lose(1, reason)
            self._in_hand -= 1
            if self._last_failure != reason:
                _log.warning("a sample was lost (%s): %s", reason.value, type(error).__name__)
            self._last_failure = reason
            return None


def sample_to(
    url: str,
    *,
    rate: float,
    max_per_second: float | None = None,
    rates: JudgingRates = DEFAULT_RATES,
    privacy: Privacy = DEFAULT_PRIVACY,
    seed: str = "",
    limits: Limits | None = None,
) -> SampleWriter:
    """Sample this process's requests into a store, from now on.

    Give the ``sampler`` of the returned writer to the guard. The writer stops by itself at exit.

    Args:
        url: ``sqlite:///samples.db`` for the processes of one host, ``postgresql://…`` for
            several hosts.
        rate, max_per_second, seed: As ``Sampler``'s.
        rates, privacy: As ``SampleWriter``'s.
        limits: Limits on how much the store keeps.

    Raises:
        ConfigurationError: a setting out of range, or a URL that cannot be used.
        StoreError: the store cannot be opened. One that is full, damaged or locked stops sampling
            alone: the writer tries again until it is mended.
    """
    sampler = Sampler(rate, max_per_second=max_per_second, seed=seed)
    store = SampleStore(url, limits=Limits() if limits is None else limits)
    try:
        store.check()
    except (StoreFullError, StoreCorruptError, StoreLockedError) as error:
        _log.warning("no samples are stored until the store is repaired: %s", describe_error(error))
    writer = SampleWriter(sampler, store, rates=rates, privacy=privacy)
    writer.start()
    return writer
