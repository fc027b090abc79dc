"""Counts of a monitoring process: samples by outcome, verdicts, tokens, calls of the judge."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum

from ctxguard.core.types import Mode, Route
from ctxguard.monitor.judges import Judge, Judgment, Ledger
from ctxguard.monitor.sampling.record import SampleRecord, TokenAccount

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
    "place_verdicts": ("half", "relevant"),
    "judge_calls": (),
    "judge_retries": (),
    "judge_invalid": ("reason",),
    "judge_tokens": ("direction",),
    "judge_cost": (),
}
"""Every count, and what labels it beside the judge."""


def token_counts(mode: Mode, tokens: TokenAccount, weight: float = 1.0) -> Counts:
    """The tokens of requests in a mode, as counts."""
    *fates, (_, today) = tokens._asdict().items()
    counts: dict[tuple[str, ...], float] = {
        ("candidate_tokens", mode.value, fate): weight * n for fate, n in fates
    }
    return {**counts, ("today_tokens", mode.value): weight * today}


def tokens_by_mode(counts: Counts) -> dict[Mode, TokenAccount]:
    """The tokens of all requests in each mode, from counts."""
    keys = {mode: token_counts(mode, TokenAccount()) for mode in Mode}
    return {
        mode: TokenAccount(*[round(counts.get(key, 0.0)) for key in of_mode])
        for mode, of_mode in keys.items()
    }


NOTHING_COUNTED: Counts = {
    **{
        ("judged_samples", route.value, outcome.value): 0.0
        for route in Route
        for outcome in JudgedAs
    },
    **{
        (name, route.value): 0.0
        for name, labels in LABELS.items()
        if labels == ("route",)
        for route in Route
    },
    **{key: 0.0 for mode in Mode for key in token_counts(mode, TokenAccount())},
    **{("canary_verdicts", same): 0.0 for same in ("yes", "no")},
    **{
        ("place_verdicts", half, relevant): 0.0
        for half in ("first", "second")
        for relevant in ("yes", "no")
    },
}
"""What a series begins with: a count that is first seen above 0 has no rate before."""


class MonitorCounters:
    """Counts since the process began. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counter[tuple[str, ...]]()
        self.errors = 0
        """Steps that failed as a whole, and results that the store refused."""

    def add_canary(self, same: int, other: int) -> None:
        """Count the verdicts on a sample that was judged again by the same judge."""
        self._add({("canary_verdicts", "yes"): same, ("canary_verdicts", "no"): other})

    def add_places(self, verdicts: Iterable[Judgment]) -> None:
        """Count the verdicts of one list by the half of it in which the passage stood."""
        placed = [one for one in verdicts if one.place is not None]
        middle = (max([one.place or 0 for one in placed], default=0) + 1) / 2
        counts = Counter[tuple[str, ...]]()
        for one in placed:
            half = "first" if (one.place or 0) < middle else "second"
            counts["place_verdicts", half, "yes" if one.grade > 0 else "no"] += 1
        self._add(counts)

    def add_outcome(self, outcome: JudgedAs, route: Route | None) -> None:
        """Count one claimed sample; ``route`` is None if it cannot be read."""
        self._add({("judged_samples", route or "", outcome): 1})

    def add_verdicts(self, route: Route, passages: int, invalid: int) -> None:
        """Count passages submitted to the judge, and those without a valid verdict."""
        self._add({("verdicts", route): passages, ("invalid_verdicts", route): invalid})

    def add_tokens(self, record: SampleRecord) -> None:
        """Add the tokens of a sample, weighted by 1/π: each stands for all traffic."""
        weight = 1.0 / record.probability if record.probability else 0.0
        self._add(token_counts(record.mode, record.tokens, weight))

    def _add(self, more: Mapping[tuple[str, ...], float]) -> None:
        with self._lock:
            for key, n in more.items():
                self._counts[tuple(map(str, key))] += n  # type: ignore[assignment]

    def add_error(self) -> None:
        """Count a step that failed as a whole, or a result that the store refused."""
        with self._lock:
            self.errors += 1

    def counts(self) -> Counts:
        """All counts now."""
        with self._lock:
            return dict(self._counts)

    def outcomes(self) -> dict[JudgedAs, int]:
        """Samples that this process claimed, by outcome."""
        found = dict.fromkeys(JudgedAs, 0)
        for (name, *labels), n in self.counts().items():
            if name == "judged_samples":
                found[JudgedAs(labels[1])] += int(n)
        return found

    def total(self, name: str) -> int:
        """A count over all of its labels."""
        return int(sum(n for (each, *_), n in self.counts().items() if each == name))


def judge_counts(judge: Judge) -> Counts:
    """The accounts of a judge as counts; empty for one that keeps none."""
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
