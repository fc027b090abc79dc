"""What the monitor knows, as Prometheus metrics: additive sums, and estimates with intervals.

The counters add up over any window and any number of processes, so ratios may be taken in PromQL:
recall is ``rate(ctxguard_kept_relevant_total) / rate(ctxguard_relevant_total)``. The gauges are
this process's own estimates. No data is an absent series, never a zero and never NaN, so that
``absent()`` finds it and no dashboard draws it.
"""

from collections.abc import Iterator
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ctxguard.monitor.estimates import Metric
from ctxguard.monitor.monitor import Monitor, Report
from ctxguard.monitor.sampler import Accounts

_Family = CounterMetricFamily | GaugeMetricFamily

# Each sum stands for all traffic: requests and dropped passages weigh 1 / (their probability).
_SUMS = (
    ("ctxguard_kept_relevant", "Relevant passages served.", Metric.RECALL, "a"),
    ("ctxguard_relevant", "Relevant passages in the pools.", Metric.RECALL, "b"),
    ("ctxguard_reciprocal_rank", "Reciprocal ranks of what was served.", Metric.MRR, "a"),
    ("ctxguard_answerable_requests", "Requests with a relevant passage.", Metric.MRR, "b"),
    ("ctxguard_gain", "Positive part of UDCG.", Metric.GAIN, "a"),
    ("ctxguard_harm", "Negative part of UDCG, as a positive number.", Metric.HARM, "a"),
    ("ctxguard_represented_requests", "Requests that gain and harm stand for.", Metric.UDCG, "b"),
)


class MonitorCollector(Collector):
    """Exports a monitor and its sampler; read afresh at every scrape.

    Args:
        monitor: What is exported. One per registry: a second one raises ``ValueError`` there.
        registry: Where it is registered; None registers it nowhere.
    """

    def __init__(self, monitor: Monitor, registry: CollectorRegistry | None = REGISTRY) -> None:
        self._monitor = monitor
        if registry is not None:
            registry.register(self)

    def collect(self) -> Iterator[_Family]:
        # The queue is read after the outcomes: what is drained meanwhile is not yet an outcome.
        report = self._monitor.report()
        yield from _accounts(self._monitor.sampler.accounts(), report)
        yield from _sums(report)
        yield from _estimates(report)


def _accounts(accounts: Accounts, report: Report) -> Iterator[_Family]:
    yield CounterMetricFamily(
        "ctxguard_samples", "Requests that were sampled.", value=accounts.sampled
    )
    yield CounterMetricFamily(
        "ctxguard_drained_samples", "Samples that the monitor took.", value=accounts.drained
    )
    yield GaugeMetricFamily(
        "ctxguard_pending_samples", "Samples that wait in the queue.", value=accounts.pending
    )
    lost = CounterMetricFamily(
        "ctxguard_lost_samples", "Samples that were dropped, by reason.", labels=["reason"]
    )
    for reason, count in accounts.lost.items():
        lost.add_metric([reason.value], count)
    yield lost
    outcomes = CounterMetricFamily(
        "ctxguard_judged_samples", "Drained samples by what became of them.", labels=["outcome"]
    )
    for outcome, count in report.outcomes.items():
        outcomes.add_metric([outcome.value], count)
    yield outcomes
    yield CounterMetricFamily(
        "ctxguard_verdicts", "Passages that the judge was asked about.", value=report.verdicts
    )
    yield CounterMetricFamily(
        "ctxguard_invalid_verdicts",
        "Passages that got no valid verdict.",
        value=report.invalid_verdicts,
    )
    yield CounterMetricFamily(
        "ctxguard_monitor_errors", "Steps of the monitor that failed.", value=report.errors
    )


def _sums(report: Report) -> Iterator[_Family]:
    for name, documentation, metric, side in _SUMS:
        yield CounterMetricFamily(
            name,
            documentation + " Weighted to stand for all traffic.",
            value=getattr(report.sums[metric], side),
        )


def _estimates(report: Report) -> Iterator[_Family]:
    families: dict[str, Any] = {
        part: GaugeMetricFamily(
            f"ctxguard_{name}",
            f"{documentation} by metric and window.",
            labels=["metric", "window"],
        )
        for part, name, documentation in (
            ("value", "estimate", "Live estimate; absent where the data do not suffice;"),
            ("lower", "estimate_lower", "Lower end of the estimate's interval,"),
            ("upper", "estimate_upper", "Upper end of the estimate's interval,"),
            ("n", "estimate_requests", "Judged requests that the estimate rests on,"),
            ("n_needed", "estimate_requests_needed", "Judged requests that it would take,"),
        )
    }
    for window, estimates in report.estimates.items():
        for metric, estimate in estimates.items():
            for part, family in families.items():
                number = getattr(estimate, part)
                if number is not None:
                    family.add_metric([metric.value, window.value], number)
    yield from families.values()
    if report.age_seconds is not None:
        yield GaugeMetricFamily(
            "ctxguard_estimate_age_seconds",
            "Time since a request was last judged; absent before the first.",
            value=report.age_seconds,
        )
