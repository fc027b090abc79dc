"""What callers saw beside what was counted: the invariants of DESIGN.md §7, to the last request.

Callers keep their own tally. Nothing here is worked out from the other side's figures, but for
``pending``, which is what is left.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from ctxguard.context import Context
from ctxguard.errors import CtxguardError, OverloadedError
from ctxguard.monitor.sampler import Accounts


class Tally:
    """What the callers of one process saw; safe to use from many threads."""

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
        """Note an answer."""
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
        """Note an error."""
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
        """Requests that got a context."""
        return self.ok + self.degraded


@dataclass(frozen=True)
class Counted:
    """What one process's metrics say."""

    received: int = 0
    ok: int = 0
    degraded: int = 0
    failed: int = 0
    shed: int = 0
    kept: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)

    def less(self, before: "Counted") -> "Counted":
        """What was counted since ``before``: a forked child inherits its parent's counts."""
        numbers = {
            name: getattr(self, name) - getattr(before, name)
            for name in ("received", "ok", "degraded", "failed", "shed", "kept")
        }
        dropped = {why: n - before.dropped.get(why, 0) for why, n in self.dropped.items()}
        return Counted(**numbers, dropped={why: n for why, n in dropped.items() if n})


def counted(registry: CollectorRegistry) -> Counted:
    """Read a registry."""
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
    return Counted(**found, dropped=dict(dropped))


@dataclass(frozen=True)
class Books:
    """One process's accounts, and every figure in them that does not agree.

    Attributes:
        counted: What its metrics say.
        candidates: That the retriever gave, as callers saw them.
        samples: As the writing process counted them; None where nothing is sampled.
        stored_rows: Samples of this process's that are in the store.
        under_way: Requests that had begun and not ended when the process was killed.
        wrong: What does not add up, in words; empty where all does.
        worker_id: As which the store knows it.
    """

    counted: Counted
    candidates: int
    samples: Accounts | None
    stored_rows: int
    under_way: int = 0
    wrong: tuple[str, ...] = ()
    worker_id: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def balance(
    tally: Tally,
    metrics: Counted,
    samples: Accounts | None,
    stored_rows: int,
    *,
    waiting: int = 0,
    worker_id: str = "",
) -> Books:
    """The accounts of a process that lived to tell, every request of which was sampled.

    Args:
        tally: What its callers saw.
        metrics: What its metrics say.
        samples: What its sampler and writer say; None where nothing is sampled.
        stored_rows: What the store holds of it.
        waiting: Samples that are still in its queue.
        worker_id: As which the store knows it.
    """
    pairs = [
        ("requests received", metrics.received, tally.asked),
        ("requests ok", metrics.ok, tally.ok),
        ("requests degraded", metrics.degraded, tally.degraded),
        ("requests failed", metrics.failed, tally.failed),
        ("requests shed", metrics.shed, tally.shed),
        (
            "requests that ended",
            metrics.ok + metrics.degraded + metrics.failed + metrics.shed,
            metrics.received,
        ),
        ("candidates kept", metrics.kept, tally.kept),
        (
            "candidates kept and dropped",
            metrics.kept + sum(metrics.dropped.values()),
            tally.candidates,
        ),
        ("errors that are not the package's", 0, tally.untyped),
    ]
    if samples is not None:
        pairs += [
            ("samples", samples.sampled, tally.answers),
            ("samples stored", samples.stored, stored_rows),
            ("samples pending", samples.pending, waiting),
        ]
    wrong = [f"{what}: {found}, not {due}" for what, found, due in pairs if found != due]
    return Books(
        counted=metrics,
        candidates=tally.candidates,
        samples=samples,
        stored_rows=stored_rows,
        wrong=tuple(wrong),
        worker_id=worker_id,
    )


def requests_in_words(books: Iterable[Books]) -> str:
    """Every process's requests in one sum."""
    total: Counter[str] = Counter()
    for one in books:
        for name in ("received", "ok", "degraded", "failed", "shed"):
            total[name] += getattr(one.counted, name)
        total["under way"] += one.under_way
    parts = ["ok", "degraded", "failed", "shed"] + ["under way"] * (total["under way"] > 0)
    return _sum(total["received"], [(total[part], part) for part in parts])


def candidates_in_words(books: Iterable[Books]) -> str:
    """Every process's candidates in one sum."""
    total = kept = 0
    dropped: Counter[str] = Counter()
    for one in books:
        total += one.candidates
        kept += one.counted.kept
        dropped.update(one.counted.dropped)
    return _sum(total, [(kept, "kept"), (sum(dropped.values()), "dropped")])


def samples_in_words(books: Iterable[Books]) -> str:
    """Every process's samples in one sum."""
    total: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    for one in books:
        if one.samples is not None:
            total["sampled"] += one.samples.sampled
            total["stored"] += one.samples.stored
            total["pending"] += one.samples.pending
            lost.update({why.value: n for why, n in one.samples.lost.items() if n})
    why = f" ({', '.join(sorted(lost))})" if lost else ""
    return _sum(
        total["sampled"],
        [
            (total["stored"], "stored"),
            (total["pending"], "pending"),
            (sum(lost.values()), f"lost{why}"),
        ],
    )


def _sum(total: int, parts: list[tuple[int, str]]) -> str:
    return f"{total:,} = " + " + ".join([f"{n:,} {name}" for n, name in parts])
