"""Counts HTTP requests and their outcomes.

Exact while no request is in progress: for each endpoint ``received = ok + degraded + rejected +
shed + failed + cancelled``. What the guard decides is counted by ``ctxguard.guard.telemetry``.
Touches the given registry; ``forget_dead_workers`` looks at processes and deletes files.
"""

import os
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.multiprocess import mark_process_dead

from ctxguard._support.default_metrics import ChosenMetrics

_BUCKETS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Endpoint(StrEnum):
    """The endpoint of a request. A closed set: it labels a metric."""

    RERANK = "rerank"
    FILTER = "filter"
    CONTEXT = "context"
    CONSOLE = "console"
    METRICS = "metrics"
    HEALTH = "health"
    OTHER = "other"


class Outcome(StrEnum):
    """How a request ended. A closed set: it labels a metric."""

    OK = "ok"
    DEGRADED = "degraded"
    """Answered although a stage was left out."""
    REJECTED = "rejected"
    """A status from 400 to 499."""
    SHED = "shed"
    """Refused because too many were in progress."""
    FAILED = "failed"
    """A status from 500 on."""
    CANCELLED = "cancelled"
    """The client went away, or the process was told to end."""


class HttpMetrics:
    """The counters of one registry; one instance serves any number of applications.

    A count that fails, such as when the disk of the workers' files is full, fails no request.
    """

    def __init__(self, registry: CollectorRegistry, *, all_metrics: bool = False) -> None:
        target, registry = registry, CollectorRegistry()
        received = Counter(
            "ctxguard_http_received_requests",
            "HTTP requests received, by endpoint; each ends in one outcome.",
            ["endpoint"],
            registry=registry,
        )
        self._received = {each: received.labels(each.value) for each in Endpoint}
        requests = Counter(
            "ctxguard_http_requests",
            "HTTP requests that ended, by endpoint and outcome (ok; degraded: without a stage; "
            "rejected: 4xx; shed; failed: 5xx; cancelled).",
            ["endpoint", "outcome"],
            registry=registry,
        )
        self._requests = {
            (endpoint, outcome): requests.labels(endpoint.value, outcome.value)
            for endpoint in Endpoint
            for outcome in Outcome
        }
        seconds = Histogram(
            "ctxguard_http_request_seconds",
            "Seconds from the head of a request to the end of its answer, by endpoint.",
            ["endpoint"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._seconds = {each: seconds.labels(each.value) for each in Endpoint}
        ChosenMetrics(registry, target, all_metrics=all_metrics)

    def received(self, endpoint: Endpoint) -> None:
        """Count a received request; never raises."""
        with suppress(Exception):
            self._received[endpoint].inc()

    def ended(self, endpoint: Endpoint, outcome: Outcome, seconds: float) -> None:
        """Count a request that ended; never raises."""
        with suppress(Exception):
            self._requests[endpoint, outcome].inc()
            self._seconds[endpoint].observe(seconds)


def forget_dead_workers(folder: Path) -> None:
    """Remove the live gauges of worker processes that were killed."""
    names = {file.stem.rpartition("_")[2] for file in folder.glob("gauge_live*.db")}
    for pid in map(int, filter(str.isdecimal, names)):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            mark_process_dead(pid, str(folder))  # type: ignore[no-untyped-call]
        except OSError:
            pass
