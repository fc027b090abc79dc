"""The whole loop on the demonstration corpus: index, calibrate, guard, watch.

Every step is what a user's own program would do with the same calls; ``ctxguard demo`` shows
what they return.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

from calibration.calibrate import Calibration, Passes, calibrate
from calibration.certify import BASELINE_K, Settings
from calibration.evaluate import per_query
from calibration.labelling.labels import Dataset, Query
from calibration.losses import label
from ctxguard.context import Context
from ctxguard.demo.labels import passages
from ctxguard.errors import IndexFolderError
from ctxguard.guard import ContextGuard
from ctxguard.metrics import (
    Negative,
    mean,
    precision_at_k,
    reciprocal_rank,
    strict_utilities,
    udcg,
)
from ctxguard.monitor.estimates import Estimate, Metric
from ctxguard.monitor.exporter import MonitorCollector
from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.monitor import Monitor
from ctxguard.monitor.report import Window
from ctxguard.monitor.sampler import Sampler
from ctxguard.monitor.store import SampleStore
from ctxguard.monitor.writer import SampleWriter
from ctxguard.policy import Policy, RatioPolicy
from ctxguard.profile import Evidence
from ctxguard.retrieval import HybridRetriever
from ctxguard.retrieval.protocols import Progress
from ctxguard.telemetry import Telemetry
from ctxguard.types import DEFAULT_K, Route

SAMPLING_RATE = 0.5
REQUESTS = 300
SEED = 7


def open_index(folder: Path, progress: Progress | None = None) -> tuple[HybridRetriever, bool]:
    """The index of this Python's documentation: opened where it was built before, or built.

    Returns:
        The retriever, and whether it had to be built.
    """
    corpus = list(passages())
    try:
        retriever = HybridRetriever.load(folder)
        if len(retriever) == len(corpus) and all(
            retriever.passage(passage.passage_id) == passage for passage in corpus
        ):
            return retriever, False
    except (IndexFolderError, KeyError):
        pass  # none yet, or that of another Python or another release
    retriever = HybridRetriever.build(corpus, progress=progress)
    retriever.save(folder)
    return retriever, True


def calibrate_demo(
    retriever: HybridRetriever, questions: Dataset, passes: Passes | None = None
) -> Calibration:
    """Calibrate every route on one half of the questions, and measure on the other."""
    return calibrate(retriever, questions, Settings(seed=SEED), passes=passes)


def held_out_evidence(calibration: Calibration) -> dict[str, Evidence]:
    """What fixed k, the common 70% rule and the calibrated policy achieve on held-out questions."""
    held_out = calibration.held_out or calibration.dataset
    pools = calibration.pools[Route.HYBRID].subset([q.query_id for q in held_out.queries])
    labels = label(pools, calibration.dataset, baseline_k=BASELINE_K)
    policies: dict[str, Policy] = {
        f"top {DEFAULT_K}": RatioPolicy(k=DEFAULT_K),
        "top 3 at 70%": RatioPolicy(k=3, min_ratio=0.7),
        "calibrated": calibration.profile.routes[Route.HYBRID].policy,
    }
    return {
        name: per_query(pools, labels, policy).evidence(SEED) for name, policy in policies.items()
    }


@dataclass(frozen=True)
class Tradeoff:
    """The best policy that loses at most a given share of recall, on the choosing questions.

    Attributes:
        most_recall_loss: Against the retriever's first ten.
        udcg_strict: Its mean.
        kept: Its mean number of passages.
    """

    most_recall_loss: float
    recall_loss: float
    udcg_strict: float
    kept: float


def tradeoffs(
    calibration: Calibration, limits: Sequence[float] = (0.1, 0.25, 0.5, 1.0)
) -> list[Tradeoff]:
    """What more recall would cost: uncertified means of the whole grid, to choose a promise by."""
    means = calibration.outcomes[Route.HYBRID].chosen_grid.means
    found = []
    for limit in limits:
        allowed = means.recall_loss <= limit
        if allowed.any():
            cell = np.unravel_index(
                np.argmax(np.where(allowed, means.udcg_strict, -np.inf)), allowed.shape
            )
            found.append(
                Tradeoff(
                    limit,
                    float(means.recall_loss[cell]),
                    float(means.udcg_strict[cell]),
                    float(means.kept[cell]),
                )
            )
    return found


@dataclass(frozen=True)
class BeforeAfter:
    """One held-out question, as the bare retriever answers it and as the guard does.

    Attributes:
        query: The question.
        bare: Its top k without the guard.
        guarded: What the calibrated policy serves.
        labels: Passage id to grade, and −1 for a known distractor.
    """

    query: Query
    bare: Context
    guarded: Context
    labels: Mapping[str, int]

    def udcg(self, context: Context) -> float:
        """Strict UDCG of what a context serves."""
        labels = [self.labels.get(passage.passage_id, 0) for passage in context.passages]
        utilities = strict_utilities(
            [max(label, 0) for label in labels],
            top_grade=2,
            negatives=[Negative.DISTRACTOR if label < 0 else None for label in labels],
        )
        return udcg(utilities).value


def before_and_after(
    retriever: HybridRetriever, calibration: Calibration, k: int = DEFAULT_K
) -> BeforeAfter:
    """Of the held-out questions whose answer the bare top k holds, the one of median gain.

    Not the best: the one in the middle says what to expect. Where the retriever found nothing
    there is nothing for a guard to show.
    """
    bare = ContextGuard(retriever, policy=RatioPolicy(k=k), telemetry=_uncounted())
    guarded = ContextGuard(retriever, profile=calibration.profile, telemetry=_uncounted())
    held_out = calibration.held_out or calibration.dataset
    shown = []
    for query in held_out.queries:
        if not held_out.relevant(query.query_id):
            continue
        labels = {
            **held_out.qrels[query.query_id],
            **dict.fromkeys(held_out.distractors.get(query.query_id, {}), -1),
        }
        pair = BeforeAfter(query, bare.retrieve(query.text), guarded.retrieve(query.text), labels)
        if any(labels.get(passage.passage_id, 0) > 1 for passage in pair.bare.passages):
            gain = pair.udcg(pair.guarded) - pair.udcg(pair.bare)
            shown.append((gain, query.query_id, pair))
    shown.sort(key=lambda entry: entry[:2])
    return shown[len(shown) // 2][2]


@dataclass(frozen=True)
class Watched:
    """Live estimates from sampled traffic, beside the truth that only a demonstration knows.

    Attributes:
        requests: How many were served.
        sampled: How many of them were judged.
        estimates: By metric, over all the traffic.
        truth: By metric, from the labels of every request.
        registry: What ``/metrics`` serves.
    """

    requests: int
    sampled: int
    estimates: Mapping[Metric, Estimate]
    truth: Mapping[Metric, float]
    registry: CollectorRegistry


def watch(
    retriever: HybridRetriever,
    calibration: Calibration,
    requests: int = REQUESTS,
    progress: Progress | None = None,
) -> Watched:
    """Serve traffic drawn from the held-out questions, sample and judge it, estimate."""
    registry = CollectorRegistry()
    sampler = Sampler(SAMPLING_RATE, seed="demo", capacity=requests)
    guard = ContextGuard(
        retriever, profile=calibration.profile, sampler=sampler, telemetry=Telemetry(registry)
    )
    held_out = calibration.held_out or calibration.dataset
    by_text = {query.text: query.query_id for query in held_out.queries}
    # In memory, because a demonstration leaves nothing behind; in production, a file or a server.
    writer = SampleWriter(sampler, SampleStore.open("sqlite://"))
    monitor = Monitor(
        writer.store,
        LabelJudge(
            {text: held_out.qrels.get(query_id, {}) for text, query_id in by_text.items()},
            {text: held_out.distractors.get(query_id, {}) for text, query_id in by_text.items()},
        ),
    )
    MonitorCollector(monitor, registry)
    draw = random.Random(SEED)  # noqa: S311 - traffic, not a secret
    served = []
    for number, query in enumerate(draw.choices(held_out.queries, k=requests)):
        served.append(guard.retrieve(query.text, request_id=f"demo-{number}"))
        if progress is not None:
            progress(1)
    writer.flush()
    while monitor.step():
        pass
    report = monitor.report()
    writer.stop()
    return Watched(
        requests=requests,
        sampled=writer.accounts().sampled,
        estimates=report.estimates[Window.KEPT],
        truth=_truth(served, held_out, by_text),
        registry=registry,
    )


def _truth(
    served: Sequence[Context], labels: Dataset, query_ids: Mapping[str, str]
) -> dict[Metric, float]:
    """The figures over every request, which production cannot know, straight from the labels."""
    kept_relevant = in_pools = 0
    reciprocal_ranks, udcgs, precisions = [], [], []
    for context in served:
        query_id = query_ids[context.query]
        relevant = labels.relevant(query_id)
        distractors = labels.distractors.get(query_id, {})
        grades = [relevant.get(passage_id, 0) for passage_id in context.kept_ids]
        negatives = [
            Negative.DISTRACTOR if passage_id in distractors else None
            for passage_id in context.kept_ids
        ]
        found = sum(grade > 0 for grade in grades)
        pool = sum(i in relevant for i in context.decision.ranking.passage_ids)
        kept_relevant, in_pools = kept_relevant + found, in_pools + pool
        if pool:
            reciprocal_ranks.append(reciprocal_rank(grades, list(relevant.values())))
        udcgs.append(udcg(strict_utilities(grades, top_grade=2, negatives=negatives)).value)
        precisions.append(precision_at_k(grades))
    means = {
        Metric.RECALL: kept_relevant / in_pools if in_pools else None,
        Metric.MRR: mean(reciprocal_ranks).value,
        Metric.UDCG: mean(udcgs).value,
        Metric.PRECISION: mean(precisions).value,
    }
    return {metric: value for metric, value in means.items() if value is not None}


def _uncounted() -> Telemetry:
    """Requests that only show something must not count as traffic."""
    return Telemetry(CollectorRegistry())
