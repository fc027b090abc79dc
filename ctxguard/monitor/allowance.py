"""What the budget lets a monitor take up now, and what the judge has taken of it.

The budget's arithmetic is in ``budget.py``; here it meets the queue, the judge's accounts and the
store, in which the spending outlives the process.
"""

import time
from collections.abc import Callable

from ctxguard.monitor.budget import Budget, Spending
from ctxguard.monitor.judges import Judge
from ctxguard.monitor.store import SampleStore, State

_ARRIVALS_SECONDS = 10.0


class Allowance:
    """The probability with which samples are taken up for judging.

    Args:
        budget: The most that judging may take; None for no limit.
        store: Whose samples wait, and where the spending is kept.
        judge: Whose accounts say what was paid, where it keeps any.
        series: The judge's.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        budget: Budget | None,
        store: SampleStore,
        judge: Judge,
        series: str,
        clock: Callable[[], float],
    ) -> None:
        self._budget = budget
        self._store = store
        self._judge = judge
        self._key = f"budget {series}"
        self._clock = clock
        self._spending: Spending | None = None
        self._cost = 0.0
        self._is_kept = True
        self._arrivals: tuple[float, int] | None = None
        self._arriving_per_second = 0.0
        self._waiting = 0
        self.share = 1.0
        """As it was last worked out; 0.0 once all is spent."""

    def share_now(self) -> float:
        """The probability with which the next sample is taken up; 0.0 once all is spent."""
        if self._budget is None:
            return 1.0
        if self._spending is None:
            spending = Spending(self._budget, self._clock)
            if known := self._store.get_state(self._key):
                spending.restore(known)
            self._spending = spending
        now = time.monotonic()
        if self._arrivals is None or now - self._arrivals[0] >= _ARRIVALS_SECONDS:
            stored = sum(worker.stored for worker in self._store.workers())
            if self._arrivals is not None:
                since, before = self._arrivals
                self._arriving_per_second = max(stored - before, 0) / (now - since)
            self._arrivals = (now, stored)
            self._waiting = self._store.states().get(State.PENDING, 0)
        self.share = self._spending.share(self._waiting, self._arriving_per_second)
        return self.share

    def affords(self, passages: int) -> bool:
        """Whether a sample that may take so many verdicts keeps within the budget."""
        return self._spending is None or self._spending.affords(passages)

    def taken(self) -> None:
        """A sample waits no longer."""
        self._waiting = max(self._waiting - 1, 0)

    def spend(self, passages: int) -> None:
        """The judge was asked about the passages of one sample."""
        if self._spending is None:
            return
        accounts_of = getattr(self._judge, "accounts", None)
        cost = (None if accounts_of is None else accounts_of().cost) or 0.0
        self._spending.spend(passages, cost - self._cost)
        self._cost = cost
        self._is_kept = False

    def keep(self) -> None:
        """Put down what was spent since this was last called, for the next process."""
        if self._spending is not None and not self._is_kept:
            self._store.set_state(self._key, self._spending.to_json())
            self._is_kept = True
