"""What the monitors of a store share: who leads, what they counted and spent, and other values."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ctxguard.monitor.store.database import AHEAD_SECONDS
from ctxguard.monitor.store.transactions import Transaction, reads, writes
from ctxguard.monitor.store.types import BudgetPeriod

_LEADER = "leader"


@writes
def lead(db: Transaction, who: str, *, lease_seconds: float, task: str = _LEADER) -> bool:
    """Become or stay the one monitor that leads, until the lease ends.

    Args:
        lease_seconds: 0 to step down.
        task: In which it leads: each task has its own leader.

    Returns:
        Whether ``who`` leads; False while another does.
    """
    key = f"lease {task}"
    held, now = db.locked_state(key), db.lease_now()
    holder, begun, until = json.loads(held) if held else (who, 0.0, 0.0)
    if holder != who and begun - AHEAD_SECONDS <= now < until:
        return False
    db.set_state(key, json.dumps([who, now, now + lease_seconds]))
    return True


@writes
def add_counts(
    db: Transaction, series: str, more: Mapping[tuple[str, ...], float]
) -> dict[tuple[str, ...], float]:
    """Add what a monitor has counted; return the totals of all monitors, which never fall.

    Args:
        more: By name and label values, what was counted since the last call.
    """
    key = f"counts {series}"
    totals = {tuple(name): n for *name, n in json.loads(db.locked_state(key) or "[]")}
    for name, n in more.items():
        totals[name] = totals.get(name, 0.0) + n
    if more:
        db.set_state(key, json.dumps([[*name, n] for name, n in totals.items()]))
    return totals


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
    key = f"budget {name}"
    kept: dict[str, list[float]] = json.loads(db.locked_state(key) or "{}")
    spent: dict[str, BudgetPeriod] = {}
    for period in periods:
        number, n, paid = kept.get(period.kind, (-1, 0.0, 0.0))
        if number == (returned_to or {}).get(period.kind):
            n, paid = n - returned, paid + cost
        if number < period.number:
            number, n, paid = period.number, 0.0, 0.0
        spent[period.kind] = replace(period, number=int(number), calls=n, cost=paid)
    fits = all(period.fits(calls) for period in spent.values())
    if fits:
        spent = {kind: replace(one, calls=one.calls + calls) for kind, one in spent.items()}
    now = {kind: [one.number, one.calls, one.cost] for kind, one in spent.items()}
    db.set_state(key, json.dumps(now))
    return fits, spent


@reads
def get_state(db: Transaction, key: str) -> str | None:
    """Read a value that monitors keep; None where none was set."""
    return db.state(key)


@writes
def set_state(db: Transaction, key: str, value: str) -> None:
    """Keep a value for this and other monitors."""
    db.set_state(key, value)


@reads
def check(_: Transaction) -> None:
    """Raise what ``SampleStore.open`` raises where the store cannot be used at present."""
