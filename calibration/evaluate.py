"""What a policy achieves on labelled queries: every metric per query, then means with intervals.

Decisions are made by ``ctxguard.policy.decide`` itself, so that what is evaluated is what runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np

from calibration.fit import fit_temperature
from calibration.losses import Labels
from calibration.replay import Pools
from ctxguard.metrics import (
    DEFAULT_UTILITIES,
    Utilities,
    context_recall,
    distractor_rate,
    heuristic_utilities,
    ndcg,
    precision_at_k,
    reciprocal_rank,
    strict_utilities,
    udcg,
)
from ctxguard.policy import Policy, RatioPolicy, decide
from ctxguard.profile import Evidence, Interval
from ctxguard.scores import is_relative, relative_scores, within_domain
from ctxguard.types import FloatArray, Ranking

RESAMPLES = 2_000
CONFIDENCE = 0.95
NDCG_CUTOFF = 10

DESCRIPTIONS: Mapping[str, str] = {
    "recall": "share of the query's relevant passages that the context holds",
    "precision": "share of the context that is relevant",
    "mrr": "reciprocal rank of the context's first relevant passage",
    "ndcg": "nDCG of the context, ideal cut off at 10",
    "udcg": "utility of the context, suspected distractors negative (heuristic)",
    "udcg_strict": "utility of the context, every irrelevant passage negative",
    "harm": "the negative part of udcg_strict, as a positive number",
    "distractor_rate": "share of the context with negative utility (heuristic)",
    "kept": "passages in the context",
    "recall_loss": "share of the baseline's relevant passages that the filter dropped",
    "recall_at_depth": "recall of the retriever's whole pool, before the filter",
    "ndcg_at_10": "nDCG@10 of the retriever's order, before the filter",
    "judged": "share of the context for which any label exists",
}


@dataclass(frozen=True)
class QueryMetrics:
    """Every metric of every query; NaN where a metric is undefined.

    Attributes:
        query_ids: Length n_q.
        values: Metric name to shape (n_q,).
    """

    query_ids: tuple[str, ...]
    values: Mapping[str, FloatArray]

    def evidence(self, seed: int = 0) -> Evidence:
        """Means with bootstrap intervals; undefined values are left out and n says so."""
        return Evidence(
            queries=len(self.query_ids),
            metrics={
                name: bootstrap_interval(values, seed=seed) for name, values in self.values.items()
            },
        )


def per_query(
    pools: Pools,
    labels: Labels,
    policy: Policy,
    utilities: Utilities = DEFAULT_UTILITIES,
) -> QueryMetrics:
    """Decide on every recorded pool and measure the context that results.

    Recall, MRR and nDCG are undefined for a query without relevant passages; precision and the
    distractor rate for an empty context; recall loss where the baseline holds nothing relevant.
    """
    temperature = policy.temperature if isinstance(policy, RatioPolicy) else fit_temperature(pools)
    rows = [
        _measure(ranking, row, labels, policy, utilities, temperature=temperature)
        for row, ranking in enumerate(pools.rankings())
    ]
    return QueryMetrics(
        pools.query_ids,
        {
            name: np.array(
                [np.nan if row[name] is None else row[name] for row in rows], dtype=np.float64
            )
            for name in DESCRIPTIONS
        },
    )


def _measure(
    ranking: Ranking,
    row: int,
    labels: Labels,
    policy: Policy,
    utilities: Utilities,
    *,
    temperature: float,
) -> dict[str, float | None]:
    decision = decide(ranking, policy)
    order, kept = list(decision.order), list(decision.kept)
    upstream = labels.grades[row, : len(ranking)].tolist()
    grades = labels.grades[row, kept].tolist()
    negatives = [labels.negatives[row][position] for position in kept]
    judged = labels.query_grades[row]
    counted = labels.relevant[row] & labels.in_baseline[row]
    in_baseline = int(counted.sum())
    strict = udcg(
        strict_utilities(
            grades, top_grade=labels.top_grade, negatives=negatives, utilities=utilities
        )
    )
    scores = [cast(float, ranking.scores[position]) for position in order]
    comparable = is_relative(ranking.kind) and (
        not scores or within_domain(ranking.kind, min(scores), max(scores))
    )
    relative = relative_scores(ranking.kind, scores, temperature) if comparable else None
    heuristic = heuristic_utilities(
        grades,
        None if relative is None else relative[: len(kept)],
        top_grade=labels.top_grade,
        negatives=negatives,
        utilities=utilities,
    )
    return {
        "recall": context_recall(grades, judged),
        "precision": precision_at_k(grades),
        "mrr": reciprocal_rank(grades, judged),
        "ndcg": ndcg(grades, judged, NDCG_CUTOFF),
        "udcg": udcg(heuristic).value,
        "udcg_strict": strict.value,
        "harm": strict.harm,
        "distractor_rate": distractor_rate(heuristic),
        "kept": float(len(kept)),
        "recall_loss": 1.0 - int(counted[kept].sum()) / in_baseline if in_baseline else None,
        "recall_at_depth": context_recall(upstream, judged),
        "ndcg_at_10": ndcg(upstream, judged, NDCG_CUTOFF),
        "judged": float(labels.judged[row, kept].mean()) if kept else None,
    }


def bootstrap_interval(
    values: FloatArray, *, seed: int = 0, resamples: int = RESAMPLES, confidence: float = CONFIDENCE
) -> Interval:
    """The mean over defined values with its percentile bootstrap interval, clustered by query.

    Efron and Tibshirani, An Introduction to the Bootstrap, 1993, §13. With one value there is
    no spread to resample: the interval is None.

    >>> interval = bootstrap_interval(np.array([0.0, 1.0, np.nan, 1.0]))
    >>> round(interval.value, 4), interval.n
    (0.6667, 3)
    """
    defined = values[~np.isnan(values)]
    if defined.size == 0:
        return Interval(value=None, lower=None, upper=None, n=0)
    mean = float(defined.mean())
    if defined.size == 1:
        return Interval(value=mean, lower=None, upper=None, n=1)
    means = resampled_means(defined[:, None], seed=seed, resamples=resamples)[:, 0]
    tail = (1.0 - confidence) / 2.0
    lower, upper = np.quantile(means, [tail, 1.0 - tail])
    return Interval(value=mean, lower=float(lower), upper=float(upper), n=int(defined.size))


def resampled_means(values: FloatArray, *, seed: int = 0, resamples: int = RESAMPLES) -> FloatArray:
    """Means of columns over resampled rows, shape (resamples, n_columns).

    The columns of a row are resampled together, so that differences between columns are paired.
    """
    n = values.shape[0]
    random = np.random.default_rng(seed)
    # Multinomial counts of each row are the same resample, and make it one product of tables;
    # not a matrix product, whose order of sums depends on the number of threads.
    counts = random.multinomial(n, np.full(n, 1.0 / n), size=resamples).astype(np.float64)
    means: FloatArray = np.einsum("rn,nc->rc", counts, values) / n
    return means
