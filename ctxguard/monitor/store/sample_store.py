"""The sample store: what writers, monitors, people and exports do with it.

Its methods are grouped by who uses them: ``accounts``, ``queue``, ``judgments``, ``labelling``,
``picks``, ``graded``, ``budgets``, ``retention``. Each is one transaction, unless its docstring
says otherwise, and may be called from any thread of any process. Errors and logs never hold a
payload.
"""

import time
from collections.abc import Callable

import sqlalchemy as sa

from ctxguard.monitor.store import schema
from ctxguard.monitor.store.accounts import WorkerAccounts
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


class SampleStore(
    WorkerAccounts, SampleQueue, Budgets, Judgments, Labelling, Picks, Graded, Retention
):
    """Samples, their judgments, and people's labels of them; opened by ``open``.

    On a fault of the database every method raises a ``StoreError`` that says how to mend it. Once
    it is mended the store goes on: there is room again, or a damaged file was moved away.
    """

    @classmethod
    def open(
        cls, url: str, *, limits: Limits = DEFAULT_LIMITS, clock: Callable[[], float] = time.time
    ) -> "SampleStore":
        """Open a store, and create its tables where there are none.

        Args:
            url: ``sqlite:///path/samples.db`` for the processes of one host, ``sqlite://`` for
                one in memory, ``postgresql://user@host/database`` for several hosts.
            limits: What ``clean`` keeps.
            clock: Seconds since the epoch.

        Raises:
            ConfigurationError: a URL that cannot be used.
            MissingExtraError: the database's driver is not installed.
            StoreUnavailableError: the folder or the server cannot be reached.
            StoreSchemaError: it is another release's, another program's or not a whole store; it
                is not changed.
            StoreError: another fault of the database.
        """
        store = cls.at(url, limits=limits, clock=clock)
        store.check()
        return store

    @classmethod
    def at(
        cls, url: str, *, limits: Limits = DEFAULT_LIMITS, clock: Callable[[], float] = time.time
    ) -> "SampleStore":
        """A store that is opened when it is first used; see ``open``."""
        return cls(Database(url), limits, clock)

    @reads
    def check(self, connection: sa.Connection) -> None:
        """Raise what ``open`` raises where the store cannot be used at present."""

    @property
    def name(self) -> str:
        """The file or URL, without a password."""
        return self._database.name

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
