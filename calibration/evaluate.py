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
from ctxguard.core.interval import Interval
from ctxguard.core.metrics import READERS, Utilities, keyword_first_ranks
from ctxguard.core.policies import Policy, RatioPolicy
from ctxguard.core.types import FloatArray
from ctxguard.profile.schema import RouteEvidence

RESAMPLES = 2_000
_RESAMPLED = 200
CONFIDENCE = 0.95
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
        """Tell whether every metric that both have is the same on every query."""
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


def bootstrap_interval(
    values: FloatArray, *, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """Compute the mean over defined values with its percentile interval, resampled by query.

    Efron and Tibshirani, An Introduction to the Bootstrap, 1993, §13. One value cannot be
    resampled: its bounds are None.

    >>> interval = bootstrap_interval(np.array([0.0, 1.0, np.nan, 1.0]))
    >>> round(interval.value, 4), interval.n
    (0.6667, 3)
    """
    return bootstrap_intervals([values], seed=seed, resamples=resamples)[0]


def bootstrap_intervals(
    columns: Iterable[FloatArray], *, seed: int = 0, resamples: int = RESAMPLES
) -> list[Interval]:
    """Compute ``bootstrap_interval`` of several columns of the same queries.

    Columns that are defined on the same queries are resampled together, which is faster.
    """
    columns = list(columns)
    defined = [~np.isnan(column) for column in columns]
    groups: dict[bytes, list[int]] = {}
    for place, known in enumerate(defined):
        groups.setdefault(known.tobytes(), []).append(place)
    found = [Interval.undefined()] * len(columns)
    for places in groups.values():
        known = defined[places[0]]
        n = int(known.sum())
        if n == 0:
            continue
        values = [columns[place][known] for place in places]
        ends: list[list[float | None]] = [[None, None]] * len(places)
        if n > 1:
            table = np.column_stack(values)
            samples = resampled_means(table, seed=seed, resamples=resamples)
            ends = interval_bounds(samples).T.tolist()
        for place, column, (lower, upper) in zip(places, values, ends, strict=True):
            found[place] = Interval(float(column.mean()), lower, upper, n)
    return found


def bootstrap_ratio(parts: FloatArray, wholes: FloatArray, *, seed: int = 0) -> Interval:
    """Compute Σ parts / Σ wholes with its percentile interval, over queries that have a whole.

    >>> ratio = bootstrap_ratio(np.array([1.0, 0.0]), np.array([2.0, 2.0]))
    >>> ratio.value, ratio.n
    (0.25, 2)
    """
    some = wholes > 0
    n = int(some.sum())
    if n == 0:
        return Interval.undefined()
    value = float(parts[some].sum() / wholes[some].sum())
    if n == 1:
        return Interval(value, None, None, n)
    means = resampled_means(np.column_stack([parts[some], wholes[some]]), seed=seed)
    lower, upper = interval_bounds(means[:, 0] / means[:, 1]).tolist()
    return Interval(value, lower, upper, n)


def interval_bounds(samples: FloatArray) -> FloatArray:
    """Return the ends of the percentile interval of bootstrap samples, along the first axis."""
    tail = (1.0 - CONFIDENCE) / 2.0
    bounds: FloatArray = np.quantile(samples, [tail, 1.0 - tail], axis=0)
    return bounds


def resampled_means(values: FloatArray, *, seed: int = 0, resamples: int = RESAMPLES) -> FloatArray:
    """Return the means of columns over resampled rows, shape (resamples, n_columns).

    The columns of a row are resampled together, so that differences between columns are paired.
    """
    n = values.shape[0]
    random = np.random.default_rng(seed)
    # Drawing multinomial counts of the rows resamples them. The product is not a matrix product,
    # whose order of sums depends on the number of threads.
    shares, means = np.full(n, 1.0 / n), list[FloatArray]()
    for first in range(0, resamples, _RESAMPLED):
        size = min(_RESAMPLED, resamples - first)
        counts = random.multinomial(n, shares, size=size).astype(np.float64)
        means.append(np.einsum("rn,nc->rc", counts, values) / n)
    return np.concatenate(means)
