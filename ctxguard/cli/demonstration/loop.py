"""The demonstration: index a corpus, calibrate on it, guard its retriever, monitor the traffic.

Every step makes the calls a user's own program would make; ``ctxguard demo`` prints the results.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from prometheus_client import CollectorRegistry

from calibration.calibrate import Calibration, Passes, calibrate
from calibration.calibrate_route import Settings
from calibration.data.dataset import Dataset, Query
from calibration.report.before_after import BeforeAfter
from ctxguard.cli._console import by_total
from ctxguard.cli._store import label_judge
from ctxguard.cli.demonstration.corpus import passages
from ctxguard.core.context import Context
from ctxguard.core.fusion import Fusion
from ctxguard.core.types import Passage, Route
from ctxguard.errors import IndexFolderError
from ctxguard.guard import ContextGuard
from ctxguard.guard.telemetry import Telemetry
from ctxguard.measure.estimate import Estimate
from ctxguard.measure.metrics import Metric, udcg
from ctxguard.measure.worth import READERS, Negative
from ctxguard.monitor.estimation.live import Window
from ctxguard.monitor.export.prometheus import MonitorCollector
from ctxguard.monitor.sampling.sampler import Sampler
from ctxguard.monitor.sampling.writer import SampleWriter
from ctxguard.monitor.service import Monitor
from ctxguard.monitor.store import Counts, SampleStore
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder

SERVING_K = 10
FUSION = Fusion("reciprocal_rank")
SAMPLING_RATE = 0.5
REQUESTS = 300
SEED = 7
TOP_GRADE = 2


def open_index(folder: Path, passes: Passes) -> tuple[HybridRetriever, bool]:
    """Open the index of this Python's documentation, or build and save it.

    An index of another Python or of another release of ctxguard is rebuilt.

    Args:
        folder: Folder of the saved index.
        passes: Reports progress if the index is built.

    Returns:
        The retriever, and whether it was built.
    """
    corpus = list(passages())
    try:
        retriever = HybridRetriever.load(folder)
        if (
            retriever.has_signals
            and len(retriever) == len(corpus)
            and all(retriever.passage(passage.passage_id) == passage for passage in corpus)
        ):
            return retriever, False
    except (IndexFolderError, KeyError):
        pass
    embedder = SentenceTransformerEmbedder()
    progress = by_total(passes, "encoding passages")
    retriever = HybridRetriever.build(corpus, embedder=embedder, progress=progress)
    retriever.save(folder)
    return retriever, True


def calibrate_demo(retriever: HybridRetriever, questions: Dataset, passes: Passes) -> Calibration:
    """Calibrate every route; each question is measured by the choice of the others.

    What is served today is plain hybrid search, as most people have it: the first 10 of BM25 and
    of vectors, fused by rank.
    """
    settings = Settings(seed=SEED, serving_k=SERVING_K)
    return calibrate(retriever, questions, settings, fusion=FUSION, passes=passes)


class ShownQuestion(NamedTuple):
    """One question without and with the guard, by a choice that it had no part in.

    Attributes:
        query: The question.
        before: The passages served today.
        after: The passages that the chosen policy keeps, whether or not it is served.
        labels: Grade by passage id, and −1 for a known distractor.
    """

    query: Query
    before: tuple[Passage, ...]
    after: tuple[Passage, ...]
    labels: Mapping[str, int]


def before_and_after(
    retriever: HybridRetriever, calibration: Calibration
) -> tuple[BeforeAfter, dict[str, ShownQuestion]]:
    """Count all questions without and with the guard; return those worth seeing, by reason."""
    outcome = calibration.outcomes[Route.HYBRID]
    pools = outcome.route.measured
    counted = BeforeAfter.of(outcome)
    queries = {query.query_id: query for query in calibration.dataset.queries}
    shown = {}
    for name, row in counted.shown().items():
        query_id, ids = pools.query_ids[row], pools.passage_ids[row]
        before, after = (
            tuple([retriever.passage(ids[at]) for at in option.order[row][option.kept[row]]])
            for option in (outcome.today, outcome.chosen)
        )
        labels = _labels(calibration.dataset, query_id)
        shown[name] = ShownQuestion(queries[query_id], before, after, labels)
    return counted, shown


def _labels(dataset: Dataset, query_id: str) -> dict[str, int]:
    """Return grade by passage id, and −1 for a known distractor."""
    distractors = dict.fromkeys(dataset.distractors.get(query_id, {}), -1)
    return {**dataset.qrels[query_id], **distractors}


def _udcg(passage_ids: Sequence[str], labels: Mapping[str, int]) -> float:
    utilities = []
    for passage_id in passage_ids:
        label = labels.get(passage_id)
        negative = Negative.DISTRACTOR if (label or 0) < 0 else None
        utilities.append(
            READERS.of(
                max(label or 0, 0),
                top_grade=TOP_GRADE,
                negative=negative,
                is_judged=label is not None,
            )
        )
    gain, harm = udcg(np.array([utilities]))
    return float(gain[0] - harm[0])


class MonitoredTraffic(NamedTuple):
    """Live estimates from sampled requests, beside the values over all requests.

    Attributes:
        requests: Number of requests served.
        sampled: Number of requests sampled and judged.
        estimates: Estimates by metric, from the sampled requests.
        truth: Values by metric, from the labels of every request; unavailable in production.
        counts: The monitor's counts, with the tokens kept and dropped.
        registry: The metrics that ``/metrics`` serves.
    """

    requests: int
    sampled: int
    counts: Counts
    estimates: Mapping[Metric, Estimate]
    truth: Mapping[Metric, float]
    registry: CollectorRegistry


def monitor_traffic(
    retriever: HybridRetriever, calibration: Calibration, passes: Passes, requests: int = REQUESTS
) -> MonitoredTraffic:
    """Serve requests drawn from the questions, sample and judge them, and estimate."""
    registry = CollectorRegistry()
    sampler = Sampler(SAMPLING_RATE, seed="demo", capacity=requests)
    guard = ContextGuard(
        retriever, profile=calibration.profile, sampler=sampler, telemetry=Telemetry(registry)
    )
    dataset = calibration.dataset
    query_ids = {query.text: query.query_id for query in dataset.queries}
    # A store in memory, because the demonstration leaves no samples behind.
    writer = SampleWriter(sampler, SampleStore.open("sqlite://"))
    monitor = Monitor(writer.store, label_judge(dataset))
    MonitorCollector(monitor, registry)
    advance = passes("serving requests", requests)
    traffic = random.Random(SEED).choices(dataset.queries, k=requests)  # noqa: S311 - no secret
    served = []
    for number, query in enumerate(traffic):
        served.append(guard.retrieve(query.text, request_id=f"demo-{number}"))
        advance(1)
    writer.flush()
    while monitor.step():
        pass
    report = monitor.report()
    writer.stop()
    return MonitoredTraffic(
        requests=requests,
        sampled=writer.accounts().sampled,
        counts=report.counts,
        estimates=report.estimates[Window.ALL_RETAINED],
        truth=_truth(served, dataset, query_ids),
        registry=registry,
    )


def _truth(
    served: Sequence[Context], dataset: Dataset, query_ids: Mapping[str, str]
) -> dict[Metric, float]:
    """Compute the metrics over every request, from the labels, without undefined ones."""
    sums: dict[Metric, list[float]] = {}
    for context in served:
        query_id = query_ids[context.query]
        served_ids = [passage.passage_id for passage in context.passages]
        relevant = dataset.relevant(query_id)
        ranks = [rank for rank, name in enumerate(served_ids, start=1) if name in relevant]
        n_in_pool = sum(name in relevant for name in context.decision.ranking.passage_ids)
        found = {
            Metric.POOLED_RECALL: (len(ranks), n_in_pool),
            Metric.UDCG: (_udcg(served_ids, _labels(dataset, query_id)), 1),
        }
        if served_ids:
            # As in the estimate: 0 if nothing served is relevant.
            found[Metric.SERVED_MRR] = (1.0 / ranks[0] if ranks else 0.0, 1)
            found[Metric.PRECISION] = (len(ranks) / len(served_ids), 1)
        for metric, (value, weight) in found.items():
            of_metric = sums.setdefault(metric, [0.0, 0.0])
            of_metric[0] += value
            of_metric[1] += weight
    return {metric: value / weight for metric, (value, weight) in sums.items() if weight}
