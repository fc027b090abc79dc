"""How SQLite is set up: a write-ahead log, short waits for locks, space returned to the disk."""

import random
import sqlite3
import time
from typing import Any

import sqlalchemy as sa

from ctxguard.monitor.store import errors as faults

WRITES = "ctxguard_writes"
"""The execution option of a transaction that will write."""

_JOURNAL_BYTES = 16 * 2**20
"""Size to which the log is truncated after a burst."""

_LOOK_SECONDS = (0.0005, 0.003)
"""Wait between two attempts to take the write lock."""


def prepare(connection: sqlite3.Connection, _: object) -> None:
    """Set up a new connection; nothing of it is kept in the file."""
    connection.isolation_level = None  # only begin() begins transactions
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
