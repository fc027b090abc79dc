"""A monitor's results as Prometheus metrics: additive sums, and estimates with intervals.

Counters are of the whole store since the series of the judge began, alike from each monitor, and
never fall. PromQL may take their ratios over any window: the judge's recall is
``rate(ctxguard_kept_relevant_total) / rate(ctxguard_relevant_total)``. The gauges
``ctxguard_estimate`` describe the whole store, corrected by human labels;
``ctxguard_judge_estimate`` is the judge's own figure, without that correction. Where there is no
data there is no series, never a zero or NaN, so that ``absent()`` finds it and no dashboard draws
it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ctxguard.core.types import Route
from ctxguard.monitor.alarms import AlarmReport, SignalCounts
from ctxguard.monitor.estimation.live import Estimates, LiveEstimates
from ctxguard.monitor.estimation.rise import Rise
from ctxguard.monitor.judging.counters import LABELS, SUMS
from ctxguard.monitor.service import Monitor, Report

_Family = TypeVar("_Family", CounterMetricFamily, GaugeMetricFamily)
_Families = Iterator[CounterMetricFamily | GaugeMetricFamily]
_Values = float | None | Mapping[Any, float]

_COUNTS = {
    "judged_samples": "Samples claimed for judging, by outcome.",
    "verdicts": "Passages submitted to the judge.",
    "invalid_verdicts": "Passages for which the judge gave no valid verdict.",
    "kept_relevant": "Relevant passages served.",
    "relevant": "Relevant passages in the candidate pools.",
    "reciprocal_rank": "Sum of reciprocal ranks of what was served.",
    "answerable_requests": "Requests with a relevant candidate.",
    "gain": "Sum of the positive parts of UDCG.",
    "harm": "Sum of the negative parts of UDCG, as a positive number.",
    "estimated_requests": "Requests behind ctxguard_gain_total.",
    "precision_sum": "Sum of precisions (relevant shares of what was served), non-empty requests.",
    "precision_requests": "Non-empty requests, behind ctxguard_precision_sum_total.",
    "candidate_tokens": "Tokens of the candidates retrieved, by mode and fate: kept, or dropped in "
    "assembly or by the policy; outside enforce, as enforcing would have it.",
    "today_tokens": "Tokens that the bare retriever would serve in their place, by mode.",
    "canary_verdicts": "Verdicts on labelled passages that were judged again, by whether the same.",
    "judge_calls": "Calls of the judge's endpoint.",
    "judge_retries": "Judge calls that were retries.",
    "judge_invalid": "Passages for which the judge gave no valid verdict, by reason.",
    "judge_tokens": "Tokens that the judge's endpoint reported, by direction.",
    "judge_cost": "Cost of judging, in the currency of its prices; absent without prices.",
}
_MEANING = (
    "recall: share of the pools' relevant passages that was served. precision: mean over non-empty "
    "requests of the share of served passages that is relevant. mrr: mean reciprocal rank of what "
    "was served, non-empty requests. answerable: share of requests whose pool has a relevant one. "
    "udcg, gain, harm: discounted worth of what was served, and its two parts, per request. "
    "recall_loss: mean share lost of the relevant among the retriever's first few. "
    "retriever_miss: share of relevant passages beyond the pool."
)
_PARTS = (
    ("value", "", f"{{}}; absent where the data do not suffice. {_MEANING}"),
    ("lower", "_lower", "Lower end of the 95% confidence interval of the {}."),
    ("upper", "_upper", "Upper end of the 95% confidence interval of the {}."),
    ("n", "_requests", "Requests (or sessions) behind the {}."),
    (
        "n_effective",
        "_requests_effective",
        "How many requests (or sessions) of equal weight would support the {} as well.",
    ),
    (
        "n_needed",
        "_requests_needed",
        "Requests (or sessions) that the {} would need; absent where it has enough.",
    ),
)


class MonitorCollector(Collector):
    """Exports a monitor; a scrape shows its last report and reads no database.

    Args:
        monitor: The monitor to export. Registering a second one in a registry raises
            ``ValueError``.
        registry: Where it is registered; None registers it nowhere.
        price_per_million: Price of a million tokens of context; None if not known.
    """

    def __init__(
        self,
        monitor: Monitor,
        registry: CollectorRegistry | None = REGISTRY,
        *,
        price_per_million: float | None = None,
    ) -> None:
        self._monitor = monitor
        self._price = price_per_million
        if registry is not None:
            registry.register(self)

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Nothing: otherwise a registry would collect once to learn the names."""
        return []

    def collect(self) -> _Families:
        # Not part of the report, which may be what failed.
        errors = self._monitor.errors
        yield _counter("ctxguard_monitor_errors", "Steps of this monitor that failed.", errors)
        fault = self._monitor.store_fault
        yield _gauge(
            "ctxguard_store_failing",
            "1 while this monitor cannot use the sample store, by error: full, damaged, absent.",
            {} if fault is None else {fault: 1.0},
            "error",
        )
        yield _gauge(
            "ctxguard_price_per_million",
            "Price of a million tokens of context, as given; absent if not known.",
            self._price,
        )
        report = self._monitor.latest
        if report is None:
            return
        yield from _samples(report)
        yield from _counts(report)
        for name, what, by_key, labels in (
            ("estimate", "live estimate", report.live.estimates, ("window",)),
            (
                "judge_estimate",
                "judge's own figure, not corrected by human labels",
                report.live.judge_estimates,
                ("window",),
            ),
            (
                "arm_estimate",
                "live estimate of the requests that enforce_share dealt to a mode",
                report.live.arms,
                ("window", "arm"),
            ),
            (
                "arm_difference",
                "live estimate of enforced requests less that of shadowed ones",
                report.live.arm_differences,
                ("window",),
            ),
        ):
            yield from _estimates(f"ctxguard_{name}", what, report.judge, by_key, *labels)
        yield _gauge(
            "ctxguard_estimate_borrowed",
            "1 for each live estimate that takes the judge's errors from labels of other requests "
            "than it is about, and so assumes that they have not changed.",
            {
                (report.judge, metric, window): 1.0
                for window, estimates in report.live.estimates.items()
                for metric, estimate in estimates.items()
                if estimate.is_borrowed
            },
            *("judge", "metric", "window"),
        )
        yield _gauge(
            "ctxguard_estimate_shown",
            "1 for the window to show of each metric: the narrowest one that has an estimate, or "
            "without any the one with most requests behind it.",
            {(report.judge, metric, window): 1.0 for metric, window in report.live.shown.items()},
            *("judge", "metric", "window"),
        )
        yield from _populations(report.live)
        yield from _labels(report)
        yield from _rises(report.rises)
        if self._monitor.alarms is not None:
            yield from _alarms(self._monitor.alarms.report())


def _counter(name: str, text: str, values: _Values, *labels: str) -> CounterMetricFamily:
    return _with_values(CounterMetricFamily(name, text, labels=labels), values)


def _gauge(name: str, text: str, values: _Values, *labels: str) -> GaugeMetricFamily:
    return _with_values(GaugeMetricFamily(name, text, labels=labels), values)


def _with_values(family: _Family, values: _Values) -> _Family:
    """Add values: one, none at all, or one for each label value or tuple of label values."""
    if values is None:
        return family
    for key, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        labels = key if isinstance(key, tuple) else (key,)
        family.add_metric(["" if label is None else str(label) for label in labels], value)
    return family


_SAMPLES = (
    ("pending_samples", "accounts.pending", "Samples in the memory of processes."),
    (
        "unaccounted_samples",
        "accounts.unaccounted",
        "Samples that processes held when they were killed; else 0, or a count is wrong.",
    ),
    ("waiting_samples", "waiting", "Stored samples not yet judged."),
    (
        "oldest_waiting_seconds",
        "oldest_waiting_seconds",
        "Age of the oldest sample not yet judged; absent where none waits.",
    ),
    (
        "report_time_seconds",
        "time_seconds",
        "Time of the last report, in seconds since the epoch.",
    ),
    (
        "judging_sampling_probability",
        "judging_sampling_probability",
        "Probability with which a sample is judged, as the judging budget allows.",
    ),
    ("monitor_is_leader", "is_leader", "1 for the one monitor of a store that cleans it, else 0."),
)


def _samples(report: Report) -> _Families:
    found = report.accounts
    yield _counter("ctxguard_samples", "Sampled requests of all processes.", found.sampled)
    yield _counter("ctxguard_stored_samples", "Samples written to the store.", found.stored)
    text = "Samples that were never stored, by reason."
    yield _counter("ctxguard_lost_samples", text, found.lost, "reason")
    for name, attribute, text in _SAMPLES:
        yield _gauge(f"ctxguard_{name}", text, attrgetter(attribute)(report))


def _counts(report: Report) -> _Families:
    for name, text in _COUNTS.items():
        values = {(report.judge, *key[1:]): n for key, n in report.counts.items() if key[0] == name}
        source = (
            " From the judge's verdicts, weighted by 1/π to all traffic." if name in SUMS else ""
        )
        yield _counter(f"ctxguard_{name}", text + source, values, "judge", *LABELS[name])


def _estimates(
    name: str, what: str, judge: str, by_key: Mapping[Any, Estimates], *labels: str
) -> _Families:
    for part, suffix, text in _PARTS:
        described = text.format(what)
        values = {
            (judge, metric, *(key if isinstance(key, tuple) else (key,))): value
            for key, estimates in by_key.items()
            for metric, estimate in estimates.items()
            if (value := getattr(estimate, part)) is not None
        }
        described = described[0].upper() + described[1:]
        yield _gauge(name + suffix, described, values, "judge", "metric", *labels)


def _populations(live: LiveEstimates) -> _Families:
    yield _gauge(
        "ctxguard_window_requests",
        "Judged requests that the estimates of a window are about.",
        {window: one.judged for window, one in live.populations.items()},
        "window",
    )
    yield _gauge(
        "ctxguard_window_labelled_requests",
        "How many of a window's judged requests people have graded.",
        {window: one.labelled for window, one in live.populations.items()},
        "window",
    )
    for name, end, text in (
        ("start", "since_seconds", "first"),
        ("end", "until_seconds", "last"),
    ):
        yield _gauge(
            f"ctxguard_window_{name}_seconds",
            f"When the {text} judged request of a window was answered, in seconds since the epoch.",
            {
                window: time
                for window, one in live.populations.items()
                if (time := getattr(one, end)) is not None
            },
            "window",
        )


def _labels(report: Report) -> _Families:
    live = report.live
    yield _gauge(
        "ctxguard_estimate_age_seconds",
        "Age of the newest judged request; absent before the first.",
        live.age_seconds,
    )
    yield _gauge(
        "ctxguard_labelled_requests",
        "Requests that people have graded, also such whose text was deleted since.",
        live.labelled,
    )
    yield _gauge(
        "ctxguard_labelled_waiting_samples",
        "Labelled samples of another judge that this one has yet to judge again.",
        report.labelled_waiting,
    )
    yield _gauge(
        "ctxguard_judge_changed",
        "1 once verdicts on samples that are judged again show that the judge has changed behind "
        "its name: nothing is borrowed from its labels then. Else 0.",
        {report.judge: float(live.canaries.changed_at is not None)},
        "judge",
    )
    yield _gauge(
        "ctxguard_unpicked_labelled_requests",
        "How many of these were not picked at random, and so are in no estimate.",
        live.unpicked,
    )
    yield _gauge(
        "ctxguard_label_disagreements",
        "Passages whose relevance annotators disagree on.",
        live.disagreements,
    )
    # A gauge, because reactions are deleted with the samples that they are about.
    yield _gauge(
        "ctxguard_feedback",
        "User reactions in the store, by kind. Users see only what was served: in no estimate.",
        report.feedback,
        "kind",
    )


_RISES = (
    ("may_rise", "risen", "1 where judged requests let a route in shadow be enforced, else 0."),
    ("requests", "n", "Judged requests that say whether a route in shadow may be enforced."),
    ("requests_needed", "missing", "About how many more are missing; absent where no number does."),
    ("labels_needed", "labels_missing", "How many more of these people must grade."),
    ("days_needed", "days_missing", "About how many days until as many are judged, if known."),
)


def _rises(rises: Mapping[Route, Rise]) -> _Families:
    for name, attribute, text in _RISES:
        values = {route: getattr(rise, attribute) for route, rise in rises.items()}
        known = {route: value for route, value in values.items() if value is not None}
        yield _gauge(f"ctxguard_shadow_{name}", text, known, "route")


_COMPARISON = ("route", "quantity", "reference")


def _alarms(report: AlarmReport) -> _Families:
    yield _counter("ctxguard_alarms", "Alarms raised, by kind.", report.raised, "kind")
    yield _gauge(
        "ctxguard_alarm_active",
        "1 for each active alarm.",
        {(one.kind, one.severity, one.route, one.reference): 1.0 for one in report.active},
        *("kind", "severity", "route", "reference"),
    )
    yield _gauge(
        "ctxguard_alarm_e_value",
        "e-CUSUM e-value of the days so far against a mean loss of at most ctxguard_alarm_target; "
        "the alarm is raised at 1,000; absent before the first day that is compared.",
        {one.key: one.e_value for one in report.losses if one.e_value is not None},
        *_COMPARISON,
    )
    yield _gauge(
        "ctxguard_alarm_target",
        "Mean loss that judged losses are compared with: the promise, the promise on the scale of "
        "a judge that errs (corrected), or this judge's own mean over its first requests "
        "(baseline), which says nothing about the promise.",
        {one.key: one.target for one in report.losses if one.target is not None},
        *_COMPARISON,
    )
    yield _gauge(
        "ctxguard_alarm_requests_needed",
        "Judged requests until the baseline is known and losses are compared with it; 0 once it "
        "is.",
        {one.key: one.n_needed for one in report.losses},
        *_COMPARISON,
    )
    yield from _signals(report.signals)


_BEYOND = ("route", "signal", "decile", "side")


def _signals(counted: Sequence[SignalCounts]) -> _Families:
    levels = [place / 10 for place in range(11)]
    yield _counter(
        "ctxguard_signal_requests",
        "Sampled requests of the profile, by signal that needs no label.",
        {(one.route, one.signal): one.n for one in counted},
        *("route", "signal"),
    )
    yield _counter(
        "ctxguard_signal_beyond",
        "Of these, the ones whose value lies below or above a quantile of the calibration.",
        {
            (one.route, one.signal, level, side): n
            for one in counted
            for side, beyond in (("below", one.below), ("above", one.above))
            for level, n in zip(levels, beyond, strict=True)
        },
        *_BEYOND,
    )
    yield _gauge(
        "ctxguard_reference_beyond_ratio",
        "Largest share of the calibration's queries that lies below or above that quantile.",
        {
            (one.route, one.signal, level, side): share
            for one in counted
            for level in levels
            for side, share in (("below", level), ("above", 1.0 - level))
        },
        *_BEYOND,
    )
    yield _gauge(
        "ctxguard_reference_queries",
        "Queries that the calibration's quantiles of a signal were taken from.",
        {(one.route, one.signal): one.n_reference for one in counted if one.n_reference},
        *("route", "signal"),
    )
