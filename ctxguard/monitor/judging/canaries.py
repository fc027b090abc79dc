"""Tells whether a judge has changed, from labelled samples that it judges again: canaries. Pure.

An endpoint may replace a model behind an unchanged name. A judge may also waver by itself, so each
canary is judged twice more, on two days: of three grades on a passage that are not all the same,
any one is as often the odd one out while the judge is the same; once it has changed, the first is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from pydantic import TypeAdapter

from ctxguard.measure.betting import Evidence

PER_DAY = 5
"""Samples of a series that become canaries each day."""
TOLERATED = 0.02
"""The share of grades that may change without the judge counting as changed."""
CHANGED = 2e3
"""The evidence at which a judge counts as changed; an unchanged judge takes at least this many
canaries (400 days) on average to reach it."""

_STAKES = np.array([0.5, 1.0, 1.9])
"""The shares staked, below 1 / (0.5 + TOLERATED), so that no canary can take all the wealth."""


def excess(first: Sequence[bool], *later: Sequence[bool]) -> float:
    """Compare the first grades on some passages with two later ones on the same passages.

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
    """The evidence from the canaries of one series so far.

    A bet that the mean ``excess`` is above ``TOLERATED`` starts at every canary; the wealth of
    these bets is summed (``Evidence.from_all``).

    Attributes:
        day, today: Day of the last new canary, since the epoch, and their number on it.
        waiting: Canaries that were judged a second time and wait for a third: sample, day, and
            whether each passage is relevant, as ``1`` or ``0``.
        wealth: The wealth of each bet.
        has_changed: Whether the judge was ever found to have changed.
    """

    day: int = -1
    today: int = 0
    waiting: tuple[tuple[int, int, str], ...] = ()
    wealth: tuple[float, float, float] = (0.0, 0.0, 0.0)
    has_changed: bool = False

    def due(self, labelled: Sequence[int], day: int) -> list[int]:
        """Return which of the labelled samples to judge again now, in order of preference."""
        known, waiting = set(labelled), {one for one, _, _ in self.waiting}
        third = [one for one, since, _ in self.waiting if since < day and one in known]
        left = PER_DAY - self.today if day == self.day else PER_DAY
        return third + [one for one in labelled if one not in waiting][: max(left, 0)]

    def after(
        self, sample_id: int, first: Sequence[bool], now: Sequence[bool], day: int
    ) -> "Canaries":
        """Return the state after a sample was judged again, on a day since the epoch.

        ``first`` are the first grades on its passages, ``now`` those on the same passages now.

        >>> found = Canaries()
        >>> for place in range(60):
        ...     for day in (0, 1):
        ...         found = found.after(place, [True] * 5, [False, *[True] * 4], day)
        >>> found.has_changed
        True
        """
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
        with np.errstate(divide="ignore"):
            before = Evidence(np.log(self.wealth))
        evidence = before.from_all().after(np.array([[gain]]), stakes=_STAKES)
        a, b, c = np.exp(np.minimum(evidence.log_wealth, 500.0)).tolist()
        has_changed = self.has_changed or evidence.e_value >= CHANGED
        return replace(found, wealth=(a, b, c), has_changed=has_changed)


_FORM = TypeAdapter(Canaries)


def read_canaries(text: str | None) -> Canaries:
    """Read ``to_json``'s output; start afresh if it is missing or cannot be read."""
    try:
        return _FORM.validate_json(text or "{}")
    except ValueError:
        return Canaries()


def to_json(canaries: Canaries) -> str:
    """Write the evidence for the store."""
    return _FORM.dump_json(canaries).decode()
