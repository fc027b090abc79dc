"""Holds the lock that makes one monitor the owner of a store while others wait.

On SQLite it is a lock on a file beside the database. On PostgreSQL it is an advisory lock of a
transaction that stays open, on a connection of its own: behind a pooler that lends the server's
connections by the transaction, such as PgBouncer, a lock of a session would stay with a connection
that others get next, while an open transaction keeps its connection. A row with a heartbeat would
also work, but its lock ends late, and by a clock. Here the lock of a process that was killed is
free at once. Touches the file or the database, and the monotonic clock.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa

from ctxguard._support.atomic_write import PRIVATE, lock
from ctxguard.errors import StoreReadOnlyError
from ctxguard.monitor.store import errors as faults

_LOCK = 7_243_119
"""An arbitrary number that, with the samples table's, names the lock of one store in a database."""
_CHECK_SECONDS = 5.0
"""Seconds between uses of the connection that holds the lock, which show that it still exists."""
_TRY = sa.text(
    f"SELECT pg_try_advisory_xact_lock({_LOCK}, 'ctxguard_samples'::regclass::oid::int4)"
)
# A server may end idle transactions, and takes two hours to notice a lost host.
_KEEP = sa.text(
    "SELECT set_config(name, CASE WHEN unit IS NULL OR name LIKE '%timeout' THEN '0' ELSE '15' END,"
    " true) FROM pg_settings WHERE name IN ('idle_in_transaction_session_timeout', "
    "'transaction_timeout', 'tcp_keepalives_idle', 'tcp_keepalives_interval')"
)


class Ownership:
    """The lock of a store, held by one ``Store`` object; for any thread.

    It is on a file beside ``file``, or, without one, in a transaction of PostgreSQL.
    """

    def __init__(self, file: Path | None, name: str, connect: Callable[[], sa.Connection]) -> None:
        self._beside = None if file is None else Path(f"{os.path.realpath(file)}-monitor")
        self._name = name
        self._connect = connect
        self._taking = threading.Lock()
        self._file: int | None = None
        self._connection: sa.Connection | None = None
        self._checked_at = 0.0

    def take(self) -> bool:
        """Take or keep the lock; return whether it is held."""
        with self._taking:
            if self._beside is None:
                return self._keeps_connection() or self._take_connection()
            return self._file is not None or self._take_file(self._beside)

    @property
    def is_held(self) -> bool:
        """Whether the lock was held when last checked."""
        return self._file is not None or self._connection is not None

    def leave_to_parent(self) -> None:
        """Forget the lock in a forked child; the parent keeps it."""
        self._close_file()

    def release(self) -> None:
        """Release the lock."""
        with self._taking:
            self._close_file()
            self._close_connection()

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _close_connection(self) -> None:
        if self._connection is not None:
            # Closing it, however that goes, ends the transaction too.
            self._connection.invalidate()
            self._connection.close()
            self._connection = None

    def _take_file(self, beside: Path) -> bool:
        try:
            descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
        except OSError as error:
            raise StoreReadOnlyError(
                f"{beside} cannot be opened ({error.strerror}): the monitor locks it; make the "
                "file and its folder writable"
            ) from error
        if lock(descriptor):
            self._file = descriptor
            return True
        os.close(descriptor)
        return False

    def _keeps_connection(self) -> bool:
        """Return whether the transaction that holds the lock is still open."""
        if self._connection is None:
            return False
        if time.monotonic() < self._checked_at + _CHECK_SECONDS:
            return True
        try:
            self._connection.execute(sa.text("SELECT 1"))
        except sa.exc.DBAPIError:
            self._close_connection()
            return False
        self._checked_at = time.monotonic()
        return True

    def _take_connection(self) -> bool:
        connection = self._connect()
        try:
            if connection.execute(_TRY).scalar():
                connection.execute(_KEEP)
                self._connection, self._checked_at = connection, time.monotonic()
                return True
        except sa.exc.DBAPIError as error:
            connection.close()
            raise faults.store_error(error, self._name, None) or error from error
        connection.close()
        return False
