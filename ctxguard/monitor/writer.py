"""From the queue of sampled requests to the store: redacted, written down, counted.

A background thread of each process that serves requests. Nothing that goes wrong here reaches a
request, and nothing is lost without a reason on record: ``sampled = stored + pending + lost``
holds exactly, also through the sudden death of the process (DESIGN.md §7).
"""

import atexit
import logging
import math
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from urllib.parse import urlsplit

from ctxguard.errors import ConfigurationError
from ctxguard.forks import start_afresh_in_children
from ctxguard.hygiene import describe_error
from ctxguard.monitor.chance import Draw
from ctxguard.monitor.counts import counts_of_the_dead
from ctxguard.monitor.records import DEFAULT_RATES, Choices, JudgingRates, Record
from ctxguard.monitor.redaction import Redactor, Text, kept, redact, redacted
from ctxguard.monitor.sampler import Accounts, LostReason, Sample, Sampler, accounts, of_the_dead
from ctxguard.monitor.store import Entry, Limits, SampleStore, WorkerCounts

_log = logging.getLogger(__name__)

_BATCH = 100
_REMEMBERED_TEXTS = 100_000
_GRACE_SECONDS = 0.5
_RETRY_SECONDS = (0.1, 5.0)
"""Between attempts at a store that refuses: the first wait, and the longest."""


@dataclass(frozen=True, slots=True)
class Privacy:
    """What of a request's text is written down.

    Attributes:
        redactor: Applied to every text before anything is written; None for none. If it raises,
            the sample is lost, never written unredacted.
        query: Whether queries are stored, replaced by a keyed hash, or left out.
        passages: The same for titles and texts of passages. Judges need texts: where they are
            not stored, the monitor has to be given the index.
        hash_key: Keeps hashes from being reversed by a dictionary; needed where one is asked for.
    """

    redactor: Redactor | None = redact
    query: Text = Text.STORED
    passages: Text = Text.STORED
    hash_key: bytes | None = None

    def __post_init__(self) -> None:
        for how in (self.query, self.passages):
            kept("", how, self.hash_key)  # refuses a hash without a key

    def apply(self, record: Record) -> Record:
        """The record as it may be written.

        Raises:
            RedactionError: the redactor failed.
        """
        query = None if record.query is None else self._kept(record.query, self.query)
        passages = {
            position: replace(
                passage,
                title=self._kept_of_passage(passage.title),
                text=self._kept_of_passage(passage.text),
                metadata=None,
            )
            for position, passage in record.passages.items()
        }
        if self.passages is Text.OMITTED:
            passages = {}
        return replace(record, query=query, passages=passages)

    def _kept_of_passage(self, text: str) -> str:
        if self.passages is Text.STORED and self.redactor is not None:
            return _remembered(text, self.redactor)
        return self._kept(text, self.passages) or ""

    def _kept(self, text: str, how: Text) -> str | None:
        if how is Text.STORED and self.redactor is not None:
            text = redacted(text, self.redactor)
        return kept(text, how, self.hash_key)


_known: dict[tuple[Redactor, bytes], str | None] = {}


def _remembered(text: str, redactor: Redactor) -> str:
    """A passage's redacted text; the same passages come again and again.

    Redaction takes a third of a millisecond for a thousand characters, their hash a microsecond.
    Only what changed is kept, so that a hundred thousand passages are remembered in a few MB.
    """
    key = redactor, blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    try:
        known = _known[key]
    except KeyError:
        clean = redacted(text, redactor)
        if len(_known) >= _REMEMBERED_TEXTS:
            _known.clear()
        _known[key] = None if clean == text else clean
        return clean
    return text if known is None else known


DEFAULT_PRIVACY = Privacy()


class SampleWriter:
    """Writes one sampler's requests to a store, from a thread of its own.

    A forked child of a process in which it runs gets a thread of its own with the child's samples.

    Args:
        sampler: Where samples wait. One writer per sampler.
        store: Where they go.
        rates: How much of what was dropped is judged.
        privacy: What of the text is written.
        interval_seconds: How often the queue is looked into, > 0.
        exit_seconds: How long the end of the process may be held up to write what waits, ≥ 0;
            what is not written by then is counted as lost.

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
        self._choices = Choices(rates, seed=sampler.seed)
        self._label_order = Draw("labels", sampler.seed)
        self._privacy = privacy
        self._interval_seconds = interval_seconds
        self._exit_seconds = exit_seconds
        self._running = False
        self.start_afresh()
        start_afresh_in_children(self)
        atexit.register(self.stop)

    def start_afresh(self) -> None:
        """Begin with nothing in hand; in a forked child, on a thread of its own."""
        # First of all, or the thread would take the parent's samples for its own.
        self.sampler.start_afresh()
        self._writing = threading.Lock()
        self._stored = 0
        self._in_doubt = False
        self._told = WorkerCounts(0, {})
        self._quarantined = self.store.quarantined
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._deadline = math.inf
        self._failing = ""
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
        """Write what waits now; returns whether all of it was written in time."""
        return self._write(time.monotonic() + timeout_seconds)

    def stop(self) -> None:
        """Write what waits, within ``exit_seconds``; count the rest as lost, and end.

        Called by itself at the end of the process.
        """
        atexit.unregister(self.stop)
        self._deadline = time.monotonic() + self._exit_seconds
        thread, self._thread, self._running = self._thread, None, False
        self._stopping.set()
        if thread is None:
            self._close()
            return
        # The thread writes to the end itself: a store that hangs must not hold the process.
        # A little longer than the thread gives itself, so that it may say what it gave up.
        thread.join(self._exit_seconds + _GRACE_SECONDS)
        if thread.is_alive():
            # What it has in hand is in doubt: whoever reads the counts will know it as killed.
            self.sampler.close()

    def accounts(self) -> Accounts:
        """Where every sample of this process is."""
        # In this order: what is stored or lost was sampled before.
        lost, stored = self.sampler.lost(), self._stored
        return accounts(
            self.sampler.sampled(), stored, {reason.value: n for reason, n in lost.items()}
        )

    def _run(self, stopping: threading.Event) -> None:
        while not stopping.wait(self._interval_seconds):
            try:
                self._write(math.inf)
                self._tell()
            except Exception as error:
                _log.warning("writing samples failed: %s", describe_error(error))
        self._close()

    def _close(self) -> None:
        self._write(self._deadline)
        self.sampler.close()
        try:
            self.store.close_worker(self.sampler.worker_id, self._counts())
            self.sampler.leave()
        except Exception as error:
            _log.warning("the counts of samples could not be closed: %s", describe_error(error))

    def _write(self, deadline: float) -> bool:
        """Write until nothing waits, or the deadline or that of the writer's end has passed."""
        # Whoever has it may be waiting for a store that refuses, for as long as that takes.
        patience = min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
        if not self._writing.acquire(timeout=patience):
            return False
        try:
            while True:
                samples = self.sampler.drain(_BATCH)
                if not samples:
                    return True
                entries = [entry for sample in samples if (entry := self._entry(sample))]
                if not self._append(entries, deadline):
                    self.sampler.lose(len(entries), LostReason.STORE_FAILED)
                    return False
        finally:
            self._writing.release()

    def _tell(self) -> None:
        """Let the store know of samples that were lost since it last took one."""
        if (moved := self.store.quarantined) != self._quarantined:
            self._quarantined = moved
            stored = self.store.stored_count(self.sampler.worker_id)
            self.sampler.lose(max(self._stored - stored, 0), LostReason.QUARANTINED)
            self._stored = min(stored, self._stored)
        counts = self._counts()
        if counts != self._told and not self._in_doubt:
            self.store.append(self.sampler.worker_id, (), counts)
            self._told = counts

    def _append(self, entries: Sequence[Entry], deadline: float) -> bool:
        """Whether the store took them, in the end."""
        first, longest = _RETRY_SECONDS
        wait = first
        while True:
            try:
                if not self._known_as_stored(entries):
                    self._in_doubt = True
                    counts = self._counts()
                    self.store.append(self.sampler.worker_id, entries, counts)
                    self._in_doubt, self._told = False, counts
                self._stored += len(entries)
                self._failing = ""
                return True
            except Exception as error:
                reason = describe_error(error)
                if reason != self._failing:
                    # Once until it works again: a dead store must not fill the log.
                    _log.warning("samples wait for the store: %s", reason)
                self._failing = reason
            left = min(deadline, self._deadline) - time.monotonic()
            if left <= 0.0:
                return self._known_at_the_end(entries)
            if self._stopping.is_set():
                time.sleep(min(first, left))
            else:
                self._stopping.wait(min(wait, left))
            wait = min(2.0 * wait, longest)

    def _known_as_stored(self, entries: Sequence[Entry]) -> bool:
        """Whether an attempt that seemed to fail went through: a connection may break too late."""
        if not self._in_doubt:
            return False
        known = self.store.stored_count(self.sampler.worker_id) == self._stored + len(entries)
        self._in_doubt = False
        return known and bool(entries)

    def _known_at_the_end(self, entries: Sequence[Entry]) -> bool:
        try:
            if self._known_as_stored(entries):
                self._stored += len(entries)
                return True
        except Exception as error:
            _log.warning("the store cannot say what it took: %s", describe_error(error))
        return False

    def _entry(self, sample: Sample) -> Entry | None:
        reason = LostReason.UNREADABLE
        try:
            record = self._choices.record(sample)
            reason = LostReason.REDACTION_FAILED
            record = self._privacy.apply(record)
            reason = LostReason.UNREADABLE
            return Entry(
                request_id=record.request_id,
                time_seconds=record.time_seconds,
                probability=record.probability,
                session_id=record.session_id,
                label_order=self._label_order(record.request_id),
                payload=record.to_bytes(),
            )
        except Exception as error:
            self.sampler.lose(1, reason)
            if self._failing != reason:
                _log.warning("a sample was lost (%s): %s", reason.value, type(error).__name__)
            self._failing = reason
            return None

    def _counts(self) -> WorkerCounts:
        lost = {reason.value: n for reason, n in self.sampler.lost().items() if n}
        return WorkerCounts(self.sampler.sampled(), lost)


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

    Give ``.sampler`` of what is returned to the guard; ``stop`` is called by itself at exit.

    Args:
        url: ``sqlite:///samples.db`` for the processes of one host, ``postgresql://…`` for a fleet.
        rate: π, the probability that a request is sampled.
        max_per_second: About the most samples a second in this process; None for no cap.
        rates: How much of what was dropped is judged.
        privacy: What of the text is written.
        seed: Of the choices.
        limits: What the store keeps.

    Raises:
        ConfigurationError: a setting out of range, or a URL that cannot be used.
        StoreError: the store cannot be opened.
    """
    sampler = Sampler(
        rate, max_per_second=max_per_second, seed=seed, counts_folder=counts_folder(url)
    )
    store = SampleStore.open(url, limits=Limits() if limits is None else limits)
    writer = SampleWriter(sampler, store, rates=rates, privacy=privacy)
    writer.start()
    return writer


def counts_folder(url: str) -> Path | None:
    """Where the processes of one host that write to a store keep their counts, by convention.

    Beside a SQLite file; for a database server, in the host's folder for temporary files.

    Returns:
        None for a store in memory.

    >>> counts_folder("sqlite:////var/lib/ctxguard/samples.db").as_posix()
    '/var/lib/ctxguard/samples.db.counts'
    """
    parts = urlsplit(url)
    if parts.scheme.startswith("sqlite"):
        return Path(parts.path[1:] + ".counts") if len(parts.path) > 1 else None
    place = f"{parts.hostname}:{parts.port}{parts.path}".encode()
    return Path(tempfile.gettempdir()) / f"ctxguard-{blake2b(place, digest_size=8).hexdigest()}"


def account_for_the_dead(store: SampleStore, counts_folder: Path | str) -> int:
    """Settle the accounts of processes that ended without a word.

    Whatever such a process had sampled, and neither stored nor lost, died with it: it is counted
    as lost, ``killed``.

    Args:
        store: Where they wrote.
        counts_folder: Where they kept their counts.

    Returns:
        How many processes were settled.
    """
    settled = 0
    for dead in counts_of_the_dead(counts_folder):
        sampled, lost = of_the_dead(dead.totals, store.stored_count(dead.worker_id))
        counted = WorkerCounts(sampled, {reason: n for reason, n in lost.items() if n})
        store.close_worker(dead.worker_id, counted)
        settled += 1
    return settled
