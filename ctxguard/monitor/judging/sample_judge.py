"""Judging one sample, at first and again.

All served passages are judged, and dropped ones with the probabilities that the record holds. A
verdict that is missing, misplaced or out of range is counted and never imputed.

What people graded is judged again. A new judge judges all of it, so that the labels count under it
too: before fresh samples, and within the same budget. A judge that stays judges a few of its
samples again each day (``estimation.judge_drift``), so that a change behind an unchanged name is
seen.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ctxguard.core.metrics import Utilities
from ctxguard.core.types import Passage
from ctxguard.errors import DataError, JudgeError
from ctxguard.monitor.estimation.judge_drift import Canaries, canaries_key, yes_or_no
from ctxguard.monitor.estimation.judged_request import Scale, judged_request
from ctxguard.monitor.judges import PEOPLE_ALONE, Judge, Judgment, Ledger
from ctxguard.monitor.judges.protocol import verdicts_from_json, verdicts_to_json
from ctxguard.monitor.judging.counters import Counts
from ctxguard.monitor.redaction import Redactor, is_hash, redacted_once
from ctxguard.monitor.sampling.record import SampleRecord, as_written
from ctxguard.monitor.sampling.sampler import HashSampler
from ctxguard.monitor.store import SampleStore

PassageLookup = Callable[[str], Passage]
"""The passage of an id; raises where there is none."""

CALLS_IN_VAIN = 20
"""Calls without any valid verdict after which a judge is asked no more."""

LEASE_SECONDS = 60.0
"""How long what a monitor has claimed stays with it without a word of it."""
_DAY_SECONDS = 86_400.0
_LOOK_SECONDS = 60.0
"""How often the store is asked for labelled samples while none is due."""
_RETRY_SECONDS = 3600.0
"""After which a sample is tried again on which the judge failed."""


@dataclass(frozen=True, slots=True)
class SampleVerdicts:
    """The verdicts on one sample.

    Attributes:
        block: What estimates need of it; None if a served passage got no valid verdict.
        verdicts: The valid ones by passage id, in the order in which they were wanted.
        missing: Ids of the passages that got none though one was wanted, unreadable ones included.
        is_complete: Whether all served passages got one.
    """

    block: bytes | None
    verdicts: Mapping[str, Judgment]
    missing: tuple[str, ...]
    is_complete: bool


class SampleJudge:
    """Has samples judged, one at a time.

    Args:
        judge: Grades passages.
        utilities, lookup, redactor: As of ``Monitor``.

    Attributes:
        ledger: The accounts of the judge; None for one that keeps none.
        n_judged: Passages that the judge has given a verdict of, or was asked for one in vain,
            also those of samples on which it failed later.
        is_proven: Whether it has given a valid verdict; always of a judge that asks no endpoint.
    """

    def __init__(
        self,
        judge: Judge,
        utilities: Utilities,
        lookup: PassageLookup | None,
        redactor: Redactor | None,
    ) -> None:
        self.judge = judge
        self.ledger: Ledger | None = getattr(judge, "ledger", None)
        self._utilities = utilities
        self._lookup = lookup
        self._redactor = redactor
        self.is_exact = bool(getattr(judge, "exact", False))
        self._reads_text = getattr(judge, "reads_text", True)
        self._judges_pools = bool(getattr(judge, "judges_pools", False))
        self.n_judged = 0
        self.is_proven = self.ledger is None

    def most_passages(self, record: SampleRecord) -> int:
        """Return the most passages of a sample that are given to the judge."""
        dropped = max(len(record.to_judge(has_hit=False)), len(record.to_judge(has_hit=True)))
        return len(record.served) + dropped

    def verdicts_on(self, record: SampleRecord, probability: float | None = None) -> SampleVerdicts:
        """Judge one sample; raises whatever the judge raises.

        Args:
            probability: With which it was sampled and then taken up for judging; None for the
                sampling alone.
        """
        at_first = record.to_judge(has_hit=True) if self._judges_pools else ()
        first = [self._passage(record, each) for each in (*record.served, *at_first)]
        found = self._graded(record, first)
        names = record.passage_ids
        verdicts = {names[one]: found[names[one]] for one in record.served if names[one] in found}
        is_complete = len(verdicts) == len(record.served)
        # Without people's grades a missing verdict would be a guess: an exact judge has none.
        counts = is_complete or (bool(verdicts) and not self.is_exact)
        has_hit = record.has_hit(verdicts)
        # A judge that has no verdict on anything served has none on the rest.
        is_answered = bool(verdicts) or not record.served
        dropped = record.to_judge(has_hit=has_hit) if is_answered else ()
        left = [self._passage(record, each) for each in dropped if each not in at_first]
        found |= self._graded(record, left)
        wanted = [names[position] for position in (*record.served, *dropped)]
        verdicts = {name: found[name] for name in wanted if name in found}
        missing = tuple([each for each in wanted if each not in verdicts])
        block = None
        if counts:
            scale = Scale(self._utilities, self.judge.max_grade)
            block = judged_request(record, verdicts, scale, probability=probability)
        return SampleVerdicts(block, verdicts, missing, is_complete)

    def verdicts_again(self, record: SampleRecord, positions: Sequence[int]) -> dict[str, Judgment]:
        """Judge some candidates of a sample; the valid verdicts by passage id."""
        return self._graded(record, [self._passage(record, each) for each in positions])

    def _passage(self, record: SampleRecord, position: int) -> Passage | None:
        passage = record.passage(position)
        is_there = (passage.text or passage.title) and not is_hash(passage.text)
        return passage if is_there else self._unstored(record, passage.passage_id)

    def _unstored(self, record: SampleRecord, passage_id: str) -> Passage | None:
        """Look up a passage that the record holds no text of.

        None if the judge needs the text, and it is lost or the request's filter forbids it.
        """
        if not self._reads_text:
            return Passage(passage_id, "")
        try:
            passage = None if self._lookup is None else self._lookup(passage_id)
            if passage is None:
                return None
            if record.where is not None and not record.where.allows(passage.metadata):
                return None
            return self._redacted(passage)
        except Exception:
            return None

    def _redacted(self, passage: Passage) -> Passage:
        """Redact a passage of the index as a sample would hold it: its beginning."""
        passage, redactor = as_written(passage), self._redactor
        if redactor is None:
            return passage
        title, text = (redacted_once(one, redactor) for one in (passage.title, passage.text))
        return replace(passage, title=title, text=text)

    def _graded(
        self, record: SampleRecord, wanted: Sequence[Passage | None]
    ) -> dict[str, Judgment]:
        """Ask for verdicts; return the valid ones by passage id: none missing or out of range."""
        passages = [passage for passage in wanted if passage is not None]
        if not passages or record.query is None:
            return {}
        if self._reads_text and is_hash(record.query):
            return {}
        verdicts = self.judge.judge(record.query, passages)
        self.n_judged += len(passages)
        if len(verdicts) != len(passages):
            return {}
        highest = self.judge.max_grade
        found = {
            passage.passage_id: verdict
            for verdict, passage in zip(verdicts, passages, strict=True)
            if verdict is not None
            and verdict.passage_id == passage.passage_id
            and isinstance(verdict.grade, int)
            and 0 <= verdict.grade <= highest
        }
        self.is_proven = self.is_proven or bool(found)
        if not self.is_proven and self.ledger is not None:
            _check_replies(self.judge, self.ledger)
        return found


def _check_replies(judge: Judge, ledger: Ledger) -> None:
    """Refuse a judge that has given no valid verdict.

    Raises:
        JudgeError: ``CALLS_IN_VAIN`` calls or more were made.
    """
    accounts = ledger.accounts()
    calls = accounts.calls - accounts.retries
    if calls < CALLS_IN_VAIN:
        return
    last = ledger.rejected()[-1:]
    said = "".join([f"; it said, {one.reason.value}: {one.reply[:200]!r}" for one in last])
    raise JudgeError(
        f"the judge {judge.name} {judge.version} gave no valid verdict in {calls:,} calls{said}. "
        "The samples wait. Name another model, one that keeps to a JSON schema (--model), or "
        "allow longer replies"
    )


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
