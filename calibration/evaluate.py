"""What a policy achieves on labelled queries: every metric per query, then means with intervals.

Decisions are made by ``ctxguard.core.decision.decide`` itself: what is evaluated is what runs.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from calibration.data.dataset import Dataset
from calibration.fit import fit_temperature
from calibration.grid import relative_values
from calibration.pool_labels import IntArray, PoolLabels, discounted_sums, label, row_sums
from calibration.replay import Pools
from ctxguard.core.decision import decide
from ctxguard.core.policies import Policy, RatioPolicy
from ctxguard.core.types import FloatArray
from ctxguard.measure.interval import Interval, bootstrap_intervals, bootstrap_ratio
from ctxguard.measure.metrics import keyword_first_ranks
from ctxguard.measure.worth import READERS, Utilities
from ctxguard.profile.schema import RouteEvidence

PROFILE_METRICS: Mapping[str, str] = {
    "recall": "share of the query's relevant passages that the context holds",
    "pooled_recall": "share of all relevant candidates that contexts hold, as live metrics count",
    "precision": "share of the context that is labelled relevant",
    "precision_judged": "share of the context's labelled passages that is relevant",
    "mrr": "reciprocal rank of the context's first relevant passage",
    "served_mrr": "as mrr, and 0 where nothing served is relevant, as live metrics count",
    "ndcg": "nDCG of the context, ideal cut off at 10",
    "udcg": "worth of the context to the reader, discounted by rank; below 0 it does harm",
    "harm": "the negative part of udcg, as a positive number",
    "misleading": "passages labelled hard negative (looks like an answer, and is not) or "
    "distractor (leads to a wrong answer)",
    "distractor_rate": "share of the context with negative utility (preset blog)",
    "harm_undiscounted": "kept × distractor rate × 0.5, at any rank alike (preset blog)",
    "kept": "passages in the context",
    "tokens": "tokens of the context's texts, estimated as cl100k counts them",
    "recall_loss": "share of the baseline's relevant passages that the policy drops",
    "recall_at_depth": "recall of the retriever's whole pool, before the policy",
    "ndcg_at_10": "nDCG@10 of the retriever's order, before the policy",
    "judged": "share of the context that has a label",
}
"""The metrics of a profile's evidence, with what they mean."""

LABEL_METRICS: Mapping[str, str] = {
    **PROFILE_METRICS,
    "hit_rate": "1 if the context holds a relevant passage, else 0",
    "average_precision": "precision at each relevant rank, averaged over all relevant passages",
    "context_precision": "precision at each relevant rank, averaged over those in the context",
}
"""The metrics that need labelled passages: those of ``per_query``."""

KEYWORD_METRICS: Mapping[str, str] = {
    "keyword_recall": "share of the query's keywords that the context holds",
    "keyword_mrr": "reciprocal rank of the first passage with a keyword, averaged over keywords",
}
"""The metrics that need keywords: those of ``per_query_keywords``."""

DESCRIPTIONS: Mapping[str, str] = {**LABEL_METRICS, **KEYWORD_METRICS}


@dataclass(frozen=True)
class QueryMetrics:
    """Every metric of every query; NaN where a metric is undefined.

    Attributes:
        query_ids: Length n_q.
        values: Metric name to shape (n_q,).
        sizes: By metric that is a ratio over all queries, shape (n_q,), each query's part of the
            denominator.
    """

    query_ids: tuple[str, ...]
    values: Mapping[str, FloatArray]
    sizes: Mapping[str, FloatArray] = field(default_factory=dict)

    def evidence(self, seed: int = 0, metrics: Iterable[str] | None = None) -> RouteEvidence:
        """Return means with bootstrap intervals over the queries that define a metric.

        Args:
            metrics: Which ones; all unless given.
        """
        names = tuple(self.values if metrics is None else metrics)
        found = self.intervals({name: self.values[name] for name in names}, seed)
        return RouteEvidence(queries=len(self.query_ids), metrics=found)

    def intervals(self, columns: Mapping[str, FloatArray], seed: int = 0) -> dict[str, Interval]:
        """Average columns of these queries by metric, or add them up over the metric's sizes.

        Args:
            columns: By metric, shape (n_q,): its values, or differences in it.
        """
        plain = [name for name in columns if name not in self.sizes]
        means = bootstrap_intervals([columns[name] for name in plain], seed=seed)
        found = dict(zip(plain, means, strict=True))
        for name in columns.keys() - found.keys():
            sizes = self.sizes[name]
            found[name] = bootstrap_ratio(columns[name] * sizes, sizes, seed=seed)
        return {name: found[name] for name in columns}

    def equals(self, other: "QueryMetrics") -> bool:
        """Return whether every metric that both have is the same on every query."""
        shared = self.values.keys() & other.values.keys()
        return self.query_ids == other.query_ids and all(
            np.array_equal(self.values[name], other.values[name], equal_nan=True) for name in shared
        )

    def of_queries(self, rows: Sequence[int]) -> "QueryMetrics":
        """Return the same of some queries, by their rows."""
        places = list(rows)
        return QueryMetrics(
            tuple([self.query_ids[row] for row in places]),
            {name: values[places] for name, values in self.values.items()},
            {name: sizes[places] for name, sizes in self.sizes.items()},
        )


def contexts(pools: Pools, policy: Policy) -> tuple[IntArray, NDArray[np.bool_]]:
    """Decide on every recorded pool.

    Returns:
        Shape (n_q, depth), columns of the pools, best first; and whether each is kept, which is
        true of the first of every row.
    """
    order = np.tile(np.arange(pools.scores.shape[1]), (len(pools), 1))
    n_kept = np.zeros((len(pools), 1), dtype=np.int64)
    for row, ranking in enumerate(pools.rankings()):
        decision = decide(ranking, policy)
        order[row, : len(decision.order)] = decision.order
        n_kept[row] = decision.n_kept
    return order, np.arange(order.shape[1]) < n_kept


def per_query(pools: Pools, labels: PoolLabels, policy: Policy) -> QueryMetrics:
    """Decide on every recorded pool and measure the resulting context by ``LABEL_METRICS``.

    Recall, MRR, nDCG, hit rate and average precision are undefined for a query without relevant
    passages; precision and context precision for an empty context; precision over judged passages
    for a context without one, and where labels hold relevant passages only; misleading passages
    where none is labelled so; the distractor rate where utilities suspect nothing;
    recall loss if the baseline holds nothing relevant. Pooled recall is the ratio of sums over
    queries whose candidates hold something relevant; reciprocal ranks of all that was served need
    only a context.
    """
    temperature = policy.temperature if isinstance(policy, RatioPolicy) else fit_temperature(pools)
    return of_contexts(pools, labels, *contexts(pools, policy), temperature)


def of_contexts(
    pools: Pools,
    labels: PoolLabels,
    order: IntArray,
    kept: NDArray[np.bool_],
    temperature: float,
) -> QueryMetrics:
    """Measure contexts as `per_query` does, whoever decided on them.

    Args:
        pools: The candidates.
        labels: Their labels, in the order of the pools.
        order: Shape (n_q, depth), columns of the pools, best first.
        kept: Shape (n_q, depth), whether each of these is in the context.
        temperature: Of the relative scores by which a passage is suspected to do harm.
    """
    own, rules = labels.reordered(order), labels.rules
    ranks = np.arange(1, kept.shape[1] + 1)
    worth = np.where(kept, own.utilities, 0.0)
    misleads = own.negatives != None  # noqa: E711  element by element
    suspects = rules.score_ratio is not None
    if rules.score_ratio is not None:
        relative, incomparable = relative_values(pools, temperature)
        suspected = np.take_along_axis(relative, order, axis=1) > rules.score_ratio
        suspected &= ~incomparable[:, None]
        # The label alone determines what these are worth, not the heuristics.
        certain = own.relevant | misleads
        if 0 in (rules.by_grade or {}):
            certain |= own.judged | own.positives_only
        worth = np.where(certain | suspected | (ranks <= rules.rank_limit), worth, 0.0)
    gain, harm = (discounted_sums(np.maximum(part, 0.0)) for part in (worth, -worth))
    n_penalised, n_kept = (worth < 0.0).sum(axis=1), kept.sum(axis=1)
    relevant = own.relevant & kept
    n_found = relevant.sum(axis=1)
    n_relevant = np.where(labels.n_relevant, labels.n_relevant, np.nan)
    size, n_judged = np.where(n_kept, n_kept, np.nan), (own.judged & kept).sum(axis=1)
    in_pool = labels.relevant.sum(axis=1)
    precisions = row_sums(relevant * (relevant.cumsum(axis=1) / ranks))
    of_baseline = (own.relevant & own.in_baseline).sum(axis=1)
    tokens = np.full(kept.shape, np.nan) if pools.tokens is None else pools.tokens
    first = np.where(relevant, 1.0 / ranks, 0.0).max(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        values = {
            "recall": n_found / n_relevant,
            "pooled_recall": n_found / np.where(in_pool, in_pool, np.nan),
            "precision": n_found / size,
            "precision_judged": n_found / np.where(labels.positives_only, np.nan, n_judged),
            "mrr": first / (n_relevant / n_relevant),
            "served_mrr": first / (size / size),
            "ndcg": labels.ndcg(np.where(kept, own.grades, 0), rules.gain),
            "udcg": gain - harm,
            "harm": harm,
            "misleading": np.where(misleads.any(), (misleads & kept).sum(axis=1), np.nan),
            "distractor_rate": np.where(suspects, n_penalised / size, np.nan),
            "harm_undiscounted": np.where(suspects, 0.5 * n_penalised, np.nan),
            "kept": n_kept.astype(np.float64),
            "tokens": np.where(kept, np.take_along_axis(tokens, order, axis=1), 0.0).sum(axis=1),
            "recall_loss": 1.0 - (relevant & own.in_baseline).sum(axis=1) / of_baseline,
            "recall_at_depth": in_pool / n_relevant,
            "ndcg_at_10": labels.ndcg(gain=rules.gain),
            "judged": n_judged / size,
            "hit_rate": (n_found > 0) / (n_relevant / n_relevant),
            "average_precision": precisions / n_relevant,
            "context_precision": precisions / (np.maximum(n_found, 1) * (size / size)),
        }
    sizes = {"pooled_recall": in_pool.astype(np.float64)}
    return QueryMetrics(pools.query_ids, values, sizes)


def per_query_keywords(
    pools: Pools,
    keywords: Mapping[str, Sequence[str]],
    policy: Policy,
    text_of: Callable[[str], str],
) -> QueryMetrics:
    """Decide on every recorded pool and measure the resulting context by ``KEYWORD_METRICS``.

    Args:
        keywords: Words and phrases that an answer needs, by query id; the metrics are undefined
            for a query without any.
        text_of: The text of a passage.
    """
    columns = np.full((len(KEYWORD_METRICS), len(pools)), np.nan)
    order, kept = contexts(pools, policy)
    for row, query_id in enumerate(pools.query_ids):
        texts = [text_of(pools.passage_ids[row][column]) for column in order[row][kept[row]]]
        if wanted := keywords.get(query_id):
            found = [1.0 / rank for rank in keyword_first_ranks(wanted, texts) if rank]
            columns[:, row] = len(found) / len(wanted), math.fsum(found) / len(wanted)
    return QueryMetrics(pools.query_ids, dict(zip(KEYWORD_METRICS, columns, strict=True)))


def measure(
    pools: Pools,
    dataset: Dataset,
    policy: Policy,
    utilities: Utilities = READERS,
    *,
    baseline_k: int,
    text_of: Callable[[str], str],
) -> QueryMetrics:
    """Measure every metric that the labels allow: of passages, of keywords, or of both.

    Args:
        baseline_k: What recall loss is relative to, as in ``label``.
        text_of: The text of a passage, in which keywords are looked for.
    """
    measured = QueryMetrics(pools.query_ids, {})
    if dataset.answerable:
        labels = label(pools, dataset, utilities, baseline_k=baseline_k)
        measured = per_query(pools, labels, policy)
    if not dataset.keywords:
        return measured
    by_keywords = per_query_keywords(pools, dataset.keywords, policy, text_of).values
    return replace(measured, values={**measured.values, **by_keywords})
