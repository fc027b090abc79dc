"""Opens the database of a store: its URL, SQLite's settings, its tables.

SQLite has a write-ahead log, short waits for locks, and returns space to the disk. Touches files,
the database and the monotonic clock, and waits for locks for random times.
"""

import os
import random
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from ctxguard._support.postgresql_url import SCHEMES, own_options
from ctxguard.errors import ConfigurationError, StoreSchemaError
from ctxguard.monitor.store.errors import is_busy
from ctxguard.monitor.store.schema import SCHEMA_VERSION, metadata, schema_version

BUSY_SECONDS = 5.0
"""How long a transaction waits for others."""
_JOURNAL_BYTES = 16 * 2**20
"""Size to which SQLite's log is truncated after a burst."""
_LOOK_SECONDS = (0.0005, 0.003)
"""Seconds between two attempts while others block SQLite."""
_CREATION_LOCK = 7_243_118
"""An arbitrary lock number that all processes creating tables in a PostgreSQL database share."""

_URLS = "write sqlite:///path/to/samples.db, without options, or postgresql://user@host/database"


def read_url(url: str) -> sa.URL:
    """Parse the URL of a store; raise a ConfigurationError if it cannot be used."""
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


def database_file(url: sa.URL) -> Path | None:
    """Return the file of a SQLite database; None for other databases, or one in memory."""
    name = url.database or ""
    is_file = url.get_backend_name() == "sqlite" and name not in ("", ":memory:")
    return Path(name) if is_file else None


def identity(file: Path) -> tuple[int, int] | None:
    """Return the device and inode of a file; None if there is none."""
    try:
        status = os.stat(file)  # noqa: PTH116  called before every transaction
    except OSError:
        return None
    return status.st_dev, status.st_ino


def open_engine(url: sa.URL, name: str) -> tuple[sa.Engine, tuple[int, int] | None]:
    """Open the database of the store ``name``, creating its tables if there are none.

    Returns the engine, and the ``identity`` of its file, if any; raises StoreSchemaError for the
    database of another release or program, or an incomplete one.
    """
    file, of_file = database_file(url), None
    if file is not None:
        _make_private(file)
        of_file = identity(file)
    is_sqlite = url.get_backend_name() == "sqlite"
    # As many connections as threads use the store at once.
    options: dict[str, Any] = {"pool_size": 0, "connect_args": {"timeout": BUSY_SECONDS}}
    if not is_sqlite:
        options["pool_pre_ping"] = True
        options["connect_args"] = {
            "connect_timeout": max(2, round(BUSY_SECONDS)),
            # A pooler lends a connection of the server to others between transactions, and
            # statements that it has prepared with it.
            "prepare_threshold": None,
        }
    elif file is None:
        options = {"poolclass": StaticPool, "connect_args": {"check_same_thread": False}}
    # Parameters hold payloads: no message may show them.
    engine = sa.create_engine(url, hide_parameters=True, **options)
    if is_sqlite:
        sa.event.listen(engine, "connect", _prepare)
    try:
        with engine.connect() as connection:
            is_new = not _has_tables(connection, name)
        if is_sqlite:
            _persist(engine)
        if is_new:
            with engine.begin() as connection:
                begin(connection, writes=True)
                if not is_sqlite:
                    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_CREATION_LOCK})")
                if not _has_tables(connection, name):
                    metadata.create_all(connection, checkfirst=False)
                    connection.execute(sa.insert(schema_version).values(version=SCHEMA_VERSION))
    except BaseException:
        engine.dispose()
        raise
    return engine, of_file


def begin(connection: sa.Connection, *, writes: bool) -> None:
    """Begin a transaction, or limit its waits for locks.

    On SQLite one that writes holds the write lock from the start, so that it never has to be
    repeated.
    """
    driver: Any = connection.connection.driver_connection
    if connection.dialect.name != "sqlite":
        # Of this transaction, not of the connection, which a pooler may lend.
        driver.execute(f"SET LOCAL lock_timeout = {round(1e3 * BUSY_SECONDS)}")
    elif not writes:
        driver.execute("BEGIN")
    else:
        driver.execute("PRAGMA busy_timeout = 0")
        try:
            _once_free(lambda: driver.execute("BEGIN IMMEDIATE"))
        finally:
            driver.execute(f"PRAGMA busy_timeout = {round(1e3 * BUSY_SECONDS)}")


def _has_tables(connection: sa.Connection, name: str) -> bool:
    """Return whether a store exists; raise a StoreSchemaError if this release cannot use it."""
    found = set(sa.inspect(connection).get_table_names())
    tables = metadata.tables.keys()
    if not (found if connection.dialect.name == "sqlite" else found & tables):
        return False
    lacking, version = sorted(tables - found), None
    if schema_version.name in found:
        version = connection.execute(sa.select(sa.func.max(schema_version.c.version))).scalar()
    if version == SCHEMA_VERSION and not lacking:
        return True
    problem = f"has schema version {version}, but this release reads {SCHEMA_VERSION}"
    if lacking and version in (None, SCHEMA_VERSION):
        problem = f"is not a complete sample store: it has no table {lacking[0]}"
    raise StoreSchemaError(
        f"{name} {problem}. It was not changed: use the release that made it, restore a complete "
        "copy of it, or give ctxguard a store of its own",
        found=version,
        known=SCHEMA_VERSION,
    )


def _make_private(file: Path) -> None:
    """Create an empty database that only this user can read, if there is none.

    SQLite gives its log the same permissions. An existing file's permissions are left alone.
    """
    # Opening the database will report what is wrong with the folder.
    with suppress(OSError):
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        os.close(os.open(os.path.realpath(file), flags, 0o600))


def _prepare(connection: sqlite3.Connection, _: object) -> None:
    """Set up a new connection; none of this is kept in the file."""
    connection.isolation_level = None  # only begin() begins transactions
    connection.execute("PRAGMA synchronous = NORMAL")
    # Deleted data must not remain in the file, though overwriting costs a write.
    connection.execute("PRAGMA secure_delete = ON")
    connection.execute(f"PRAGMA journal_size_limit = {_JOURNAL_BYTES}")


def _persist(engine: sa.Engine) -> None:
    """Apply the settings kept in the file: how it returns space, and its write-ahead log."""

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
            if not is_busy(error) or time.monotonic() > deadline:
                raise
            time.sleep(random.uniform(*_LOOK_SECONDS))  # noqa: S311  no secret
