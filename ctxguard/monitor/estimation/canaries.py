"""Canaries: labelled samples that a judge judges again, which show that it has changed.

An endpoint may replace a model behind an unchanged name. Verdicts on the same passages then differ
in one direction more often than in the other. Pure: no I/O, no clock, no logging.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from itertools import product
from typing import NamedTuple

from ctxguard.monitor.judges import Judgment

PER_DAY = 5
"""Samples of a series that are judged again each day."""
CHANGED = 100.0
"""The e-value from which a judge counts as changed: of those that never change at most 1 in 100
ever gets there, however long they are watched."""

_BETS = tuple(product((1.0, -1.0), (0.5, 0.9)))
"""Direction and size of each bet on the direction of a change."""


class Changes(NamedTuple):
    """How the verdicts on one sample have changed since they were given first.

    Attributes:
        relevant: Passages that people call relevant and the judge now does too, less those that it
            no longer does.
        irrelevant: The same of those that people call irrelevant.
        all: The same of all its passages, graded by people or not.
        n: Passages with both verdicts.
        n_same: How many of these have the same.
    """

    relevant: int
    irrelevant: int
    all: int
    n: int
    n_same: int

    @classmethod
    def of(
        cls,
        before: Mapping[str, Judgment],
        now: Mapping[str, Judgment],
        people: Mapping[str, Judgment],
    ) -> "Changes":
        """Compare two verdicts on each passage, by passage id.

        >>> no, yes = Judgment("a", 0), Judgment("a", 1)
        >>> Changes.of({"a": yes, "b": no}, {"a": no, "b": no}, {"a": yes})
        Changes(relevant=-1, irrelevant=0, all=-1, n=2, n_same=1)
        """
        both = before.keys() & now.keys()
        step = {one: (now[one].grade > 0) - (before[one].grade > 0) for one in both}
        by_people = {True: 0, False: 0}
        for one in both & people.keys():
            by_people[people[one].grade > 0] += step[one]
        same = sum(not each for each in step.values())
        return cls(by_people[True], by_people[False], sum(step.values()), len(both), same)


@dataclass(frozen=True, slots=True)
class Canaries:
    """What the canaries of one series have shown so far.

    While the judge is the same, its two verdicts on a sample may be swapped without anybody
    noticing: a change to more relevant passages is as likely as one to fewer. So each direction is
    bet on, from every moment on (the k-th change at a share of 1/(k(k+1))): a non-negative
    martingale with mean 1 (Shafer and Vovk, "Game-Theoretic Foundations for Probability and
    Finance", 2019), whatever share of its verdicts a judge changes by itself.

    Attributes:
        day: Of the last canary, in days since the epoch.
        today: How many that day had.
        n: Samples with a change, by kind in the order of ``Changes``.
        wealth: Of each kind and bet, what the shares that are at stake have grown to.
        changed_at: When the judge was found to have changed, in seconds since the epoch; None
            while it was not.
    """

    day: int = -1
    today: int = 0
    n: tuple[int, ...] = (0, 0, 0)
    wealth: tuple[float, ...] = (0.0,) * 3 * len(_BETS)
    changed_at: float | None = None

    @property
    def e_value(self) -> float:
        """Evidence that the judge has changed; about 1 or less while it has not."""
        kept = [1.0 / (n + 1) for n in self.n for _ in _BETS]
        return (sum(self.wealth) + sum(kept)) / len(self.wealth)

    def left(self, day: int) -> int:
        """How many canaries a day still has."""
        return PER_DAY - self.today if day == self.day else PER_DAY

    def after(self, changes: Changes, day: int, now_seconds: float) -> "Canaries":
        """The state after one more canary.

        >>> found = Canaries()
        >>> for _ in range(14):
        ...     found = found.after(Changes(-1, 0, -1, 5, 4), 1, 7.0)
        >>> found.changed_at
        7.0
        """
        n, wealth = list(self.n), list(self.wealth)
        for kind, change in enumerate(changes[:3]):
            if not change:
                continue
            n[kind] += 1
            share = 1.0 / (n[kind] * (n[kind] + 1))
            for place, (direction, size) in enumerate(_BETS, kind * len(_BETS)):
                gain = 1.0 + direction * size * math.copysign(1.0, change)
                wealth[place] = min((wealth[place] + share) * gain, 1e100)
        today = self.today + 1 if day == self.day else 1
        found = replace(self, day=day, today=today, n=tuple(n), wealth=tuple(wealth))
        is_new = found.changed_at is None and found.e_value >= CHANGED
        return replace(found, changed_at=now_seconds) if is_new else found

    def to_json(self) -> str:
        """Write the state, for ``from_json``."""
        return json.dumps(astuple(self))

    @classmethod
    def from_json(cls, text: str | None) -> "Canaries":
        """Read a state; a new one of None, or of a text that is none.

        >>> Canaries.from_json(Canaries(day=3).to_json()).day, Canaries.from_json("7").day
        (3, -1)
        """
        try:
            day, today, n, wealth, changed_at = json.loads(text or "null")
            found = cls(int(day), int(today), tuple(map(int, n)), tuple(map(float, wealth)))
            is_whole = len(found.n) == 3 and len(found.wealth) == len(cls().wealth)
            changed_at = None if changed_at is None else float(changed_at)
        except (TypeError, ValueError):
            return cls()
        return replace(found, changed_at=changed_at) if is_whole else cls()


def canaries_key(series: str) -> str:
    """The key under which the store keeps the state of a series."""
    return f"canaries {series}"
