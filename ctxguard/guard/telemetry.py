"""Defines every Prometheus metric of the request path.

The child of every label value is looked up once and kept, because a lookup costs as much as three
increments. All label values come from closed sets: modes, routes, reasons, flags, outcomes, stages.
Touches the metrics of the given registry, which are made once for it in a process.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from operator import getitem
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from ctxguard._support.default_metrics import ChosenMetrics
from ctxguard._support.fork_safety import reset_in_children
from ctxguard.core.types import DropReason, FailureKind, Flag, Mode, Route
from ctxguard.resilience.bounded_caller import cause_of

if TYPE_CHECKING:
    from ctxguard.core.context import Context
    from ctxguard.core.value_of_information import Assessment

_T = TypeVar("_T")

_GUARD_BUCKETS = (10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 5e-3, 20e-3, 0.1)
_KEPT_BUCKETS = (0, 1, 2, 3, 5, 7, 10, 20, 50)
KNOWN_STAGES = frozenset(
    {"lexical", "dense", "rerank", "signals", "retriever", "assembly", "assess"}
)
FAILED_CAUSES = frozenset(
    {*FailureKind, "unavailable", "filter_violation", "invalid_request", "cancelled"}
)
"""The cause of a failed request.

A `FailureKind` is the failure of its only stage. ``unavailable``: no stage was left that could
answer. ``filter_violation``: the retriever returned passages that the request's filter forbids.
``invalid_request``: the query, an argument or a setting was refused. ``cancelled``: the caller
gave up.
"""

ReloadTarget = Literal["profile", "index"]
"""A file that is reloaded while serving. A closed set: it names metrics."""


ReloadOutcome = Literal["reloaded", "malformed", "mismatched", "unreadable"]
"""The outcome of an attempt to reload a file. A closed set: it labels a metric.

``malformed``: incomplete, damaged, or of another schema. ``mismatched``: made for another system.
``unreadable``: absent, or access to it is denied."""


_Values = Iterable[str] | Mapping[bool, str]
"""The values of a label; those in a mapping are looked up by its keys."""

_STAGES = (*sorted(KNOWN_STAGES), "other")

_COUNTERS: Mapping[str, tuple[str, Mapping[str, _Values]]] = {
    "received_requests": (
        "Requests received, by mode; each ends as ok, degraded, failed or shed.",
        {"mode": Mode},
    ),
    "requests": (
        "Requests answered, by mode, route and outcome (ok, or degraded: a stage was missing).",
        {"mode": Mode, "route": Route, "outcome": {False: "ok", True: "degraded"}},
    ),
    "failed_requests": (
        "Requests that raised an error or were cancelled, by mode and cause.",
        {"mode": Mode, "cause": sorted(FAILED_CAUSES)},
    ),
    "shed_requests": ("Requests refused because too many were under way, by mode.", {"mode": Mode}),
    "kept_candidates": ("Candidate passages that were kept.", {}),
    "dropped_candidates": (
        "Candidate passages that were dropped, by reason.",
        {"reason": DropReason},
    ),
    "flags": ("Answers with a flag, by flag.", {"flag": Flag}),
    "context_sufficiency": (
        (
            "Answers whose policy has a certified threshold of sufficiency, by route and context "
            "(sufficient, or insufficient: probably nothing that was kept is relevant)."
        ),
        {"route": Route, "context": {True: "sufficient", False: "insufficient"}},
    ),
    "stage_failures": (
        "Stages missing from an answer, and failures in assembly, by stage and cause.",
        {"stage": _STAGES, "cause": FailureKind},
    ),
    "circuit_changes": (
        "Times that a circuit breaker opened or closed, by stage and new state.",
        {"stage": _STAGES, "state": {True: "open", False: "closed"}},
    ),
    "observer_failures": (
        "Errors of sampler, telemetry and tracing, by observer; they never fail a request.",
        {"observer": ("sampler", "telemetry", "tracing")},
    ),
    "assessed_candidates": (
        (
            "Candidates that were worth asking an assessor about, by outcome (answered, cached, "
            "refused, failed, or over_budget: not asked)."
        ),
        {"outcome": ("answered", "cached", "refused", "failed", "over_budget")},
    ),
    "assessed_requests": ("Requests that asked an assessor.", {}),
    "changed_decisions": (
        (
            "Requests whose kept passages an assessor's answers changed (applied), or would change "
            "(recorded, in shadow)."
        ),
        {"answers": {True: "applied", False: "recorded"}},
    ),
    "assessor_cost": ("Cost of an assessor's answers, in the currency of its prices.", {}),
    "filter_violations": (
        "Requests that failed because the retriever returned passages their filter forbids.",
        {},
    ),
    **{
        f"{what}_reloads": (
            f"Attempts to reload a changed {what} while serving, by outcome.",
            {"outcome": get_args(ReloadOutcome)},
        )
        for what in get_args(ReloadTarget)
    },
}
_GAUGES: Mapping[str, tuple[str, Mapping[str, _Values], Literal["livesum", "livemax"]]] = {
    "open_circuits": (
        "Circuit breakers that are open now, by stage.",
        {"stage": _STAGES},
        "livesum",
    ),
    **{
        f"{what}_reload_failing": (
            f"Watchers whose last reload of a changed {what} failed; the former {what} serves.",
            {},
            "livemax",
        )
        for what in get_args(ReloadTarget)
    },
}
_HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "guard_seconds": (
        "Seconds that the guard adds to a request: decide, assemble, sample.",
        _GUARD_BUCKETS,
    ),
    "retrieve_seconds": ("Seconds that the retriever takes.", Histogram.DEFAULT_BUCKETS),
    "context_passages": ("Passages in each context.", _KEPT_BUCKETS),
}


def _children(metric: Any, labels: Mapping[str, _Values]) -> Any:
    """Map each label value to its child, or each tuple of values if there are several labels."""
    if not labels:
        return metric
    texts = [
        each if isinstance(each, Mapping) else {one: str(one) for one in each}
        for each in labels.values()
    ]
    return {
        key if len(key) > 1 else key[0]: metric.labels(*map(getitem, texts, key))
        for key in product(*texts)
    }


class Telemetry:
    """The request-path metrics of one registry; one instance serves any number of guards.

    Exact by construction while no request is in progress: ``received = ok + degraded + failed +
    shed`` and ``candidates = kept + dropped by reason``.

    Args:
        registry: Exports the metrics.
        all_metrics: Whether to export all metrics; by default only those that the default alerts
            and panels use.
    """

    def __init__(
        self, registry: CollectorRegistry = REGISTRY, *, all_metrics: bool = False
    ) -> None:
        target, registry = registry, CollectorRegistry()
        self._counters = {
            name: _children(
                Counter(f"ctxguard_{name}", text, list(labels), registry=registry), labels
            )
            for name, (text, labels) in _COUNTERS.items()
        }
        self._gauges = {
            name: _children(
                Gauge(
                    f"ctxguard_{name}",
                    text,
                    list(labels),
                    registry=registry,
                    multiprocess_mode=over_workers,
                ),
                labels,
            )
            for name, (text, labels, over_workers) in _GAUGES.items()
        }
        self._histograms = {
            name: Histogram(f"ctxguard_{name}", text, buckets=buckets, registry=registry)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        ChosenMetrics(registry, target, all_metrics=all_metrics)
        self._ever_open: set[str] = set()
        reset_in_children(self)

    def _reset_after_fork(self) -> None:
        """Set the gauge of open circuits to 0."""
        for stage in self._ever_open:
            self._gauges["open_circuits"][stage].set(0)
        self._ever_open.clear()

    def answered(
        self, context: "Context", retrieve_seconds: float | None, guard_seconds: float
    ) -> None:
        """Count one answered request; it is degraded if its ranking lacks a stage.

        A request that cannot be counted completely is not counted at all. ``retrieve_seconds`` is
        None if the retriever was not called.
        """
        decision, counters = context.decision, self._counters
        dropped = counters["dropped_candidates"]
        added = [counters["requests"][context.mode, context.route, bool(decision.ranking.failures)]]
        added += map(counters["flags"].__getitem__, context.flags)
        for drop in context.dropped_in_assembly:
            added.append(dropped[drop.reason])
        for failure in context.failures:
            added.append(counters["stage_failures"][_stage_label(failure.stage), failure.kind])
        if context.sufficient is not None:
            added.append(counters["context_sufficiency"][context.route, context.sufficient])
        for counter in added:
            counter.inc()
        for reason, count in decision.dropped_by_reason.items():
            dropped[reason].inc(count)
        counters["kept_candidates"].inc(decision.n_kept - len(context.dropped_in_assembly))
        self._histograms["context_passages"].observe(len(context.passages))
        self._histograms["guard_seconds"].observe(guard_seconds)
        if retrieve_seconds is not None:
            self._histograms["retrieve_seconds"].observe(retrieve_seconds)
        if context.assessment is not None:
            self._count_assessment(context.assessment)

    def _count_assessment(self, assessment: "Assessment") -> None:
        counters = self._counters
        missing = "refused" if assessment.failure is None else "failed"
        answered = assessment.asked - assessment.cached - assessment.refused
        for outcome, n in (
            ("answered", answered),
            ("cached", assessment.cached),
            (missing, assessment.refused),
            ("over_budget", assessment.over_budget),
        ):
            counters["assessed_candidates"][outcome].inc(n)
        counters["assessed_requests"].inc(assessment.asked > 0)
        if assessment.changed:
            counters["changed_decisions"][assessment.applied].inc()
        counters["assessor_cost"].inc(max(assessment.cost, 0.0))

    def received(self, mode: Mode) -> None:
        """Count one request received."""
        self._counters["received_requests"][mode].inc()

    def raised(self, mode: Mode, error: BaseException) -> None:
        """Count one request that failed, was cancelled, or was refused under overload."""
        cause = cause_of(error) if isinstance(error, Exception) else "cancelled"
        if cause == FailureKind.SATURATED:
            self._counters["shed_requests"][mode].inc()
        else:
            self._counters["failed_requests"][mode, cause].inc()
        if cause == "filter_violation":
            self._counters["filter_violations"].inc()

    def circuit_changed(self, stage: str, is_open: bool) -> None:
        """Count a circuit breaker that opened or closed."""
        stage = _stage_label(stage)
        if is_open:
            self._ever_open.add(stage)
        self._counters["circuit_changes"][stage, is_open].inc()
        self._gauges["open_circuits"][stage].inc(1 if is_open else -1)

    def reload_attempted(self, what: ReloadTarget, outcome: ReloadOutcome) -> None:
        """Count one attempt to reload a file."""
        self._counters[f"{what}_reloads"][outcome].inc()

    def reload_failing(self, what: ReloadTarget, is_failing: bool) -> None:
        """Note that a watcher began or stopped failing."""
        self._gauges[f"{what}_reload_failing"].inc(1 if is_failing else -1)

    def observer_failed(self, observer: str) -> None:
        """Count one error in ``sampler`` or ``telemetry``, which never fails the request."""
        self._counters["observer_failures"][observer].inc()


def _stage_label(stage: str) -> str:
    return stage if stage in KNOWN_STAGES else "other"


_lock = Lock()
_of_registry: WeakKeyDictionary[CollectorRegistry, dict[Any, Any]] = WeakKeyDictionary()


def made_once(
    registry: CollectorRegistry, make: Callable[..., _T], *, all_metrics: bool = False
) -> _T:
    """Return a registry's metrics of one kind, made only once: it refuses duplicate names.

    The first call decides whether all are exported.
    """
    with _lock:
        made = _of_registry.setdefault(registry, {})
        if make not in made:
            made[make] = make(registry, all_metrics=all_metrics)
        return cast(_T, made[make])


def default_telemetry(
    registry: CollectorRegistry = REGISTRY, *, all_metrics: bool = False
) -> Telemetry:
    """Return a registry's telemetry."""
    return made_once(registry, Telemetry, all_metrics=all_metrics)
