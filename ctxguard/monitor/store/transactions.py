"""The transactions of a store: each of its functions runs in one; shared steps are here."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from ctxguard.errors import CtxguardError, DataError
from ctxguard.monitor.store import schema
from ctxguard.monitor.store.database import Store

P = ParamSpec("P")
T = TypeVar("T")

_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Errors from reading a row that the store cannot have written."""
_MOST_VALUES = 1_000
"""Values in one statement, below every database's limit on parameters."""


class Transaction:
    """One transaction of a store.

    Attributes:
        store: The store that it belongs to.
        execute: ``Connection.execute`` of its connection.
    """

    def __init__(self, store: Store, connection: sa.Connection) -> None:
        self.store = store
        self.is_sqlite = store.is_sqlite
        self.execute = connection.execute
        self._connection = connection
        self._series: dict[str, int] = {}

    def lock_writers(self, table: sa.Table) -> None:
        """Exclude other writers, for a transaction that reads before it inserts."""
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

    def upsert(
        self,
        table: sa.Table,
        values: dict[str, Any],
        *,
        changes: dict[str, Any] | None,
    ) -> None:
        """Insert a row, or change the row with its key; ``changes`` None leaves that as it is."""
        insert, key = insertion(table, is_sqlite=self.is_sqlite), list(table.primary_key)
        upsert = (
            insert.on_conflict_do_nothing()
            if changes is None
            else insert.on_conflict_do_update(index_elements=key, set_=changes)
        )
        self.execute(upsert.values(values))

    def insert(self, table: sa.Table, rows: Sequence[dict[str, Any]]) -> None:
        """Insert rows, if there are any."""
        if rows:
            self.execute(sa.insert(table), rows)

    def replace(self, table: sa.Table, rows: Sequence[dict[str, Any]]) -> None:
        """Insert rows, or change the given columns of rows whose key exists."""
        if rows:
            insert, key = insertion(table, is_sqlite=self.is_sqlite), list(table.primary_key)
            given = [name for name in rows[0] if name not in table.primary_key.columns]
            new = {name: insert.excluded[name] for name in given}
            self.execute(insert.on_conflict_do_update(index_elements=key, set_=new), rows)

    def scalars(self, query: sa.Select[T]) -> list[T]:
        """Return the first column of all rows."""
        return list(self.execute(query).scalars())

    def raw_rows(self, query: sa.Select[Any]) -> Sequence[Any]:
        """Return the driver's own rows: a million take SQLAlchemy longer than the query."""
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
        self, query: sa.Select[Any], column: sa.ColumnElement[Any], values: Sequence[Any]
    ) -> Iterator[sa.Row[Any]]:
        """Return the rows of a query in which a column has one of many values."""
        for some in chunks(values):
            yield from self.execute(query.where(column.in_(some)))

    def by_sample(self, query: sa.Select[tuple[int, T]], sample_ids: Sequence[int]) -> dict[int, T]:
        """Return the second column of a query by the first, the sample, which is one of many."""
        rows = self.rows_with(query, query.selected_columns[0], sample_ids)
        return dict(map(tuple, rows))

    def series_id(self, series: str) -> int:
        """Return the id of a series; -1, which no row has, for one that has not begun."""
        if series not in self._series:
            table = schema.series.c
            found = self.execute(sa.select(table.series_id).where(table.name == series)).scalar()
            if found is None:
                return -1
            self._series[series] = found
        return self._series[series]

    def state(self, key: str) -> str | None:
        """Read a value that a monitor keeps; None where none was set."""
        table = schema.state.c
        return self.execute(sa.select(table.value).where(table.key == key)).scalar() or None

    def set_state(self, key: str, value: str) -> None:
        """Save a value for this monitor and later ones."""
        self.upsert(schema.state, {"key": key, "value": value}, changes={"value": value})


@contextmanager
def snapshot(store: Store) -> Iterator[None]:
    """Make this thread's reads of a store in the block one transaction, so all of one moment."""
    with store.transaction(writes=False) as connection:
        store.of_thread.reading = Transaction(store, connection)
        try:
            yield
        finally:
            del store.of_thread.reading


def reads(
    function: Callable[Concatenate[Transaction, P], T],
) -> Callable[Concatenate[Store, P], T]:
    """Turn a function of a transaction into one of a store, in a reading transaction."""
    return _of_store(function, writes=False)


def writes(
    function: Callable[Concatenate[Transaction, P], T],
) -> Callable[Concatenate[Store, P], T]:
    """Do the same in a writing transaction: all of it is stored, or nothing."""
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
                f"{store.name}: {function.__name__} met a value that ctxguard cannot have "
                f"stored ({type(error).__name__}); restore a copy, or begin a new store"
            ) from error

    return in_transaction


def insertion(table: sa.Table, *, is_sqlite: bool) -> Any:
    """Make an insertion that can handle a row with the same key."""
    return (sqlite if is_sqlite else postgresql).insert(table)


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
