"""Judging one sample: which passages the judge is given, and which verdicts are valid.

All served passages are judged, and dropped ones with the probabilities that the record holds. A
verdict that is missing, misplaced or out of range is counted and never imputed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ctxguard.core.metrics import DEFAULT_UTILITIES, Utilities
from ctxguard.core.types import Passage
from ctxguard.errors import JudgeError
from ctxguard.monitor.estimation.judged_request import Scale, judged_request
from ctxguard.monitor.judges import Judge, Judgment, Ledger
from ctxguard.monitor.judging.budget import NO_LIMITS, BudgetLimits
from ctxguard.monitor.redaction import Redactor, is_hash, redact
from ctxguard.monitor.sampling.privacy import redacted_once
from ctxguard.monitor.sampling.record import SampleRecord, as_written

PassageLookup = Callable[[str], Passage]
"""The passage of an id; raises where there is none."""

CALLS_IN_VAIN = 20
"""Calls without any valid verdict after which a judge is asked no more."""


@dataclass(frozen=True, slots=True)
class JudgingSettings:
    """What a monitor judges with, and how much of it.

    Attributes:
        judge: Grades passages. Another name or version begins another series of estimates.
        utilities: The utility of a passage; every served passage that is not relevant costs.
        budget: The most that judging may take.
        lookup: Finds the texts of passages that were not stored; None if all are stored.
        redactor: Applied to texts that ``lookup`` finds before the judge reads them, as the
            samples' own (``Privacy.redactor``) is to texts that are stored; one that fails costs
            the passage its verdict. None for no redaction.
    """

    judge: Judge
    utilities: Utilities = DEFAULT_UTILITIES
    budget: BudgetLimits = NO_LIMITS
    lookup: PassageLookup | None = None
    redactor: Redactor | None = redact

    @property
    def series(self) -> str:
        """The name of the judge's series."""
        return f"{self.judge.name} {self.judge.version}"


@dataclass(frozen=True, slots=True)
class SampleVerdicts:
    """The verdicts on one sample.

    Attributes:
        block: What estimates need of it; None if a served passage got no valid verdict.
        verdicts: The valid ones by passage id, in the order in which they were wanted.
        missing: Ids of the pool's passages that got none.
        is_complete: Whether all served passages got one.
        n_wanted: Passages that a verdict was wanted of.
        n_invalid: Wanted passages without a valid verdict, unreadable passages included.
    """

    block: bytes | None
    verdicts: Mapping[str, Judgment]
    missing: tuple[str, ...]
    is_complete: bool
    n_wanted: int
    n_invalid: int


class SampleJudge:
    """Has samples judged, one at a time.

    Attributes:
        n_judged: Passages that the judge has given a verdict of, or was asked for one in vain,
            also those of samples on which it failed later.
        is_proven: Whether it has given a valid verdict; always of a judge that asks no endpoint.
    """

    def __init__(self, settings: JudgingSettings) -> None:
        self.judge = judge = settings.judge
        self._settings = settings
        self.is_exact = bool(getattr(judge, "exact", False))
        self._reads_text = getattr(judge, "reads_text", True)
        self._judges_pools = bool(getattr(judge, "judges_pools", False))
        self.n_judged = 0
        self._ledger: Ledger | None = getattr(judge, "ledger", None)
        self.is_proven = self._ledger is None

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
        has_hit = max([verdict.grade for verdict in verdicts.values()], default=0) > 0
        # A judge that has no verdict on anything served has none on the rest.
        is_answered = bool(verdicts) or not record.served
        dropped = record.to_judge(has_hit=has_hit) if is_answered else ()
        left = [self._passage(record, each) for each in dropped if each not in at_first]
        found |= self._graded(record, left)
        wanted = [names[position] for position in (*record.served, *dropped)]
        verdicts = {name: found[name] for name in wanted if name in found}
        missing = tuple([each for each in wanted if each not in verdicts])
        block, n_wanted, n_invalid = None, len(wanted), len(wanted) - len(verdicts)
        if counts:
            scale = Scale(self._settings.utilities, self.judge.max_grade)
            block = judged_request(record, verdicts, scale, probability=probability)
        return SampleVerdicts(block, verdicts, missing, is_complete, n_wanted, n_invalid)

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
            passage = None if self._settings.lookup is None else self._settings.lookup(passage_id)
            if passage is None:
                return None
            if record.where is not None and not record.where.allows(passage.metadata):
                return None
            return self._redacted(passage)
        except Exception:
            return None

    def _redacted(self, passage: Passage) -> Passage:
        """Redact a passage of the index as a sample would hold it: its beginning."""
        passage, redactor = as_written(passage), self._settings.redactor
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
        if not self.is_proven and self._ledger is not None:
            _check_replies(self.judge, self._ledger)
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
