"""Exports a monitor's results as Prometheus metrics: counts, and estimates with intervals.

Counters are of the whole store since the series of the judge began, and never fall. The gauges
``ctxguard_estimate`` describe the whole store, corrected by human labels;
``ctxguard_judge_estimate`` is the judge's own figure, without that correction. Where there is no
data there is no series, never a zero or NaN, so that ``absent()`` finds it and no dashboard draws
it. A panel or rule reads each metric, and a test checks that. The default export is the few metrics
that the default panels and alerts read, with three estimates in the window to show. Reads the
monitor's latest report, not the store, and adds to the given registry.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ctxguard._support.default_metrics import DEFAULT_METRICS
from ctxguard.measure.metrics import Metric as Estimated
from ctxguard.monitor.alarms import AlarmReport
from ctxguard.monitor.judging.counts import LABELS
from ctxguard.monitor.service import Monitor, Report

_Row = tuple[str, str, float | Mapping[Any, float | None] | None, tuple[str, ...]]
"""A metric: its name, its text, one value or one for each value or tuple of values of its labels
(None is left out), and its labels."""

_COUNTS = {
    "judged_samples": "Samples judged, by outcome; one that is asked about again counts again.",
    "grades": "Passages submitted to the judge.",
    "invalid_grades": "Passages for which the judge gave no valid grade.",
    "candidate_tokens": "Tokens of the candidates retrieved, by mode and fate: kept, or dropped in "
    "assembly or by the policy; outside enforce, as enforcing would have it.",
    "today_tokens": "Tokens of the retriever's first k, which today's contexts hold, by mode.",
    "canary_grades": "Grades on labelled passages that were judged again, by whether the same.",
    "judge_calls": "Calls of the judge's endpoint.",
    "judge_retries": "Judge calls that were retries.",
    "judge_invalid": "Passages for which the judge gave no valid grade, by reason.",
    "judge_tokens": "Tokens that the judge's endpoint reported, by direction.",
    "judge_cost": "Cost of judging, in the currency of its prices; absent without prices.",
}
_MEANING = (
    "pooled_recall: share of the pools' relevant passages that was served, all requests together. "
    "recall: mean of each request's share, from whole pools. precision: mean over non-empty "
    "requests of the share of served passages that is relevant. served_mrr: mean reciprocal rank "
    "of the served passages, over requests that served any; 0 without a relevant one. "
    "udcg, gain, harm: discounted worth of the served passages, and its two parts, per request. "
    "recall_loss: mean share lost of the relevant among the retriever's first few."
)
_PARTS = {
    "value": ("", f"{{}}; absent where the data do not suffice. {_MEANING}"),
    "lower": ("_lower", "Lower end of the 95% confidence interval. {}."),
    "upper": ("_upper", "Upper end of the 95% confidence interval. {}."),
    "n": ("_requests", "Requests (or sessions) behind it. {}."),
    "n_effective": (
        "_requests_effective",
        "How many requests (or sessions) of equal weight would support it as well. {}.",
    ),
    "requests_needed": (
        "_requests_needed",
        "Judged requests (or sessions) that it would need; absent where no such lack. {}.",
    ),
    "grades_needed": (
        "_grades_needed",
        "Passages that people have yet to grade for it, at least; absent where no such lack. {}.",
    ),
}
_ESTIMATES = (
    ("estimate", "Live estimate", tuple(_PARTS)),
    ("judge_estimate", "Judge's own figure, not corrected by human labels", ("value",)),
)
_FAILING = "1 while this monitor cannot use the sample store, by error: full, damaged, absent."
_CHANGED = (
    "1 once grades on samples that are judged again show that the judge has changed behind its "
    "name, else 0."
)
DEFAULT_ESTIMATES = (Estimated.POOLED_RECALL, Estimated.SERVED_MRR, Estimated.UDCG)
"""The estimates exported by default."""
_SHOWN = (
    "1 for the window to show of each metric: the narrowest one that has an estimate, or without "
    "any the one with most requests behind it."
)
_REPORTED: tuple[tuple[str, ...], ...] = (
    ("samples_total", "accounts.sampled", "Sampled requests of all processes."),
    ("stored_samples_total", "accounts.stored", "Samples written to the store."),
    ("lost_samples_total", "accounts.lost", "Samples that were never stored, by reason.", "reason"),
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
    ("report_time_seconds", "time_seconds", "Time of the last report, in seconds since the epoch."),
    (
        "judging_sampling_probability",
        "judging_sampling_probability",
        "Probability with which a sample is judged, as the judging budget allows.",
    ),
    (
        "failed_passages",
        "failed_passages",
        "Passages without a grade, because a call of the judge failed: asked about again.",
    ),
    (
        "estimate_age_seconds",
        "age_seconds",
        "Age of the newest judged request; absent before the first.",
    ),
    (
        "labelled_requests",
        "labelled",
        "Requests that people have graded, including those whose text has since been deleted.",
    ),
    (
        "labelled_waiting_samples",
        "labelled_waiting",
        "Labelled samples of another judge that this one has yet to judge again.",
    ),
    (
        "label_disagreements",
        "disagreements",
        "Passages whose relevance annotators disagree on.",
    ),
)
"""The metrics that are attributes of a report: name, attribute, text and labels."""
_LOSSES = (
    (
        "e_value",
        "e_value",
        "e-CUSUM e-value of the days so far; the alarm is raised at 2,000; absent before a first.",
    ),
    (
        "target",
        "target",
        "Mean loss that judged losses are compared with, on the judge's scale; by reference.",
    ),
    (
        "requests_needed",
        "n_needed",
        "About how many judged requests until the baseline is known; 0 once it is.",
    ),
)


class MonitorCollector(Collector):
    """Exports a monitor's last report; a scrape reads no database.

    Args:
        registry: Where it is registered; None registers it nowhere. Registering a second monitor
            raises ``ValueError``.
        price_per_million: Price of a million tokens of context; None if not known.
        all_metrics: Whether to export all metrics, in all windows.
    """

    def __init__(
        self,
        monitor: Monitor,
        registry: CollectorRegistry | None = REGISTRY,
        *,
        price_per_million: float | None = None,
        all_metrics: bool = False,
    ) -> None:
        self._monitor = monitor
        self._all = all_metrics
        self._price = price_per_million
        if registry is not None:
            registry.register(self)

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Describe nothing; otherwise a registry would collect once to learn the names."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Make a metric family from each exported row: a counter if it ends in ``_total``, else a
        gauge."""
        families: list[Metric] = []
        for name, text, values, labels in self._rows():
            kept = labels if self._all else DEFAULT_METRICS.get(name.removesuffix("_total"))
            if kept is None:
                continue
            sums: dict[tuple[str, ...], float] = defaultdict(float)
            for key, value in (values if isinstance(values, Mapping) else {(): values}).items():
                if value is not None:
                    own = dict(zip(labels, key if isinstance(key, tuple) else (key,), strict=True))
                    sums[tuple(map(str, map(own.__getitem__, kept)))] += value
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(f"ctxguard_{name}", text, labels=kept)
            for key, value in sums.items():
                family.add_metric(key, value)
            families.append(family)
        return families

    def _rows(self) -> list[_Row]:
        # Neither is part of the report, which may be what failed.
        errors, fault = self._monitor.errors, self._monitor.store_fault
        rows: list[_Row] = [
            ("monitor_errors_total", "Steps of this monitor that failed.", errors, ()),
            ("store_failing", _FAILING, {fault: 1.0} if fault else {}, ("error",)),
            (
                "price_per_million",
                "Price of a million tokens of context, as given; absent if not known.",
                self._price,
                (),
            ),
        ]
        if self._monitor.latest is not None:
            rows += _report(self._monitor.latest, all_metrics=self._all)
            if self._monitor.alarms is not None:
                rows += _alarms(self._monitor.alarms.report())
        return rows


def _report(report: Report, *, all_metrics: bool) -> list[_Row]:
    rows = list[_Row]()
    judge, shown = report.judge, report.shown
    for name, attribute, text, *labels in _REPORTED:
        rows.append((name, text, attrgetter(attribute)(report), tuple(labels)))
    counts: dict[str, dict[Any, float]] = {name: {} for name in _COUNTS}
    for (name, *key), n in report.counts.items():
        if name in counts:
            counts[name][judge, *key] = n
    for name, text in _COUNTS.items():
        rows.append((f"{name}_total", text, counts[name], ("judge", *LABELS[name])))
    of_window = ("judge", "metric", "window")
    for source, (name, what, parts) in zip(
        (report.estimates, report.judge_estimates), _ESTIMATES, strict=True
    ):
        found: dict[str, dict[Any, float | None]] = {part: {} for part in parts}
        for window, estimates in source.items():
            for metric, estimate in estimates.items():
                if not all_metrics and (
                    metric not in DEFAULT_ESTIMATES or shown.get(metric) != window
                ):
                    continue
                for part in parts:
                    if not part.endswith("_needed"):
                        found[part][judge, metric, window] = getattr(estimate, part)
                if needed := estimate.n_needed:
                    unit = "requests_needed" if estimate.grades is None else "grades_needed"
                    found.get(unit, {})[judge, metric, window] = needed
        for part, values in found.items():
            suffix, text = _PARTS[part]
            rows.append((name + suffix, text.format(what), values, of_window))
    rows.append(("judge_changed", _CHANGED, {judge: float(report.judge_changed)}, ("judge",)))
    windows = {
        (judge, metric, window): 1.0
        for metric, window in shown.items()
        if all_metrics or metric in DEFAULT_ESTIMATES
    }
    rows.append(("estimate_shown", _SHOWN, windows, of_window))
    return rows


def _alarms(report: AlarmReport) -> list[_Row]:
    active = {(one.kind, one.route or "", one.reference or ""): 1.0 for one in report.active}
    of_alarm, of_loss = ("kind", "route", "reference"), ("route", "quantity", "reference")
    rows: list[_Row] = [
        ("alarms_total", "Alarms raised, by kind.", report.raised, ("kind",)),
        ("alarm_active", "1 for each active alarm.", active, of_alarm),
    ]
    for name, attribute, text in _LOSSES:
        losses = {one.key: getattr(one, attribute) for one in report.losses}
        rows.append((f"alarm_{name}", text, losses, of_loss))
    return rows
