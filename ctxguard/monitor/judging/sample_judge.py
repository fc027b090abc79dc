"""Judges one sample, and keeps its counts.

All served passages are judged, and dropped ones with the probabilities that the record holds. A
grade that is missing, misplaced or out of range is counted and never imputed: the passage is
unjudged until it is asked about again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product

from ctxguard.core.types import Mode, Passage, Route
from ctxguard.errors import JudgeError
from ctxguard.measure.worth import Utilities
from ctxguard.monitor.judges import Judge, Judgment, Ledger
from ctxguard.monitor.labels.evidence import Scale, judged_request
from ctxguard.monitor.redaction import Redactor, redacted_once
from ctxguard.monitor.sampling.record import SampleRecord, TokenAccount, as_written
from ctxguard.monitor.store.types import Counts

PassageLookup = Callable[[str], Passage]
"""Returns the passage of an id; raises if there is none."""

CALLS_IN_VAIN = 20
"""After this many calls without any valid grade, a judge is asked no more."""
_NOTHING: Mapping[str, Judgment] = {}


@dataclass(frozen=True, slots=True)
class JudgedSample:
    """A judge's findings on one sample.

    Attributes:
        block: The part that estimates need; None if the judge knows nothing of the question.
        grades: The valid ones by passage id, in the order in which they were wanted.
        n_failed: Passages that lack a wanted grade because a call failed or they cannot be read:
            they are asked about again.
        n_asked: Passages that it was asked about now.
    """

    block: bytes | None
    grades: Mapping[str, Judgment]
    n_failed: int
    n_asked: int = 0


class SampleJudge:
    """Has samples judged, one at a time.

    Args:
        judge: Grades passages.
        utilities, lookup, redactor: As in ``Monitor``.

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
        self._utilities = utilities
        self._lookup = lookup
        self._redactor = redactor
        self.is_exact = bool(getattr(judge, "exact", False))
        self._reads_text = getattr(judge, "reads_text", True)
        self.n_judged = 0
        self.is_proven = self.ledger is None

    def most_passages(self, record: SampleRecord, known: int = 0) -> int:
        """Return the largest number of passages of a sample that the judge may be given.

        Args:
            known: How many already have a grade.
        """
        return max(len(record.may_be_judged) - known, 0)

    def grade(
        self,
        record: SampleRecord,
        probability: float | None = None,
        known: Mapping[str, Judgment] = _NOTHING,
    ) -> JudgedSample:
        """Have a sample's ungraded passages graded; raises whatever the judge raises.

        Args:
            probability: The probability with which it was sampled and taken up for judging; None
                for the sampling alone.
            known: The grades that it has already, by passage id.
        """
        if record.query is None:
            return JudgedSample(None, known, 0)
        served = self._graded(record, record.served, known)
        if served is None:
            return JudgedSample(None, known, 0)
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
            return JudgedSample(None, known, 0)
        return self._judged(record, {**grades, **found}, probability, known)

    def failed(
        self,
        record: SampleRecord,
        probability: float | None = None,
        known: Mapping[str, Judgment] = _NOTHING,
    ) -> JudgedSample:
        """Return the findings on a sample on which the judge failed; for arguments see `grade`."""
        return self._judged(record, known, probability, known)

    def _judged(
        self,
        record: SampleRecord,
        grades: Mapping[str, Judgment],
        probability: float | None,
        known: Mapping[str, Judgment],
    ) -> JudgedSample:
        wanted = dict.fromkeys([record.passage_ids[each] for each in record.to_judge(grades)])
        n_failed = len(wanted.keys() - grades.keys())
        scale = Scale(self._utilities, self.judge.max_grade)
        block = judged_request(record, grades, scale, probability=probability)
        in_order = {name: grades[name] for name in (*wanted, *grades) if name in grades}
        n_asked = len(wanted.keys() - known.keys())
        return JudgedSample(block, in_order, n_failed, n_asked)

    def grade_again(
        self,
        record: SampleRecord,
        positions: Sequence[int],
        known: Mapping[str, Judgment] = _NOTHING,
    ) -> dict[str, Judgment]:
        """Grade some candidates of a sample; the valid grades by passage id, known ones too."""
        return {**known, **(self._graded(record, positions, known) or {})}

    def _passage(self, record: SampleRecord, position: int) -> Passage | None:
        passage = record.passage(position)
        is_there = passage.text or passage.title
        return passage if is_there else self._unstored(record, passage.passage_id)

    def _unstored(self, record: SampleRecord, passage_id: str) -> Passage | None:
        """Look up a passage whose text is not in the record.

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
        self, record: SampleRecord, positions: Sequence[int], known: Mapping[str, Judgment]
    ) -> dict[str, Judgment] | None:
        """Ask for the grades that are not known; None where the judge knows nothing of the query.

        Returns:
            The valid ones by passage id: none missing, misplaced or out of range.
        """
        if not positions:
            return {}
        lacking = [one for one in positions if record.passage_ids[one] not in known]
        read = [self._passage(record, one) for one in lacking]
        passages = [passage for passage in read if passage is not None]
        if not passages or record.query is None:
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


def _check_replies(judge: Judge, ledger: Ledger) -> None:
    """Refuse a judge that has given no valid grade.

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
        f"the judge {judge.name} {judge.version} gave no valid grade in {calls:,} calls{said}. "
        "The samples wait. Name another model, one that keeps to a JSON schema (--model), or "
        "allow longer replies"
    )


class JudgingOutcome(StrEnum):
    """How the judging of a sample ended. A closed set: it labels a metric."""

    JUDGED = "judged"
    INCOMPLETE = "incomplete"
    """A passage got no grade, or the judge knows nothing of the question: no figure uses it."""
    SKIPPED = "skipped"
    """Not judged, at random, to keep within the budget."""
    UNREADABLE = "unreadable"
    """It was written by another release, or is damaged."""
    JUDGE_FAILED = "judge_failed"
    """The judge could not be called; the sample waits for another try."""


LABELS = {
    "judged_samples": ("route", "outcome"),
    "grades": ("route",),
    "invalid_grades": ("route",),
    "candidate_tokens": ("mode", "fate"),
    "today_tokens": ("mode",),
    "canary_grades": ("same",),
    "judge_calls": (),
    "judge_retries": (),
    "judge_invalid": ("reason",),
    "judge_tokens": ("direction",),
    "judge_cost": (),
}
"""Every exported count, with its labels besides the judge."""

MISMATCHED = "mismatched_samples"
"""A count for the table alone: serving processes export the flags of all their answers."""


def token_counts(mode: Mode, tokens: TokenAccount, weight: float = 1.0) -> Counts:
    """Count the tokens of requests in a mode."""
    *fates, (_, today) = tokens._asdict().items()
    counts: dict[tuple[str, ...], float] = {
        ("candidate_tokens", mode.value, fate): weight * n for fate, n in fates
    }
    return {**counts, ("today_tokens", mode.value): weight * today}


def tokens_by_mode(counts: Counts) -> dict[Mode, TokenAccount]:
    """Return the tokens of all requests in each mode, from counts."""
    keys = {mode: token_counts(mode, TokenAccount()) for mode in Mode}
    return {
        mode: TokenAccount(*[round(counts.get(key, 0.0)) for key in of_mode])
        for mode, of_mode in keys.items()
    }


_VALUES: dict[str, Iterable[str]] = {
    "route": Route,
    "outcome": JudgingOutcome,
    "mode": Mode,
    "fate": TokenAccount._fields[:-1],
    "same": ("yes", "no"),
}
NOTHING_COUNTED: Counts = {
    (name, *map(str, values)): 0.0
    for name, labels in LABELS.items()
    if labels and _VALUES.keys() >= set(labels)
    for values in product(*[_VALUES[label] for label in labels])
}
"""The initial counts of a series: Prometheus sees no rate in a count that first appears above 0."""


def judge_counts(judge: Judge) -> Counts:
    """Return the accounts of a judge as counts; empty for one that keeps none."""
    ledger: Ledger | None = getattr(judge, "ledger", None)
    if ledger is None:
        return {}
    accounts = ledger.accounts()
    counts: dict[tuple[str, ...], float] = {
        ("judge_calls",): accounts.calls,
        ("judge_retries",): accounts.retries,
        ("judge_tokens", "input"): accounts.input_tokens,
        ("judge_tokens", "output"): accounts.output_tokens,
        **{("judge_invalid", reason.value): n for reason, n in accounts.invalid.items()},
    }
    return counts if accounts.cost is None else {**counts, ("judge_cost",): accounts.cost}
