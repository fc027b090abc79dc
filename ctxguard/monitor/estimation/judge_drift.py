"""Canaries: labelled samples that a judge judges again, which show that it has changed.

An endpoint may replace a model behind an unchanged name. A judge may also waver by itself, so each
canary is judged twice more, on two days: of three verdicts on a passage that are not all the same,
any one is as often the odd one out while the judge is the same; once it has changed, the first is.
Pure: no I/O, no clock, no logging.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from pydantic import TypeAdapter

from ctxguard.core.betting import Evidence
from ctxguard.monitor.judges import Judgment

PER_DAY = 5
"""Samples of a series that become canaries each day."""
TOLERATED = 0.02
"""Share of its verdicts by which a judge may change without counting as changed."""
CHANGED = 2e3
"""The evidence from which a judge counts as changed: while it is the same, at least this many
canaries (400 days) pass on average before that."""

_STAKES = np.array([0.5, 1.0, 1.9])
"""Below 1 / (0.5 + TOLERATED), so that no canary takes all."""


def excess(first: Sequence[bool], *later: Sequence[bool]) -> float:
    """Compare the first verdicts on some passages with two later ones on the same.

    Returns:
        The share of passages on which the first is the odd one out, less half of that on which one
        of the others is: in [−0.5, 1], about 0 while the judge is the same; 0 without passages.

    >>> excess([True, True, True, False], [False, True, True, False], [False, True, False, False])
    0.125
    """
    found = 0.0
    for one, second, third in zip(first, *later, strict=True):
        if second == third != one:
            found += 1.0
        elif second != third:
            found -= 0.5
    return found / max(len(first), 1)


@dataclass(frozen=True, slots=True)
class Canaries:
    """What the canaries of one series have shown so far.

    From every canary on, it is bet that the mean ``excess`` is above ``TOLERATED``; what these bets
    have grown to is added up (``Evidence.from_all``).

    Attributes:
        day: Of the last new canary, in days since the epoch.
        today: How many that day had.
        waiting: Canaries that were judged a second time and wait for a third: sample, day, and
            whether each passage is relevant, as ``1`` or ``0``.
        wealth: What each bet has grown to.
        changed_at: When the judge was found to have changed, in seconds since the epoch; None
            while it was not.
    """

    day: int = -1
    today: int = 0
    waiting: tuple[tuple[int, int, str], ...] = ()
    wealth: tuple[float, float, float] = (0.0, 0.0, 0.0)
    changed_at: float | None = None

    @property
    def evidence(self) -> float:
        """Evidence that the judge has changed, to be compared with ``CHANGED``."""
        return self._evidence.e_value

    @property
    def _evidence(self) -> Evidence:
        with np.errstate(divide="ignore"):
            return Evidence(np.log(self.wealth))

    def due(self, labelled: Sequence[int], day: int) -> list[int]:
        """Return the samples to judge again now, of those labelled, in the order of preference."""
        known, waiting = set(labelled), {one for one, _, _ in self.waiting}
        third = [one for one, since, _ in self.waiting if since < day and one in known]
        left = PER_DAY - self.today if day == self.day else PER_DAY
        return third + [one for one in labelled if one not in waiting][: max(left, 0)]

    def after(
        self, sample_id: int, first: Sequence[bool], now: Sequence[bool], now_seconds: float
    ) -> "Canaries":
        """Return the state after a sample was judged again.

        Args:
            first: The first verdicts on its passages.
            now: The verdicts on the same passages now.
            now_seconds: The present, in seconds since the epoch.

        >>> found = Canaries()
        >>> for place in range(60):
        ...     for day in (0, 1):
        ...         found = found.after(place, [True] * 5, [False, *[True] * 4], day * 86400.0)
        >>> found.changed_at
        86400.0
        """
        day = int(now_seconds // 86_400.0)
        second = next((said for one, _, said in self.waiting if one == sample_id), None)
        if second is None:
            said = "".join("01"[yes] for yes in now)
            waiting = (*self.waiting, (sample_id, day, said))[-4 * PER_DAY :]
            today = self.today + 1 if day == self.day else 1
            return replace(self, day=day, today=today, waiting=waiting)
        waiting = tuple(one for one in self.waiting if one[0] != sample_id)
        found = replace(self, waiting=waiting)
        if len(second) != len(now):
            return found
        gain = excess(first, [one == "1" for one in second], now) - TOLERATED
        evidence = self._evidence.from_all().after(np.array([[gain]]), stakes=_STAKES)
        a, b, c = np.exp(np.minimum(evidence.log_wealth, 500.0)).tolist()
        found = replace(found, wealth=(a, b, c))
        is_new = found.changed_at is None and found.evidence >= CHANGED
        return replace(found, changed_at=now_seconds) if is_new else found

    def to_json(self) -> str:
        """Write the state, for ``from_json``."""
        return _form().dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str | None) -> "Canaries":
        """Read a state; a new one of None, or of a text that is none.

        >>> Canaries.from_json(Canaries(day=3).to_json()).day, Canaries.from_json("7").day
        (3, -1)
        """
        try:
            return _form().validate_json(text or "")
        except ValueError:
            return cls()


@cache
def _form() -> TypeAdapter[Canaries]:
    return TypeAdapter(Canaries)


def yes_or_no(
    before: Mapping[str, Judgment], now: Mapping[str, Judgment]
) -> tuple[list[bool], list[bool]]:
    """Pair two verdicts on whether each passage is relevant, in the order of the first.

    A passage without a verdict now counts as unchanged.
    """
    first = [one.grade > 0 for one in before.values()]
    return first, [
        now[name].grade > 0 if name in now else one.grade > 0 for name, one in before.items()
    ]


def canaries_key(series: str) -> str:
    """Return the key under which the store keeps the state of a series."""
    return f"canaries {series}"
