"""Writing sampled requests to the store: redacted, serialised, counted.

A background thread of each process that serves requests. An error here never reaches a request,
and every lost sample has a recorded reason: ``sampled = stored + pending + lost`` holds exactly,
also if the process is killed (DESIGN.md §7). Each of the four is counted by itself, and all are
stored in one transaction, so that the sum can be checked.
"""

import atexit
import logging
import math
import threading
import time
from dataclasses import replace
from pathlib import Path

from ctxguard._support.error_text import describe_error
from ctxguard._support.fork_safety import reset_in_children
from ctxguard.errors import ConfigurationError
from ctxguard.monitor.sampling.counts import counts_of_dead_processes
from ctxguard.monitor.sampling.inclusion import (
    DEFAULT_RATES,
    HashSampler,
    InclusionDesign,
    JudgingRates,
)
from ctxguard.monitor.sampling.privacy import DEFAULT_PRIVACY, Privacy
from ctxguard.monitor.sampling.record import record_of
from ctxguard.monitor.sampling.sampler import (
    N_COUNTERS,
    Accounts,
    LostReason,
    Sample,
    Sampler,
    counted,
)
from ctxguard.monitor.store import Entry, Limits, SampleStore, WorkerCounts

_log = logging.getLogger(__name__)

_BATCH = 100
_GRACE_SECONDS = 0.5
_RETRY_SECONDS = (0.1, 5.0)
"""Waits between attempts at a store that fails: the first, and the longest."""
_HEARTBEAT_SECONDS = 30.0
"""The store hears of a process at least as often."""
_SETTLE_SECONDS = 60.0
"""How often dead processes of this host are looked for."""
_LOOKS = 20
_LOOK_SECONDS = 0.001
"""Counts are read anew so often, and after so long, while requests are being counted."""


class SampleWriter:
    """Writes one sampler's requests to a store, on a thread of its own.

    In a forked child, a running writer begins again with a thread and samples of the child's own.

    Args:
        sampler: The queue of samples. Use one writer per sampler.
        store: The store to write to.
        rates: How many of the dropped passages are judged.
        privacy: How much of the text is stored.
        interval_seconds: How often the queue is emptied, > 0.
        exit_seconds: How long the end of the process may be delayed to write waiting samples,
            ≥ 0; those not written by then are counted as lost.

    Raises:
        ConfigurationError: an interval out of range.
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
        if not 0.0 < interval_seconds < math.inf or not 0.0 <= exit_seconds < math.inf:
            raise ConfigurationError(
                f"interval_seconds {interval_seconds!r} must be > 0 and exit_seconds "
                f"{exit_seconds!r} at least 0"
            )
        self.sampler = sampler
        self.store = store
        self._design = InclusionDesign(rates, seed=sampler.seed)
        self._label_order = HashSampler("labels", sampler.seed)
        self._privacy = privacy
        self._interval_seconds = interval_seconds
        self._exit_seconds = exit_seconds
        self._running = False
        self._reset_after_fork()
        reset_in_children(self)
        atexit.register(self.stop)

    def _reset_after_fork(self) -> None:
        """Begin without samples and without a thread."""
        # First, or the thread would take the parent's samples.
        self.sampler._reset_after_fork()
        self._writing = threading.Lock()
        self._stored = 0
        self._batch: list[Entry] = []
        """Taken from the queue and not stored yet; kept until the store has answered."""
        self._number = 0
        """Of that batch, or of what was sent last."""
        self._in_hand = 0
        """How many were taken from the queue and are neither stored nor lost."""
        self._told = WorkerCounts(0)
        self._told_at = -math.inf
        self._settled_at = -math.inf
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._deadline = math.inf
        self._last_failure = ""

    def _resume_after_fork(self) -> None:
        """Write in a forked child as in its parent, on a thread of the child's own."""
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
            # Samples that it still holds will be counted as killed.
            self.sampler.close()

    def accounts(self) -> Accounts:
        """The counts of this process's samples."""
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
                if time.monotonic() >= self._settled_at + _SETTLE_SECONDS:
                    self._settled_at = time.monotonic()
                    self._settle_others()
                self._write(math.inf)
                self._tell()
            except Exception as error:
                _log.warning("writing samples failed: %s", describe_error(error))
            if stopping.wait(self._interval_seconds):
                break
        self._close()

    def _settle_others(self) -> None:
        if self.sampler.counts_folder is not None:
            settle_dead_processes(self.store, self.sampler.counts_folder)

    def _close(self) -> None:
        self._write(self._deadline)
        self.sampler.close()
        # By now an offer that was under way is counted, and may have been queued after all.
        self.accounts()
        self.sampler.close()
        if not self._writing.acquire(timeout=_GRACE_SECONDS):
            return  # whoever waits for the store is left behind: its samples count as killed
        try:
            while self._close_accounts():
                pass
            self.sampler.leave()
        except Exception as error:
            _log.warning("the final counts could not be stored: %s", describe_error(error))
        finally:
            self._writing.release()

    def _close_accounts(self) -> bool:
        """Store the final counts; whether samples were found lost, so that they have changed.

        Nobody knows whether the batch in hand was stored, if its answer was lost: the store does.
        """
        reason, in_hand = LostReason.STORE_FAILED, self._in_hand
        counts = replace(self._counts(), pending=in_hand)
        stored = self.store.close_worker(
            self.sampler.worker_id, counts, reason=reason.value, batch=self._number
        )
        failed = min(max(self._stored + in_hand - stored, 0), in_hand)
        self.sampler.lose(failed, reason)
        self._in_hand -= failed
        return self._learn(stored)

    def _write(self, deadline: float) -> bool:
        """Write until no sample waits, or ``deadline`` or the writer's own has passed.

        A batch that could not be written by then stays in hand, for the next time.
        """
        # The thread that holds the lock may be waiting for a store that fails.
        patience = min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
        if not self._writing.acquire(timeout=patience):
            return False
        try:
            while True:
                if not self._batch:
                    samples = self.sampler.drain(_BATCH)
                    if not samples:
                        return True
                    self._in_hand = len(samples)
                    self._batch = [entry for sample in samples if (entry := self._entry(sample))]
                    self._number += 1
                if self._batch and not self._append(deadline):
                    return False
                # Requests may come faster than they can be written.
                if time.monotonic() >= min(deadline, self._deadline):
                    return not self.sampler.waiting
        finally:
            self._writing.release()

    def _tell(self) -> None:
        """Store the counts, where they have changed or the store has not heard of them lately."""
        with self._writing:
            is_due = time.monotonic() >= self._told_at + _HEARTBEAT_SECONDS
            if not self._batch and (is_due or self._counts() != self._told):
                self._number += 1
                self._send()

    def _append(self, deadline: float) -> bool:
        """Store the batch in hand, retrying until a deadline; returns whether it was stored."""
        wait, longest = _RETRY_SECONDS
        while True:
            try:
                self._send()
                self._last_failure = ""
                return True
            except Exception as error:
                # Logged once until it works again: a dead store must not fill the log.
                if (failure := describe_error(error)) != self._last_failure:
                    _log.warning("samples wait for the store: %s", failure)
                self._last_failure = failure
            left = min(deadline, self._deadline) - time.monotonic()
            if left <= 0.0:
                return False
            if self._stopping.is_set():
                time.sleep(min(_RETRY_SECONDS[0], left))
            else:
                self._stopping.wait(min(wait, left))
            wait = min(2.0 * wait, longest)

    def _send(self) -> None:
        """Store the batch in hand, if any, with the counts."""
        counts = self._counts()
        stored = self.store.append(self.sampler.worker_id, self._batch, counts, batch=self._number)
        self._told, self._told_at = counts, time.monotonic()
        self._learn(stored)

    def _learn(self, stored: int) -> bool:
        """Count what the store holds; whether it no longer holds what it held before."""
        gone = max(self._stored + self._in_hand - stored, 0)
        self.sampler.lose(gone, LostReason.QUARANTINED)
        self._stored, self._in_hand, self._batch = stored, 0, []
        return gone > 0

    def _entry(self, sample: Sample) -> Entry | None:
        reason = LostReason.UNREADABLE
        try:
            record = record_of(sample, self._design)
            reason = LostReason.REDACTION_FAILED
            record = self._privacy.apply(record)
            reason = LostReason.UNREADABLE
            return Entry(
                request_id=record.request_id,
                time_seconds=record.time_seconds,
                probability=record.probability,
                session_id=record.session_id,
                label_order=self._label_order.uniform(record.request_id),
                payload=record.to_bytes(),
            )
        except Exception as error:
            self.sampler.lose(1, reason)
            self._in_hand -= 1
            if self._last_failure != reason:
                _log.warning("a sample was lost (%s): %s", reason.value, type(error).__name__)
            self._last_failure = reason
            return None

    def _counts(self) -> WorkerCounts:
        """The counts as they will be when the batch in hand is stored."""
        found = self.accounts()
        lost = {reason.value: n for reason, n in found.lost.items() if n}
        return WorkerCounts(found.sampled, lost, found.pending - self._in_hand)


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
    """Sample this process's requests to a store, from now on.

    Give the ``sampler`` of the returned writer to the guard. The writer stops by itself at exit.

    Args:
        url: ``sqlite:///samples.db`` for the processes of one host, ``postgresql://…`` for
            several hosts.
        rate: π, the probability that a request is sampled.
        max_per_second: Approximate cap on samples a second in this process; None for no cap.
        rates: How many of the dropped passages are judged.
        privacy: How much of the text is stored.
        seed: Seed of the random choices.
        limits: What the store keeps.

    Raises:
        ConfigurationError: a setting out of range, or a URL that cannot be used.
        StoreError: the store cannot be opened.
    """
    store = SampleStore.open(url, limits=Limits() if limits is None else limits)
    try:
        folder = store.counts_folder()
        sampler = Sampler(rate, max_per_second=max_per_second, seed=seed, counts_folder=folder)
    except BaseException:
        store.close()
        raise
    writer = SampleWriter(sampler, store, rates=rates, privacy=privacy)
    writer.start()
    return writer


def settle_dead_processes(store: SampleStore, counts_folder: Path | str) -> int:
    """Store the final counts of processes that were killed.

    Samples that such a process had taken, and neither stored nor lost, are counted as lost, with
    the reason ``killed``.

    Args:
        store: The store that they wrote to.
        counts_folder: The folder of their counts.

    Returns:
        How many processes were settled.
    """
    settled = 0
    for dead in counts_of_dead_processes(counts_folder):
        if len(dead.totals) != N_COUNTERS:
            continue  # of another release: counted by what it told the store, once it is silent
        sampled, lost = counted(dead.totals)
        by_name = {reason.value: n for reason, n in lost.items() if n}
        store.close_worker(
            dead.worker_id,
            # Any of them may have been pending.
            WorkerCounts(sampled, by_name, pending=sampled),
            reason=LostReason.KILLED.value,
        )
        settled += 1
    return settled
