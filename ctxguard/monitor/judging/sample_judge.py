"""Judging one sample, and what is counted of it.

All served passages are judged, and dropped ones with the probabilities that the record holds. A
verdict that is missing, misplaced or out of range is counted and never imputed.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product

from ctxguard.core.metrics import Utilities
from ctxguard.core.types import Mode, Passage, Route
from ctxguard.errors import JudgeError
from ctxguard.monitor.estimation.judged_request import Scale, judged_request
from ctxguard.monitor.judges import Judge, Judgment, Ledger
from ctxguard.monitor.redaction import Redactor, redacted_once
from ctxguard.monitor.sampling.record import SampleRecord, TokenAccount, as_written

PassageLookup = Callable[[str], Passage]
"""The passage of an id; raises where there is none."""

CALLS_IN_VAIN = 20
"""Calls without any valid verdict after which a judge is asked no more."""


@dataclass(frozen=True, slots=True)
class SampleVerdicts:
    """The verdicts on one sample.

    Attributes:
        block: What estimates need of it; None if a served passage got no valid verdict.
        verdicts: The valid ones by passage id, in the order in which they were wanted.
        n_missing: Passages that got none though one was wanted, unreadable ones included.
        is_complete: Whether all served passages got one.
    """

    block: bytes | None
    verdicts: Mapping[str, Judgment]
    n_missing: int
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
        block = None
        if counts:
            scale = Scale(self._utilities, self.judge.max_grade)
            block = judged_request(record, verdicts, scale, probability=probability)
        return SampleVerdicts(block, verdicts, len(wanted) - len(verdicts), is_complete)

    def verdicts_again(self, record: SampleRecord, positions: Sequence[int]) -> dict[str, Judgment]:
        """Judge some candidates of a sample; the valid verdicts by passage id."""
        return self._graded(record, [self._passage(record, each) for each in positions])

    def _passage(self, record: SampleRecord, position: int) -> Passage | None:
        passage = record.passage(position)
        is_there = passage.text or passage.title
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


Counts = Mapping[tuple[str, ...], float]
"""Counts by name and label values, in the order of ``LABELS``."""


class JudgedAs(StrEnum):
    """How the judging of a claimed sample ended. A closed set: it labels a metric."""

    JUDGED = "judged"
    INCOMPLETE = "incomplete"
    """A served passage got no valid verdict: left out of the estimates, and counted."""
    SKIPPED = "skipped"
    """Not judged, at random, to keep within the budget."""
    UNREADABLE = "unreadable"
    """It was written by another release, is damaged, or ended each process that judged it."""
    JUDGE_FAILED = "judge_failed"
    """The judge could not be called; the sample waits for another try, up to five that count."""


LABELS = {
    "judged_samples": ("route", "outcome"),
    "verdicts": ("route",),
    "invalid_verdicts": ("route",),
    "candidate_tokens": ("mode", "fate"),
    "today_tokens": ("mode",),
    "canary_verdicts": ("same",),
    "judge_calls": (),
    "judge_retries": (),
    "judge_invalid": ("reason",),
    "judge_tokens": ("direction",),
    "judge_cost": (),
}
"""Every count, and what labels it beside the judge."""


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
    "outcome": JudgedAs,
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
"""What a series begins with: a count that is first seen above 0 has no rate before."""


class MonitorCounters:
    """Counts since the process began. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counter[tuple[str, ...]]()
        self.errors = 0
        """Steps that failed as a whole, and results that the store refused."""

    def add(self, more: Counts) -> None:
        """Add counts; names and label values may be enums."""
        with self._lock:
            for key, n in more.items():
                self._counts[tuple(map(str, key))] += n  # type: ignore[assignment]

    def add_error(self) -> None:
        """Count a step that failed as a whole, or a result that the store refused."""
        with self._lock:
            self.errors += 1

    def counts(self) -> Counts:
        """Return all counts now."""
        with self._lock:
            return dict(self._counts)

    def outcomes(self) -> dict[JudgedAs, int]:
        """Count the samples that this process claimed, by outcome."""
        found = dict.fromkeys(JudgedAs, 0)
        for (name, *labels), n in self.counts().items():
            if name == "judged_samples":
                found[JudgedAs(labels[1])] += int(n)
        return found


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
