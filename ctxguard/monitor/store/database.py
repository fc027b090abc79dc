"""One database behind every table: connections, transactions, and errors that say how to mend them.

A connection never crosses a fork, a transaction waits a bounded time, and a damaged SQLite file is
moved aside, after which the work is repeated on a new one.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.pool import StaticPool

from ctxguard._support.extras import require
from ctxguard._support.fork_safety import reset_in_children
from ctxguard.errors import (
    ConfigurationError,
    StoreCorruptError,
    StoreFullError,
    StoreLockedError,
    StoreReadOnlyError,
    StoreUnavailableError,
)
from ctxguard.monitor.store import errors as faults
from ctxguard.monitor.store import files
from ctxguard.monitor.store import sqlite as lite
from ctxguard.monitor.store.forking import ClosedAtForks
from ctxguard.monitor.store.schema import SCHEMA_VERSION, metadata, samples, schema_version

_log = logging.getLogger(__name__)

T = TypeVar("T")

BUSY_SECONDS = 5.0
"""How long a transaction waits for others."""
AHEAD_SECONDS = 60.0
"""A time of the clock of leases may lie this much ahead: another may have read the clock later and
acted sooner. One further ahead is from before a restart or a change of the clock."""
_ATTEMPTS = 4
"""How often a transaction is tried on a file that is damaged or that others move aside."""
_CREATION_SECONDS = 60.0
"""How long the creation of the tables waits for others on PostgreSQL."""
_CREATION_LOCK = 7_243_118
"""Any number: processes that create the tables in one PostgreSQL database agree on it."""

_inherited: list[object] = []
"""A parent's connections, never closed in the child: closing would end the parent's."""


class Database:
    """SQLite in a file or in memory, or PostgreSQL.

    Args:
        url: A URL of SQLAlchemy; ``postgresql://`` is read as ``postgresql+psycopg://``.
        reserve_bytes: Space to reserve on the disk of a SQLite file.

    Raises:
        ConfigurationError: another kind of database, or a URL that cannot be read.
        StoreError: it cannot be opened.
    """

    def __init__(self, url: str, *, reserve_bytes: int) -> None:
        self.url = _read(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.file = _file(self.url)
        self.reserve = None if self.file is None else files.Reserve(self.file, reserve_bytes)
        self._in_memory = self.is_sqlite and self.file is None
        self._reset_after_fork()
        reset_in_children(self)
        self.read(lambda _: None)
        if self.reserve is not None and not self.reserve.hold(resize=True):
            _log.warning(
                "%s: %d bytes could not be reserved on its disk", self.name, self.reserve.size
            )

    @property
    def name(self) -> str:
        """The file or URL, without a password."""
        if self.is_sqlite:
            return str(self.file or "the store in memory")
        return self.url.render_as_string(hide_password=True)

    def _reset_after_fork(self) -> None:
        """Connect anew when next used; in a forked child, leave the parent's connections alone."""
        if (engine := getattr(self, "_engine", None)) is not None:
            _inherited.append(engine)
        self._engine: sa.Engine | None = None
        self._identity: files.Identity | None = None
        self._opening = threading.RLock()
        self._turn: AbstractContextManager[Any] = nullcontext()
        if self._in_memory:
            # One connection holds a database in memory, so its transactions take turns.
            self._turn = threading.RLock()
        elif self.is_sqlite:
            self._turn = ClosedAtForks(self._dispose)

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run work that reads in one transaction."""
        return self._run(work, writes=False)

    def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Run work that writes in one transaction: all of it is stored, or nothing.

        On SQLite it holds the write lock from the start, so that it never has to be repeated.
        """
        return self._run(work, writes=True)

    def close(self) -> None:
        """Close the connections; the next use opens new ones."""
        with self._opening:
            self._dispose()
            self._engine = None

    @contextmanager
    def reserve_given_up(self) -> Iterator[None]:
        """Within, the reserved space is free to clean a full disk; then it is reserved again."""
        if self.reserve is None:
            yield
            return
        try:
            with self.reserve.given_up():
                yield
        except OSError as error:
            raise StoreFullError(
                f"{self.name}: the disk is full, and another process is cleaning in the reserved "
                "space; try again"
            ) from error
        if not self.reserve.hold():
            _log.warning("%s: the disk is too full to reserve space again", self.name)

    def empty_log(self) -> None:
        """Move a SQLite file's write-ahead log into the file, and truncate it.

        Does nothing while the disk has no room for it.
        """
        if self.file is None:
            return
        with suppress(StoreFullError), self._translated(), self._turn:
            connection = self._current().raw_connection()
            try:
                connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
            finally:
                connection.close()

    def _dispose(self) -> None:
        if self._engine is not None:
            self._engine.dispose()

    def lease_clock(self) -> sa.ColumnElement[float]:
        """The time for leases, in seconds; no change of a host's wall clock moves it.

        PostgreSQL's own clock, which all monitors share; on SQLite the host's monotonic clock,
        which all of its processes share, and which begins anew when the host does.
        """
        if self.is_sqlite:
            return sa.literal(time.monotonic())
        return sa.cast(sa.func.extract("epoch", sa.func.clock_timestamp()), sa.Double)

    def lease_now(self, connection: sa.Connection) -> float:
        """``lease_clock`` of this moment."""
        return float(connection.execute(sa.select(self.lease_clock())).scalar_one())

    def new_sample_ids(self, connection: sa.Connection, n: int) -> list[int]:
        """The ids of the next n samples, ascending; never used before."""
        if not self.is_sqlite:
            places = sa.func.generate_series(1, n).table_valued("place")
            ids = sa.select(sa.func.nextval(f"{samples.name}_sample_id_seq")).select_from(places)
            return sorted(connection.execute(ids).scalars())
        last = connection.exec_driver_sql(
            "SELECT seq FROM sqlite_sequence WHERE name = ?", (samples.name,)
        ).scalar()
        return list(range((last or 0) + 1, (last or 0) + 1 + n))

    def upsert(
        self,
        connection: sa.Connection,
        table: sa.Table,
        values: dict[str, Any],
        *,
        changes: dict[str, Any] | None,
    ) -> None:
        """Insert a row, or change the row with its key; ``changes`` None leaves that as it is."""
        dialect: Any = sqlite if self.is_sqlite else postgresql
        insert = dialect.insert(table).values(values)
        connection.execute(
            insert.on_conflict_do_nothing()
            if changes is None
            else insert.on_conflict_do_update(index_elements=list(table.primary_key), set_=changes)
        )

    def _run(self, work: Callable[[sa.Connection], T], *, writes: bool) -> T:
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._once(work, writes=writes)
            except StoreCorruptError:
                if not self._quarantine():
                    raise
            except (StoreUnavailableError, StoreReadOnlyError):
                if not self._was_moved():
                    raise
        return self._once(work, writes=writes)

    def _once(self, work: Callable[[sa.Connection], T], *, writes: bool) -> T:
        with self._translated(), self._turn, self._current().connect() as connection:
            connection.execution_options(**{lite.WRITES: writes})
            with connection.begin():
                return work(connection)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise the database's errors as the store's."""
        try:
            yield
        except sa.exc.TimeoutError as error:
            raise StoreLockedError(
                f"{self.name}: no connection came free within {BUSY_SECONDS:g} s; use the store "
                "from fewer threads"
            ) from error
        except (sa.exc.DBAPIError, sqlite3.Error) as error:
            ours = faults.store_error(error, self.name, self.file)
            if ours is None:
                raise
            raise ours from error

    def _current(self) -> sa.Engine:
        """The engine; a new one if there is none, or if the file is no longer the one it opened.

        Another process may have moved a damaged file aside, and samples written to that are lost.
        """
        engine = self._engine
        if engine is not None and self._is_in_place():
            return engine
        with self._opening:
            if self._engine is None or not self._is_in_place():
                former = self._identity
                # Asked now: once it is closed, a new file may get the number of the former.
                is_another = former is not None and not self._is_in_place()
                self.close()
                self._engine = self._opened()
                if is_another and self.file is not None:
                    self._tell_of_new_file(self.file, former)
            return self._engine

    def _tell_of_new_file(self, file: Path, former: files.Identity | None) -> None:
        """Log that the file is another than the one that was in use, and why."""
        aside = files.quarantined(file)
        if aside is not None and files.identity(aside) == former:
            _log.error("%s was damaged, and another process moved it to %s", self.name, aside)
            return
        _log.error(
            "%s was deleted or replaced while it was in use: what was stored in the former file is "
            "missing, and its samples count as lost; stop the processes that write to a store "
            "before you move it",
            self.name,
        )

    def _is_in_place(self) -> bool:
        return self.file is None or files.identity(self.file) == self._identity

    def _opened(self) -> sa.Engine:
        if self.file is None:
            return self._set_up()
        with files.kept_in_place(self.file):
            files.make_private(self.file)
            self._identity = files.identity(self.file)
            engine = self._set_up()
            self._identity = files.identity(self.file)
            return engine

    def _set_up(self) -> sa.Engine:
        engine = self._engine_for_url()
        try:
            if self.is_sqlite:
                lite.persist(engine, BUSY_SECONDS)
            self._create_tables(engine)
        except BaseException:
            engine.dispose()
            raise
        return engine

    def _engine_for_url(self) -> sa.Engine:
        options: dict[str, Any] = {
            "pool_timeout": BUSY_SECONDS,
            "max_overflow": 20,
            "connect_args": {"timeout": BUSY_SECONDS},
        }
        if not self.is_sqlite:
            options["pool_pre_ping"] = True
            options["connect_args"] = {"connect_timeout": max(2, round(BUSY_SECONDS))}
        elif self._in_memory:
            options = {"poolclass": StaticPool, "connect_args": {"check_same_thread": False}}
        # Parameters hold payloads: no message may show them.
        engine = sa.create_engine(self.url, hide_parameters=True, **options)
        if not self.is_sqlite:
            sa.event.listen(engine, "connect", _bound_waiting)
            return engine
        name, patience = self.name, BUSY_SECONDS
        sa.event.listen(engine, "connect", lambda driver, _: lite.prepare(driver, name))
        sa.event.listen(engine, "begin", lambda connection: lite.begin(connection, patience))
        return engine

    def _create_tables(self, engine: sa.Engine) -> None:
        """Create the tables, or bring those of an older release to this one's schema."""
        with engine.connect() as connection, connection.begin():
            if self._version(connection) == SCHEMA_VERSION:
                return
        with engine.connect() as connection:
            connection.execution_options(**{lite.WRITES: True})
            with connection.begin():
                if not self.is_sqlite:
                    # Others may have a long table to bring up to date.
                    patience = f"SET LOCAL lock_timeout = {round(1e3 * _CREATION_SECONDS)}"
                    connection.exec_driver_sql(patience)
                    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_CREATION_LOCK})")
                version = self._version(connection)
                if version is None:
                    metadata.create_all(connection, checkfirst=False)
                    connection.execute(sa.insert(schema_version).values(version=SCHEMA_VERSION))
                elif version < SCHEMA_VERSION:
                    self._migrate(connection, version)

    def _migrate(self, connection: sa.Connection, version: int) -> None:
        # Imported here alone: it takes as long as all else at the start of a process.
        from ctxguard.monitor.store.migrations import migrate

        try:
            migrate(connection, version)
        except sa.exc.DBAPIError as error:
            if faults.store_error(error, self.name, self.file) is not None:
                raise
            what = f"its schema version {version} cannot be brought to {SCHEMA_VERSION}"
            raise faults.half_made(self.name, version, what) from error
        _log.info("%s: schema version %d was brought to %d", self.name, version, SCHEMA_VERSION)

    def _version(self, connection: sa.Connection) -> int | None:
        """The schema version of the tables; None where there are none."""
        tables = metadata.tables.keys() & sa.inspect(connection).get_table_names()
        if not tables:
            return None
        if schema_version.name not in tables:
            raise faults.half_made(self.name, None, f"it has no table {schema_version.name}")
        newest = sa.select(sa.func.max(schema_version.c.version))
        version: int | None = connection.execute(newest).scalar()
        faults.refuse_newer(self.name, version)
        if version is None or version < 1:
            raise faults.half_made(self.name, version, f"its schema version is {version}")
        missing = sorted(metadata.tables.keys() - tables)
        if version == SCHEMA_VERSION and missing:
            raise faults.half_made(self.name, version, f"it has no table {missing[0]}")
        return version

    def _was_moved(self) -> bool:
        """Whether another store moved the file aside while this one used it."""
        if self.file is None:
            return False
        with files.kept_in_place(self.file):
            return not self._is_in_place()

    def _quarantine(self) -> bool:
        """Whether a damaged file was moved aside, here or by another process."""
        if self.file is None:
            return False
        with self._opening:
            self.close()
            try:
                moved = files.quarantine(self.file, self._identity)
            except OSError as error:
                raise StoreCorruptError(
                    f"{self.name} is damaged and could not be moved aside ({error.strerror}); "
                    "move it away by hand, with its -wal and -shm files"
                ) from error
        self._identity = None
        if moved is not None:
            _log.error(
                "%s is damaged: it was moved to %s, and a new store was begun", self.name, moved
            )
        return True


def storable(text: str) -> str:
    r"""Text that every database takes: what UTF-8 or PostgreSQL cannot hold is escaped.

    >>> storable("a\x00b\ud800")
    'a\\x00b\\ud800'
    """
    if "\0" in text:
        text = text.replace("\0", "\\x00")
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def sqlite_file(url: str) -> Path | None:
    """The file of a SQLite store; None for one in memory, or on a server.

    Raises:
        ConfigurationError: the URL cannot be used.
    """
    return _file(_read(url))


def _file(url: sa.URL) -> Path | None:
    name = url.database or ""
    is_file = url.get_backend_name() == "sqlite" and name not in ("", ":memory:")
    return Path(name) if is_file else None


def _read(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError as error:
        raise ConfigurationError(
            "the store's URL cannot be read; write sqlite:///path/to/samples.db or "
            "postgresql://user@host/database"
        ) from error
    backend = parsed.get_backend_name()
    if backend in ("postgresql", "postgres"):
        require("psycopg", "postgres")
        return parsed.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise ConfigurationError(
            f"a sample store cannot be kept in {backend!r}; use sqlite:///path/to/samples.db or "
            "postgresql://user@host/database"
        )
    if parsed.query or (parsed.database or "").startswith("file:"):
        raise ConfigurationError(
            "a SQLite store is named by a plain path, without options; write "
            "sqlite:///path/to/samples.db"
        )
    return parsed.set(drivername="sqlite+pysqlite")


def _bound_waiting(connection: Any, _: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SET lock_timeout = {round(1e3 * BUSY_SECONDS)}")
    connection.commit()
