"""What the monitors of a store share: who leads, what they counted and spent, and other values."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import sqlalchemy as sa

from ctxguard.monitor.store import schema
from ctxguard.monitor.store.database import AHEAD_SECONDS
from ctxguard.monitor.store.transactions import Transaction, insertion, reads, writes
from ctxguard.monitor.store.types import BudgetPeriod

_LEADER = "leader"
_budgets = schema.budgets.c


@writes
def lead(db: Transaction, who: str, *, lease_seconds: float, task: str = _LEADER) -> bool:
    """Become or stay the one monitor that leads, until the lease ends.

    Args:
        lease_seconds: 0 to step down.
        task: In which it leads: each task has its own leader.

    Returns:
        Whether ``who`` leads; False while another does.
    """
    now, own = db.lease_now(), schema.leases.c
    lease = {"holder": who, "leased_at": now, "leased_until": now + lease_seconds}
    is_free = sa.or_(
        own.holder == who, own.leased_until <= now, own.leased_at > now + AHEAD_SECONDS
    )
    return db.upsert(schema.leases, {"name": task, **lease}, changes=lease, where=is_free)


@writes
def add_counts(
    db: Transaction, series: str, more: Mapping[tuple[str, ...], float]
) -> dict[tuple[str, ...], float]:
    """Add what a monitor has counted; return the totals of all monitors, which never fall.

    Args:
        more: By name and label values, what was counted since the last call.
    """
    table = schema.counts
    rows = [{"series": series, "key": json.dumps(key), "n": n} for key, n in more.items()]
    if rows:
        insert = insertion(table, is_sqlite=db.is_sqlite)
        added = {"n": table.c.n + insert.excluded.n}
        upsert = insert.on_conflict_do_update(index_elements=list(table.primary_key), set_=added)
        # In one order, or two monitors might wait for each other.
        db.execute(upsert, sorted(rows, key=lambda row: str(row["key"])))
    query = sa.select(table.c.key, table.c.n).where(table.c.series == series)
    return {tuple(json.loads(row.key)): row.n for row in db.execute(query)}


@writes
def spend(
    db: Transaction,
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
    _add(db, name, returned_to or {}, -returned, cost)
    spent: dict[str, BudgetPeriod] = {}
    for period in periods:
        key = {"name": name, "kind": period.kind}
        begun = {"number": period.number, "calls": 0.0, "cost": 0.0}
        # Where it changes nothing, it still waits for whoever has the row.
        is_next = _budgets.number < period.number
        db.upsert(schema.budgets, {**key, **begun}, changes=begun, where=is_next)
        query = sa.select(_budgets.number, _budgets.calls, _budgets.cost)
        row = db.execute(query.filter_by(**key)).one()
        spent[period.kind] = replace(period, **row._mapping)
    if not all(period.fits(calls) for period in spent.values()):
        return False, spent
    _add(db, name, {kind: one.number for kind, one in spent.items()}, calls, 0.0)
    return True, {kind: replace(one, calls=one.calls + calls) for kind, one in spent.items()}


def _add(db: Transaction, name: str, numbers: Mapping[str, int], calls: float, cost: float) -> None:
    """Add to what is spent in the periods of some kinds, as far as they have not ended."""
    for kind, number in numbers.items() if calls or cost else ():
        db.execute(
            sa.update(schema.budgets)
            .where(_budgets.name == name, _budgets.kind == kind, _budgets.number == number)
            .values(calls=_budgets.calls + calls, cost=_budgets.cost + cost)
        )


@reads
def get_state(db: Transaction, key: str) -> str | None:
    """Read a value that monitors keep; None where none was set."""
    state = schema.state.c
    return db.execute(sa.select(state.value).where(state.key == key)).scalar()


@writes
def set_state(db: Transaction, key: str, value: str) -> None:
    """Keep a value for this and other monitors."""
    db.upsert(schema.state, {"key": key, "value": value}, changes={"value": value})


@reads
def check(_: Transaction) -> None:
    """Raise what ``SampleStore.open`` raises where the store cannot be used at present."""
