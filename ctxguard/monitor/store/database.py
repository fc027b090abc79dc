"""The database of a store: connections, transactions, and errors that say how to mend them.

Connections never cross a fork, and transactions wait a bounded time. SQLite has a write-ahead
log, short waits for locks, and returns space to the disk. If someone has moved its file away, the
next transaction starts a new one.
"""

import logging
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from ctxguard._support.fork_safety import ClosedAtForks, reset_in_children
from ctxguard._support.postgresql_url import SCHEMES, own_options
from ctxguard.errors import ConfigurationError, StoreSchemaError
from ctxguard.monitor.store import errors as faults
from ctxguard.monitor.store.ownership import Ownership
from ctxguard.monitor.store.schema import SCHEMA_VERSION, metadata, schema_version
from ctxguard.monitor.store.types import DEFAULT_LIMITS, Limits

_log = logging.getLogger(__name__)

_Identity = tuple[int, int]

BUSY_SECONDS = 5.0
"""How long a transaction waits for others."""
_WRITES = "ctxguard_writes"
"""The execution option of a transaction that will write."""
_JOURNAL_BYTES = 16 * 2**20
"""Size to which SQLite's log is truncated after a burst."""
_LOOK_SECONDS = (0.0005, 0.003)
"""Seconds between two attempts when others block SQLite."""
_CREATION_LOCK = 7_243_118
"""An arbitrary lock number, shared by processes that create the tables in one PostgreSQL
database."""

_URLS = "write sqlite:///path/to/samples.db, without options, or postgresql://user@host/database"
_inherited: list[object] = []
"""A parent's connections, never closed in the child: closing would end the parent's."""


class Store:
    """A database of samples, which functions act on; opened when it is first used.

    Args:
        url: ``sqlite:///path/samples.db`` for the processes of one host, ``sqlite://`` for
            one in memory, ``postgresql://user@host/database`` for several hosts.
        limits: Limits on how much ``clean`` keeps.
        clock: Seconds since the epoch.

    Raises:
        ConfigurationError: a URL that cannot be used.
        MissingExtraError: the database's driver is not installed.
    """

    def __init__(
        self, url: str, *, limits: Limits = DEFAULT_LIMITS, clock: Callable[[], float] = time.time
    ) -> None:
        self.limits = limits
        self.clock = clock
        self.url = _read(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.file = _file(self.url)
        self._in_memory = self.is_sqlite and self.file is None
        self._reset_after_fork()
        reset_in_children(self)

    @classmethod
    def open(
        cls, url: str, *, limits: Limits = DEFAULT_LIMITS, clock: Callable[[], float] = time.time
    ) -> Self:
        """Open a store, creating its tables if there are none.

        Raises:
            StoreUnavailableError: the folder or the server cannot be reached.
            StoreSchemaError: it belongs to another release or program, or is incomplete; it is not
                changed.
            StoreError: another fault of the database.
        """
        store = cls(url, limits=limits, clock=clock)
        store.check()
        return store

    def check(self) -> None:
        """Raise the error of ``open`` if the store cannot be used at present."""
        with self.transaction(writes=False):
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        if (former := getattr(self, "_ownership", None)) is not None:
            former.leave_to_parent()
            _inherited.append(former)
        self._ownership = Ownership(self.file, self.name, self.connect)
        self._engine: sa.Engine | None = None
        self._identity: _Identity | None = None
        self._opening = threading.RLock()
        self.of_thread = threading.local()
        """Thread-local; within a ``snapshot``, its ``reading`` is that transaction."""
        self._turn: AbstractContextManager[Any] = nullcontext()
        if self._in_memory:
            # One connection holds a database in memory, so its transactions take turns.
            self._turn = threading.RLock()
        elif self.is_sqlite:
            self._turn = ClosedAtForks(self._dispose)

    @contextmanager
    def transaction(self, *, writes: bool) -> Iterator[sa.Connection]:
        """Run the block in one transaction: all that it writes is stored, or nothing.

        On SQLite one that writes holds the write lock from the start, so that it never has to be
        repeated. The database's errors are raised as the store's.
        """
        try:
            # That in memory is never replaced.
            engine = self._engine if self._in_memory else None
            with self._turn, (engine or self._current()).connect() as connection:
                connection.execution_options(**{_WRITES: writes})
                if not writes and not self.is_sqlite:
                    # All that it reads is of one moment, as on SQLite.
                    connection.execution_options(isolation_level="REPEATABLE READ")
                with connection.begin():
                    yield connection
        except (sa.exc.DBAPIError, sqlite3.Error) as error:
            ours = faults.store_error(error, self.name, self.file)
            if ours is None:
                raise
            raise ours from error

    def own(self) -> bool:
        """Become or stay the store's only owner, until it is closed or the process ends.

        Returns:
            Whether this store owns it; False while another process, or another store of this one,
            does.

        Raises:
            StoreError: the database cannot be used at present.
        """
        return self._in_memory or self._ownership.take()

    @property
    def is_owned(self) -> bool:
        """Whether this store owned its database when it last looked."""
        return self._ownership.is_held

    def disown(self) -> None:
        """Release the store for another owner."""
        self._ownership.release()

    def connect(self) -> sa.Connection:
        """Open a connection that its caller closes."""
        return self._current().connect()

    def close(self) -> None:
        """Close the connections, and own it no longer; the next use opens new ones."""
        self._ownership.release()
        with self._opening:
            self._dispose()
            self._engine = None

    def _dispose(self) -> None:
        if self._engine is not None:
            self._engine.dispose()

    def _current(self) -> sa.Engine:
        """Return the engine; a new one if there is none, or if its file has been replaced.

        Someone may have moved a damaged file away: what is written to that would be lost.
        """
        engine = self._engine
        if engine is not None and self._is_in_place():
            return engine
        with self._opening:
            if self._engine is None or not self._is_in_place():
                former = self._identity
                # Read now: once the file is closed, a new file may get its number.
                is_another = former is not None and not self._is_in_place()
                self._dispose()
                if self.file is not None:
                    _make_private(self.file)
                    self._identity = _identity(self.file)
                self._engine = self._set_up()
                if is_another:
                    _log.error(
                        "%s was deleted or replaced while it was in use: what was stored in the "
                        "former file is not in the new one",
                        self.name,
                    )
            return self._engine

    def _is_in_place(self) -> bool:
        return self.file is None or _identity(self.file) == self._identity

    def _set_up(self) -> sa.Engine:
        engine = self._engine_for_url()
        try:
            with engine.connect() as connection, connection.begin():
                is_new = not self._has_tables(connection)
            if self.is_sqlite:
                _persist(engine)
            if is_new:
                self._create_tables(engine)
        except BaseException:
            engine.dispose()
            raise
        return engine

    def _engine_for_url(self) -> sa.Engine:
        # As many connections as threads use the store at once.
        options: dict[str, Any] = {"pool_size": 0, "connect_args": {"timeout": BUSY_SECONDS}}
        if not self.is_sqlite:
            options["pool_pre_ping"] = True
            options["connect_args"] = {
                "connect_timeout": max(2, round(BUSY_SECONDS)),
                # A pooler lends a connection of the server to others between transactions, and
                # statements that it has prepared with it.
                "prepare_threshold": None,
            }
        elif self._in_memory:
            options = {"poolclass": StaticPool, "connect_args": {"check_same_thread": False}}
        # Parameters hold payloads: no message may show them.
        engine = sa.create_engine(self.url, hide_parameters=True, **options)
        if not self.is_sqlite:
            sa.event.listen(engine, "begin", _bound_waiting)
            return engine
        sa.event.listen(engine, "connect", _prepare)
        sa.event.listen(engine, "begin", _begin_alone if self._in_memory else _begin)
        return engine

    def _create_tables(self, engine: sa.Engine) -> None:
        with engine.connect() as connection:
            connection.execution_options(**{_WRITES: True})
            with connection.begin():
                if not self.is_sqlite:
                    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_CREATION_LOCK})")
                if not self._has_tables(connection):
                    metadata.create_all(connection, checkfirst=False)
                    connection.execute(sa.insert(schema_version).values(version=SCHEMA_VERSION))

    def _has_tables(self, connection: sa.Connection) -> bool:
        """Return whether a complete store exists; False if there is none.

        Raises:
            StoreSchemaError: it belongs to another release or program, or is incomplete.
        """
        found = set(sa.inspect(connection).get_table_names())
        tables = metadata.tables.keys()
        if not (found if self.is_sqlite else found & tables):
            return False
        lacking, version = sorted(tables - found), None
        if schema_version.name in found:
            newest = sa.select(sa.func.max(schema_version.c.version))
            version = connection.execute(newest).scalar()
        if version == SCHEMA_VERSION and not lacking:
            return True
        problem = f"has schema version {version}, this release reads {SCHEMA_VERSION}"
        if lacking and version in (None, SCHEMA_VERSION):
            problem = f"is not a whole sample store: it has no table {lacking[0]}"
        raise StoreSchemaError(
            f"{self.name} {problem}. It was not changed: use the release that made it, restore a "
            "whole copy of it, or give ctxguard a store of its own",
            found=version,
            known=SCHEMA_VERSION,
        )


def _identity(file: Path) -> _Identity | None:
    """Return the device and inode of a file; None if there is none."""
    try:
        status = os.stat(file)  # noqa: PTH116  called before every transaction
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _make_private(file: Path) -> None:
    """Create an empty database that only this user can read, if there is none.

    SQLite gives its log the same permissions. An existing file's permissions are left alone.
    """
    # Opening the database will report what is wrong with the folder.
    with suppress(OSError):
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        os.close(os.open(os.path.realpath(file), flags, 0o600))


def _file(url: sa.URL) -> Path | None:
    name = url.database or ""
    is_file = url.get_backend_name() == "sqlite" and name not in ("", ":memory:")
    return Path(name) if is_file else None


def _read(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError as error:
        raise ConfigurationError(f"the store's URL cannot be read; {_URLS}") from error
    backend = parsed.get_backend_name()
    if backend in SCHEMES:
        options = [(name, each) for name, own in parsed.normalized_query.items() for each in own]
        return parsed.set(drivername="postgresql+psycopg", query=dict(own_options(options)))
    if backend != "sqlite" or parsed.query or (parsed.database or "").startswith("file:"):
        raise ConfigurationError(f"a sample store cannot be kept in {backend!r}; {_URLS}")
    return parsed.set(drivername="sqlite+pysqlite")


def _bound_waiting(connection: sa.Connection) -> None:
    """Bound this transaction's wait for locks; not the connection's, which a pooler may lend."""
    driver: Any = connection.connection.driver_connection
    driver.execute(f"SET LOCAL lock_timeout = {round(1e3 * BUSY_SECONDS)}")


def _prepare(connection: sqlite3.Connection, _: object) -> None:
    """Set up a new connection; none of this is kept in the file."""
    connection.isolation_level = None  # only begin() begins transactions
    connection.execute("PRAGMA synchronous = NORMAL")
    # Deleted data must not remain in the file, though overwriting costs a write.
    connection.execute("PRAGMA secure_delete = ON")
    connection.execute(f"PRAGMA journal_size_limit = {_JOURNAL_BYTES}")


def _persist(engine: sa.Engine) -> None:
    """Set up the file's own settings: how it returns space, and its write-ahead log."""

    def choose() -> None:
        with closing(engine.raw_connection()) as connection:
            cursor = connection.cursor()
            # Takes effect while the file is empty, and only before the log is chosen.
            cursor.execute("PRAGMA auto_vacuum = INCREMENTAL")
            cursor.execute("PRAGMA journal_mode = WAL")

    # Processes that create a file together refuse each other at once, without waiting.
    _once_free(choose)


def _once_free(work: Callable[[], object]) -> None:
    """Retry an action that SQLite refuses while others hold the database, as long as for a lock.

    Its own waits grow to 0.1 s, so that a busy store starves some writers for a second; short,
    uneven waits give every writer a turn.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            work()
            return
        except sqlite3.OperationalError as error:
            if not faults.is_busy(error) or time.monotonic() > deadline:
                raise
            time.sleep(random.uniform(*_LOOK_SECONDS))  # noqa: S311  no secret


def _begin_alone(connection: sa.Connection) -> None:
    """Begin a transaction in memory, where no other process waits."""
    driver: Any = connection.connection.driver_connection
    driver.execute("BEGIN")


def _begin(connection: sa.Connection) -> None:
    """Begin a transaction; one that will write has the write lock from the start."""
    driver: Any = connection.connection.driver_connection
    if not connection.get_execution_options().get(_WRITES, False):
        driver.execute("BEGIN")
        return
    driver.execute("PRAGMA busy_timeout = 0")
    try:
        _once_free(lambda: driver.execute("BEGIN IMMEDIATE"))
    finally:
        driver.execute(f"PRAGMA busy_timeout = {round(1e3 * BUSY_SECONDS)}")
