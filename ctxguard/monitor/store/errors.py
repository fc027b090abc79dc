"""A database's own errors as the store's, each saying how to mend it. They never hold data."""

import errno
import os
import sqlite3
from pathlib import Path

import sqlalchemy as sa

from ctxguard.errors import (
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StoreReadOnlyError,
    StoreUnavailableError,
)

_DAMAGED = (
    "the database is damaged; move it away with its -wal and -shm files, and restore a copy or let "
    "a new one begin: until then samples are lost"
)
_FREE_SPACE = "free space on its disk: until then samples are lost"
_SQLITE = (
    ((sqlite3.SQLITE_FULL,), StoreFullError, f"the disk is full; {_FREE_SPACE}"),
    (
        (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED),
        StoreLockedError,
        "others held the write lock for too long; use fewer writers, or PostgreSQL",
    ),
    (
        (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB),
        StoreCorruptError,
        _DAMAGED,
    ),
    (
        (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PROTOCOL),
        StoreUnavailableError,
        "the disk failed, see the system's log; or it is a network share, use a local disk",
    ),
)
"""Primary result codes, the error, and what is wrong."""
_POSTGRESQL = (
    (("53100", "53400"), StoreFullError, f"the server's disk is full; {_FREE_SPACE}"),
    (
        ("55P03", "57014", "40P01"),
        StoreLockedError,
        "others held a lock for too long; try again, and see pg_stat_activity",
    ),
    (
        ("25006", "42501"),
        StoreReadOnlyError,
        "it cannot be written; connect to the primary, as a role that may create tables",
    ),
    (
        ("XX001", "XX002"),
        StoreCorruptError,
        "the server says that its data is damaged; restore it there",
    ),
)
"""SQLSTATEs, the error, and what is wrong."""


def store_error(
    error: sa.exc.DBAPIError | sqlite3.Error, name: str, file: Path | None
) -> StoreError | None:
    """Make the store's error of a database's; None for a fault of the program.

    Args:
        error: As SQLAlchemy or the driver raised it.
        name: The store's name in messages.
        file: The file of a SQLite store; None in memory and for PostgreSQL.
    """
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    if isinstance(cause, sqlite3.Error):
        return _of_sqlite(cause, name, file)
    return None if cause is None else _of_postgresql(cause, name)


def is_busy(error: BaseException) -> bool:
    """Tell whether SQLite says that others hold the database."""
    return _code(error) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _code(error: BaseException) -> int:
    code = getattr(error, "sqlite_errorcode", 0)
    return code if isinstance(code, int) else 0


def _of_sqlite(error: sqlite3.Error, name: str, file: Path | None) -> StoreError | None:
    kind = _code(error) & 0xFF
    if kind in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return _read_only(name)
    if kind == sqlite3.SQLITE_CANTOPEN:
        return _cannot_open(name, file)
    if _code(error) == sqlite3.SQLITE_IOERR_SHMSIZE:
        kind = sqlite3.SQLITE_FULL
    for codes, kind_of_error, problem in _SQLITE:
        if kind in codes:
            return kind_of_error(f"{name}: {problem} ({error})")
    return None


def _read_only(name: str) -> StoreReadOnlyError:
    user = str(os.geteuid()) if hasattr(os, "geteuid") else "this one"
    return StoreReadOnlyError(
        f"{name} cannot be written; make the file and its folder writable for user {user}, or "
        "name another place"
    )


def _cannot_open(name: str, file: Path | None) -> StoreError:
    if file is None:
        return StoreUnavailableError(f"{name} cannot be opened")
    if not file.parent.is_dir():
        return StoreUnavailableError(f"{name}: there is no folder {file.parent}; make it first")
    if file.is_dir():
        return StoreUnavailableError(f"{name} is a folder; name a file in it")
    if not os.access(file.parent, os.W_OK):
        return _read_only(name)
    if _has_no_space(file.parent):
        return StoreFullError(f"{name}: the disk is full; {_FREE_SPACE}")
    return StoreUnavailableError(f"{name} cannot be opened; check its name and its permissions")


def _has_no_space(folder: Path) -> bool:
    try:
        return hasattr(os, "statvfs") and os.statvfs(folder).f_bavail == 0
    except OSError as error:
        return error.errno == errno.ENOSPC


def _of_postgresql(error: BaseException, name: str) -> StoreError | None:
    state = getattr(error, "sqlstate", None) or ""
    for states, kind_of_error, problem in _POSTGRESQL:
        if state in states:
            return kind_of_error(f"{name}: {problem} (SQLSTATE {state})")
    if type(error).__name__ == "OperationalError" or state[:2] in ("08", "57", "53"):
        # Without a state the message is the driver's, about the connection: it holds no data.
        lines = ["the connection broke"] if state else str(error).strip().splitlines()
        return StoreUnavailableError(
            f"{name}: the server cannot be reached ({''.join(lines[:1])}); start it, and check "
            "the URL"
        )
    return None
