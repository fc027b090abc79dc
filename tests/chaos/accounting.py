"""What callers saw beside what was counted: the invariants of DESIGN.md §7, to the last request.

Callers keep their own counts. Nothing here is worked out from the other side's figures, but for
``pending``, which is what is left.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ctxguard.core.context import Context
from ctxguard.errors import CtxguardError, OverloadedError
from ctxguard.monitor.sampling.sampler import Accounts
from tests.counted import Counted

ENDS = ("ok", "degraded", "failed", "shed")
"""How a request may end."""


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

    @contextmanager
    def counting(self) -> Iterator[list[Context | None]]:
        """Count the context that the block puts in the list's place, or that it raised."""
        started, answers = time.perf_counter(), list[Context | None]([None])
        found, errors = Counter[str](), Counter[str]()
        try:
            yield answers
        except Exception as error:
            found["shed" if isinstance(error, OverloadedError) else "failed"] += 1
            found["untyped"] += not isinstance(error, CtxguardError)
            errors[type(error).__name__] += 1
        if (context := answers[0]) is not None:
            ranking = context.decision.ranking
            found["degraded" if ranking.failures else "ok"] += 1
            found.update(candidates=len(ranking), kept=len(context.would_keep_ids))
        seconds = time.perf_counter() - started
        with self._lock:
            self.counts.update(found)
            self.errors.update(errors)
            self.slowest_seconds = max(self.slowest_seconds, seconds)

    @property
    def answers(self) -> int:
        """How many requests got a context."""
        return self.counts["ok"] + self.counts["degraded"]


def read_metrics(counted: Counted) -> Counter[str]:
    """Read the requests received and by their ends, and the candidates kept and dropped."""
    names = {"received_requests", "failed_requests", "shed_requests"}
    names |= {"kept_candidates", "dropped_candidates"}
    found = Counter({name.partition("_")[0]: counted[name] for name in names})
    found.update({end: counted.requests(end) for end in ENDS[:2]})
    return found


@dataclass(frozen=True)
class ProcessAccounts:
    """One process's accounts: its metrics, the candidates that its callers saw, its sampler's and
    its rows in the store; and each figure that does not agree with another, in words.
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
        samples = one.samples
        counts.update(one.metrics)
        counts.update(seen=one.candidates, sampled=samples.sampled, stored=samples.stored)
        counts.update(lost=sum(samples.lost.values()), pending=samples.pending)
        counts.update(unaccounted=samples.unaccounted)

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
