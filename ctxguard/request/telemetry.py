"""Every Prometheus metric of the request path.

An answer costs a request one append, and is counted when somebody scrapes: a dozen counters and
three histograms would take a third of the guard's time. The child of every label value is looked up
once and kept, because a lookup costs three times an increment. All label values come from closed
sets: modes, routes, reasons, flags, outcomes, stages.
"""

from bisect import bisect_left
from collections import Counter as Counts
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial
from itertools import product
from operator import getitem
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Metric, values

from ctxguard._support.fork_safety import OfProcess, reset_in_children
from ctxguard.core.decision import dropped_by_policy
from ctxguard.core.policies import Policy
from ctxguard.core.types import DropReason, FailureKind, Flag, Mode, Route, StageFailure
from ctxguard.errors import CtxguardError, FilterViolationError, OverloadedError
from ctxguard.resilience import cause_of

if TYPE_CHECKING:
    from ctxguard.core.asking import Assessment
    from ctxguard.core.assembly import AssemblyDrop
    from ctxguard.core.context import Context

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
ASSESSED = ("answered", "cached", "refused", "failed", "over_budget")
OBSERVERS = frozenset({"sampler", "telemetry", "tracing"})


class ReloadTarget(StrEnum):
    """A file that is reloaded while serving. A closed set: it names metrics."""

    PROFILE = "profile"
    INDEX = "index"


class ReloadOutcome(StrEnum):
    """The outcome of an attempt to reload a file. A closed set: it labels a metric."""

    RELOADED = "reloaded"
    MALFORMED = "malformed"
    """Incomplete, damaged, of another schema, or missing."""
    MISMATCHED = "mismatched"
    """Made for another system."""
    UNREADABLE = "unreadable"
    """Absent, or access to it is denied."""


_MAX_WAITING = 256
"""Answers that wait to be counted; the request that makes them so many counts them."""


class _Answer(NamedTuple):
    """What is counted of an answer: neither the context nor its ranking, which keep a pool's texts.

    Attributes:
        request: Mode, route, and whether the ranking lacks a stage.
        policy: The policy that decided.
        usable: Number of candidates that it decided on.
        kept: Number of candidates that it kept.
        set_aside: Candidates that the decision set aside, with the reason.
    """

    request: tuple[Mode, Route, bool]
    policy: Policy
    usable: int
    kept: int
    set_aside: tuple[tuple[int, DropReason], ...]
    in_assembly: "tuple[AssemblyDrop, ...]"
    flags: tuple[Flag, ...]
    sufficient: bool | None
    failures: tuple[StageFailure, ...]
    passages: int
    guard_seconds: float
    retrieve_seconds: float | None


# Takes a third of the time of the class's own call, which is in Python.
_answer = partial(tuple.__new__, _Answer)


class CountedLater(Generic[_T]):
    """Items that are counted together when a metric that they add to is collected, or many wait.

    Args:
        count: Counts items, called by one thread at a time.
        metrics: The metrics that it adds to.

    Attributes:
        waiting: Items not yet counted.
        most: How many may wait; whoever appends the last of them calls `count`.
    """

    _counting = OfProcess(Lock)

    def __init__(self, count: Callable[[list[_T]], None], metrics: Iterable[Any]) -> None:
        self.waiting: deque[_T] = deque()
        self._count = count
        # Other processes read files, which hold only what was counted.
        shared = getattr(values.ValueClass, "_multiprocess", False)
        self.most = 1 if shared else _MAX_WAITING
        for metric in metrics:
            metric.collect = partial(self._collected, metric.collect)
        reset_in_children(self)

    def _reset_after_fork(self) -> None:
        """Leave the items that wait to the parent."""
        self.waiting = deque()

    def append(self, item: _T) -> None:
        """Have an item counted; never raises."""
        self.waiting.append(item)
        if len(self.waiting) >= self.most:
            with suppress(Exception):
                self.count()

    def count(self) -> None:
        """Count the items that wait; others may come for as long as this takes."""
        with self._counting:
            self._count([self.waiting.popleft() for _ in range(len(self.waiting))])

    def _collected(self, collect: Callable[[], Iterable[Metric]]) -> Iterable[Metric]:
        self.count()
        return collect()


_Values = Iterable[str] | Mapping[bool, str]
"""The values of a label; a mapping's are known by its keys."""


def _children(metric: Any, *labels: _Values) -> dict[Any, Any]:
    """Look up the child of every combination of label values, by value; by a tuple of several."""
    texts = [
        each if isinstance(each, Mapping) else {one: str(one) for one in each} for each in labels
    ]
    return {
        key if len(key) > 1 else key[0]: metric.labels(*map(getitem, texts, key))
        for key in product(*texts)
    }


class Telemetry:
    """The request-path metrics of one registry; one instance serves any number of guards.

    Exact by construction, once no request is under way: ``received = ok + degraded + failed +
    shed`` and ``candidates = kept + dropped by reason``.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        counted_later: list[Any] = []

        def metric(kind: Any, name: str, text: str, *, later: bool = False, **settings: Any) -> Any:
            made = kind(name, text, registry=registry, **settings)
            if later:
                counted_later.append(made)
            return made

        def counter(name: str, text: str, *, later: bool = False, **labels: _Values) -> Any:
            made = metric(Counter, name, text, later=later, labelnames=list(labels))
            return _children(made, *labels.values()) if labels else made

        stages = (*sorted(KNOWN_STAGES), "other")
        self._received = counter(
            "ctxguard_received_requests",
            "Requests received, by mode; each ends as ok, degraded, failed or shed.",
            mode=Mode,
        )
        self._requests = counter(
            "ctxguard_requests",
            "Requests answered, by mode, route and outcome (ok, or degraded: a stage was missing).",
            later=True,
            mode=Mode,
            route=Route,
            outcome={False: "ok", True: "degraded"},
        )
        self._failed = counter(
            "ctxguard_failed_requests",
            "Requests that raised an error or were cancelled, by mode and cause.",
            mode=Mode,
            cause=sorted(FAILED_CAUSES),
        )
        self._shed = counter(
            "ctxguard_shed_requests",
            "Requests refused because too many were under way, by mode.",
            mode=Mode,
        )
        self._kept = counter(
            "ctxguard_kept_candidates", "Candidate passages that were kept.", later=True
        )
        self._dropped = counter(
            "ctxguard_dropped_candidates",
            "Candidate passages that were dropped, by reason.",
            later=True,
            reason=DropReason,
        )
        self._flags = counter(
            "ctxguard_flags", "Answers with a flag, by flag.", later=True, flag=Flag
        )
        self._sufficiency = counter(
            "ctxguard_context_sufficiency",
            (("Answers whose policy has a certified threshold of sufficiency, by route and verdict "
            "(sufficient, or insufficient: probably nothing that was kept is relevant).")),
            later=True,
            route=Route,
            verdict={True: "sufficient", False: "insufficient"},
        )
        self._stage_failures = counter(
            "ctxguard_stage_failures",
            "Stages missing from an answer, and failures in assembly, by stage and cause.",
            later=True,
            stage=stages,
            cause=FailureKind,
        )
        open_circuits = metric(
            Gauge,
            "ctxguard_open_circuits",
            "Circuit breakers that are open now, by stage.",
            labelnames=["stage"],
            multiprocess_mode="livesum",
        )
        self._open_circuits = _children(open_circuits, stages)
        self._ever_open: set[str] = set()
        self._circuit_changes = counter(
            "ctxguard_circuit_changes",
            "Times that a circuit breaker opened or closed, by stage and new state.",
            stage=stages,
            state={True: "open", False: "closed"},
        )
        self._observer_failures = counter(
            "ctxguard_observer_failures",
            "Errors of sampler, telemetry and tracing, by observer; they never fail a request.",
            observer=sorted(OBSERVERS),
        )
        self._assessed = counter(
            "ctxguard_assessed_candidates",
            (("Candidates that were worth asking an assessor about, by outcome (answered, cached, "
            "refused, failed, or over_budget: not asked).")),
            outcome=ASSESSED,
        )
        self._assessed_requests = counter(
            "ctxguard_assessed_requests", "Requests that asked an assessor."
        )
        self._changed = counter(
            "ctxguard_changed_decisions",
            (("Requests whose kept passages an assessor's answers changed (applied), or would change "
            "(recorded, in shadow).")),
            answers={True: "applied", False: "recorded"},
        )
        self._assessor_cost = counter(
            "ctxguard_assessor_cost",
            "Cost of an assessor's answers, in the currency of its prices.",
        )
        self._filter_violations = counter(
            "ctxguard_filter_violations",
            "Requests that failed because the retriever returned passages their filter forbids.",
        )
        self._reloads, self._reload_failing = {}, {}
        for what in ReloadTarget:
            self._reloads[what] = counter(
                f"ctxguard_{what}_reloads",
                f"Attempts to reload a changed {what} while serving, by outcome.",
                outcome=ReloadOutcome,
            )
            self._reload_failing[what] = metric(
                Gauge,
                f"ctxguard_{what}_reload_failing",
                f"Watchers whose last reload of a changed {what} failed; the former {what} serves.",
                multiprocess_mode="livemax",
            )
        self._guard_seconds = metric(
            Histogram,
            "ctxguard_guard_seconds",
            "Seconds that the guard adds to a request: decide, assemble, sample.",
            later=True,
            buckets=_GUARD_BUCKETS,
        )
        self._retrieve_seconds = metric(
            Histogram, "ctxguard_retrieve_seconds", "Seconds that the retriever takes.", later=True
        )
        self._context_size = metric(
            Histogram,
            "ctxguard_context_passages",
            "Passages in each context.",
            later=True,
            buckets=_KEPT_BUCKETS,
        )
        self._answers = CountedLater(self._count, counted_later)
        reset_in_children(self)

    def _reset_after_fork(self) -> None:
        """Set the gauge of open circuits to 0."""
        for stage in self._ever_open:
            self._open_circuits[stage].set(0)
        self._ever_open.clear()

    def answered(
        self, context: "Context", retrieve_seconds: float | None, guard_seconds: float
    ) -> None:
        """Count one answered request; it is degraded if its ranking lacks a stage.

        Args:
            context: The answer.
            retrieve_seconds: Time of the retriever; None if it was not called.
            guard_seconds: Time of the guard itself.
        """
        decision, answers = context.decision, self._answers
        answers.waiting.append(
            _answer(
                (
                    (context.mode, context.route, bool(decision.ranking.failures)),
                    decision.policy,
                    len(decision.order),
                    decision.n_kept,
                    decision.set_aside,
                    context.dropped_in_assembly,
                    context.flags,
                    context.sufficient,
                    context.failures,
                    len(context.passages),
                    guard_seconds,
                    retrieve_seconds,
                )
            )
        )
        if context.assessment is not None:
            self._count_assessment(context.assessment)
        if len(answers.waiting) >= answers.most:
            answers.count()

    def _count(self, answers: list[_Answer]) -> None:
        tally: dict[Counter, int] = {}
        for answer in answers:
            try:
                added = self._counted(answer)
            except Exception:  # such as a flag that is none of ours
                self.observer_failed("telemetry")
                continue
            for counter, count in added.items():
                tally[counter] = tally.get(counter, 0) + count
        for counter, count in tally.items():
            counter.inc(count)
        observe(self._context_size, [answer.passages for answer in answers])
        observe(self._guard_seconds, [answer.guard_seconds for answer in answers])
        waited = [answer.retrieve_seconds for answer in answers]
        observe(self._retrieve_seconds, [each for each in waited if each is not None])

    def _counted(self, answer: _Answer) -> dict[Counter, int]:
        """Return what an answer adds to each counter."""
        added = {
            self._requests[answer.request]: 1,
            self._kept: answer.kept - len(answer.in_assembly),
        }
        by_policy = dropped_by_policy(answer.policy, answer.usable, answer.kept)
        for reason, count in by_policy.items():
            added[self._dropped[reason]] = count
        counters = [
            *[self._dropped[reason] for _, reason in answer.set_aside],
            *[self._dropped[drop.reason] for drop in answer.in_assembly],
            *[self._flags[flag] for flag in answer.flags],
            *[self._stage_failures[_stage_label(one.stage), one.kind] for one in answer.failures],
        ]
        if answer.sufficient is not None:
            counters.append(self._sufficiency[answer.request[1], answer.sufficient])
        for counter in counters:
            added[counter] = added.get(counter, 0) + 1
        return added

    def _count_assessment(self, assessment: "Assessment") -> None:
        missing = "refused" if assessment.failure is None else "failed"
        answered = assessment.asked - assessment.cached - assessment.refused
        for outcome, n in (
            ("answered", answered),
            ("cached", assessment.cached),
            (missing, assessment.refused),
            ("over_budget", assessment.over_budget),
        ):
            self._assessed[outcome].inc(n)
        self._assessed_requests.inc(assessment.asked > 0)
        if assessment.changed:
            self._changed[assessment.applied].inc()
        self._assessor_cost.inc(max(assessment.cost, 0.0))

    def received(self, mode: Mode) -> None:
        """Count one request received."""
        self._received[mode].inc()

    def failed(self, mode: Mode, cause: str) -> None:
        """Count one failed request; ``cause`` is one of `FAILED_CAUSES`."""
        self._failed[mode, cause].inc()

    def raised(self, mode: Mode, error: Exception, failure: CtxguardError) -> None:
        """Count one request that ended in an error, or was refused because of too many.

        Args:
            mode: The request's mode.
            error: The error as raised.
            failure: The typed error that replaced it.
        """
        if isinstance(failure, OverloadedError):
            self.shed(mode)
        else:
            self.failed(mode, cause_of(error))
        if isinstance(failure, FilterViolationError):
            self.filter_violated()

    def shed(self, mode: Mode) -> None:
        """Count one request that was refused because too many were under way."""
        self._shed[mode].inc()

    def circuit_changed(self, stage: str, is_open: bool) -> None:
        """Count a circuit breaker that opened or closed."""
        stage = _stage_label(stage)
        if is_open:
            self._ever_open.add(stage)
        self._circuit_changes[stage, is_open].inc()
        self._open_circuits[stage].inc(1 if is_open else -1)

    def filter_violated(self) -> None:
        """Count one request whose retriever returned passages that its filter forbids."""
        self._filter_violations.inc()

    def reload_attempted(self, what: ReloadTarget, outcome: ReloadOutcome) -> None:
        """Count one attempt to reload a file."""
        self._reloads[what][outcome].inc()

    def reload_failing(self, what: ReloadTarget, is_failing: bool) -> None:
        """Note that a watcher began or stopped failing."""
        self._reload_failing[what].inc(1 if is_failing else -1)

    def observer_failed(self, observer: str) -> None:
        """Count one error of ``sampler`` or ``telemetry``; it never fails a request."""
        self._observer_failures[observer].inc()


def observe(histogram: Histogram, amounts: Sequence[float]) -> None:
    """Observe all amounts by a step for each bucket, where ``observe`` takes several for each."""
    buckets = Counts([bisect_left(histogram._upper_bounds, amount) for amount in amounts])
    for at, count in buckets.items():
        histogram._buckets[at].inc(count)
    histogram._sum.inc(sum(amounts))


def _stage_label(stage: str) -> str:
    return stage if stage in KNOWN_STAGES else "other"


_lock = Lock()
_of_registry: WeakKeyDictionary[CollectorRegistry, dict[Any, Any]] = WeakKeyDictionary()


def made_once(registry: CollectorRegistry, make: Callable[[CollectorRegistry], _T]) -> _T:
    """Return a registry's metrics of one kind, made once: it refuses the same name twice."""
    with _lock:
        made = _of_registry.setdefault(registry, {})
        if make not in made:
            made[make] = make(registry)
        return cast(_T, made[make])


def default_telemetry(registry: CollectorRegistry = REGISTRY) -> Telemetry:
    """Return a registry's telemetry."""
    return made_once(registry, Telemetry)
