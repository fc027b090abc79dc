"""Judges graded samples again: a new judge all of them, an unchanged judge a few per day.

The labels of people count under a new judge too, so it judges what they graded before fresh
samples, and within the same budget. A judge that stays judges labelled samples again, as canaries:
an endpoint may replace a model behind an unchanged name. A judge may also waver by itself, so each
canary is judged twice more, on two days: of three grades on a passage that are not all the same,
any one is as often the odd one out while the judge is the same; once it has changed, the first is.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from pydantic import TypeAdapter

from ctxguard.errors import DataError
from ctxguard.measure.betting import Evidence
from ctxguard.monitor.judges import PEOPLE_ALONE, Judgment
from ctxguard.monitor.judges.protocol import grades_from_json, grades_to_json
from ctxguard.monitor.judging.sample_judge import SampleJudge
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.sampling.sampler import HashSampler
from ctxguard.monitor.store import Counts, SampleStore

_DAY_SECONDS = 86_400.0
_LOOK_SECONDS = 60.0
"""How often the store is asked for labelled samples while none is due."""
_RETRY_SECONDS = 3600.0
"""Seconds before a sample on which the judge failed is tried again."""

PER_DAY = 5
"""Samples of a series that become canaries each day."""
TOLERATED = 0.02
"""Share of its grades by which a judge may change without counting as changed."""
CHANGED = 2e3
"""The evidence at which a judge counts as changed: an unchanged judge reaches it after at least
this many canaries (400 days) on average."""

_STAKES = np.array([0.5, 1.0, 1.9])
"""Below 1 / (0.5 + TOLERATED), so that no canary can take all the wealth."""


def excess(first: Sequence[bool], *later: Sequence[bool]) -> float:
    """Compare the first grades on some passages with two later ones on the same.

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
        day: Day of the last new canary, in days since the epoch.
        today: Number of new canaries on that day.
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
        """Return the samples to judge again now, of those labelled, in the order of preference."""
        known, waiting = set(labelled), {one for one, _, _ in self.waiting}
        third = [one for one, since, _ in self.waiting if since < day and one in known]
        left = PER_DAY - self.today if day == self.day else PER_DAY
        return third + [one for one in labelled if one not in waiting][: max(left, 0)]

    def after(
        self, sample_id: int, first: Sequence[bool], now: Sequence[bool], day: int
    ) -> "Canaries":
        """Return the state after a sample was judged again.

        Args:
            first: The first grades on its passages.
            now: The grades on the same passages now.
            day: The present, in days since the epoch.

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


def canaries_of(store: SampleStore, series: str) -> Canaries:
    """Read the evidence from a series' canaries; start afresh if it cannot be read."""
    try:
        return _FORM.validate_json(store.get_state(_key(series)) or "{}")
    except ValueError:
        return Canaries()


def _key(series: str) -> str:
    return f"canaries {series}"


class JudgingAgain:
    """Judges labelled samples again.

    Args:
        series: The judge's series.
        judge: For an exact one, and where people grade alone, nothing is judged again: no estimate
            depends on the judge's errors.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        store: SampleStore,
        series: str,
        judge: SampleJudge,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._series = series
        self._judge = judge
        self._clock = clock
        self._is_off = judge.is_exact or self._series == PEOPLE_ALONE
        self._looked_at = -math.inf
        self._retry_at: dict[int, float] = {}
        self._order = HashSampler("judged again", self._series)
        self._of_day = HashSampler("canary", self._series)

    def due(self, limit: int) -> list[tuple[int, bool]]:
        """Choose at most ``limit`` samples to judge again now: ids, and which are canaries.

        In random order, so that those that are judged stand for those that are not yet.
        """
        now = self._clock()
        if self._is_off or abs(now - self._looked_at) < _LOOK_SECONDS:
            return []
        day = int(now // _DAY_SECONDS)
        labelled = self._store.labelled(self._series)
        new = [one for one, is_judged in labelled.items() if not is_judged]
        old = [one for one, is_judged in labelled.items() if is_judged]
        new.sort(key=lambda one: self._order.uniform(str(one)))
        old.sort(key=lambda one: self._of_day.uniform(f"{day} {one}"))
        of_day = canaries_of(self._store, self._series).due(old, day)
        wanted = [*((one, True) for one in of_day), *((one, False) for one in new)]
        found = list(
            islice((one for one in wanted if now >= self._retry_at.get(one[0], now)), limit)
        )
        if not found:
            self._looked_at = now
        return found

    def record(self, sample_id: int) -> SampleRecord | None:
        """Read the record of a sample; None where it was deleted or cannot be read."""
        self._retry_at[sample_id] = self._clock() + _RETRY_SECONDS
        try:
            return SampleRecord.from_bytes(self._store.payloads([sample_id]).get(sample_id, b""))
        except DataError:
            return None

    def positions(self, sample_id: int, record: SampleRecord) -> list[int]:
        """Return the candidates to judge: those judged before, and all served ones."""
        first = self._store.grades(None, [sample_id]).get(sample_id, "")
        before = {*grades_from_json(first), *self._before(sample_id)}
        wanted, order = set(record.to_judge({})), (*record.served, *record.dropped)
        return [one for one in order if one in wanted or record.passage_ids[one] in before]

    def judge(self, sample_id: int, record: SampleRecord, *, is_canary: bool) -> Counts:
        """Judge a sample again, and store the result; raises whatever the judge raises.

        Returns:
            For a canary, counts of the grades equal to the first ones, and of the others.
        """
        positions, before = self.positions(sample_id, record), self._before(sample_id)
        if not is_canary:
            # What it has graded by now is kept; what failed is asked about again.
            grades = self._judge.grade_again(record, positions, before)
            n_failed = sum(record.passage_ids[place] not in grades for place in positions)
            text = grades_to_json(grades.values())
            self._store.save_again(self._series, sample_id, text, n_failed)
            if not n_failed:
                self._retry_at.pop(sample_id, None)
            return {}
        grades = self._judge.grade_again(record, positions)
        self._retry_at.pop(sample_id, None)
        first = [one.grade > 0 for one in before.values()]
        # A passage without a grade now counts as unchanged.
        now = [grades.get(name, one).grade > 0 for name, one in before.items()]
        day = int(self._clock() // _DAY_SECONDS)
        canaries = canaries_of(self._store, self._series).after(sample_id, first, now, day)
        self._store.set_state(_key(self._series), _FORM.dump_json(canaries).decode())
        same = sum(one == other for one, other in zip(first, now, strict=True))
        return {("canary_grades", "yes"): same, ("canary_grades", "no"): len(first) - same}

    def _before(self, sample_id: int) -> dict[str, Judgment]:
        found = self._store.grades(self._series, [sample_id])
        return grades_from_json(found.get(sample_id, ""))
