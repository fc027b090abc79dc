"""Runs of a scenario: services that answer the same traffic, and what is scraped of each."""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks._live_scenarios import Change, Scenario
from benchmarks._live_service import START, Figure, Service, figures, label_some
from benchmarks._live_traffic import JudgeErrors, SimulatedJudge, draw_traffic
from benchmarks._processes import postgresql
from ctxguard.measure.metrics import Metric
from ctxguard.monitor.estimation.live import Window
from ctxguard.monitor.store import Limits

MOST_SECONDS = Limits().max_age_seconds or math.inf
"""How long a store retains samples."""


class Look(NamedTuple):
    """What is scraped at one moment.

    Attributes:
        step: After which.
        labels: Requests that people were asked to label by then.
        figures: What is shown, by window and metric.
        truths: Every metric over all traffic of each window.
    """

    step: int
    labels: int
    figures: Mapping[tuple[Window, Metric], Figure]
    truths: Mapping[tuple[Window, Metric], float]


class Run:
    """Services of one scenario that answer the same traffic.

    Args:
        scenario: What is simulated.
        urls: Of empty stores.
        seed: Of all random choices.
    """

    def __init__(self, scenario: Scenario, urls: Iterator[str], seed: int) -> None:
        self.scenario = scenario
        self._rng = rng = np.random.default_rng([seed, 1])
        self.traffic = draw_traffic(scenario.shape, rng)
        self._judge = SimulatedJudge(self.traffic, JudgeErrors(*scenario.judge), rng)
        self._urls = urls
        self._seed = f"run {seed}"
        parts = np.linspace(0.0, scenario.shape.seconds, scenario.steps + 1).tolist()
        self._parts = list(enumerate(pairwise(parts), start=1))

    def looks(self, labellings: int) -> Iterator[Look]:
        """What is seen, in the order of time.

        Args:
            labellings: How often the labels are drawn from what one service judged; with 1 the
                service goes through all of it itself.
        """
        with closing(self._service()) as service:
            if labellings == 1:
                for step, (_, until) in self._parts:
                    self._answer(service, step, until)
                    yield from self._after(service, step)
                return
            for step, (_, until) in self._parts:
                self._answer(service, step, until)
            for labelling in range(labellings):
                with closing(self._service()) as other:
                    for step, (since, until) in self._parts:
                        other.take_over(service, since, until, f"{self._seed}, {labelling}")
                        yield from self._after(other, step)

    def _service(self) -> Service:
        url = next(self._urls)
        return Service(url, self.traffic, self._judge, self.scenario.setting, self._seed)

    def _answer(self, service: Service, step: int, until: float) -> None:
        """Answer, store and judge the requests of a step, as far as nothing is down."""
        scenario = self.scenario
        if scenario.changed is not None and step == scenario.changed.step:
            self._change_judge(service, scenario.changed)
        service.serve(until)
        if step in scenario.locked:
            service.write_while_locked()
        service.write(late=step == scenario.steps)
        service.judge.down = step in scenario.down
        service.judge_waiting()

    def _change_judge(self, service: Service, change: Change) -> None:
        """Let the judge err otherwise, under its name or as a new version."""
        if change.is_silent:
            service.judge.change(change.errors, self._rng)
            return
        service.monitor_with(SimulatedJudge(self.traffic, change.errors, self._rng, ", new"))

    def _after(self, service: Service, step: int) -> Iterator[Look]:
        """What the monitor and people do after a step."""
        scenario = self.scenario
        if scenario.shape.seconds > MOST_SECONDS:
            service.maintain()
        for pick in scenario.picks:
            if pick.step == step:
                label_some(service, pick)
                if scenario.look_after_each_pick:
                    yield self._look(service, step)
        is_last = step == scenario.steps and not scenario.look_after_each_pick
        if is_last or step in scenario.looks:
            yield self._look(service, step)

    def _look(self, service: Service, step: int) -> Look:
        service.maintain()
        report = service.monitor.latest
        assert report is not None
        until = service.now - START
        lengths = dict.fromkeys(Window, MOST_SECONDS)
        lengths[Window.RECENT] = self.scenario.setting.window_seconds
        truths: dict[tuple[Window, Metric], float] = {}
        for window, about in report.populations.items():
            # Figures are of requests from the first to the last that was judged.
            if about.since_seconds is None or about.until_seconds is None:
                continue
            since = max(until - lengths[window], about.since_seconds - START)
            answered = service.picked_at if window is Window.UP_TO_LABELS else math.inf
            found = self.traffic.truths(since, about.until_seconds - START, answered - START)
            truths |= {(window, metric): truth for metric, truth in found.items()}
        return Look(step, service.labelled, figures(service.scrape()), truths)


class Database(NamedTuple):
    """Where stores are kept.

    Attributes:
        name: In the tables.
        stores: Opens the URLs of empty stores, which are deleted in the end.
    """

    name: str
    stores: Callable[[], AbstractContextManager[Iterator[str]]]


@contextmanager
def sqlite_stores() -> Iterator[Iterator[str]]:
    """Empty SQLite files, in memory where this machine has a folder for that."""
    memory = Path("/dev/shm")  # noqa: S108 - a new folder in it
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield (f"sqlite:///{Path(folder) / f'{number}.db'}" for number in count())


SQLITE = Database("sqlite", sqlite_stores)


@contextmanager
def postgresql_database() -> Iterator[Database]:
    """A PostgreSQL server that ends with the block."""
    import psycopg

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # A server that runs as another user must reach its folder.
        folder.chmod(0o755)
        with postgresql(folder) as url, psycopg.connect(url, autocommit=True) as connection:
            # It need not survive a crash of this machine.
            connection.execute("ALTER SYSTEM SET fsync = off")
            connection.execute("SELECT pg_reload_conf()")

            @contextmanager
            def stores() -> Iterator[Iterator[str]]:
                connection.execute("DROP SCHEMA IF EXISTS live CASCADE")
                connection.execute("CREATE SCHEMA live")
                yield iter([f"{url}&options=-csearch_path%3Dlive"])

            yield Database("postgresql", stores)
