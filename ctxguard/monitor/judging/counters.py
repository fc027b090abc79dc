"""What one monitoring process has counted: samples by outcome, verdicts, and sums."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ctxguard.monitor.estimation.sums import NO_TERMS, RatioSums, TermSums, request_terms
from ctxguard.monitor.estimation.terms import Metric, Table


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


@dataclass(frozen=True, slots=True)
class JudgingCounts:
    """The counters at one moment, consistent with each other.

    Attributes:
        sums: The additive statistics of each metric.
        outcomes: Claimed samples by outcome.
        verdicts: Passages submitted to the judge.
        invalid_verdicts: Passages for which it gave no valid verdict.
    """

    sums: Mapping[Metric, RatioSums]
    outcomes: Mapping[JudgedAs, int]
    verdicts: int
    invalid_verdicts: int


class MonitorCounters:
    """Counts and sums since the process began. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcomes = dict.fromkeys(JudgedAs, 0)
        self._verdicts = self._invalid = self._errors = 0
        self._sums = NO_TERMS

    def add_outcome(self, outcome: JudgedAs) -> None:
        """Count one claimed sample."""
        with self._lock:
            self._outcomes[outcome] += 1

    def add_verdicts(self, passages: int, invalid: int) -> None:
        """Count passages submitted to the judge, and those without a valid verdict."""
        with self._lock:
            self._verdicts += passages
            self._invalid += invalid

    def add_error(self) -> None:
        """Count a step that failed as a whole, or a result that the store refused."""
        with self._lock:
            self._errors += 1

    def add_judged(self, table: Table) -> None:
        """Add the terms of judged requests that were stored."""
        # Not clustered by session: another process may have judged the rest of one.
        sums = TermSums.of(request_terms(table))
        with self._lock:
            self._sums += sums

    @property
    def errors(self) -> int:
        """Steps that failed as a whole, and results that the store refused."""
        return self._errors

    def snapshot(self) -> JudgingCounts:
        """All counters now."""
        with self._lock:
            return JudgingCounts(
                sums={metric: self._sums.ratio(metric) for metric in Metric},
                outcomes=dict(self._outcomes),
                verdicts=self._verdicts,
                invalid_verdicts=self._invalid,
            )
