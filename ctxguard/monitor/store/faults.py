"""A database's own errors as the store's, each saying what mends it. Never with the data."""

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
    StoreSchemaError,
    StoreUnavailableError,
)
from ctxguard.monitor.store.schema import SCHEMA_VERSION

_FREE_SPACE = (
    "free space on its disk, or lower max_bytes or max_age_seconds and clean: until then samples "
    "are lost"
)
_SHM_SIZE = sqlite3.SQLITE_IOERR_SHMSIZE


def in_words(
    error: sa.exc.DBAPIError | sqlite3.Error, name: str, file: Path | None
) -> StoreError | None:
    """The store's error for a database's; None where it is a fault of the program's.

    Args:
        error: As SQLAlchemy or the driver raised it.
        name: What messages call the store.
        file: Of a SQLite store; None in memory and for PostgreSQL.
    """
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    if isinstance(cause, sqlite3.Error):
        return _of_sqlite(cause, name, file)
    return None if cause is None else _of_postgresql(cause, name)


def refuse_newer(name: str, found: int | None) -> None:
    """Raise StoreSchemaError for tables that a newer release made."""
    if found is not None and found > SCHEMA_VERSION:
        raise StoreSchemaError(
            f"{name} has schema version {found}, this release reads {SCHEMA_VERSION}; it was left "
            "as it is: upgrade ctxguard here, or give this release another store",
            found=found,
            known=SCHEMA_VERSION,
        )


def is_busy(error: BaseException) -> bool:
    """Whether SQLite says that others hold the database."""
    return _code(error) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _code(error: BaseException) -> int:
    code = getattr(error, "sqlite_errorcode", 0)
    return code if isinstance(code, int) else 0


def _of_sqlite(error: sqlite3.Error, name: str, file: Path | None) -> StoreError | None:
    code = _code(error)
    kind = code & 0xFF
    if kind == sqlite3.SQLITE_FULL or code == _SHM_SIZE:
        return StoreFullError(f"{name}: the disk is full; {_FREE_SPACE}")
    if is_busy(error):
        return StoreLockedError(
            f"{name}: others held the write lock for too long; have fewer processes write, or "
            "move to PostgreSQL"
        )
    if kind in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StoreCorruptError(
            f"{name}: the database is damaged; restore a copy, or begin a new store"
        )
    return _of_sqlite_file(error, name, file)


def _of_sqlite_file(error: sqlite3.Error, name: str, file: Path | None) -> StoreError | None:
    kind = _code(error) & 0xFF
    if kind in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return _read_only(name)
    if kind == sqlite3.SQLITE_CANTOPEN:
        return _cannot_open(name, file)
    if kind in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PROTOCOL):
        return StoreUnavailableError(
            f"{name}: the disk failed ({error}); see the system's log. A SQLite store must lie "
            "on a disk of this host, not on a network share"
        )
    return None


def _read_only(name: str) -> StoreReadOnlyError:
    return StoreReadOnlyError(
        f"{name} cannot be written; make the file and its folder writable for user "
        f"{_user()}, or name another place"
    )


def _cannot_open(name: str, file: Path | None) -> StoreError:
    if file is not None and not file.parent.is_dir():
        return StoreUnavailableError(f"{name}: there is no folder {file.parent}; make it first")
    if file is not None and file.is_dir():
        return StoreUnavailableError(f"{name} is a folder; name a file in it")
    if file is not None and not os.access(file.parent, os.W_OK):
        return _read_only(name)
    if file is not None and _has_no_space(file.parent):
        return StoreFullError(f"{name}: the disk is full; {_FREE_SPACE}")
    return StoreUnavailableError(f"{name} cannot be opened; check its name and its permissions")


def _has_no_space(folder: Path) -> bool:
    try:
        return hasattr(os, "statvfs") and os.statvfs(folder).f_bavail == 0
    except OSError as error:
        return error.errno == errno.ENOSPC


def _user() -> str:
    return str(os.geteuid()) if hasattr(os, "geteuid") else "this one"


_POSTGRESQL_LOCKED = ("55P03", "57014", "40P01")
_POSTGRESQL_FULL = ("53100", "53400")
_POSTGRESQL_READ_ONLY = ("25006", "42501")
_POSTGRESQL_CORRUPT = ("XX001", "XX002")


def _of_postgresql(error: BaseException, name: str) -> StoreError | None:
    state = getattr(error, "sqlstate", None)
    if state in _POSTGRESQL_FULL:
        return StoreFullError(f"{name}: the server's disk is full; {_FREE_SPACE}")
    if state in _POSTGRESQL_LOCKED:
        return StoreLockedError(
            f"{name}: others held a lock for too long (SQLSTATE {state}); try again, and look "
            "for long transactions in pg_stat_activity"
        )
    if state in _POSTGRESQL_READ_ONLY:
        return StoreReadOnlyError(
            f"{name} cannot be written (SQLSTATE {state}); connect to the primary, as a role "
            "that may create and write tables there"
        )
    if state in _POSTGRESQL_CORRUPT:
        return StoreCorruptError(
            f"{name}: the server says that its data is damaged (SQLSTATE {state}); restore it there"
        )
    if type(error).__name__ == "OperationalError" or (state or "")[:2] in ("08", "57", "53"):
        # A message of the connection's: who, where and why, no data.
        why = "the connection broke" if state else str(error).strip().splitlines()[0:1]
        reason = why if isinstance(why, str) else "".join(why)
        return StoreUnavailableError(
            f"{name}: the server cannot be reached ({reason}); start it, and check the URL"
        )
    return None
