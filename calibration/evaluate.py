"""Evaluates a policy on labelled queries: every metric per query, then means with intervals.

Decisions are made by ``ctxguard.core.decision.decide`` itself: what is evaluated is what runs.
Pure, but for the texts that `measure` looks up where labels are keywords.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from calibration.data.dataset import Dataset
from calibration.fit import fit_temperature
from calibration.grid import relative_values
from calibration.pools import LabelledPools, Pools, label
from ctxguard.core.decision import decide
from ctxguard.core.policies import Policy, RatioPolicy
from ctxguard.core.types import FloatArray
from ctxguard.measure.interval import Interval, bootstrap_intervals, bootstrap_ratio
from ctxguard.measure.metrics import (
    keyword_first_ranks,
    ndcg,
    precision_sums,
    reciprocal_ranks,
    share,
    udcg,
)
from ctxguard.measure.rows import BoolArray, IntArray
from ctxguard.measure.worth import READERS, Utilities, gains

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
"""The metrics of a profile's evidence, with their meanings."""

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

IN_POOL = "in_pool"
"""The number of relevant candidates of each query, its weight in pooled recall, which is one ratio
over all queries."""

Measured = Mapping[str, FloatArray]
"""The values of each metric by name, one per query, shape (n_q,), NaN where undefined; also
``IN_POOL``."""


def intervals(columns: Measured, measured: Measured, seed: int = 0) -> dict[str, Interval]:
    """Average metrics, or differences in them, over these queries, with their intervals."""
    found = dict(zip(columns, bootstrap_intervals(columns.values(), seed=seed), strict=True))
    if (pooled := columns.get("pooled_recall")) is not None:
        own = measured[IN_POOL]
        found["pooled_recall"] = bootstrap_ratio(pooled * own, own, seed=seed)
    return found


def contexts(pools: Pools, policy: Policy) -> tuple[IntArray, BoolArray]:
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


def per_query(pools: LabelledPools, policy: Policy) -> dict[str, FloatArray]:
    """Decide on every recorded pool and measure the resulting context by ``LABEL_METRICS``.

    Recall, MRR, nDCG, hit rate and average precision are undefined for a query without relevant
    passages; precision and context precision for an empty context; precision over judged passages
    for a context without one, and where labels hold relevant passages only; misleading passages
    where none is labelled so; the distractor rate where utilities suspect nothing;
    recall loss if the baseline holds nothing relevant. Pooled recall is the ratio of sums over
    queries whose candidates hold something relevant; reciprocal ranks of all that was served need
    only a context.
    """
    temperature = policy.temperature if isinstance(policy, RatioPolicy) else None
    return of_contexts(pools, *contexts(pools, policy), temperature)


def of_contexts(
    pools: LabelledPools, order: IntArray, kept: BoolArray, temperature: float | None = None
) -> dict[str, FloatArray]:
    """Measure contexts as `per_query` does, however they were chosen.

    Args:
        order: Shape (n_q, depth), columns of the pools, best first.
        kept: Shape (n_q, depth), whether each of these is in the context.
        temperature: Temperature of the relative scores by which a passage is suspected of harm;
            fitted to these pools unless given.
    """
    rules, suspects = pools.rules, pools.rules.score_ratio is not None
    worth = np.where(kept, np.take_along_axis(pools.utilities, order, axis=1), 0.0)
    if suspects:
        certain = _counts_for_sure(pools, temperature or fit_temperature(pools))
        certain = np.take_along_axis(certain, order, axis=1)
        certain[:, : rules.rank_limit] = True
        worth[~certain] = 0.0

    def served(marked: BoolArray) -> BoolArray:
        return np.take_along_axis(marked, order, axis=1) & kept

    def count(marked: BoolArray) -> IntArray:
        counts: IntArray = served(marked).sum(axis=1)
        return counts

    relevant, n_kept = served(pools.relevant), kept.sum(axis=1)
    n_found, n_judged = relevant.sum(axis=1), count(pools.judged)
    n_relevant, in_pool = pools.n_relevant, pools.relevant.sum(axis=1)
    at_stake, n_harmful = pools.at_stake.sum(axis=1), (worth < 0.0).sum(axis=1)
    tokens = np.full(kept.shape, np.nan) if pools.tokens is None else pools.tokens
    grades = np.where(kept, np.take_along_axis(pools.grades, order, axis=1), 0)
    (gain, harm), nothing = udcg(worth), np.full(len(kept), np.nan)
    first, precisions = reciprocal_ranks(relevant.astype(np.float64)), precision_sums(relevant)
    best = gains(pools.best_grades, rules.gain)
    return {
        "recall": share(n_found, n_relevant),
        "pooled_recall": share(n_found, in_pool),
        "precision": share(n_found, n_kept),
        "precision_judged": nothing if pools.positives_only else share(n_found, n_judged),
        "mrr": np.where(n_relevant, first, np.nan),
        "served_mrr": np.where(n_kept, first, np.nan),
        "ndcg": ndcg(gains(grades, rules.gain), best),
        "udcg": gain - harm,
        "harm": harm,
        "misleading": count(pools.misleading) * 1.0 if pools.misleading.any() else nothing,
        "distractor_rate": share(n_harmful, n_kept) if suspects else nothing,
        "harm_undiscounted": 0.5 * n_harmful if suspects else nothing,
        "kept": n_kept * 1.0,
        "tokens": np.where(kept, np.take_along_axis(tokens, order, axis=1), 0.0).sum(axis=1),
        "recall_loss": share(at_stake - count(pools.at_stake), at_stake),
        "recall_at_depth": share(in_pool, n_relevant),
        "ndcg_at_10": ndcg(gains(pools.grades, rules.gain), best),
        "judged": share(n_judged, n_kept),
        "hit_rate": np.where(n_relevant, n_found > 0, np.nan),
        "average_precision": share(precisions, n_relevant),
        "context_precision": np.where(n_kept, precisions / np.maximum(n_found, 1), np.nan),
        IN_POOL: in_pool * 1.0,
    }


def _counts_for_sure(pools: LabelledPools, temperature: float) -> BoolArray:
    """Find candidates whose worth comes from a label, or whose score makes harm likely."""
    rules = pools.rules
    relative, incomparable = relative_values(pools, temperature)
    certain = (relative > (rules.score_ratio or 0.0)) & ~incomparable[:, None]
    certain |= pools.relevant | pools.misleading
    if 0 in (rules.by_grade or {}):
        certain |= pools.judged | pools.positives_only
    return np.asarray(certain)


def per_query_keywords(
    pools: Pools,
    keywords: Mapping[str, Sequence[str]],
    policy: Policy,
    text_of: Callable[[str], str],
) -> dict[str, FloatArray]:
    """Decide on every recorded pool and measure the resulting context by ``KEYWORD_METRICS``.

    The keywords are words and phrases that an answer needs, by query id; the metrics are undefined
    for a query without any.
    """
    columns = np.full((len(KEYWORD_METRICS), len(pools)), np.nan)
    order, kept = contexts(pools, policy)
    for row, query_id in enumerate(pools.query_ids):
        texts = [text_of(pools.passage_ids[row][column]) for column in order[row][kept[row]]]
        if wanted := keywords.get(query_id):
            found = [1.0 / rank for rank in keyword_first_ranks(wanted, texts) if rank]
            columns[:, row] = len(found) / len(wanted), math.fsum(found) / len(wanted)
    return dict(zip(KEYWORD_METRICS, columns, strict=True))


def measure(
    pools: Pools,
    dataset: Dataset,
    policy: Policy,
    utilities: Utilities = READERS,
    *,
    baseline_k: int,
    text_of: Callable[[str], str],
) -> dict[str, FloatArray]:
    """Measure every metric that the labels allow: of passages, of keywords, or of both."""
    measured: dict[str, FloatArray] = {}
    if dataset.answerable:
        measured = per_query(label(pools, dataset, utilities, baseline_k=baseline_k), policy)
    if dataset.keywords:
        measured |= per_query_keywords(pools, dataset.keywords, policy, text_of)
    return measured
