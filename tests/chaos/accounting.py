"""What callers saw beside what was counted: the invariants of DESIGN.md §7, to the last request.

Callers keep their own callers. Nothing here is worked out from the other side's figures, but for
``pending``, which is what is left.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from ctxguard.core.context import Context
from ctxguard.errors import CtxguardError, OverloadedError
from ctxguard.monitor.store import Accounts

_ENDED = ("ok", "degraded", "failed", "shed")
"""How a request may end."""


class CallerCounts:
    """The requests of one process, counted by its callers. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.asked = self.ok = self.degraded = self.failed = self.shed = 0
        self.candidates = self.kept = 0
        self.errors: Counter[str] = Counter()
        self.untyped = 0
        self.slowest_seconds = 0.0

    def answered(self, context: Context, seconds: float) -> None:
        """Count a context."""
        ranking = context.decision.ranking
        with self._lock:
            self.asked += 1
            if ranking.failures:
                self.degraded += 1
            else:
                self.ok += 1
            self.candidates += len(ranking)
            self.kept += len(context.kept_ids)
            self.slowest_seconds = max(self.slowest_seconds, seconds)

    def raised(self, error: BaseException, seconds: float) -> None:
        """Count an error."""
        with self._lock:
            self.asked += 1
            if isinstance(error, OverloadedError):
                self.shed += 1
            else:
                self.failed += 1
            self.untyped += not isinstance(error, CtxguardError)
            self.errors[type(error).__name__] += 1
            self.slowest_seconds = max(self.slowest_seconds, seconds)

    @property
    def answers(self) -> int:
        """How many requests got a context."""
        return self.ok + self.degraded


@dataclass(frozen=True)
class MetricCounts:
    """The requests of one process, counted by its metrics."""

    received: int = 0
    ok: int = 0
    degraded: int = 0
    failed: int = 0
    shed: int = 0
    kept: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)

    def less(self, before: "MetricCounts") -> "MetricCounts":
        """What was counted since ``before``: a forked child inherits its parent's counts."""
        numbers = {
            name: getattr(self, name) - getattr(before, name)
            for name in (*_ENDED, "received", "kept")
        }
        dropped = {why: n - before.dropped.get(why, 0) for why, n in self.dropped.items()}
        return MetricCounts(**numbers, dropped={why: n for why, n in dropped.items() if n})


def read_metrics(registry: CollectorRegistry) -> MetricCounts:
    """Read the counts from a registry."""
    found: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for metric in registry.collect():
        for sample in metric.samples:
            if not sample.value:
                continue
            n = int(sample.value)
            match sample.name:
                case "ctxguard_received_requests_total":
                    found["received"] += n
                case "ctxguard_requests_total":
                    found[sample.labels["outcome"]] += n
                case "ctxguard_failed_requests_total":
                    found["failed"] += n
                case "ctxguard_shed_requests_total":
                    found["shed"] += n
                case "ctxguard_kept_candidates_total":
                    found["kept"] += n
                case "ctxguard_dropped_candidates_total":
                    dropped[sample.labels["reason"]] += n
    return MetricCounts(**found, dropped=dict(dropped))


@dataclass(frozen=True)
class ProcessAccounts:
    """One process's accounts, and the figures in them that do not agree.

    Attributes:
        metrics: The counts of its metrics.
        candidates: How many candidates the callers saw.
        samples: The counts of its sampler and writer; None where nothing is sampled.
        stored_rows: How many of its samples the store holds.
        under_way: How many requests were under way when the process was killed.
        wrong: Each figure that does not agree with another, in words; empty if all do.
    """

    metrics: MetricCounts
    candidates: int
    samples: Accounts | None
    stored_rows: int
    under_way: int = 0
    wrong: tuple[str, ...] = ()
    worker_id: str = ""


def compare(
    callers: CallerCounts,
    metrics: MetricCounts,
    samples: Accounts | None,
    stored_rows: int,
    *,
    waiting: int = 0,
) -> ProcessAccounts:
    """Compare the accounts of a process that ended by itself and sampled every request.

    Args:
        callers: The counts of its callers.
        metrics: The counts of its metrics.
        samples: The counts of its sampler and writer; None where nothing is sampled.
        stored_rows: How many of its samples the store holds.
        waiting: How many samples are still in its queue.
    """
    pairs = [
        ("requests received", metrics.received, callers.asked),
        *[(f"requests {end}", getattr(metrics, end), getattr(callers, end)) for end in _ENDED],
        ("requests that ended", sum(getattr(metrics, end) for end in _ENDED), metrics.received),
        ("candidates kept", metrics.kept, callers.kept),
        (
            "candidates kept and dropped",
            metrics.kept + sum(metrics.dropped.values()),
            callers.candidates,
        ),
        ("errors that are not the package's", 0, callers.untyped),
    ]
    if samples is not None:
        pairs += [
            ("samples", samples.sampled, callers.answers),
            ("samples stored", samples.stored, stored_rows),
            ("samples pending", samples.pending, waiting),
            ("samples unaccounted for", samples.unaccounted, 0),
        ]
    wrong = [f"{what}: {found}, not {due}" for what, found, due in pairs if found != due]
    return ProcessAccounts(
        metrics=metrics,
        candidates=callers.candidates,
        samples=samples,
        stored_rows=stored_rows,
        wrong=tuple(wrong),
    )


def in_sums(processes: Iterable[ProcessAccounts]) -> str:
    """The requests, candidates and samples of all processes, each as one sum."""
    metrics, samples, lost = Counter[str](), Counter[str](), Counter[str]()
    for one in processes:
        metrics.update({name: getattr(one.metrics, name) for name in (*_ENDED, "received", "kept")})
        metrics.update({"under way": one.under_way, "seen": one.candidates})
        metrics["dropped"] += sum(one.metrics.dropped.values())
        if (found := one.samples) is not None:
            lost.update({why.value: n for why, n in found.lost.items() if n})
            names = ("sampled", "stored", "pending", "unaccounted")
            samples.update({name: getattr(found, name) for name in names})
    samples[f"lost ({', '.join(sorted(lost))})"] = sum(lost.values())

    def in_words(what: str, counts: Counter[str], whole: str, parts: Iterable[str]) -> str:
        each = [f"{counts[part]:,} {part}" for part in parts if counts[part]]
        return f"{counts[whole]:,} {what} = {' + '.join(each) or '0'}"

    return "; ".join(
        [
            in_words("requests", metrics, "received", (*_ENDED, "under way")),
            in_words("candidates", metrics, "seen", ("kept", "dropped")),
            in_words("samples", samples, "sampled", [one for one in samples if one != "sampled"]),
        ]
    )
