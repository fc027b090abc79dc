"""What judging has spent in the current hour and day, shared by all monitors of a store."""

import math
from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from ctxguard.monitor.store import schema
from ctxguard.monitor.store.database import storable
from ctxguard.monitor.store.part import StorePart, writes
from ctxguard.monitor.store.types import BudgetPeriod, Spent

_budgets = schema.budgets.c


class Budgets(StorePart):
    """What monitors reserve before they judge, and settle afterwards."""

    @writes
    def spend(
        self,
        connection: sa.Connection,
        name: str,
        periods: Sequence[BudgetPeriod],
        *,
        least: float = 0.0,
        most: float = 0.0,
        cost_per_call: float = 0.0,
        returned: float = 0.0,
        cost: float = 0.0,
        returned_to: Mapping[str, int] | None = None,
    ) -> tuple[float, dict[str, Spent]]:
        """Settle what was reserved before, and reserve calls of the judge.

        Calls that are reserved are spent until they are returned. A period that has begun for one
        monitor has begun for all of them.

        Args:
            name: Whose budget.
            periods: The current ones, by the clock of the caller, with their limits.
            least: As many calls must be free for any to be reserved, ≥ 0.
            most: How many to reserve, where so many are free.
            cost_per_call: What a reserved call is expected to cost.
            returned: Calls that were reserved and not used.
            cost: Cost beyond what was reserved; negative where it was less.
            returned_to: Number of each kind of period in which they were reserved.

        Returns:
            How many calls were reserved, 0 or at least ``least``; and by kind, the period in force
            and all that is spent or reserved in it.
        """
        own = storable(name)
        for kind, number in (returned_to or {}).items():
            connection.execute(
                sa.update(schema.budgets)
                .where(_budgets.name == own, _budgets.period == _key(kind, number))
                .values(calls=_budgets.calls - returned, cost=_budgets.cost + cost)
            )
        spent = {period.kind: self._in_force(connection, own, period) for period in periods}
        free = min(
            [most, *(_free(period, spent[period.kind], cost_per_call) for period in periods)]
        )
        if free <= 0.0 or free < least:
            return 0.0, spent
        for kind, one in spent.items():
            spent[kind] = Spent(one.number, one.calls + free, one.cost + free * cost_per_call)
            connection.execute(
                sa.update(schema.budgets)
                .where(_budgets.name == own, _budgets.period == _key(kind, one.number))
                .values(calls=spent[kind].calls, cost=spent[kind].cost)
            )
        return free, spent

    def _in_force(self, connection: sa.Connection, name: str, period: BudgetPeriod) -> Spent:
        """The period of a kind that began last, locked until the transaction ends."""
        new = {"name": name, "period": _key(period.kind, period.number), "calls": 0.0, "cost": 0.0}
        # Changes nothing where it is there, but waits for whoever has it.
        self._database.upsert(connection, schema.budgets, new, changes={"name": name})
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
        return Spent(number, by_number[number].calls, by_number[number].cost)


def _free(period: BudgetPeriod, spent: Spent, cost_per_call: float) -> float:
    """How many more calls the limits of a period allow."""
    free = math.inf
    if period.max_calls is not None:
        free = period.max_calls - spent.calls
    if period.max_cost is not None and spent.cost >= period.max_cost:
        return 0.0
    if period.max_cost is not None and cost_per_call:
        free = min(free, (period.max_cost - spent.cost) / cost_per_call)
    return free


def _key(kind: str, number: int) -> str:
    return f"{kind} {number}"
