"""Defines the counts of judging: their names and labels, and the tokens among them. Pure."""

from collections.abc import Iterable
from enum import StrEnum
from itertools import product

from ctxguard.core.types import Mode, Route
from ctxguard.monitor.sampling.record import TokenAccount
from ctxguard.monitor.store.types import Counts


class JudgingOutcome(StrEnum):
    """How the judging of a sample ended. A closed set: it labels a metric."""

    JUDGED = "judged"
    INCOMPLETE = "incomplete"
    """A passage got no grade, or the judge knows nothing about the question; no figure uses it."""
    SKIPPED = "skipped"
    """Not judged, at random, to keep within the budget."""
    UNREADABLE = "unreadable"
    """The sample was written by another release, or is damaged."""
    JUDGE_FAILED = "judge_failed"
    """The judge could not be called; the sample waits for another attempt."""


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
"""Every exported count, with its labels other than the judge."""

MISMATCHED = "mismatched_samples"
"""A count only for the table: serving processes export the flags of all their answers."""
JUDGE_CHANGED = "judge_changed"
"""A count only for reports: above 0 once canaries have shown that the judge has changed."""


def tokens_by_mode(counts: Counts) -> dict[Mode, TokenAccount]:
    """Return the tokens of all requests in each mode, taken from counts."""
    keys = {mode: TokenAccount().counts(mode) for mode in Mode}
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
