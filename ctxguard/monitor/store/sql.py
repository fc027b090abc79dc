"""The sample store: what writers, monitors, people and exports do with it, one method each.

Every method is one transaction, or several short ones where it says so, and may be called from
any thread of any process. Messages and logs never hold a payload.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import sqlalchemy as sa

from ctxguard.errors import ConfigurationError, StoreError, StoreFullError
from ctxguard.monitor.store import files, judged, labels, parquet, queue, retention, schema
from ctxguard.monitor.store.database import Database, storable
from ctxguard.monitor.store.types import (
    DEFAULT_LIMITS,
    Claimed,
    Cleaned,
    Entry,
    FeedbackAdded,
    FeedbackRow,
    Finished,
    FinishedEach,
    JudgedRows,
    LabelRow,
    LabelsAdded,
    Limits,
    State,
    WorkerCounts,
    WorkerRow,
)

_LEADER = "leader"


class SampleStore:
    """Samples, what became of them, and what people said of them; made by ``open``.

    On a fault of the database every method raises a ``StoreError`` that says what mends it. A
    damaged SQLite file is moved aside and a new one begun, and the call goes on with that.
    """

    def __init__(self, database: Database, limits: Limits, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock
        self.limits = limits

    @classmethod
    def open(
        cls, url: str, *, limits: Limits = DEFAULT_LIMITS, clock: Callable[[], float] = time.time
    ) -> "SampleStore":
        """Open a store; tables are made where there are none.

        Args:
            url: ``sqlite:///path/samples.db`` for the processes of one host, ``sqlite://`` for
                one in memory, ``postgresql://user@host/database`` for a fleet.
            limits: What ``clean`` keeps, and the space held back.
            clock: Seconds since the epoch.

        Raises:
            ConfigurationError: a URL that cannot be used.
            MissingExtraError: the database's driver is not installed.
            StoreUnavailableError: there is no such folder or server.
            StoreSchemaError: it is a newer release's or another program's; it is not touched.
            StoreError: another fault of the database.
        """
        return cls(Database(url, reserve_bytes=limits.reserve_bytes), limits, clock)

    @property
    def name(self) -> str:
        """The file or URL, without a password."""
        return self._database.name

    @property
    def quarantined(self) -> Path | None:
        """The damaged database that was moved aside last, by any process; None without one.

        Stays until the file is moved away, so that an alarm rings until someone has looked.
        """
        file = self._database.file
        return None if file is None else files.quarantined(file)

    def close(self) -> None:
        """Close its connections; it opens new ones when used again."""
        self._database.close()

    def __enter__(self) -> "SampleStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Writers

    def append(self, worker_id: str, entries: Sequence[Entry], counts: WorkerCounts) -> None:
        """Write samples down together with their writer's counts: all of it or nothing.

        Args:
            worker_id: Of one process, for as long as it lives.
            entries: May be empty, to say that the worker is alive.
            counts: Since that process began.

        Raises:
            StoreFullError: the disk is full, or the space that was held back is in use to clean.
        """
        reserve = self._database.reserve
        if reserve is not None and entries and not reserve.hold():
            raise StoreFullError(
                f"{self.name}: the disk is full but for what cleaning needs; free space on it, or "
                "lower max_bytes or max_age_seconds and clean"
            )

        def work(connection: sa.Connection) -> None:
            if entries:
                queue.insert_samples(self._database, connection, entries)
            self._count(connection, worker_id, counts, stored=len(entries), closed=False)

        self._database.write(work)

    def close_worker(self, worker_id: str, counts: WorkerCounts) -> None:
        """Put down a worker's final counts; calling it again changes nothing else."""
        self._database.write(
            lambda connection: self._count(connection, worker_id, counts, stored=0, closed=True)
        )

    def workers(self) -> list[WorkerRow]:
        """Every writing process so far, in the order in which they began."""
        return self._database.read(queue.workers)

    def stored_count(self, worker_id: str) -> int:
        """How many samples the store took from a worker; 0 for one that it does not know."""
        workers = schema.workers.c
        query = sa.select(workers.stored).where(workers.worker_id == storable(worker_id))
        return self._database.read(lambda connection: connection.execute(query).scalar()) or 0

    # Monitors

    def claim(self, claimant: str, limit: int, *, lease_seconds: float) -> list[Claimed]:
        """Take the samples that wait longest, for as long as the lease lasts.

        No other claimant gets them before the lease ends; then they wait again. Leases go by
        a clock that no step of the wall clock moves.

        Args:
            claimant: Who takes them.
            limit: How many at most, ≥ 1.
            lease_seconds: Longer than judging them takes.
        """
        if limit < 1:
            raise ConfigurationError(f"limit {limit!r} must be at least 1")
        return self._database.write(
            lambda connection: queue.claim(
                self._database, connection, claimant, limit, lease_seconds
            )
        )

    def finish(self, series: str, finished: Sequence[Finished]) -> int:
        """Put down what became of claimed samples, once for each sample.

        Args:
            series: The judge's pinned name and version.
            finished: Of samples that are finished already, nothing is changed.

        Returns:
            How many were accepted; the others were finished before, deleted or forced.

        Raises:
            ConfigurationError: summaries of another size than the series holds.
        """
        return len(self._finish(series, finished))

    def finish_each(self, series: str, finished: Sequence[Finished]) -> FinishedEach:
        """Put down what became of claimed samples, each whatever the others hold.

        One transaction for all of them; one for each where something in them cannot be written.

        Args:
            series: The judge's pinned name and version.
            finished: Of samples that are finished already, nothing is changed.

        Raises:
            StoreError: nothing can be written at present; nothing was.
        """
        try:
            return FinishedEach(frozenset(self._finish(series, finished)))
        except StoreError:
            raise
        except Exception as error:
            if len(finished) == 1:
                return FinishedEach(frozenset(), {finished[0].sample_id: error})
        accepted, refused = set[int](), dict[int, Exception]()
        for one in finished:
            try:
                accepted.update(self._finish(series, [one]))
            except Exception as error:
                refused[one.sample_id] = error
        return FinishedEach(frozenset(accepted), refused)

    def _finish(self, series: str, finished: Sequence[Finished]) -> list[int]:
        if not finished:
            return []
        return self._database.write(
            lambda connection: queue.finish(self._database, connection, series, finished)
        )

    def give_back(self, sample_ids: Sequence[int], *, max_attempts: int | None) -> int:
        """Let claimed samples wait again, because they could not be judged now.

        Args:
            sample_ids: Those that are not claimed any more stay as they are.
            max_attempts: Samples that were tried so often fail instead, ≥ 1; None for those
                that were not tried at all.

        Returns:
            How many failed.
        """
        return self._database.write(
            lambda connection: queue.give_back(connection, sample_ids, max_attempts)
        )

    def lead(self, who: str, *, lease_seconds: float) -> bool:
        """Become or stay the one monitor that leads, until the lease ends.

        Args:
            who: The monitor.
            lease_seconds: 0 to step down.

        Returns:
            Whether ``who`` leads; False while another does.
        """
        return self._database.write(
            lambda connection: queue.lead(self._database, connection, _LEADER, who, lease_seconds)
        )

    def states(self) -> dict[State, int]:
        """How many samples are in each state; ``PENDING`` is the judges' queue."""
        return self._database.read(queue.states)

    def oldest_pending_seconds(self) -> float | None:
        """For how long the first sample in the queue has waited, ≥ 0; None where none waits."""
        answered = self._database.read(queue.oldest_pending)
        return None if answered is None else max(0.0, self._clock() - answered)

    def get_state(self, key: str) -> str | None:
        """A value that monitors keep; None where none was set."""
        state = schema.state.c
        query = sa.select(state.value).where(state.key == storable(key))
        return self._database.read(lambda connection: connection.execute(query).scalar())

    def set_state(self, key: str, value: str) -> None:
        """Keep a value for this and other monitors."""
        row = {"key": storable(key), "value": storable(value)}
        self._database.write(
            lambda connection: self._database.upsert(
                connection, schema.state, row, changes={"value": row["value"]}
            )
        )

    # What was judged

    def series(self) -> list[str]:
        """Every series of judgments, in the order in which they began."""
        return self._database.read(judged.series_names)

    def judged(
        self,
        series: str,
        *,
        since: float | None = None,
        until: float | None = None,
        with_grades: bool = False,
    ) -> JudgedRows:
        """The judged requests of a series with since ≤ time < until, ordered by time.

        Args:
            series: One that has not begun has no rows.
            since: Seconds since the epoch; None for the beginning.
            until: Seconds since the epoch; None for no end.
            with_grades: Whether grades are read too.
        """
        return self._database.read(
            lambda connection: judged.judged(
                connection, series, since=since, until=until, with_grades=with_grades
            )
        )

    def verdicts(self, series: str, sample_ids: Sequence[int]) -> dict[int, str]:
        """Verdicts by sample; without those that were deleted or never given."""
        return self._database.read(
            lambda connection: judged.verdicts(connection, series, sample_ids)
        )

    def rejected(self, sample_ids: Sequence[int]) -> dict[int, tuple[tuple[str, str, str], ...]]:
        """(passage id, reason, raw reply) of verdicts that were not valid, by sample."""
        return self._database.read(lambda connection: judged.rejected(connection, sample_ids))

    def payloads(self, sample_ids: Sequence[int]) -> dict[int, bytes]:
        """Payloads by sample; without those that were deleted."""
        return self._database.read(lambda connection: queue.payloads(connection, sample_ids))

    def find(self, request_id: str) -> list[int]:
        """The samples of a request, oldest first."""
        return self._database.read(lambda connection: judged.find(connection, request_id))

    def request_ids(self, sample_ids: Sequence[int]) -> dict[int, str]:
        """Which request each sample is of; without samples that were deleted."""
        return self._database.read(lambda connection: judged.request_ids(connection, sample_ids))

    # What people said

    def add_labels(self, rows: Sequence[LabelRow]) -> LabelsAdded:
        """Keep labels of sampled requests.

        An annotator's word that is known already is left out. Words that contradict others, or
        the same annotator's earlier one, are kept and counted: which of them holds is for those
        who read them.
        """
        return self._database.write(
            lambda connection: labels.add_labels(self._database, connection, rows)
        )

    def unknown_requests(self, request_ids: Sequence[str]) -> list[str]:
        """Those of which the store has no sample, each once, in the order given."""
        return self._database.read(
            lambda connection: labels.unknown_requests(connection, request_ids)
        )

    def labels(self, sample_ids: Sequence[int] | None = None) -> list[tuple[int, LabelRow]]:
        """(sample id, label) in the order in which they were handed in.

        Args:
            sample_ids: None for all. A request that was sampled twice has its labels twice.
        """
        return self._database.read(lambda connection: labels.labels(connection, sample_ids))

    def pick_for_labels(self, series: str, n: int, *, since: float | None = None) -> list[int]:
        """A uniform random pick of judged samples: of those not picked or labelled at random yet.

        Those of lowest label order. Samples that were labelled because they were sought (after an
        alarm) are picked like all others, or what is labelled at random would lack them.

        Asked again before labels have come, it picks the same.

        Args:
            series: Whose judged samples.
            n: How many at most.
            since: Answered from then on, in seconds since the epoch; None for all.

        Returns:
            Sample ids of lowest label order first; only of samples whose payload is kept.
        """
        return self._database.read(
            lambda connection: judged.pick_for_labels(connection, series, n, since=since)
        )

    def queue_labels(self, sample_ids: Sequence[int], *, why: str) -> int:
        """Ask people for labels of these samples; returns how many were not asked for before.

        A sample that is picked by its label order (``why`` is ``random`` or ``weighed``) counts
        as such from then on, also where it was asked for before: the order knows no reason.
        """
        return self._database.write(
            lambda connection: labels.queue_labels(self._database, connection, sample_ids, why)
        )

    def label_queue(self) -> list[tuple[int, str]]:
        """(sample id, why) of samples that were asked for and have no label yet, in order."""
        return self._database.read(labels.label_queue)

    def label_reasons(self) -> dict[int, str]:
        """Why each sample was asked for, labelled by now or not; ``random`` where it was picked."""
        return self._database.read(labels.label_reasons)

    def add_feedback(self, rows: Sequence[FeedbackRow]) -> FeedbackAdded:
        """Keep what users showed of answers to sampled requests."""
        return self._database.write(lambda connection: labels.add_feedback(connection, rows))

    def feedback_counts(self) -> dict[str, int]:
        """Users' reactions by kind."""
        return self._database.read(labels.feedback_counts)

    def feedback(self, sample_ids: Sequence[int] | None = None) -> list[tuple[int, FeedbackRow]]:
        """(sample id, feedback) in the order in which it was handed in; None for all samples."""
        return self._database.read(lambda connection: labels.feedback(connection, sample_ids))

    # Keeping it in bounds

    def size_bytes(self) -> int:
        """Bytes of payload in the store, which ``Limits.max_bytes`` bounds."""
        return self._database.read(retention.size_bytes)

    def clean(self) -> Cleaned:
        """Delete what is over the limits, oldest first, in many short transactions.

        By age a sample goes whole, unless people labelled it: then its labels, judged row and
        grades stay, its text goes. By size the oldest payloads and verdicts go: judged rows stay
        for the estimates, samples that nobody has judged go whole. A SQLite file then shrinks; on
        a full disk it is cleaned in the space that was held back. PostgreSQL's own vacuum frees
        its space, and a full server is its administrator's to mend.

        Raises:
            StoreFullError: not even what was held back was enough, or another process is cleaning.
        """
        age = self.limits.max_age_seconds
        cleaning = partial(
            retention.Cleaning,
            self._database,
            oldest_seconds=None if age is None else self._clock() - age,
            max_bytes=self.limits.max_bytes,
        )
        reserve = self._database.reserve
        if reserve is not None:
            reserve.hold()
        first = cleaning()
        try:
            first.run()
        except StoreFullError:
            if reserve is None or reserve.size == 0:
                raise
        else:
            return first.cleaned
        second = cleaning(disk_is_full=True)
        with self._database.reserve_given_up():
            second.run()
        return first.cleaned + second.cleaned

    def export_parquet(self, path: Path | str, what: parquet.Content) -> int:
        """Write all samples, judged requests or labels to a Parquet file; returns how many.

        Read in many short transactions: what is written meanwhile may or may not be in it.

        Raises:
            MissingExtraError: pyarrow is not installed.
            StoreError: the file cannot be written.
        """
        return parquet.export(self._database, Path(path), what)

    def _count(
        self,
        connection: sa.Connection,
        worker_id: str,
        counts: WorkerCounts,
        *,
        stored: int,
        closed: bool,
    ) -> None:
        queue.count_for_worker(
            self._database,
            connection,
            worker_id,
            counts,
            self._clock(),
            stored=stored,
            closed=closed,
        )
