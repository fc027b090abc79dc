"""What the parts of the sample store share: one database, and methods that are transactions."""

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import sqlalchemy as sa

from ctxguard.errors import CtxguardError, DataError
from ctxguard.monitor.store.database import Database
from ctxguard.monitor.store.types import Limits

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="StorePart")

_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What a row raises that holds anything else than what was written."""
_MOST_VALUES = 1_000
"""In one statement, below every database's limit on parameters."""


class StorePart:
    """A group of the store's methods.

    Args:
        database: The database of all parts.
        limits: What ``clean`` keeps.
        clock: Seconds since the epoch.
    """

    def __init__(self, database: Database, limits: Limits, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock
        self.limits = limits

    def _lock_writers(self, connection: sa.Connection, table: sa.Table) -> None:
        """Exclude other writers, for a transaction that reads before it inserts."""
        # On SQLite every transaction that writes excludes the others.
        if not self._database.is_sqlite:
            connection.exec_driver_sql(f"LOCK TABLE {table.name} IN SHARE ROW EXCLUSIVE MODE")


def reads(
    method: Callable[Concatenate[S, sa.Connection, P], T],
) -> Callable[Concatenate[S, P], T]:
    """Run a method in one transaction that reads, whose connection is its first argument."""
    return _in_transaction(method, "read")


def writes(
    method: Callable[Concatenate[S, sa.Connection, P], T],
) -> Callable[Concatenate[S, P], T]:
    """Run a method in one transaction that writes: all of it is stored, or nothing."""
    return _in_transaction(method, "write")


def _in_transaction(
    method: Callable[Concatenate[S, sa.Connection, P], T], run: Literal["read", "write"]
) -> Callable[Concatenate[S, P], T]:
    @wraps(method)
    def in_transaction(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        transaction: Callable[[Callable[[sa.Connection], T]], T] = getattr(self._database, run)
        try:
            return transaction(lambda connection: method(self, connection, *args, **kwargs))
        except CtxguardError:
            raise  # some are ValueErrors too
        except _UNREADABLE as error:
            raise DataError(
                f"{self._database.name}: {method.__name__} met a value that ctxguard cannot have "
                f"stored ({type(error).__name__}); restore a copy, or begin a new store"
            ) from error

    return in_transaction


def rows_with(
    connection: sa.Connection,
    query: sa.Select[Any],
    column: sa.ColumnElement[Any],
    values: Sequence[Any],
) -> Iterator[sa.Row[Any]]:
    """The rows of a query in which a column has one of many values."""
    for some in chunks(values):
        yield from connection.execute(query.where(column.in_(some)))


def chunks(values: Sequence[T], size: int = _MOST_VALUES) -> list[Sequence[T]]:
    """Pieces small enough for one statement's parameters.

    >>> chunks([1, 2, 3], 2)
    [[1, 2], [3]]
    """
    return [values[start : start + size] for start in range(0, len(values), size)]
