"""What callers saw beside what was counted: the invariants of DESIGN.md §7, to the last request.

Callers keep their own callers. Nothing here is worked out from the other side's figures, but for
``pending``, which is what is left.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from ctxguard.core.context import Context
from ctxguard.errors import CtxguardError, OverloadedError
from ctxguard.monitor.store import Accounts


class CallerCounts:
    """The requests of one process, counted by its callers. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.asked = self.ok = self.degraded = self.failed = self.shed = 0
        self.candidates = self.kept = 0
        self.routes: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.flags: Counter[str] = Counter()
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
            self.routes[context.route.value] += 1
            self.failures.update([f"{one.stage} {one.kind.value}" for one in context.failures])
            self.flags.update([flag.value for flag in context.flags])
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
            for name in ("received", "ok", "degraded", "failed", "shed", "kept")
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
        worker_id: Its id in the store.
    """

    metrics: MetricCounts
    candidates: int
    samples: Accounts | None
    stored_rows: int
    under_way: int = 0
    wrong: tuple[str, ...] = ()
    worker_id: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def compare(
    callers: CallerCounts,
    metrics: MetricCounts,
    samples: Accounts | None,
    stored_rows: int,
    *,
    waiting: int = 0,
    worker_id: str = "",
) -> ProcessAccounts:
    """Compare the accounts of a process that ended by itself and sampled every request.

    Args:
        callers: The counts of its callers.
        metrics: The counts of its metrics.
        samples: The counts of its sampler and writer; None where nothing is sampled.
        stored_rows: How many of its samples the store holds.
        waiting: How many samples are still in its queue.
        worker_id: Its id in the store.
    """
    pairs = [
        ("requests received", metrics.received, callers.asked),
        ("requests ok", metrics.ok, callers.ok),
        ("requests degraded", metrics.degraded, callers.degraded),
        ("requests failed", metrics.failed, callers.failed),
        ("requests shed", metrics.shed, callers.shed),
        (
            "requests that ended",
            metrics.ok + metrics.degraded + metrics.failed + metrics.shed,
            metrics.received,
        ),
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
        worker_id=worker_id,
    )


def requests_in_words(processes: Iterable[ProcessAccounts]) -> str:
    """The requests of all processes as one sum."""
    total: Counter[str] = Counter()
    for one in processes:
        for name in ("received", "ok", "degraded", "failed", "shed"):
            total[name] += getattr(one.metrics, name)
        total["under way"] += one.under_way
    parts = ["ok", "degraded", "failed", "shed"] + ["under way"] * (total["under way"] > 0)
    return _sum(total["received"], [(total[part], part) for part in parts])


def candidates_in_words(processes: Iterable[ProcessAccounts]) -> str:
    """The candidates of all processes as one sum."""
    total = kept = 0
    dropped: Counter[str] = Counter()
    for one in processes:
        total += one.candidates
        kept += one.metrics.kept
        dropped.update(one.metrics.dropped)
    return _sum(total, [(kept, "kept"), (sum(dropped.values()), "dropped")])


def samples_in_words(processes: Iterable[ProcessAccounts]) -> str:
    """The samples of all processes as one sum."""
    total: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    for one in processes:
        if one.samples is not None:
            total["sampled"] += one.samples.sampled
            total["stored"] += one.samples.stored
            total["pending"] += one.samples.pending
            total["unaccounted"] += one.samples.unaccounted
            lost.update({why.value: n for why, n in one.samples.lost.items() if n})
    why = f" ({', '.join(sorted(lost))})" if lost else ""
    return _sum(
        total["sampled"],
        [
            (total["stored"], "stored"),
            (total["pending"], "pending"),
            (sum(lost.values()), f"lost{why}"),
            (total["unaccounted"], "unaccounted"),
        ],
    )


def _sum(total: int, parts: list[tuple[int, str]]) -> str:
    return f"{total:,} = " + " + ".join([f"{n:,} {name}" for n, name in parts])
