"""Chooses which metrics are exported: a few by default, all with the setting ``all-metrics``.

The default metrics are those that the default alerts and panels use. Counts are summed over labels
that these do not need. Reads the registry that it filters.
"""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

OURS = "ctxguard_"
_ESTIMATE = ("judge", "metric", "window")

DEFAULT_METRICS: Mapping[str, tuple[str, ...]] = {
    "received_requests": ("mode",),
    "requests": ("mode", "outcome"),
    "failed_requests": ("cause",),
    "shed_requests": (),
    "flags": ("flag",),
    "stage_failures": ("stage",),
    "filter_violations": (),
    "guard_seconds": ("le",),
    "estimate": _ESTIMATE,
    "estimate_lower": _ESTIMATE,
    "estimate_upper": _ESTIMATE,
    "estimate_requests_needed": _ESTIMATE,
    "estimate_grades_needed": _ESTIMATE,
    "estimate_shown": _ESTIMATE,
    "estimate_age_seconds": (),
    "judge_estimate": _ESTIMATE,
    "alarm_active": ("kind", "route", "reference"),
    "alarm_requests_needed": ("route", "quantity", "reference"),
    "candidate_tokens": ("judge", "mode", "fate"),
    "today_tokens": ("judge", "mode"),
    "samples": (),
    "stored_samples": (),
    "lost_samples": ("reason",),
    "judged_samples": ("judge", "outcome"),
    "report_time_seconds": (),
    "monitor_errors": (),
}
"""Labels of the metrics that are exported by default, by name without prefix and ``_total``."""


def chosen(metrics: Iterable[Metric], *, all_metrics: bool) -> list[Metric]:
    """Choose the metrics to export; those of other libraries are left unchanged.

    The chosen ones may be changed in place: the times at which counters were created are left out.
    """
    found = []
    for metric in metrics:
        if all_metrics or not metric.name.startswith(OURS):
            found.append(metric)
            continue
        kept = DEFAULT_METRICS.get(metric.name.removeprefix(OURS))
        if kept is None:
            continue
        sums: dict[tuple[str, ...], Sample] = {}
        for sample in metric.samples:
            if sample.name.endswith("_created"):
                continue
            labels = {name: sample.labels[name] for name in kept if name in sample.labels}
            key = (sample.name, *labels.values())
            before = sums[key].value if key in sums else 0.0
            sums[key] = Sample(sample.name, labels, sample.value + before)
        metric.samples = list(sums.values())
        found.append(metric)
    return found


class ChosenMetrics(Collector):
    """Exports the metrics of its own registry: the chosen ones, or all.

    Raises:
        ValueError: the registry exports one of them already.
    """

    def __init__(
        self, metrics: CollectorRegistry, registry: CollectorRegistry, *, all_metrics: bool
    ) -> None:
        self._metrics = metrics
        self._all = all_metrics
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Name all metrics, so that a registry refuses another of the same name."""
        return self._metrics.collect()

    def collect(self) -> Iterable[Metric]:
        return chosen(self._metrics.collect(), all_metrics=self._all)
