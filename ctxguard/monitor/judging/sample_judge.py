"""Has samples judged, one at a time: fresh ones, and labelled ones again.

All served passages are judged, and dropped ones with the probabilities that the record holds. A
grade that is missing, misplaced or out of range is counted and never imputed: the passage is
unjudged until it is asked about again.

The labels of people count under a new judge too, so it judges what they graded before fresh
samples, and within the same budget; an unchanged one judges a few a day again, as canaries. Calls
the judge, the lookup of passages and the redactor, reads and writes the store, and reads the clock.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from ctxguard._support.words import count
from ctxguard.core.types import Passage
from ctxguard.errors import JudgeError
from ctxguard.measure.worth import Utilities
from ctxguard.monitor.judges import PEOPLE_ALONE, Judge, Judgment, Ledger
from ctxguard.monitor.judging.canaries import Canaries, read_canaries, to_json
from ctxguard.monitor.judging.counts import JUDGE_CHANGED
from ctxguard.monitor.labels.evidence import Scale, judged_request
from ctxguard.monitor.labels.samples import GradedSample
from ctxguard.monitor.redaction import Redactor, redacted_once
from ctxguard.monitor.sampling.record import SampleRecord, as_written
from ctxguard.monitor.sampling.sampler import HashSampler
from ctxguard.monitor.store import Counts, Finished, SampleStore, State

PassageLookup = Callable[[str], Passage]
"""Returns the passage with an id; raises if there is none."""

CALLS_IN_VAIN = 20
"""After this many calls without a valid grade, a judge is not asked any more."""
_DAY_SECONDS = 86_400.0
_LOOK_SECONDS = 60.0
"""How often the store is asked for labelled samples while none is due."""
_RETRY_SECONDS = 3600.0
"""Seconds before a sample on which the judge failed is tried again."""

_NOTHING: Mapping[str, Judgment] = {}


class SampleJudge:
    """Has samples judged, one at a time; for arguments see ``Monitor``.

    Attributes:
        ledger: The accounts of the judge; None for one that keeps none.
        n_judged: Passages that the judge has graded, or was asked to grade in vain, also those of
            samples on which it failed later.
        is_proven: Whether it has given a valid grade; always of a judge that asks no endpoint.
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
        self._scale = Scale(utilities, judge.max_grade)
        self._lookup = lookup
        self._redactor = redactor
        self.is_exact = bool(getattr(judge, "exact", False))
        self._reads_text = getattr(judge, "reads_text", True)
        self.n_judged = 0
        self.is_proven = self.ledger is None

    def finish(
        self,
        sample_id: int,
        record: SampleRecord,
        probability: float,
        known: Mapping[str, Judgment] = _NOTHING,
    ) -> Finished:
        """Have a sample's ungraded passages graded; raises the judge's errors.

        ``known`` are the grades that it has already, by passage id.
        """
        if self.ledger is not None:
            self.ledger.take_rejected()  # of a sample on which the judge failed
        found = self._finished(sample_id, record, probability, known)
        return replace(found, rejected=self._rejected(record))

    def _finished(
        self,
        sample_id: int,
        record: SampleRecord,
        probability: float,
        known: Mapping[str, Judgment],
    ) -> Finished:
        served = self._graded(record, record.served, known)
        if served is None:
            return Finished(sample_id, State.INCOMPLETE)
        grades = {**known, **served}
        dropped = record.to_judge(grades)[len(record.served) :]
        try:
            found = self._graded(record, dropped, grades)
        except JudgeError:
            raise
        except Exception:
            # The grades so far are paid for; the rest has failed.
            if not served:
                raise
            found = {}
        if found is None:
            return Finished(sample_id, State.INCOMPLETE)
        return self.as_graded(sample_id, record, probability, {**grades, **found}, known)

    def as_graded(
        self,
        sample_id: int,
        record: SampleRecord,
        probability: float,
        grades: Mapping[str, Judgment] = _NOTHING,
        known: Mapping[str, Judgment] = _NOTHING,
    ) -> Finished:
        """Make a sample's result from its grades; ``known`` are those it had before."""
        sample = GradedSample(sample_id, record, {}, grades)
        wanted = dict.fromkeys([record.passage_ids[each] for each in record.to_judge(grades)])
        n_failed = len(wanted.keys() - grades.keys())
        return Finished(
            sample_id,
            State.INCOMPLETE if n_failed else State.JUDGED,
            {name: grades[name] for name in (*wanted, *grades) if name in grades},
            judged_request(sample, self._scale, probability=probability),
            counts={
                ("grades", record.route): len(wanted.keys() - known.keys()),
                ("invalid_grades", record.route): n_failed,
            },
        )

    def grade_again(
        self,
        record: SampleRecord,
        positions: Sequence[int],
        known: Mapping[str, Judgment] = _NOTHING,
    ) -> dict[str, Judgment]:
        """Grade some candidates of a sample; return valid grades by passage id, also known ones."""
        return {**known, **(self._graded(record, positions, known) or {})}

    def counts(self) -> Counts:
        """Return the judge's accounts as counts; empty for a judge that keeps none."""
        if self.ledger is None:
            return {}
        accounts = self.ledger.accounts()
        counts: dict[tuple[str, ...], float] = {
            ("judge_calls",): accounts.calls,
            ("judge_retries",): accounts.retries,
            ("judge_tokens", "input"): accounts.input_tokens,
            ("judge_tokens", "output"): accounts.output_tokens,
            **{("judge_invalid", reason.value): n for reason, n in accounts.invalid.items()},
        }
        return counts if accounts.cost is None else {**counts, ("judge_cost",): accounts.cost}

    def _passage(self, record: SampleRecord, position: int) -> Passage | None:
        """Return a passage as the judge reads it; look it up if its text is not stored.

        None if the judge needs the text, and it is lost or the request's filter forbids it.
        """
        passage = record.passage(position)
        if passage.text or passage.title or not self._reads_text:
            return passage
        try:
            found = None if self._lookup is None else self._lookup(passage.passage_id)
            if found is None or (
                record.where is not None and not record.where.allows(found.metadata)
            ):
                return None
            # As a sample would hold it.
            found = as_written(found)
            title, text = (redacted_once(one, self._redactor) for one in (found.title, found.text))
            return replace(found, title=title, text=text)
        except Exception:
            return None

    def _graded(
        self, record: SampleRecord, positions: Sequence[int], known: Mapping[str, Judgment]
    ) -> dict[str, Judgment] | None:
        """Ask for the unknown grades, and return the valid ones by passage id.

        None where the query is not stored, or the judge knows nothing of it.
        """
        if record.query is None:
            return None
        lacking = [one for one in positions if record.passage_ids[one] not in known]
        read = [self._passage(record, one) for one in lacking]
        passages = [passage for passage in read if passage is not None]
        if not passages:
            return {}
        given = self.judge.judge(record.query, passages)
        if not given and self.is_exact:
            return None
        self.n_judged += len(passages)
        highest = self.judge.max_grade
        found = {
            passage.passage_id: judgment
            for judgment, passage in zip(given, passages, strict=False)
            if judgment is not None
            and len(given) == len(passages)
            and judgment.passage_id == passage.passage_id
            and isinstance(judgment.grade, int)
            and 0 <= judgment.grade <= highest
        }
        self.is_proven = self.is_proven or bool(found)
        if not self.is_proven and self.ledger is not None:
            _check_replies(self.judge, self.ledger)
        return found

    def _rejected(self, record: SampleRecord) -> tuple[tuple[str, str, str], ...]:
        """List replies that are not grades; they may quote passages whose text is not stored."""
        taken = () if self.ledger is None else self.ledger.take_rejected()
        stored = {passage.passage_id for passage in record.passages.values() if passage.text}
        return tuple(
            [
                (passage_id, reason.value, reply if passage_id in stored else "")
                for passage_id, reason, reply in taken
            ]
        )


def _check_replies(judge: Judge, ledger: Ledger) -> None:
    """Refuse a judge that has given no valid grade in ``CALLS_IN_VAIN`` calls or more."""
    accounts = ledger.accounts()
    calls = accounts.calls - accounts.retries
    if calls < CALLS_IN_VAIN:
        return
    last = ledger.rejected()[-1:]
    said = "".join(
        [f"; its last reply ({reason.value}) was {reply[:200]!r}" for _, reason, reply in last]
    )
    raise JudgeError(
        f"the judge {judge.name} {judge.version} gave no valid grade in "
        f"{count(calls, 'call')}{said}. The samples still wait to be judged. "
        "Name a model that keeps to a JSON schema (--model), or allow longer replies"
    )


class JudgingAgain:
    """Judges labelled samples again; for arguments see ``JudgingWorker``.

    Nothing is judged again by an exact judge, nor where people grade alone: no estimate depends on
    the judge's errors.
    """

    def __init__(
        self, store: SampleStore, series: str, judge: SampleJudge, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._series = series
        self._judge = judge
        self._clock = clock
        self._is_off = judge.is_exact or series == PEOPLE_ALONE
        self._looked_at = -math.inf
        self._retry_at: dict[int, float] = {}
        self._order = HashSampler("judged again", series)
        self._of_day = HashSampler("canary", series)

    def due(self, limit: int) -> list[tuple[int, bool]]:
        """Choose at most ``limit`` samples to judge again now; return ids, and which are canaries.

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
        ready = (one for one in wanted if now >= self._retry_at.get(one[0], now))
        found = list(islice(ready, limit))
        if not found:
            self._looked_at = now
        return found

    def read(
        self, sample_id: int
    ) -> tuple[SampleRecord, tuple[int, ...], dict[str, Judgment]] | None:
        """Read a sample that is due; None if it was deleted or cannot be read.

        Returns its record; the candidates to judge, those that were judged first; and this judge's
        grades so far.
        """
        self._retry_at[sample_id] = self._clock() + _RETRY_SECONDS
        record = self._store.records([sample_id]).get(sample_id)
        if record is None:
            return None
        first = self._store.grades(None, [sample_id]).get(sample_id, {})
        before = self._store.grades(self._series, [sample_id]).get(sample_id, {})
        return record, record.to_judge(first), before

    def judge(
        self,
        sample_id: int,
        record: SampleRecord,
        positions: tuple[int, ...],
        before: Mapping[str, Judgment],
        *,
        is_canary: bool,
    ) -> Counts:
        """Judge the sample that ``read`` returned, and store the result; raises the judge's errors.

        Returns, for a canary, counts of the grades equal to the first ones, and of the others.
        """
        if not is_canary:
            # What it has graded by now is kept; what failed is asked about again.
            grades = self._judge.grade_again(record, positions, before)
            n_failed = sum(record.passage_ids[place] not in grades for place in positions)
            self._store.save_again(self._series, sample_id, grades, n_failed)
            if not n_failed:
                self._retry_at.pop(sample_id, None)
            return {}
        grades = self._judge.grade_again(record, positions)
        self._retry_at.pop(sample_id, None)
        first = [one.grade > 0 for one in before.values()]
        # A passage without a grade now counts as unchanged.
        now = [grades.get(name, one).grade > 0 for name, one in before.items()]
        day = int(self._clock() // _DAY_SECONDS)
        former = self._canaries()
        canaries = former.after(sample_id, first, now, day)
        self._store.set_state(self._key, to_json(canaries))
        same = sum(one == other for one, other in zip(first, now, strict=True))
        return {
            ("canary_grades", "yes"): same,
            ("canary_grades", "no"): len(first) - same,
            (JUDGE_CHANGED,): canaries.has_changed - former.has_changed,
        }

    @property
    def _key(self) -> str:
        return f"canaries {self._series}"

    def _canaries(self) -> Canaries:
        return read_canaries(self._store.get_state(self._key))
