"""One simulated service from its requests to the figures that Prometheus scrapes.

The sampler, the writer, the store, the monitor and the exporter are the real ones, on a clock that
the simulation sets; only the traffic, the judge and the people are made up.
"""

import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks._live_traffic import (
    DAY_SECONDS,
    TENANTS,
    SimulatedJudge,
    Traffic,
    context_of,
    true_grade,
)
from ctxguard.measure.metrics import Metric
from ctxguard.monitor.estimation.live import Window
from ctxguard.monitor.estimation.sampling_design import to_label
from ctxguard.monitor.export.prometheus import MonitorCollector
from ctxguard.monitor.judging import budget as budget_module
from ctxguard.monitor.judging.budget import NO_LIMITS, BudgetLimits
from ctxguard.monitor.labels.files import RowToLabel
from ctxguard.monitor.labels.human import IF_NONE_ABOVE
from ctxguard.monitor.sampling.record import Privacy
from ctxguard.monitor.sampling.sampler import HashSampler, Sampler
from ctxguard.monitor.service import Monitor
from ctxguard.monitor.store import (
    LabelRow,
    SampleStore,
    engine,
    schema,
)
from ctxguard.monitor.store.writer import SampleWriter

START = 20_000 * DAY_SECONDS
"""When the traffic begins: at midnight."""
_PRIVACY = Privacy(redactor=None, passages="omitted")
"""The simulated judge and people know the passages by their ids."""
_AT_ONCE = 500
_SAMPLES = schema.samples.name
_OF_A_SAMPLE = (
    _SAMPLES,
    schema.judged.name,
    schema.payloads.name,
    schema.grades.name,
)
_OF_A_STORE = (schema.series.name, schema.accounts.name)
_LOCKED_SECONDS = 0.05


@dataclass(frozen=True)
class Setting:
    """How a service is monitored.

    Attributes:
        rate: Sampling rate.
        max_per_second: Cap on samples a second; None for none.
        budget: Of judging.
        window_seconds: Length of the recent window.
        lost: Share of the samples that are lost from noon to midnight.
        later_rate: Sampling rate in the second half of the time; None for the same.
        rate_by_day: Sampling rate from noon to midnight; None for the same.
    """

    rate: float = 0.05
    max_per_second: float | None = None
    budget: BudgetLimits = NO_LIMITS
    window_seconds: float = 2 * DAY_SECONDS
    lost: float = 0.0
    later_rate: float | None = None
    rate_by_day: float | None = None


@dataclass(frozen=True)
class Pick:
    """Some passages that people label after a step.

    Attributes:
        step: From 1.
        n: Passages to grade.
        whole: Whether requests are graded as far as they are judged.
        graded: Share of the requests that people get to; of the last one half of what is asked.
        tenants: Whose files people grade; None for one file of all.
    """

    step: int
    n: int
    whole: bool = False
    graded: float = 1.0
    tenants: tuple[str, ...] | None = None


class Figure(NamedTuple):
    """An estimate as scraped."""

    value: float
    lower: float
    upper: float
    effective: float

    def holds(self, truth: float) -> bool:
        """Whether the truth lies between the ends."""
        return self.lower - 1e-9 <= truth <= self.upper + 1e-9


class Service:
    """A service and its monitor, at a moment that only goes on.

    Args:
        url: Of an empty store.
        traffic: Whose requests are answered.
        judge: Of the monitor.
        setting: How it is monitored.
        seed: Of every random choice by a hash.
    """

    def __init__(
        self, url: str, traffic: Traffic, judge: SimulatedJudge, setting: Setting, seed: str
    ) -> None:
        self.now = START
        self.traffic = traffic
        self._seed = seed
        self._served = 0
        self.labelled = 0
        self.picked_at = START
        self._setting = setting
        self._lost = np.random.default_rng(list(seed.encode()))
        self.store = SampleStore.open(url, clock=self._clock)
        self.samplers = [
            Sampler(
                setting.rate,
                max_per_second=setting.max_per_second,
                capacity=len(traffic.asked),
                seed=seed,
                clock=self._clock,
            )
            for _ in traffic.shape.hosts
        ]
        self.writers = [
            SampleWriter(sampler, self.store, privacy=_PRIVACY) for sampler in self.samplers
        ]
        self.monitor_with(judge)
        # A queue is measured by a clock that does not pass in a simulation.
        self._patch = mock.patch.object(
            budget_module, "time", SimpleNamespace(monotonic=self._clock, time=self._clock)
        )
        self._patch.start()

    def monitor_with(self, judge: SimulatedJudge) -> None:
        """Start the monitor anew, with this judge."""
        self.judge = judge
        self.monitor = Monitor(
            self.store,
            judge,
            window_seconds=self._setting.window_seconds,
            budget=self._setting.budget,
            clock=self._clock,
        )
        self._registry = CollectorRegistry()
        MonitorCollector(self.monitor, self._registry, all_metrics=True)

    def _clock(self) -> float:
        return self.now

    def close(self) -> None:
        self._patch.stop()
        for writer in self.writers:
            writer.stop()
        self.store.close()

    def serve(self, until: float) -> None:
        """Answer the requests up to a moment, and sample them."""
        traffic, setting = self.traffic, self._setting
        last = int(np.searchsorted(traffic.seconds, until, side="right"))
        stamped, hosts = (START + traffic.stamped).tolist(), traffic.host.tolist()
        for request in range(self._served, last):
            self.now = START + float(traffic.seconds[request])
            sampler = self.samplers[hosts[request]]
            is_day = self.now % DAY_SECONDS >= DAY_SECONDS / 2.0
            if setting.later_rate is not None and 2.0 * (self.now - START) > traffic.shape.seconds:
                sampler.rate = setting.later_rate
            if setting.rate_by_day is not None:
                sampler.rate = setting.rate_by_day if is_day else setting.rate
            request_id = f"{self._seed}-{request}"
            probability = sampler.draw(request_id)
            if probability:
                is_full = is_day and self._lost.random() < setting.lost
                sampler.capacity = 0 if is_full else len(traffic.asked)
                context = context_of(traffic, request, request_id)
                sampler.offer(context, probability, stamped[request])
        self._served = last
        self.now = START + until

    def write(self, *, late: bool = True) -> None:
        """Store what was sampled.

        Args:
            late: Whether hosts that are late store theirs as well.
        """
        for host, writer in zip(self.traffic.shape.hosts, self.writers, strict=True):
            if late or not host.is_late:
                writer.flush()

    @property
    def file(self) -> Path:
        """The store's SQLite file."""
        assert self.store.file is not None
        return self.store.file

    def take_over(self, other: "Service", since: float, until: float, seed: str) -> None:
        """Go on from the samples that another service stored and judged in some time.

        As if they had been stored here by a sampler of another seed, which decides who is picked
        for labelling: many draws of labels from one traffic cost little.
        """
        label_order = HashSampler("labels", seed)
        within, times = "time_seconds > ? AND time_seconds <= ?", (START + since, START + until)
        with closing(sqlite3.connect(self.file, isolation_level=None)) as here:
            here.create_function("label_order_of", 1, label_order.uniform, deterministic=True)
            here.execute("ATTACH ? AS other", [str(other.file)])
            here.execute("BEGIN IMMEDIATE")
            for table in _OF_A_STORE:
                here.execute(
                    f"INSERT OR REPLACE INTO {table} SELECT * FROM other.{table}"  # noqa: S608
                )
            for table in _OF_A_SAMPLE:
                here.execute(
                    f"INSERT INTO {table} SELECT * FROM other.{table} WHERE sample_id IN "  # noqa: S608
                    f"(SELECT sample_id FROM other.{_SAMPLES} WHERE {within})",
                    times,
                )
            here.execute(
                f"UPDATE {_SAMPLES} SET label_order = "  # noqa: S608
                f"label_order_of(request_id) WHERE {within}",
                times,
            )
            here.execute("COMMIT")
        self.now = START + until

    def write_while_locked(self) -> None:
        """Try to store what was sampled while another process holds the store's lock."""
        with closing(sqlite3.connect(self.file, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with mock.patch.object(engine, "BUSY_SECONDS", _LOCKED_SECONDS):
                self.store.close()
                self.writers[0].flush(2.0 * _LOCKED_SECONDS)
            other.execute("ROLLBACK")
        self.store.close()

    def judge_waiting(self) -> None:
        """Judge what waits."""
        while self.monitor.step(_AT_ONCE):
            pass

    def maintain(self) -> None:
        """What a monitor does now and then: clean the store, and report."""
        self.monitor.maintain()

    def scrape(self) -> dict[tuple[str, ...], float]:
        """Every sample of the exposition, by (name, label values in order of names).

        The judge is left out, since there is one.
        """
        text = generate_latest(self._registry).decode()
        return {
            (
                sample.name,
                *[sample.labels[name] for name in sorted(sample.labels) if name != "judge"],
            ): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


def figures(
    scraped: Mapping[tuple[str, ...], float], name: str = "ctxguard_estimate"
) -> dict[tuple[Window, Metric], Figure]:
    """The estimates that a scrape shows, by window and metric."""
    return {
        (window, metric): Figure(
            value=scraped[name, metric, window],
            lower=scraped[f"{name}_lower", metric, window],
            upper=scraped[f"{name}_upper", metric, window],
            effective=scraped[f"{name}_requests_effective", metric, window],
        )
        for window in Window
        for metric in Metric
        if (name, metric, window) in scraped
    }


def check_counts(service: Service) -> None:
    """Compare what is counted with what is stored.

    Raises:
        RuntimeError: the counts are not those of the judgments in the store.
    """
    key = ("ctxguard_judged_samples_total", "judged")
    counted = sum(n for name, n in service.scrape().items() if name[: len(key)] == key)
    pages = service.store.judged_pages(service.monitor.series)
    judged = sum(len(page.requests) for page in pages)
    if counted != judged:
        raise RuntimeError(f"the counters do not add up to {judged} judged samples")


def label_some(service: Service, pick: Pick) -> int:
    """Pick samples as ``ctxguard label export`` does, and have a person grade what it asks for.

    Returns:
        How many passages were graded.
    """
    store, series = service.store, service.monitor.series
    service.picked_at = service.now
    if pick.tenants is not None:
        files = {
            tenant: to_label(store, series, pick.n, tenant=tenant) for tenant in reversed(TENANTS)
        }
        in_order = [sample for tenant in pick.tenants for sample in files[tenant]]
    else:
        in_order = to_label(store, series, pick.n, whole=pick.whole)
    n = math.ceil(pick.graded * len(in_order))
    labels = [list(graded_by_people(service, sample.rows())) for sample in in_order[:n]]
    if pick.graded < 1.0:
        labels[-1] = labels[-1][: len(labels[-1]) // 2]
    rows = list(chain.from_iterable(labels))
    store.add_labels(rows, service.traffic.shape.top_grade)
    service.labelled += pick.n
    return len(rows)


def graded_by_people(service: Service, rows: Sequence[RowToLabel]) -> Iterator[LabelRow]:
    """The labels that a person gives to one request, as the guide of the file says."""
    grades: list[int] = []
    for row in rows:
        if row.when == IF_NONE_ABOVE and any(grades):
            continue
        grade, negative = true_grade(service.traffic, row.query, row.passage_id)
        grades.append(grade)
        yield LabelRow(row.request_id, row.passage_id, grade, negative, "ann", service.now)
