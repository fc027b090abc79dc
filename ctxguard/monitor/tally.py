"""What one monitoring process has come to: samples by outcome, verdicts, sums, and sequences."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ctxguard.monitor.estimates import Metric, RatioSums
from ctxguard.monitor.sequences import BettingSequence
from ctxguard.monitor.table import Table, sums_of

WATCHED = (Metric.PRECISION, Metric.DISTRACTOR_RATE, Metric.RECALL_LOSS)
"""Means of what lies in [0, 1] in every single request: what a confidence sequence can follow."""


class Outcome(StrEnum):
    """What became of a claimed sample. A closed set: it labels a metric."""

    JUDGED = "judged"
    INCOMPLETE = "incomplete"
    """A served passage got no valid verdict: left out, and counted."""
    SKIPPED = "skipped"
    """Passed over at random to keep within the budget."""
    UNREADABLE = "unreadable"
    """It was written by another release, or is damaged."""
    JUDGE_FAILED = "judge_failed"
    """The judge could not be asked; the sample waits for another attempt, up to five."""


@dataclass(frozen=True, slots=True)
class Tallied:
    """A tally at one moment, consistent in itself.

    Attributes:
        sums: The additive statistics of each metric.
        sequences: By metric, the interval that may be looked at as often as one likes; without
            those that have seen nothing.
        outcomes: Claimed samples by what became of them.
        verdicts: Passages that the judge was asked about.
        invalid_verdicts: Those among them without a valid verdict.
    """

    sums: Mapping[Metric, RatioSums]
    sequences: Mapping[Metric, tuple[float, float]]
    outcomes: Mapping[Outcome, int]
    verdicts: int
    invalid_verdicts: int


class Tally:
    """Counts and sums since the process began. Safe to use from several threads.

    Args:
        confidence: Of the sequences' intervals, in (0, 1).
    """

    def __init__(self, confidence: float) -> None:
        self._lock = threading.Lock()
        self._outcomes = dict.fromkeys(Outcome, 0)
        self._verdicts = self._invalid = self._errors = 0
        self._sums = {metric: RatioSums() for metric in Metric}
        self._sequences = {metric: BettingSequence(confidence) for metric in WATCHED}

    def ended(self, outcome: Outcome) -> None:
        """Something became of a claimed sample."""
        with self._lock:
            self._outcomes[outcome] += 1

    def asked(self, passages: int, invalid: int) -> None:
        """The judge was asked about passages, of which some got no valid verdict."""
        with self._lock:
            self._verdicts += passages
            self._invalid += invalid

    def failed(self) -> None:
        """A step failed as a whole, or the store refused a verdict."""
        with self._lock:
            self._errors += 1

    def judged(self, table: Table) -> None:
        """Judged requests were written, one row each, in the order in which they were judged."""
        # Sums of what one process judged never clustered by session: another may have the rest.
        apart = np.array(table)
        apart["session"] = 0
        sums = {metric: sums_of(metric, apart) for metric in Metric}
        singly = [
            (metric, one)
            for metric in WATCHED
            for place in range(len(apart))
            if (one := sums_of(metric, apart[place : place + 1])).b
        ]
        with self._lock:
            for metric, more in sums.items():
                self._sums[metric] += more
            for metric, one in singly:
                self._sequences[metric].add(min(max(one.a / one.b, 0.0), 1.0))

    @property
    def errors(self) -> int:
        """Steps that failed as a whole, and verdicts that the store refused."""
        return self._errors

    def read(self) -> Tallied:
        """All of it, now."""
        with self._lock:
            return Tallied(
                sums=dict(self._sums),
                sequences={
                    metric: interval
                    for metric, sequence in self._sequences.items()
                    if sequence.n and (interval := sequence.interval) is not None
                },
                outcomes=dict(self._outcomes),
                verdicts=self._verdicts,
                invalid_verdicts=self._invalid,
            )
