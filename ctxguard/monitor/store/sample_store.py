"""The sample store: what writers, monitors, people and exports do with it.

Its methods are grouped by who uses them: ``workers``, ``queue``, ``judgments``, ``labelling``,
``picks``, ``graded``, ``budgets``, ``retention``. Each is one transaction, unless its docstring
says otherwise, and may be called from any thread of any process. Errors and logs never hold a
payload.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import sqlalchemy as sa

from ctxguard.monitor.store import files, schema
from ctxguard.monitor.store.budgets import Budgets
from ctxguard.monitor.store.database import Database, storable
from ctxguard.monitor.store.graded import Graded
from ctxguard.monitor.store.judgments import Judgments
from ctxguard.monitor.store.labelling import Labelling
from ctxguard.monitor.store.part import reads, writes
from ctxguard.monitor.store.picks import Picks
from ctxguard.monitor.store.queue import SampleQueue
from ctxguard.monitor.store.retention import Retention
from ctxguard.monitor.store.types import DEFAULT_LIMITS, Limits
from ctxguard.monitor.store.workers import Workers

_ID_KEY = "store id"


class SampleStore(Workers, SampleQueue, Budgets, Judgments, Labelling, Picks, Graded, Retention):
    """Samples, their judgments, and people's labels of them; opened by ``open``.

    On a fault of the database every method raises a ``StoreError`` that says how to mend it. A
    damaged SQLite file is moved aside and a new one begun, and the call is repeated with that.
    """

    @classmethod
    def open(
        cls, url: str, *, limits: Limits = DEFAULT_LIMITS, clock: Callable[[], float] = time.time
    ) -> "SampleStore":
        """Open a store; create its tables, or bring those of an older release up to date.

        Args:
            url: ``sqlite:///path/samples.db`` for the processes of one host, ``sqlite://`` for
                one in memory, ``postgresql://user@host/database`` for several hosts.
            limits: What ``clean`` keeps, and the reserved space.
            clock: Seconds since the epoch.

        Raises:
            ConfigurationError: a URL that cannot be used.
            MissingExtraError: the database's driver is not installed.
            StoreUnavailableError: the folder or the server cannot be reached.
            StoreSchemaError: it is a newer release's, another program's or not a whole store; it
                is not changed.
            StoreError: another fault of the database.
        """
        return cls(Database(url, reserve_bytes=limits.reserve_bytes), limits, clock)

    @property
    def name(self) -> str:
        """The file or URL, without a password."""
        return self._database.name

    @property
    def quarantined(self) -> Path | None:
        """The damaged database file that was moved aside last, by any process; None without one.

        It is reported until the file is moved away, so that an alarm lasts until someone has
        seen to it.
        """
        file = self._database.file
        return None if file is None else files.quarantined(file)

    def counts_folder(self) -> Path | None:
        """Where the processes of this host and user that write to this store keep their counts.

        Beside a SQLite file; for a database server in the folder for temporary files, by the
        store's own id: one server may be reached by many names, and hold many stores.

        Returns:
            None for a store in memory.

        Raises:
            StoreError: the store's id cannot be read.
        """
        if self._database.is_sqlite:
            file = self._database.file
            return None if file is None else file.with_name(f"{file.name}.counts")
        return Path(tempfile.gettempdir()) / f"ctxguard-{os.geteuid()}-{self._store_id()}"

    @writes
    def _store_id(self, connection: sa.Connection) -> str:
        """32 random hexadecimal digits, the same for whoever opens this store."""
        state = schema.state
        new = {"key": _ID_KEY, "value": uuid4().hex}
        self._database.upsert(connection, state, new, changes=None)
        query = sa.select(state.c.value).where(state.c.key == _ID_KEY)
        store_id: str = connection.execute(query).scalar_one()
        return store_id

    def close(self) -> None:
        """Close its connections; it opens new ones when used again."""
        self._database.close()

    def __enter__(self) -> "SampleStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @reads
    def get_state(self, connection: sa.Connection, key: str) -> str | None:
        """A value that monitors keep; None where none was set."""
        state = schema.state.c
        query = sa.select(state.value).where(state.key == storable(key))
        return connection.execute(query).scalar()

    @writes
    def set_state(self, connection: sa.Connection, key: str, value: str) -> None:
        """Keep a value for this and other monitors."""
        row = {"key": storable(key), "value": storable(value)}
        self._database.upsert(connection, schema.state, row, changes={"value": row["value"]})
