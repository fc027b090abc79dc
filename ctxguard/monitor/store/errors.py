"""Converts a database's errors to the store's, which say how to fix them and never hold data.

Looks at the disk, and at the process's user.
"""

import os
import sqlite3
from pathlib import Path
from shutil import disk_usage
from typing import Any

import sqlalchemy as sa

from ctxguard.errors import (
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StoreReadOnlyError,
    StoreUnavailableError,
)

_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_USER = f"user {os.geteuid()}" if hasattr(os, "geteuid") else "this user"
_WORDS = {
    StoreFullError: "the disk is full; free some space: until then samples are lost",
    StoreLockedError: "another process held a lock for too long; use fewer writers, or "
    "PostgreSQL, where pg_stat_activity shows who holds it",
    StoreReadOnlyError: f"it cannot be written to; make the file and its folder writable for "
    f"{_USER}, or connect to the primary server as a role that may create tables",
    StoreCorruptError: "the database is damaged; move it away with its -wal and -shm files, and "
    "restore a copy or let a new one be created: until then samples are lost",
    StoreUnavailableError: "the disk failed (see the system's log), or the file is on a network "
    "share (use a local disk)",
}
"""The fault, and how to fix it."""
_KIND_OF: dict[int | str, type[StoreError]] = {
    **dict.fromkeys((sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE), StoreFullError),
    **dict.fromkeys(_BUSY, StoreLockedError),
    **dict.fromkeys((sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM), StoreReadOnlyError),
    **dict.fromkeys((sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB), StoreCorruptError),
    **dict.fromkeys((sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PROTOCOL), StoreUnavailableError),
    **dict.fromkeys(("53100", "53400"), StoreFullError),
    **dict.fromkeys(("55P03", "57014", "40P01"), StoreLockedError),
    **dict.fromkeys(("25006", "42501"), StoreReadOnlyError),
    **dict.fromkeys(("XX001", "XX002"), StoreCorruptError),
}
"""Keyed by SQLite's code (a primary code covers its extended ones), or PostgreSQL's SQLSTATE."""


def store_error(
    error: sa.exc.DBAPIError | sqlite3.Error, name: str, file: Path | None
) -> StoreError | None:
    """Convert a database's error to one of the store ``name``; None if the program is at fault."""
    cause: Any = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    code, is_sqlite = _code_of(cause), isinstance(cause, sqlite3.Error)
    kind = _KIND_OF.get(code)
    if isinstance(code, int):
        kind = kind or _KIND_OF.get(code & 0xFF)
        if code & 0xFF == sqlite3.SQLITE_CANTOPEN and file is not None:
            kind = _unopened(file.parent)
            if kind is StoreUnavailableError:
                said = f"name a file that {_USER} may open, in a folder that exists"
                return kind(f"{name} cannot be opened; {said}")
    if kind is not None:
        return kind(f"{name}: {_WORDS[kind]} ({cause if is_sqlite else f'SQLSTATE {code}'})")
    is_lost = type(cause).__name__ == "OperationalError" or str(code)[:2] in ("08", "57", "53")
    if is_lost and not is_sqlite:
        # Without a state the message is the driver's, about the connection: it holds no data.
        said = "the connection broke" if code else str(cause).strip().partition("\n")[0]
        return StoreUnavailableError(
            f"{name}: the server cannot be reached ({said}); start it, and check the URL"
        )
    return None


def is_busy(error: BaseException) -> bool:
    """Return whether SQLite says that others hold the database."""
    code = _code_of(error)
    return isinstance(code, int) and code & 0xFF in _BUSY


def _code_of(error: BaseException | None) -> Any:
    """Return SQLite's extended result code or a SQLSTATE; empty if there is none."""
    return getattr(error, "sqlite_errorcode", None) or getattr(error, "sqlstate", None) or ""


def _unopened(folder: Path) -> type[StoreError]:
    """Say why SQLite cannot open or create a file in a folder."""
    if not folder.is_dir():
        return StoreUnavailableError
    if not os.access(folder, os.W_OK):
        return StoreReadOnlyError
    return StoreUnavailableError if disk_usage(folder).free else StoreFullError
