"""What the monitors of a store share: who leads, what they counted, and other values."""

import json
from collections.abc import Callable, Mapping
from typing import TypeVar

from ctxguard.monitor.store.database import AHEAD_SECONDS
from ctxguard.monitor.store.transactions import Transaction, writes

T = TypeVar("T")

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
def update_state(db: Transaction, key: str, change: Callable[[str | None], tuple[T, str]]) -> T:
    """Replace a value that monitors keep; nobody else changes it meanwhile.

    Args:
        change: Of the value, None where none was set: makes what is returned here, and the value
            that takes its place.
    """
    found, value = change(db.locked_state(key))
    db.set_state(key, value)
    return found
