"""What the monitor knows, as Prometheus metrics: additive sums, and estimates with intervals.

The counters add up over any window and any number of monitors, so ratios may be taken in PromQL:
the judge's recall is ``rate(ctxguard_kept_relevant_total) / rate(ctxguard_relevant_total)``. The
gauges are estimates over the whole store. What only a judge says, uncorrected by people, carries
``uncorrected`` in its name. No data is an absent series, never a zero and never NaN, so that
``absent()`` finds it and no dashboard draws it.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ctxguard.monitor.alarms import BoardReport
from ctxguard.monitor.estimates import Estimate, Metric
from ctxguard.monitor.judges import JudgeAccounts
from ctxguard.monitor.monitor import Monitor, Report
from ctxguard.monitor.report import Window

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
    ("ctxguard_precision_sum", "Precisions of what was served.", Metric.PRECISION, "a"),
    ("ctxguard_precision_requests", "Requests that these stand for.", Metric.PRECISION, "b"),
)
_PARTS = (
    ("value", "", "Live estimate; absent where the data do not suffice;"),
    ("lower", "_lower", "Lower end of the estimate's interval,"),
    ("upper", "_upper", "Upper end of the estimate's interval,"),
    ("n", "_requests", "Requests (or sessions) that the estimate rests on,"),
    ("n_needed", "_requests_needed", "Requests that it would take,"),
)


class MonitorCollector(Collector):
    """Exports a monitor; a scrape shows its last report and reads no database.

    Args:
        monitor: What is exported. One per registry: a second one raises ``ValueError`` there.
        registry: Where it is registered; None registers it nowhere.
    """

    def __init__(self, monitor: Monitor, registry: CollectorRegistry | None = REGISTRY) -> None:
        self._monitor = monitor
        if registry is not None:
            registry.register(self)

    def describe(self) -> Iterable[_Family]:
        """Nothing: a registry that asks would otherwise make a report to learn the names."""
        return []

    def collect(self) -> Iterator[_Family]:
        # Not from the report, which is what may have failed.
        yield _counter(
            "ctxguard_monitor_errors", "Steps of the monitor that failed.", self._monitor.errors
        )
        report = self._monitor.latest
        if report is None:
            return
        yield from _accounts(report)
        yield from _sums(report)
        yield from _estimates("ctxguard_estimate", report.live.estimates)
        yield from _estimates("ctxguard_uncorrected_estimate", report.live.uncorrected)
        yield from _sequences(report)
        yield from _labels(report)
        yield _gauge(
            "ctxguard_store_quarantined",
            "Whether a damaged store lies aside, and what it held is missing.",
            self._monitor.store.quarantined is not None,
        )
        if self._monitor.alarms is not None:
            yield from _alarms(self._monitor.alarms.report())
        accounts = getattr(self._monitor.judge, "accounts", None)
        if accounts is not None:
            yield from _judge(accounts())


def _counter(name: str, documentation: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, documentation, value=value)


def _gauge(name: str, documentation: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, documentation, value=value)


def _by(
    family: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    documentation: str,
    label: str,
    values: Mapping[Any, float],
) -> _Family:
    made = family(name, documentation, labels=[label])
    for key, value in values.items():
        made.add_metric([str(key)], value)
    return made


def _accounts(report: Report) -> Iterator[_Family]:
    accounts = report.accounts
    yield _counter("ctxguard_samples", "Requests that were sampled.", accounts.sampled)
    yield _counter("ctxguard_stored_samples", "Samples that the store took.", accounts.stored)
    yield _gauge("ctxguard_pending_samples", "Samples on their way to the store.", accounts.pending)
    yield _by(
        CounterMetricFamily,
        "ctxguard_lost_samples",
        "Samples that were never stored, by reason.",
        "reason",
        accounts.lost,
    )
    yield _gauge("ctxguard_waiting_samples", "Stored samples not judged yet.", report.waiting)
    if report.oldest_waiting_seconds is not None:
        yield _gauge(
            "ctxguard_oldest_waiting_seconds",
            "How long the oldest of them has waited; absent where none does.",
            report.oldest_waiting_seconds,
        )
    yield _by(
        CounterMetricFamily,
        "ctxguard_judged_samples",
        "Samples that this monitor took up, by what became of them.",
        "outcome",
        report.outcomes,
    )
    yield _counter("ctxguard_verdicts", "Passages that the judge was asked about.", report.verdicts)
    yield _counter(
        "ctxguard_invalid_verdicts",
        "Passages that got no valid verdict.",
        report.invalid_verdicts,
    )
    yield _gauge(
        "ctxguard_report_time_seconds",
        "When the estimates were made, since the epoch.",
        report.time_seconds,
    )
    yield _gauge(
        "ctxguard_judging_share",
        "Probability with which a sample is taken up within the judging budget.",
        report.share,
    )
    yield _gauge(
        "ctxguard_monitor_leads",
        "Whether this one of a store's monitors cleans it and settles accounts.",
        report.leads,
    )


def _sums(report: Report) -> Iterator[_Family]:
    for name, documentation, metric, side in _SUMS:
        yield _counter(
            name,
            f"{documentation} As judged by this monitor, weighted to stand for all traffic.",
            getattr(report.sums[metric], side),
        )


def _estimates(
    name: str, by_window: Mapping[Window, Mapping[Metric, Estimate]]
) -> Iterator[_Family]:
    for part, suffix, documentation in _PARTS:
        family = GaugeMetricFamily(
            name + suffix, f"{documentation} by metric and window.", labels=["metric", "window"]
        )
        for window, estimates in by_window.items():
            for metric, estimate in estimates.items():
                number = getattr(estimate, part)
                if number is not None:
                    family.add_metric([metric.value, window.value], number)
        yield family


def _sequences(report: Report) -> Iterator[_Family]:
    for place, end in enumerate(("lower", "upper")):
        yield _by(
            GaugeMetricFamily,
            f"ctxguard_uncorrected_sequence_{end}",
            f"{end.title()} end of the confidence sequence of what the judge says: it may be "
            "watched without end.",
            "metric",
            {metric: interval[place] for metric, interval in report.sequences.items()},
        )


def _labels(report: Report) -> Iterator[_Family]:
    live = report.live
    if live.age_seconds is not None:
        yield _gauge(
            "ctxguard_estimate_age_seconds",
            "Since the newest judged request was answered; absent before the first.",
            live.age_seconds,
        )
    yield _gauge(
        "ctxguard_labelled_requests", "Judged requests with all their human labels.", live.labelled
    )
    yield _gauge(
        "ctxguard_label_disagreements",
        "Passages on whose relevance annotators disagree.",
        live.disagreements,
    )
    # No counter: reactions go with the samples that they are about.
    yield _by(
        GaugeMetricFamily,
        "ctxguard_feedback",
        "Users' reactions in the store, by kind; they see only what was served, and enter no "
        "estimate.",
        "kind",
        report.feedback,
    )


def _alarms(board: BoardReport) -> Iterator[_Family]:
    yield _by(
        CounterMetricFamily, "ctxguard_alarms", "Alarms raised, by kind.", "kind", board.raised
    )
    active = GaugeMetricFamily(
        "ctxguard_alarm_active",
        "1 for an alarm that nobody has acknowledged.",
        labels=["kind", "severity", "route", "signal"],
    )
    for one in board.active:
        alarm = one.alarm
        active.add_metric(
            [
                alarm.kind.value,
                alarm.severity.value,
                "" if alarm.route is None else alarm.route.value,
                alarm.signal or "",
            ],
            1.0,
        )
    yield active
    evidence = GaugeMetricFamily(
        "ctxguard_alarm_evidence",
        "Evidence that a promise no longer holds: about 1 or less while it does.",
        labels=["route", "quantity"],
    )
    target = GaugeMetricFamily(
        "ctxguard_alarm_target",
        "The promise that is watched.",
        labels=["route", "quantity"],
    )
    for watch in board.losses:
        evidence.add_metric([watch.route.value, watch.quantity.value], watch.ecusum.evidence)
        target.add_metric([watch.route.value, watch.quantity.value], watch.target)
    yield evidence
    yield target


def _judge(accounts: JudgeAccounts) -> Iterator[_Family]:
    yield _counter("ctxguard_judge_calls", "Requests sent to the judge.", accounts.calls)
    yield _counter("ctxguard_judge_retries", "Those that repeat a failed one.", accounts.retries)
    yield _by(
        CounterMetricFamily,
        "ctxguard_judge_invalid",
        "Passages without a verdict, by reason.",
        "reason",
        accounts.invalid,
    )
    yield _by(
        CounterMetricFamily,
        "ctxguard_judge_tokens",
        "Tokens that the judge's endpoint counted.",
        "direction",
        {"input": accounts.input_tokens, "output": accounts.output_tokens},
    )
    if accounts.cost is not None:
        yield _counter(
            "ctxguard_judge_cost", "Cost of these, in the currency of its prices.", accounts.cost
        )
