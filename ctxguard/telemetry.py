"""Every Prometheus metric of the request path, in one place.

Children are looked up once and kept, because a label lookup costs three times an increment.
All labels come from closed sets: routes, reasons, flags, outcomes, stages.
"""

from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from ctxguard.types import DropReason, Flag, Mode, Route

if TYPE_CHECKING:
    from ctxguard.context import Context

_GUARD_BUCKETS = (10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 5e-3, 20e-3, 0.1)
_KEPT_BUCKETS = (0, 1, 2, 3, 5, 7, 10, 20, 50)
KNOWN_STAGES = frozenset({"lexical", "dense", "rerank", "retriever", "assembly"})
OBSERVERS = frozenset({"sampler", "telemetry"})


class Telemetry:
    """The request-path metrics of one registry; one instance serves any number of guards.

    Exact by construction: ``requests = ok + degraded + failed`` and
    ``candidates = kept + dropped by reason``.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        requests = Counter(
            "ctxguard_requests",
            "Requests by mode, route and outcome (ok, degraded).",
            ["mode", "route", "outcome"],
            registry=registry,
        )
        self._requests = {
            (mode, route, degraded): requests.labels(
                mode.value, route.value, "degraded" if degraded else "ok"
            )
            for mode in Mode
            for route in Route
            for degraded in (False, True)
        }
        failed = Counter(
            "ctxguard_failed_requests",
            "Requests that ended in an error, by mode.",
            ["mode"],
            registry=registry,
        )
        self._failed = {mode: failed.labels(mode.value) for mode in Mode}
        self._kept = Counter(
            "ctxguard_kept_candidates",
            "Candidates that the decision and assembly kept.",
            registry=registry,
        )
        dropped = Counter(
            "ctxguard_dropped_candidates",
            "Candidates that the decision or assembly dropped, by reason.",
            ["reason"],
            registry=registry,
        )
        self._dropped = {reason: dropped.labels(reason.value) for reason in DropReason}
        flags = Counter(
            "ctxguard_flags", "Answers that carry a flag, by flag.", ["flag"], registry=registry
        )
        self._flags = {flag: flags.labels(flag.value) for flag in Flag}
        stage_failures = Counter(
            "ctxguard_stage_failures",
            "Stages that were left out of an answer, and failures in assembly, by stage.",
            ["stage"],
            registry=registry,
        )
        self._stage_failures = {
            stage: stage_failures.labels(stage) for stage in (*sorted(KNOWN_STAGES), "other")
        }
        observer_failures = Counter(
            "ctxguard_observer_failures",
            "Errors of what watches requests (sampler, telemetry); none of them fails a request.",
            ["observer"],
            registry=registry,
        )
        self._observer_failures = {
            observer: observer_failures.labels(observer) for observer in sorted(OBSERVERS)
        }
        self._guard_seconds = Histogram(
            "ctxguard_guard_seconds",
            "Time that the guard adds to a request: validate, decide, assemble.",
            buckets=_GUARD_BUCKETS,
            registry=registry,
        )
        self._retrieve_seconds = Histogram(
            "ctxguard_retrieve_seconds", "Time that the retriever takes.", registry=registry
        )
        self._context_size = Histogram(
            "ctxguard_context_passages",
            "Passages in a context.",
            buckets=_KEPT_BUCKETS,
            registry=registry,
        )

    def answered(
        self, context: "Context", retrieve_seconds: float | None, guard_seconds: float
    ) -> None:
        """Count one answered request; degraded is one whose ranking lacks a stage."""
        degraded = bool(context.decision.ranking.failures)
        self._requests[context.mode, context.route, degraded].inc()
        dropped = context.dropped_by_reason
        kept = context.candidates - sum(dropped.values())
        self._kept.inc(kept)
        for reason, count in dropped.items():
            self._dropped[reason].inc(count)
        for flag in context.flags:
            self._flags[flag].inc()
        for failure in context.failures:
            stage = failure.stage if failure.stage in KNOWN_STAGES else "other"
            self._stage_failures[stage].inc()
        self._context_size.observe(len(context.passages))
        self._guard_seconds.observe(guard_seconds)
        if retrieve_seconds is not None:
            self._retrieve_seconds.observe(retrieve_seconds)

    def failed(self, mode: Mode) -> None:
        """Count one request that ended in an error."""
        self._failed[mode].inc()

    def observer_failed(self, observer: str) -> None:
        """Count one error of ``sampler`` or ``telemetry``, which no request is failed for."""
        self._observer_failures[observer].inc()


_lock = Lock()
_by_registry: WeakKeyDictionary[CollectorRegistry, Telemetry] = WeakKeyDictionary()


def default_telemetry(registry: CollectorRegistry = REGISTRY) -> Telemetry:
    """The telemetry of a registry, made once: a registry refuses the same name twice."""
    with _lock:
        found = _by_registry.get(registry)
        if found is None:
            found = _by_registry[registry] = Telemetry(registry)
        return found
