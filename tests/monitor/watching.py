"""A whole monitor in one process: sampled requests go through a store in memory."""

from prometheus_client import CollectorRegistry

from ctxguard.core.context import Context
from ctxguard.monitor.export.prometheus import MonitorCollector
from ctxguard.monitor.judges import Judge
from ctxguard.monitor.sampling.record import Privacy
from ctxguard.monitor.sampling.sampler import DEFAULT_RATES, JudgingRates, Sampler
from ctxguard.monitor.service import Monitor, Report
from ctxguard.monitor.store import SampleStore
from ctxguard.monitor.store.writer import SampleWriter

NOW = 1_000_000.0
DAY_SECONDS = 86_400.0


class Watching:
    """What serves and what watches, with a clock that stands still unless it is set."""

    def __init__(
        self,
        judge: Judge,
        *,
        rates: JudgingRates = DEFAULT_RATES,
        rate: float = 1.0,
        max_per_second: float | None = None,
        capacity: int = 10_000,
        seed: str = "",
        min_n: int = 2,
        privacy: Privacy | None = None,
        url: str = "sqlite://",
        store: SampleStore | None = None,
        registry: CollectorRegistry | None = None,
        all_metrics: bool = True,
        **settings: object,
    ) -> None:
        self.now = NOW

        def clock() -> float:
            return self.now

        self.sampler = Sampler(
            rate, max_per_second=max_per_second, capacity=capacity, seed=seed, clock=clock
        )
        self.store = SampleStore.open(url, clock=clock) if store is None else store
        self.writer = SampleWriter(
            self.sampler, self.store, rates=rates, privacy=Privacy() if privacy is None else privacy
        )
        self.monitor = Monitor(self.store, judge, min_n=min_n, clock=clock, **settings)
        self.registry = CollectorRegistry() if registry is None else registry
        MonitorCollector(self.monitor, self.registry, all_metrics=all_metrics)

    def serve(self, *contexts: Context, probability: float | None = None) -> None:
        """Have requests sampled and stored."""
        self.offer(*contexts, probability=probability)
        self.writer.flush()

    def offer(self, *contexts: Context, probability: float | None = None) -> None:
        """Have requests sampled, and left in memory."""
        rate = self.sampler.rate if probability is None else probability
        for context in contexts:
            self.sampler.offer(context, rate, self.now)

    def watch(self, *contexts: Context, probability: float | None = None) -> None:
        """Have requests sampled, stored and judged."""
        self.serve(*contexts, probability=probability)
        while self.monitor.step():
            pass

    def end_day(self) -> None:
        """Let the day pass, and have its losses compared."""
        self.now += DAY_SECONDS + 1_000.0
        self.monitor.maintain()


def counted(report: Report, name: str) -> int:
    """What all monitors have counted under a name, over all labels."""
    return round(sum(n for (each, *_), n in report.counts.items() if each == name))
