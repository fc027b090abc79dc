"""Counts of a monitoring process: samples by outcome, verdicts, tokens, calls of the judge."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from itertools import product

from ctxguard.core.types import Mode, Route
from ctxguard.monitor.judges import Judge, Ledger
from ctxguard.monitor.sampling.record import TokenAccount

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

    def total(self, name: str) -> int:
        """Add a count up over all of its labels."""
        return int(sum(n for (each, *_), n in self.counts().items() if each == name))


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
