"""Merges many worker processes into one scrape, by prometheus-client's multiprocess mode.

With ``PROMETHEUS_MULTIPROC_DIR`` in the environment before Python starts, each worker keeps its
metrics in files of that folder, and any one process can serve their totals. Reads the environment
and these files, adds to the given registry, and logs.
"""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from ctxguard._support.default_metrics import chosen
from ctxguard._support.regular_file import open_regular
from ctxguard.errors import ConfigurationError

_log = logging.getLogger(__name__)

_MAX_FILE_BYTES = 64 * 2**20
"""The largest file to read; a worker's file holds a few hundred bytes per series."""

_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


class SafeMultiProcessCollector(Collector):
    """Exports the totals of all workers, dead ones included; a bad file never stops the scrape.

    The files are merged by prometheus-client. Its own collector raises when one of them is empty
    or damaged; this one leaves such a file out, counts it in ``ctxguard_multiprocess_bad_files``
    and logs it once. Files are never deleted: empty the folder before the workers start, and call
    ``prometheus_client.multiprocess.mark_process_dead`` when one ends, so that its live gauges go
    with it. Multiprocess mode has no exemplars and no ``_created`` series.

    Args:
        folder: The one that ``PROMETHEUS_MULTIPROC_DIR`` names to the workers.
        registry: Where the collector is registered; None registers it nowhere.

    Raises:
        ConfigurationError: there is no such folder.
    """

    def __init__(
        self,
        folder: Path | str,
        registry: CollectorRegistry | None = None,
        *,
        all_metrics: bool = False,
    ) -> None:
        self._folder = Path(folder)
        self._all = all_metrics
        self._reported: set[str] = set()
        if not self._folder.is_dir():
            raise ConfigurationError(
                f"{str(folder)!r} is not a folder; {_VARIABLE} must name the folder that the "
                "workers write their metrics to, and it must exist before they start"
            )
        if registry is not None:
            registry.register(self)

    def collect(self) -> list[Metric]:
        """Return every chosen metric once, and the number of bad files."""
        return chosen(self._collect(), all_metrics=self._all)

    def _collect(self) -> Iterator[Metric]:
        try:
            # In one order, so that a rounded sum never falls from one scrape to the next:
            # Prometheus would take that for a restart.
            files = sorted([file for file in self._folder.iterdir() if file.suffix == ".db"])
        except OSError as error:
            self._report(f"the workers' metrics cannot be read: {error}")
            return
        try:
            metrics, n_bad = _merged(files), 0
        except Exception:
            readable = [file for file in files if self._is_readable(file)]
            metrics, n_bad = _merged(readable), len(files) - len(readable)
        yield from metrics
        yield GaugeMetricFamily(
            "ctxguard_multiprocess_bad_files",
            "Files of worker processes that are left out because they cannot be read.",
            value=n_bad,
        )

    def _is_readable(self, file: Path) -> bool:
        try:
            _merged([file])
        except Exception as error:
            self._report(f"{file} is left out of the metrics: {error!r}")
            return False
        return True

    def _report(self, message: str) -> None:
        if message not in self._reported:
            self._reported.add(message)
            _log.error("%s", message)


def _merged(files: Sequence[Path]) -> list[Metric]:
    """Add up the totals in some files; raise if one is empty, damaged or irregular."""
    for file in files:
        # A file may have been removed meanwhile.
        if file.exists():
            _check(file)
    metrics: list[Metric] = list(MultiProcessCollector.merge(map(str, files)))  # type: ignore[no-untyped-call]
    for metric in metrics:
        metric.samples = [_printable(sample) for sample in metric.samples]
    return metrics


def _check(file: Path) -> None:
    with open_regular(file, _MAX_FILE_BYTES) as stream:
        used = int.from_bytes(stream.read(4), sys.byteorder, signed=True)
    # Memory is allocated by the file's first number, which could be anything.
    if used > (size := file.stat().st_size):
        raise ValueError(f"{file.name} has {size} bytes instead of {used}")


def _printable(sample: Any) -> Any:
    """Escape lone surrogates in a sample's labels, because a single one would stop the scrape."""
    return sample._replace(
        labels={
            name: value.encode("utf-8", "backslashreplace").decode("utf-8")
            for name, value in sample.labels.items()
        }
    )


def registry_for_scrape(*, all_metrics: bool = False) -> CollectorRegistry:
    """Return the registry that a metrics endpoint should serve.

    It is new, with the totals of all workers, where ``PROMETHEUS_MULTIPROC_DIR`` is set (a
    ConfigurationError unless to a folder); else prometheus-client's default registry.
    """
    folder = os.environ.get(_VARIABLE)
    if not folder:
        return REGISTRY
    registry = CollectorRegistry()
    SafeMultiProcessCollector(folder, registry, all_metrics=all_metrics)
    return registry
