"""What judging has spent in the current hour and day, shared by all monitors of a store."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import sqlalchemy as sa

from ctxguard.monitor.store import schema
from ctxguard.monitor.store.database import storable
from ctxguard.monitor.store.transactions import StoreHandle, writes
from ctxguard.monitor.store.types import BudgetPeriod

_budgets = schema.budgets.c


@writes
def spend(
    store: StoreHandle,
    connection: sa.Connection,
    name: str,
    periods: Sequence[BudgetPeriod],
    *,
    calls: float = 0.0,
    returned: float = 0.0,
    cost: float = 0.0,
    returned_to: Mapping[str, int] | None = None,
) -> tuple[bool, dict[str, BudgetPeriod]]:
    """Settle what was reserved before, and reserve calls of the judge: all of them, or none.

    Calls that are reserved are spent until they are returned. A period that has begun for one
    monitor has begun for all of them.

    Args:
        periods: The current ones, by the clock of the caller, with their limits.
        calls: How many to reserve.
        returned: Calls that were reserved and not used.
        cost: Cost since the last call.
        returned_to: Number of each kind of period in which they were reserved.

    Returns:
        Whether the calls were within every limit and are reserved; and by kind, the period in
        force and all that is spent or reserved in it.
    """
    own = storable(name)
    _add(connection, own, returned_to or {}, -returned, cost)
    spent = {period.kind: _in_force(store, connection, own, period) for period in periods}
    if not all(period.fits(calls) for period in spent.values()):
        return False, spent
    numbers = {kind: one.number for kind, one in spent.items()}
    _add(connection, own, numbers, calls, 0.0)
    return True, {kind: replace(one, calls=one.calls + calls) for kind, one in spent.items()}


def _in_force(
    store: StoreHandle, connection: sa.Connection, name: str, period: BudgetPeriod
) -> BudgetPeriod:
    """The period of a kind that began last, locked until the transaction ends."""
    new = {"name": name, "period": _key(period.kind, period.number), "calls": 0.0, "cost": 0.0}
    # Changes nothing where it is there, but waits for whoever has it.
    store.database.upsert(connection, schema.budgets, new, changes={"name": name})
    rows = connection.execute(
        sa.select(schema.budgets)
        .where(_budgets.name == name, _budgets.period.startswith(f"{period.kind} "))
        .with_for_update()
    ).all()
    by_number = {int(row.period.removeprefix(f"{period.kind} ")): row for row in rows}
    number = max(by_number)
    ended = [row.period for other, row in by_number.items() if other != number]
    if ended:
        connection.execute(
            sa.delete(schema.budgets).where(_budgets.name == name, _budgets.period.in_(ended))
        )
    own = by_number[number]
    return replace(period, number=number, calls=own.calls, cost=own.cost)


def _add(
    connection: sa.Connection, name: str, numbers: Mapping[str, int], calls: float, cost: float
) -> None:
    """Add to what is spent in the period of a number, by kind."""
    for kind, number in numbers.items() if calls or cost else ():
        connection.execute(
            sa.update(schema.budgets)
            .where(_budgets.name == name, _budgets.period == _key(kind, number))
            .values(calls=_budgets.calls + calls, cost=_budgets.cost + cost)
        )


def _key(kind: str, number: int) -> str:
    return f"{kind} {number}"
