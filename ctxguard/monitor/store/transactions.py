"""What the functions of the sample store share: one database, and that each is a transaction."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa

from ctxguard.errors import CtxguardError, DataError
from ctxguard.monitor.store.database import Database
from ctxguard.monitor.store.types import Limits

P = ParamSpec("P")
T = TypeVar("T")

_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What a row raises that holds anything else than what was written."""
_MOST_VALUES = 1_000
"""In one statement, below every database's limit on parameters."""


class StoreHandle:
    """The database of a store, what ``clean`` keeps of it, and seconds since the epoch."""

    def __init__(self, database: Database, limits: Limits, clock: Callable[[], float]) -> None:
        self.database = database
        self.limits = limits
        self.clock = clock

    def lock_writers(self, connection: sa.Connection, table: sa.Table) -> None:
        """Exclude other writers, for a transaction that reads before it inserts."""
        # On SQLite every transaction that writes excludes the others.
        if not self.database.is_sqlite:
            connection.exec_driver_sql(f"LOCK TABLE {table.name} IN SHARE ROW EXCLUSIVE MODE")


def reads(
    function: Callable[Concatenate[StoreHandle, sa.Connection, P], T],
) -> Callable[Concatenate[StoreHandle, P], T]:
    """Run a function in one transaction that reads, whose connection is its second argument."""
    return _in_transaction(function, writes=False)


def writes(
    function: Callable[Concatenate[StoreHandle, sa.Connection, P], T],
) -> Callable[Concatenate[StoreHandle, P], T]:
    """Run a function in one transaction that writes: all of it is stored, or nothing."""
    return _in_transaction(function, writes=True)


def _in_transaction(
    function: Callable[Concatenate[StoreHandle, sa.Connection, P], T], *, writes: bool
) -> Callable[Concatenate[StoreHandle, P], T]:
    @wraps(function)
    def in_transaction(store: StoreHandle, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with store.database.transaction(writes=writes) as connection:
                return function(store, connection, *args, **kwargs)
        except CtxguardError:
            raise  # some are ValueErrors too
        except _UNREADABLE as error:
            raise DataError(
                f"{store.database.name}: {function.__name__} met a value that ctxguard cannot have "
                f"stored ({type(error).__name__}); restore a copy, or begin a new store"
            ) from error

    return in_transaction


def record(kind: type[T], row: sa.Row[Any], /, **other: object) -> T:
    """A dataclass of a row whose columns are named as its fields, but for those given."""
    read = {each.name: getattr(row, each.name) for each in fields(kind) if each.name not in other}  # type: ignore[arg-type]
    return kind(**read, **other)


def rows_with(
    connection: sa.Connection,
    query: sa.Select[Any],
    column: sa.ColumnElement[Any],
    values: Sequence[Any],
) -> Iterator[sa.Row[Any]]:
    """The rows of a query in which a column has one of many values."""
    for start in range(0, len(values), _MOST_VALUES):
        some = values[start : start + _MOST_VALUES]
        yield from connection.execute(query.where(column.in_(some)))


def by_sample(
    connection: sa.Connection, query: sa.Select[tuple[int, T]], sample_ids: Sequence[int]
) -> dict[int, T]:
    """The second column of a query by the first, the sample, which is one of many."""
    column = query.selected_columns[0]
    return dict(map(tuple, rows_with(connection, query, column, sample_ids)))


def chunks(values: Sequence[T], size: int = _MOST_VALUES) -> list[Sequence[T]]:
    """Pieces small enough for one statement's parameters.

    >>> chunks([1, 2, 3], 2)
    [[1, 2], [3]]
    """
    return [values[start : start + size] for start in range(0, len(values), size)]
