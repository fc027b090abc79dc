"""How SQLite is set up: a write-ahead log, short waits for locks, space returned to the disk."""

import random
import sqlite3
import time
from typing import Any

import sqlalchemy as sa

from ctxguard.errors import StoreSchemaError
from ctxguard.monitor.store import errors as faults
from ctxguard.monitor.store.schema import SCHEMA_VERSION, schema_version

WRITES = "ctxguard_writes"
"""The execution option of a transaction that will write."""

_JOURNAL_BYTES = 16 * 2**20
"""Size to which the log is truncated after a burst."""

_LOOK_SECONDS = (0.0005, 0.003)
"""Wait between two attempts to take the write lock."""


def prepare(connection: sqlite3.Connection, name: str) -> None:
    """Set up a new connection, unless the file is not a sample store: then nothing is changed.

    Raises:
        StoreSchemaError: it is another release's or another program's.
    """
    connection.isolation_level = None  # only begin() begins transactions
    found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    tables = {table for (table,) in found}
    if tables and schema_version.name not in tables:
        what = "is the database of another program, and was not changed: give the sample store"
        message = f"{name} {what} a file of its own"
        raise StoreSchemaError(message, found=None, known=SCHEMA_VERSION)
    if tables:
        query = f"SELECT max(version) FROM {schema_version.name}"  # noqa: S608  no input
        faults.refuse_other(name, connection.execute(query).fetchone()[0])
    connection.execute("PRAGMA synchronous = NORMAL")
    # Deleted data must not remain in the file, though overwriting costs a write.
    connection.execute("PRAGMA secure_delete = ON")
    connection.execute(f"PRAGMA journal_size_limit = {_JOURNAL_BYTES}")


def persist(engine: sa.Engine, busy_seconds: float) -> None:
    """Set up what the file keeps: how it returns space, and its write-ahead log."""
    deadline = time.monotonic() + busy_seconds
    while True:
        connection = engine.raw_connection()
        try:
            cursor = connection.cursor()
            # Takes effect while the file is empty, and only before the log is chosen.
            cursor.execute("PRAGMA auto_vacuum = INCREMENTAL")
            cursor.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            # Processes that create a file together refuse each other at once, without waiting.
            if not faults.is_busy(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        finally:
            connection.close()


def begin(connection: sa.Connection, busy_seconds: float) -> None:
    """Begin a transaction; one that will write has the write lock from the start.

    SQLite's own waits grow to 0.1 s, so that a busy store starves some writers for a second;
    short, uneven waits give every writer a turn.
    """
    driver: Any = connection.connection.driver_connection
    if not connection.get_execution_options().get(WRITES, False):
        driver.execute("BEGIN")
        return
    deadline = time.monotonic() + busy_seconds
    driver.execute("PRAGMA busy_timeout = 0")
    try:
        while True:
            try:
                driver.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if not faults.is_busy(error) or time.monotonic() > deadline:
                    raise
                time.sleep(random.uniform(*_LOOK_SECONDS))  # noqa: S311  no secret
    finally:
        driver.execute(f"PRAGMA busy_timeout = {round(1e3 * busy_seconds)}")
