"""One scrape over many worker processes: prometheus-client's multiprocess mode, made safe.

With ``PROMETHEUS_MULTIPROC_DIR`` in the environment before Python starts, every worker keeps its
metrics in files there (``files``), and one process serves their totals.
"""

import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ctxguard.monitor.multiprocess.entries import Entry, Labels, exact_sum
from ctxguard.monitor.multiprocess.files import WorkerFiles

_log = logging.getLogger(__name__)

_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_Series = dict[tuple[str, Labels], float]


class SafeMultiProcessCollector(Collector):
    """Exports what all workers counted; one bad file never stops the scrape.

    A file that is empty, cut short, damaged or foreign is left out whole, counted in
    ``ctxguard_multiprocess_bad_files`` and logged once. Lone surrogates in a label are spelled
    out. Totals are exact and depend on no order of files. As in prometheus-client, there are no
    exemplars and no ``_created`` series.

    Args:
        path: The folder that ``PROMETHEUS_MULTIPROC_DIR`` names to the workers.
        registry: Where it is registered; None registers it nowhere.
        settle_seconds: How long a worker must have been dead before ``tidy`` folds its files.

    Raises:
        ConfigurationError: there is no such folder.
    """

    def __init__(
        self,
        path: Path | str,
        registry: CollectorRegistry | None = None,
        *,
        settle_seconds: float = 600.0,
    ) -> None:
        self._files = WorkerFiles(path, settle_seconds=settle_seconds)
        self._reported: set[str] = set()
        if registry is not None:
            registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Each metric once; none at all where the folder itself cannot be read."""
        try:
            reading = self._files.read()
        except OSError as error:
            self._report(f"the workers' metrics cannot be read: {error}")
            return
        for name, fault in reading.bad_files.items():
            self._report(f"{self._files.folder / name} is left out of the metrics: {fault}")
        metrics, faults = merged(reading.entries)
        for fault in faults:
            self._report(fault)
        yield from metrics
        yield GaugeMetricFamily(
            "ctxguard_multiprocess_bad_files",
            "Files of worker processes that are left out because they cannot be read.",
            value=len(reading.bad_files),
        )

    def tidy(self) -> None:
        """Fold what dead workers left into one archive; see ``WorkerFiles``.

        To be called every minute or so by one process that sees the workers' processes. Never
        raises for the folder's sake: what cannot be tidied is logged once and still served.
        """
        try:
            self._files.tidy()
        except OSError as error:
            self._report(f"the workers' metrics cannot be tidied: {error}")

    def _report(self, message: str) -> None:
        if message not in self._reported:
            self._reported.add(message)
            _log.error("%s", message)


def merged(entries: Iterable[Entry]) -> tuple[list[Metric], list[str]]:
    """The entries of many processes as one metric each.

    Counters, summaries and histograms add up; gauges follow their ``multiprocess_mode``.

    Returns:
        The metrics in order of first appearance, and what had to be left out: metrics with a
        name that is none, or of two types (the first is served).
    """
    by_metric: dict[str, list[Entry]] = {}
    faults: dict[str, None] = {}
    for entry in entries:
        found = by_metric.setdefault(entry.metric, [])
        if found and (found[0].type, found[0].mode) != (entry.type, entry.mode):
            faults[
                f"metric {entry.metric} is a {found[0].type} in some workers and a {entry.type} "
                "in others (or a gauge of another mode); these are left out until they restart"
            ] = None
        else:
            found.append(entry)
    metrics = []
    for name, found in by_metric.items():
        try:
            metric = Metric(name, found[0].documentation, found[0].type)
        except ValueError as error:
            faults[f"metric {name!r} is left out: {error}"] = None
            continue
        for (series, labels), value in _series(found).items():
            metric.add_sample(series, dict(labels), value)
        metrics.append(metric)
    return metrics, list(faults)


def _series(entries: Sequence[Entry]) -> _Series:
    if entries[0].type == "gauge":
        return _gauge(entries)
    values: dict[tuple[str, Labels], list[float]] = defaultdict(list)
    for entry in entries:
        values[entry.name, entry.labels].append(entry.value)
    sums = {series: exact_sum(numbers) for series, numbers in values.items()}
    return _histogram(entries[0].metric, sums) if entries[0].type == "histogram" else sums


def _histogram(metric: str, sums: _Series) -> _Series:
    """Buckets are kept apart in the files, and add up in a scrape."""
    series: _Series = {}
    buckets: dict[Labels, dict[float, float]] = defaultdict(dict)
    for (name, labels), value in sums.items():
        bound = dict(labels).get("le")
        if name != f"{metric}_bucket" or bound is None:
            series[name, labels] = value
            continue
        others = tuple([pair for pair in labels if pair[0] != "le"])
        buckets[others][float(bound)] = value
    for labels, counts in buckets.items():
        total = 0.0
        for upper, count in sorted(counts.items()):
            total += count
            series[f"{metric}_bucket", (*labels, ("le", _bound(upper)))] = total
        series[f"{metric}_count", labels] = total
    return series


def _bound(upper: float) -> str:
    return str(floatToGoString(upper))  # type: ignore[no-untyped-call]


def _gauge(entries: Sequence[Entry]) -> _Series:
    mode = entries[0].mode.removeprefix("live")
    if mode not in ("min", "max", "sum", "mostrecent"):  # Each process by itself.
        return {
            (entry.name, (*entry.labels, ("pid", entry.process))): entry.value for entry in entries
        }
    values: dict[tuple[str, Labels], list[tuple[float, float]]] = defaultdict(list)
    for entry in entries:
        values[entry.name, entry.labels].append((entry.time_seconds, entry.value))
    return {series: _combined(mode, timed) for series, timed in values.items()}


def _combined(mode: str, timed: Sequence[tuple[float, float]]) -> float:
    if mode == "mostrecent":
        return max(timed)[1]
    numbers = [value for _, value in timed]
    if mode == "sum":
        return exact_sum(numbers)
    return min(numbers) if mode == "min" else max(numbers)


def registry_for_scrape(workers: SafeMultiProcessCollector | None = None) -> CollectorRegistry:
    """What a metrics endpoint serves: all workers' metrics, or this process's own.

    Args:
        workers: A collector to serve, kept by a caller that also tidies; made here unless given.

    Returns:
        A registry of its own with the workers' totals where ``PROMETHEUS_MULTIPROC_DIR`` is set
        or ``workers`` is given; prometheus-client's default registry otherwise. It can be
        served with ``prometheus_client.start_http_server(port, registry=…)`` or
        ``make_wsgi_app``, and take further collectors.

    Raises:
        ConfigurationError: the variable names no folder.
    """
    folder = os.environ.get(_VARIABLE)
    if workers is None and not folder:
        return REGISTRY
    registry = CollectorRegistry()
    registry.register(workers or SafeMultiProcessCollector(folder or ""))
    return registry
