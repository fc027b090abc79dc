"""Judging again what people have graded.

A new judge judges all of it, so that the labels count under it too: before fresh samples, and
within the same budget. A judge that stays judges a few of its samples again each day
(``estimation.judge_drift``), so that a change behind an unchanged name is seen.
"""

import math
from collections.abc import Callable
from itertools import islice

from ctxguard.errors import DataError
from ctxguard.monitor.estimation.judge_drift import Canaries, canaries_key, yes_or_no
from ctxguard.monitor.judges import PEOPLE_ALONE, Judgment
from ctxguard.monitor.judges.verdict_text import verdicts_from_json, verdicts_to_json
from ctxguard.monitor.judging.counters import Counts
from ctxguard.monitor.judging.sample_judge import SampleJudge
from ctxguard.monitor.sampling.inclusion import HashSampler
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import SampleStore

LEASE_SECONDS = 60.0
"""How long what a monitor has claimed stays with it without a word of it."""
_DAY_SECONDS = 86_400.0
_LOOK_SECONDS = 60.0
"""How often the store is asked for labelled samples while none is due."""
_RETRY_SECONDS = 3600.0
"""After which a sample is tried again on which the judge failed."""


class JudgingAgain:
    """Judges labelled samples again; one monitor of a series at a time does.

    Args:
        series: That of the judge.
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
        claimant: str,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._series = series
        self._judge = judge
        self._claimant = claimant
        self._clock = clock
        self._is_off = judge.is_exact or self._series == PEOPLE_ALONE
        self._looked_at = -math.inf
        self._retry_at: dict[int, float] = {}
        self._order = HashSampler("judged again", self._series)
        self._of_day = HashSampler("canary", self._series)

    def due(self, limit: int) -> list[tuple[int, bool]]:
        """Choose the samples to judge again now, at most ``limit``: ids, and which are canaries.

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
        of_day = self._canaries().due(old, day)
        wanted = [*((one, True) for one in of_day), *((one, False) for one in new)]
        found = list(
            islice((one for one in wanted if now >= self._retry_at.get(one[0], now)), limit)
        )
        if not found or not self._store.lead(
            self._claimant, lease_seconds=LEASE_SECONDS, task=f"judging again {self._series}"
        ):
            self._looked_at = now
            return []
        return found

    def record(self, sample_id: int) -> SampleRecord | None:
        """Read the record of a sample; None where it was deleted or cannot be read."""
        self._retry_at[sample_id] = self._clock() + _RETRY_SECONDS
        try:
            return SampleRecord.from_bytes(self._store.payloads([sample_id]).get(sample_id, b""))
        except DataError:
            return None

    def positions(self, sample_id: int, record: SampleRecord) -> list[int]:
        """Return the candidates to judge: those that were judged before, and any that is served."""
        before = self._before(sample_id) or verdicts_from_json(
            self._store.verdicts(None, [sample_id]).get(sample_id, "")
        )
        wanted = {*record.served, *record.to_judge(has_hit=True)}
        order = (*record.served, *record.dropped)
        return [one for one in order if one in wanted or record.passage_ids[one] in before]

    def judge(self, sample_id: int, record: SampleRecord, *, is_canary: bool) -> Counts:
        """Judge a sample again, and store what came of it; raises whatever the judge raises.

        Returns:
            Of a canary, counts of the verdicts that are the same as at first, and of the others.
        """
        positions = self.positions(sample_id, record)
        verdicts = self._judge.verdicts_again(record, positions)
        self._retry_at.pop(sample_id, None)
        if not is_canary:
            names = [record.passage_ids[one] for one in positions]
            missing = [name for name in names if name not in verdicts]
            self._store.save_again(self._series, {sample_id: verdicts_to_json(verdicts, missing)})
            return {}
        first, now = yes_or_no(self._before(sample_id), verdicts)
        canaries = self._canaries().after(sample_id, first, now, self._clock())
        self._store.set_state(canaries_key(self._series), canaries.to_json())
        same = sum(one == other for one, other in zip(first, now, strict=True))
        return {("canary_verdicts", "yes"): same, ("canary_verdicts", "no"): len(first) - same}

    def _before(self, sample_id: int) -> dict[str, Judgment]:
        found = self._store.verdicts(self._series, [sample_id])
        return verdicts_from_json(found.get(sample_id, ""))

    def _canaries(self) -> Canaries:
        return Canaries.from_json(self._store.get_state(canaries_key(self._series)))
