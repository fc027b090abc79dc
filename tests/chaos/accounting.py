"""What callers saw beside what was counted: the invariants of DESIGN.md §7, to the last request.

Callers keep their own counts. Nothing here is worked out from the other side's figures, but for
``pending``, which is what is left.
"""

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from ctxguard.core.context import Context
from ctxguard.errors import CtxguardError, OverloadedError
from ctxguard.monitor.sampling.sampler import Accounts

ENDS = ("ok", "degraded", "failed", "shed")
"""How a request may end."""

_METRICS = {
    "ctxguard_received_requests_total": "received",
    "ctxguard_failed_requests_total": "failed",
    "ctxguard_shed_requests_total": "shed",
    "ctxguard_kept_candidates_total": "kept",
    "ctxguard_dropped_candidates_total": "dropped",
}


class CallerCounts:
    """The requests of one process, counted by its callers. Safe to use from many threads.

    Attributes:
        counts: Requests by how they ended, ``candidates``, ``kept``, and errors that are no
            ``CtxguardError`` (``untyped``).
        errors: Errors by type.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts, self.errors = Counter[str](), Counter[str]()
        self.slowest_seconds = 0.0

    def answered(self, context: Context, seconds: float) -> None:
        """Count a context."""
        ranking = context.decision.ranking
        end = "degraded" if ranking.failures else "ok"
        found = {end: 1, "candidates": len(ranking), "kept": len(context.would_keep_ids)}
        self._count(found, seconds)

    def raised(self, error: BaseException, seconds: float) -> None:
        """Count an error."""
        end = "shed" if isinstance(error, OverloadedError) else "failed"
        self._count({end: 1, "untyped": not isinstance(error, CtxguardError)}, seconds)
        self.errors[type(error).__name__] += 1

    def _count(self, found: dict[str, int], seconds: float) -> None:
        with self._lock:
            self.counts.update(found)
            self.slowest_seconds = max(self.slowest_seconds, seconds)

    @property
    def answers(self) -> int:
        """How many requests got a context."""
        return self.counts["ok"] + self.counts["degraded"]


def read_metrics(registry: CollectorRegistry) -> Counter[str]:
    """Read the requests received and by their ends, and the candidates kept and dropped."""
    found: Counter[str] = Counter()
    for metric in registry.collect():
        for sample in metric.samples:
            name = _METRICS.get(sample.name)
            if sample.name == "ctxguard_requests_total":
                name = sample.labels["outcome"]
            if name is not None:
                found[name] += int(sample.value)
    return found


@dataclass(frozen=True)
class ProcessAccounts:
    """One process's accounts, and the figures in them that do not agree.

    Attributes:
        metrics: The counts of its metrics.
        candidates: How many candidates the callers saw.
        samples: The counts of its sampler and writer.
        stored_rows: How many of its samples the store holds.
        wrong: Each figure that does not agree with another, in words; empty if all do.
    """

    metrics: Counter[str]
    candidates: int
    samples: Accounts
    stored_rows: int
    wrong: tuple[str, ...] = ()


def compare(
    callers: CallerCounts,
    metrics: Counter[str],
    samples: Accounts,
    stored_rows: int,
    *,
    waiting: int = 0,
) -> ProcessAccounts:
    """Compare the accounts of a process that ended by itself and sampled every request.

    Args:
        callers: The counts of its callers.
        metrics: The counts of its metrics.
        samples: The counts of its sampler and writer.
        stored_rows: How many of its samples the store holds.
        waiting: How many samples are still in its queue.
    """
    seen = callers.counts
    pairs = [
        ("requests received", metrics["received"], sum(seen[end] for end in ENDS)),
        *[(f"requests {end}", metrics[end], seen[end]) for end in ENDS],
        ("candidates kept", metrics["kept"], seen["kept"]),
        ("candidates", metrics["kept"] + metrics["dropped"], seen["candidates"]),
        ("errors that are not the package's", 0, seen["untyped"]),
        ("samples", samples.sampled, callers.answers),
        ("samples stored", samples.stored, stored_rows),
        ("samples pending", samples.pending, waiting),
        ("samples unaccounted for", samples.unaccounted, 0),
    ]
    wrong = [f"{what}: {found}, not {due}" for what, found, due in pairs if found != due]
    return ProcessAccounts(metrics, seen["candidates"], samples, stored_rows, tuple(wrong))


def in_sums(processes: Iterable[ProcessAccounts]) -> str:
    """The requests, candidates and samples of all processes, each as one sum."""
    counts: Counter[str] = Counter()
    for one in processes:
        counts.update(one.metrics)
        counts["seen"] += one.candidates
        counts.update(
            {each: getattr(one.samples, each) for each in ("sampled", "stored", "pending")}
        )
        counts.update(
            {"lost": sum(one.samples.lost.values()), "unaccounted": one.samples.unaccounted}
        )

    def in_words(what: str, whole: str, *parts: str) -> str:
        each = [f"{counts[part]:,} {part}" for part in parts if counts[part]]
        return f"{counts[whole]:,} {what} = {' + '.join(each) or '0'}"

    return "; ".join(
        [
            in_words("requests", "received", *ENDS),
            in_words("candidates", "seen", "kept", "dropped"),
            in_words("samples", "sampled", "stored", "lost", "pending", "unaccounted"),
        ]
    )
