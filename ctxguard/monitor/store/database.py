"""Holds the store on which functions act: its transactions, and the steps that they share.

Connections never cross a fork, and transactions wait a bounded time. If someone has moved away
SQLite's file, the next transaction begins a new one. Touches the database and the clock, and logs.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import fields
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from ctxguard._support.fork_safety import ClosedAtForks, reset_in_children
from ctxguard.errors import CtxguardError, DataError
from ctxguard.monitor.store import schema
from ctxguard.monitor.store.engine import begin, database_file, identity, open_engine, read_url
from ctxguard.monitor.store.errors import store_error
from ctxguard.monitor.store.ownership import Ownership
from ctxguard.monitor.store.types import Limits

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)

_DEFAULT_LIMITS = Limits()
_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Errors from reading a row that the store cannot have written."""
_MOST_VALUES = 1_000
"""Values in one statement, below every database's limit on parameters."""
_inherited: list[object] = []
"""A parent's connections, never closed in a child: that would end the parent's too."""


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
        self, url: str, *, limits: Limits = _DEFAULT_LIMITS, clock: Callable[[], float] = time.time
    ) -> None:
        self.limits = limits
        self.clock = clock
        self.url = read_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.file = database_file(self.url)
        self._in_memory = self.is_sqlite and self.file is None
        self._reset_after_fork()
        reset_in_children(self)

    @classmethod
    def open(
        cls, url: str, *, limits: Limits = _DEFAULT_LIMITS, clock: Callable[[], float] = time.time
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
        """Raise the same error as ``open`` if the store cannot be used at present."""
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
        """Reconnect at the next use; in a forked child, leave the parent's connections alone."""
        if (engine := getattr(self, "_engine", None)) is not None:
            _inherited.append(engine)
        if (former := getattr(self, "_ownership", None)) is not None:
            former.leave_to_parent()
            _inherited.append(former)
        self._ownership = Ownership(self.file, self.name, self._connect)
        self._engine: sa.Engine | None = None
        self._identity: tuple[int, int] | None = None
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
        """Run the block in one transaction: everything it writes is stored, or nothing.

        The database's errors are raised as the store's.
        """
        try:
            with self._turn, self._connect() as connection:
                if not writes and not self.is_sqlite:
                    # All that it reads is of one moment, as on SQLite.
                    connection.execution_options(isolation_level="REPEATABLE READ")
                with connection.begin():
                    begin(connection, writes=writes)
                    yield connection
        except (sa.exc.DBAPIError, sqlite3.Error) as error:
            ours = store_error(error, self.name, self.file)
            if ours is None:
                raise
            raise ours from error

    def own(self) -> bool:
        """Become or stay the store's only owner, until it is closed or the process ends.

        False while another process, or another store of this one, owns it. A StoreError where the
        database cannot be used at present.
        """
        return self._in_memory or self._ownership.take()

    @property
    def is_owned(self) -> bool:
        """Whether this store owned its database when it last looked."""
        return self._ownership.is_held

    def disown(self) -> None:
        """Release the store for another owner."""
        self._ownership.release()

    def close(self) -> None:
        """Close the connections, and give up ownership; the next use opens new connections."""
        self._ownership.release()
        with self._opening:
            self._dispose()
            self._engine = None

    def _connect(self) -> sa.Connection:
        return self._current().connect()

    def _dispose(self) -> None:
        if self._engine is not None:
            self._engine.dispose()

    def _current(self) -> sa.Engine:
        """Return the engine, or a new one if there is none or its file has been replaced.

        Someone may have moved a damaged file away: what is written to that would be lost.
        """
        engine = self._engine
        if engine is not None and self._is_in_place():
            return engine
        with self._opening:
            if self._engine is None or not self._is_in_place():
                # Read now: once the file is closed, a new file may get its number.
                is_another = self._identity is not None and not self._is_in_place()
                self._dispose()
                self._engine, self._identity = open_engine(self.url, self.name)
                if is_another:
                    _log.error(
                        "%s was deleted or replaced while it was in use: what was stored in the "
                        "former file is not in the new one",
                        self.name,
                    )
            return self._engine

    def _is_in_place(self) -> bool:
        return self.file is None or identity(self.file) == self._identity


class Transaction:
    """One transaction of a store."""

    def __init__(self, store: Store, connection: sa.Connection) -> None:
        self.store = store
        self.is_sqlite = store.is_sqlite
        self.execute = connection.execute
        self._connection = connection
        self._series: dict[str, int] = {}

    def lock_writers(self, table: sa.Table) -> None:
        """Exclude other writers, because the transaction reads before it inserts."""
        # On SQLite a writing transaction excludes all others.
        if not self.is_sqlite:
            self.execute(sa.text(f"LOCK TABLE {table.name} IN SHARE ROW EXCLUSIVE MODE"))

    def new_sample_ids(self, n: int) -> list[int]:
        """Return the ids of the next n samples, ascending; never used before."""
        table = schema.samples.name
        if not self.is_sqlite:
            places = sa.func.generate_series(1, n).table_valued("place")
            ids = sa.select(sa.func.nextval(f"{table}_sample_id_seq")).select_from(places)
            return sorted(self.execute(ids).scalars())
        query = "SELECT seq FROM sqlite_sequence WHERE name = ?"
        last = self._connection.exec_driver_sql(query, (table,)).scalar() or 0
        return list(range(last + 1, last + 1 + n))

    def insertion(self, table: sa.Table) -> Any:
        """Build an INSERT that can handle a row with the same key."""
        return (sqlite if self.is_sqlite else postgresql).insert(table)

    def insert(self, table: sa.Table, rows: Sequence[dict[str, Any]]) -> None:
        """Insert rows, if there are any."""
        if rows:
            self.execute(sa.insert(table), rows)

    def replace(self, table: sa.Table, rows: Sequence[dict[str, Any]]) -> None:
        """Insert rows, or change the given columns of rows whose key exists."""
        if rows:
            insert, key = self.insertion(table), table.primary_key
            new = {name: insert.excluded[name] for name in rows[0] if name not in key.columns}
            self.execute(insert.on_conflict_do_update(index_elements=list(key), set_=new), rows)

    def scalars(self, query: sa.Select[T]) -> list[T]:
        """Return the first column of all rows."""
        return list(self.execute(query).scalars())

    def raw_rows(self, query: sa.Select[Any]) -> Sequence[Any]:
        """Return the driver's own rows: for a million, SQLAlchemy takes longer than the query."""
        if self.is_sqlite:
            cursor: Any = self.execute(query).cursor
        else:
            driver: Any = self._connection.connection.driver_connection
            compiled = query.compile(self._connection)
            # Bytes are sent as they are, not as text.
            cursor = driver.cursor(binary=True).execute(str(compiled), compiled.params)
        with closing(cursor):
            rows: Sequence[Any] = cursor.fetchall()
        return rows

    def rows_with(
        self, query: sa.Select[Any], column: sa.ColumnElement[Any], values: Iterable[Any] | None
    ) -> Iterator[sa.Row[Any]]:
        """Return the rows of a query whose column has one of many values, or all rows."""
        if values is None:
            yield from self.execute(query)
        else:
            for some in chunks(sorted(set(values))):
                yield from self.execute(query.where(column.in_(some)))

    def by_sample(self, query: sa.Select[tuple[int, T]], sample_ids: Iterable[int]) -> dict[int, T]:
        """Return a query's second column by its first, the sample id, for many samples."""
        return dict(map(tuple, self.rows_with(query, query.selected_columns[0], sample_ids)))

    def series_id(self, series: str) -> int:
        """Return the id of a series, or -1, which no row has, if it has not begun."""
        if series not in self._series:
            table = schema.series.c
            found = self.execute(sa.select(table.series_id).where(table.name == series)).scalar()
            if found is None:
                return -1
            self._series[series] = found
        return self._series[series]

    def state(self, key: str) -> str | None:
        """Read a value that a monitor keeps; None if none was set."""
        table = schema.state.c
        return self.execute(sa.select(table.value).where(table.key == key)).scalar() or None

    def set_state(self, key: str, value: str) -> None:
        """Save a value for this monitor and for later ones."""
        self.replace(schema.state, [{"key": key, "value": value}])


@contextmanager
def snapshot(store: Store) -> Iterator[None]:
    """Run all of this thread's reads in the block in one transaction, which sees one moment."""
    with store.transaction(writes=False) as connection:
        store.of_thread.reading = Transaction(store, connection)
        try:
            yield
        finally:
            del store.of_thread.reading


def reads(function: Callable[Concatenate[Transaction, P], T]) -> Callable[Concatenate[Store, P], T]:
    """Turn a function of a transaction into one of a store, which reads in one transaction."""
    return _of_store(function, writes=False)


def writes(
    function: Callable[Concatenate[Transaction, P], T],
) -> Callable[Concatenate[Store, P], T]:
    """Do the same with a writing transaction: everything is stored, or nothing."""
    return _of_store(function, writes=True)


def _of_store(
    function: Callable[Concatenate[Transaction, P], T], *, writes: bool
) -> Callable[Concatenate[Store, P], T]:
    @wraps(function)
    def in_transaction(store: Store, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            if not writes and hasattr(store.of_thread, "reading"):
                return function(store.of_thread.reading, *args, **kwargs)
            with store.transaction(writes=writes) as connection:
                return function(Transaction(store, connection), *args, **kwargs)
        except CtxguardError:
            raise  # some are ValueErrors too
        except _UNREADABLE as error:
            raise DataError(
                f"{store.name}: {function.__name__} found a value that ctxguard cannot have stored "
                f"({type(error).__name__}); restore a copy, or start a new store"
            ) from error

    return in_transaction


def record(kind: type[T], row: sa.Row[Any], /, **other: object) -> T:
    """Make a dataclass from a row whose columns are named like its fields, except those given."""
    read = {each.name: getattr(row, each.name) for each in fields(kind) if each.name not in other}  # type: ignore[arg-type]
    return kind(**read, **other)


def chunks(values: Sequence[T], size: int = _MOST_VALUES) -> list[Sequence[T]]:
    """Cut values into pieces small enough for one statement's parameters.

    >>> chunks([1, 2, 3], 2)
    [[1, 2], [3]]
    """
    return [values[start : start + size] for start in range(0, len(values), size)]
