"""Every Prometheus metric of the request path, in one place.

Children are looked up once and kept, because a label lookup costs three times an increment.
All labels come from closed sets: routes, reasons, flags, outcomes, stages.
"""

from enum import StrEnum
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from ctxguard.types import DropReason, FailureKind, Flag, Mode, Route

if TYPE_CHECKING:
    from ctxguard.context import Context

_GUARD_BUCKETS = (10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 5e-3, 20e-3, 0.1)
_KEPT_BUCKETS = (0, 1, 2, 3, 5, 7, 10, 20, 50)
KNOWN_STAGES = frozenset({"lexical", "dense", "rerank", "retriever", "assembly"})
FAILED_CAUSES = frozenset({*FailureKind, "unavailable", "filter_violation", "refused", "cancelled"})
"""Why a request failed: what became of its only stage; no stage was left; the retriever gave what
the filter forbids; the query or a setting was refused; whoever asked gave up."""
OBSERVERS = frozenset({"sampler", "telemetry"})


class Reloaded(StrEnum):
    """A file that is taken up while serving. A closed set: it labels a metric."""

    PROFILE = "profile"
    INDEX = "index"


class ReloadOutcome(StrEnum):
    """What became of a file that was to be taken up. A closed set: it labels a metric."""

    RELOADED = "reloaded"
    MALFORMED = "malformed"
    """Half of one, of another schema, damaged, or something else altogether."""
    MISMATCHED = "mismatched"
    """Made for another system."""
    UNREADABLE = "unreadable"
    """Gone, or access is refused."""


class Telemetry:
    """The request-path metrics of one registry; one instance serves any number of guards.

    Exact by construction, once no request is under way: ``received = ok + degraded + failed +
    shed`` and ``candidates = kept + dropped by reason``.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        received = Counter(
            "ctxguard_received_requests",
            "Requests that began, by mode; each ends as ok, degraded, failed or shed.",
            ["mode"],
            registry=registry,
        )
        self._received = {mode: received.labels(mode.value) for mode in Mode}
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
            "Requests that ended in an error or were cancelled, by mode and cause.",
            ["mode", "cause"],
            registry=registry,
        )
        self._failed = {
            (mode, cause): failed.labels(mode.value, cause)
            for mode in Mode
            for cause in sorted(FAILED_CAUSES)
        }
        shed = Counter(
            "ctxguard_shed_requests",
            "Requests refused because too many came at once, by mode.",
            ["mode"],
            registry=registry,
        )
        self._shed = {mode: shed.labels(mode.value) for mode in Mode}
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
            "Stages that were left out of an answer, and failures in assembly, by stage and cause.",
            ["stage", "cause"],
            registry=registry,
        )
        stages = (*sorted(KNOWN_STAGES), "other")
        self._stage_failures = {
            (stage, kind): stage_failures.labels(stage, kind.value)
            for stage in stages
            for kind in FailureKind
        }
        open_circuits = Gauge(
            "ctxguard_open_circuits",
            "Circuit breakers that leave their stage out now, by stage.",
            ["stage"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._open_circuits = {stage: open_circuits.labels(stage) for stage in stages}
        circuit_changes = Counter(
            "ctxguard_circuit_changes",
            "Circuit breakers that opened, and that closed again, by stage.",
            ["stage", "state"],
            registry=registry,
        )
        self._circuit_changes = {
            (stage, is_open): circuit_changes.labels(stage, "open" if is_open else "closed")
            for stage in stages
            for is_open in (True, False)
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
        self._filter_violations = Counter(
            "ctxguard_filter_violations",
            "Requests that failed because the retriever gave what their filter forbids.",
            registry=registry,
        )
        self._reloads = {}
        self._reload_failing = {}
        for what in Reloaded:
            reloads = Counter(
                f"ctxguard_{what}_reloads",
                f"Attempts to take up a changed {what} while serving, by outcome.",
                ["outcome"],
                registry=registry,
            )
            for outcome in ReloadOutcome:
                self._reloads[what, outcome] = reloads.labels(outcome.value)
            self._reload_failing[what] = Gauge(
                f"ctxguard_{what}_reload_failing",
                f"Watchers whose {what} could not be taken up, so that the one before serves.",
                registry=registry,
                multiprocess_mode="livemax",
            )
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
            self._stage_failures[_known(failure.stage), failure.kind].inc()
        self._context_size.observe(len(context.passages))
        self._guard_seconds.observe(guard_seconds)
        if retrieve_seconds is not None:
            self._retrieve_seconds.observe(retrieve_seconds)

    def received(self, mode: Mode) -> None:
        """Count one request that begins."""
        self._received[mode].inc()

    def failed(self, mode: Mode, cause: str) -> None:
        """Count one request that ended in an error, for one of `FAILED_CAUSES`."""
        self._failed[mode, cause].inc()

    def shed(self, mode: Mode) -> None:
        """Count one request that was refused because too many came at once."""
        self._shed[mode].inc()

    def circuit_changed(self, stage: str, is_open: bool) -> None:
        """Count a stage's circuit that opened, or closed again."""
        stage = _known(stage)
        self._circuit_changes[stage, is_open].inc()
        self._open_circuits[stage].inc(1 if is_open else -1)

    def filter_violated(self) -> None:
        """Count one request whose retriever gave what its filter forbids."""
        self._filter_violations.inc()

    def reload_attempted(self, what: Reloaded, outcome: ReloadOutcome) -> None:
        """Count one attempt to take up a changed file."""
        self._reloads[what, outcome].inc()

    def reload_failing(self, what: Reloaded, is_failing: bool) -> None:
        """Note that a watcher's file cannot be taken up any more, or can again."""
        self._reload_failing[what].inc(1 if is_failing else -1)

    def observer_failed(self, observer: str) -> None:
        """Count one error of ``sampler`` or ``telemetry``, which no request is failed for."""
        self._observer_failures[observer].inc()


def _known(stage: str) -> str:
    return stage if stage in KNOWN_STAGES else "other"


_lock = Lock()
_by_registry: WeakKeyDictionary[CollectorRegistry, Telemetry] = WeakKeyDictionary()


def default_telemetry(registry: CollectorRegistry = REGISTRY) -> Telemetry:
    """The telemetry of a registry, made once: a registry refuses the same name twice."""
    with _lock:
        found = _by_registry.get(registry)
        if found is None:
            found = _by_registry[registry] = Telemetry(registry)
        return found
