"""What a monitor judges with."""

from collections.abc import Callable
from dataclasses import dataclass

from ctxguard.core.metrics import DEFAULT_UTILITIES, Utilities
from ctxguard.core.types import Passage
from ctxguard.monitor.estimation.terms import JudgedRequest
from ctxguard.monitor.judges import Judge
from ctxguard.monitor.judging.audit import Audit
from ctxguard.monitor.judging.budget import NO_LIMITS, BudgetLimits
from ctxguard.monitor.redaction import Redactor, redact
from ctxguard.monitor.sampling.record import SampleRecord

PassageLookup = Callable[[str], Passage]
"""The passage of an id; raises where there is none."""
OnJudged = Callable[[SampleRecord, JudgedRequest], None]
"""Takes a judged sample and its verdicts as the estimates count them; what it raises is logged."""


@dataclass(frozen=True, slots=True)
class JudgingSettings:
    """What a monitor judges with, and how much of it.

    Attributes:
        judge: Grades passages. Another name or version begins another series of estimates.
        utilities: The utility of a passage; every served passage that is not relevant costs.
        budget: The most that judging may take.
        lookup: Finds the texts of passages that were not stored; None if all are stored.
        audit: Estimates what the retriever missed; None for no audit.
        redactor: Applied to texts that ``lookup`` finds before the judge reads them, as the
            samples' own (``Privacy.redactor``) is to texts that are stored; one that fails costs
            the passage its verdict. None for no redaction.
        on_judged: Called with each judged sample and its verdicts, once they are stored, such as
            ``ctxguard.integrations.opentelemetry.EvaluationEvents``; None for nothing.
    """

    judge: Judge
    utilities: Utilities = DEFAULT_UTILITIES
    budget: BudgetLimits = NO_LIMITS
    lookup: PassageLookup | None = None
    audit: Audit | None = None
    redactor: Redactor | None = redact
    on_judged: OnJudged | None = None

    @property
    def series(self) -> str:
        """The name of the judge's series."""
        return f"{self.judge.name} {self.judge.version}"
