"""The demonstration: index a corpus, calibrate on it, guard its retriever, monitor the traffic.

Each step makes the same calls as a user's own program; ``ctxguard demo`` prints the results.
Loads the model, and reads and writes the index folder; the store is in memory, the traffic drawn
with a seed. Needs the extras of the whole demonstration.
"""

import random
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from calibration.calibrate import Calibration, calibrate
from calibration.calibrate_route import RouteOutcome
from calibration.data.dataset import Dataset, Query
from calibration.evaluate import intervals, per_query
from calibration.replay import Passes
from calibration.settings import Settings
from ctxguard.cli._console import by_total
from ctxguard.cli._store import label_judge
from ctxguard.cli.demonstration.corpus import passages
from ctxguard.core.fusion import Fusion
from ctxguard.core.types import Route
from ctxguard.errors import IndexFolderError
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.guard.telemetry import Telemetry
from ctxguard.measure.metrics import Metric
from ctxguard.monitor.export.prometheus import MonitorCollector
from ctxguard.monitor.sampling.sampler import Sampler
from ctxguard.monitor.service import Monitor, Report
from ctxguard.monitor.store import SampleStore
from ctxguard.monitor.store.writer import SampleWriter
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder

SERVING_K = 10
FUSION = Fusion("reciprocal_rank")
SAMPLING_RATE = 0.5
REQUESTS = 300
SEED = 7
_TRUE = (Metric.POOLED_RECALL, Metric.UDCG, Metric.SERVED_MRR, Metric.PRECISION)


def open_index(folder: Path, passes: Passes) -> tuple[HybridRetriever, bool]:
    """Open the index of this Python's documentation, or build and save it.

    An index of another Python or release is rebuilt. Returns also whether it was built.
    """
    corpus = list(passages())
    try:
        retriever = HybridRetriever.load(folder)
        is_whole = retriever.has_signals and len(retriever) == len(corpus)
        if is_whole and all(retriever.passage(one.passage_id) == one for one in corpus):
            return retriever, False
    except (IndexFolderError, KeyError):
        pass
    embedder = SentenceTransformerEmbedder()
    progress = by_total(passes, "encoding passages")
    retriever = HybridRetriever.build(corpus, embedder=embedder, progress=progress)
    retriever.save(folder)
    return retriever, True


def calibrate_demo(retriever: HybridRetriever, questions: Dataset, passes: Passes) -> Calibration:
    """Calibrate every route; each question is measured under a choice made without it.

    What is served today is plain hybrid search, as most people have it: the first 10 of BM25 and
    of vectors, fused by rank.
    """
    settings = Settings(seed=SEED, serving_k=SERVING_K)
    return calibrate(retriever, questions, settings, fusion=FUSION, passes=passes)


def monitor_traffic(
    retriever: HybridRetriever, calibration: Calibration, passes: Passes
) -> tuple[Report, dict[Metric, float], CollectorRegistry]:
    """Serve requests drawn from the questions, sample and judge them, and estimate the metrics.

    Returns also the true values, by the labels of every request, and what ``/metrics`` serves.
    """
    registry = CollectorRegistry()
    sampler = Sampler(SAMPLING_RATE, seed="demo", capacity=REQUESTS)
    guard = ContextGuard(
        retriever, profile=calibration.profile, sampler=sampler, telemetry=Telemetry(registry)
    )
    # A store in memory, because the demonstration leaves no samples behind.
    writer = SampleWriter(sampler, SampleStore.open("sqlite://"))
    monitor = Monitor(writer.store, label_judge(calibration.dataset))
    MonitorCollector(monitor, registry)
    advance = passes("serving requests", REQUESTS)
    queries = calibration.dataset.queries
    traffic = random.Random(SEED).choices(queries, k=REQUESTS)  # noqa: S311 - no secret
    for number, query in enumerate(traffic):
        guard.retrieve(query.text, request_id=f"demo-{number}")
        advance(1)
    writer.flush()
    while monitor.step():
        pass
    report = monitor.report()
    writer.stop()
    return report, _truth(calibration.outcomes[Route.HYBRID], traffic), registry


def _truth(outcome: RouteOutcome, traffic: Sequence[Query]) -> dict[Metric, float]:
    """Measure the served contexts by the labels of every request; leave out undefined metrics."""
    pools = outcome.route.measured
    is_chosen = outcome.served is outcome.chosen
    policy = outcome.profile.policy if is_chosen else outcome.today.policy
    rows = [pools.query_ids.index(query.query_id) for query in traffic]
    found = {name: each[rows] for name, each in per_query(pools, policy).items()}
    means = intervals({metric.value: found[metric.value] for metric in _TRUE}, found)
    values = {metric: means[metric.value].value for metric in _TRUE}
    return {metric: value for metric, value in values.items() if value is not None}
