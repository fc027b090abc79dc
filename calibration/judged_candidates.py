"""Fits a policy to the judged candidates of requests, and estimates the worth of any contexts.

People graded some of the candidates; a ridge logistic regression of their grades on what the judge
said predicts all of them (``ctxguard.measure.corrected``). P(relevant) is fitted to the grade where
there is one and else to the prediction. Without grades there is the judge's own view alone. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from calibration.asked_questions import JUDGED_DEPTH
from calibration.calibrate_route import Settings
from calibration.choice import LOST_QUERIES, RICHEST
from calibration.evaluate import contexts
from calibration.fit import fit_model, pool_features, predicted
from calibration.pools import Pools
from ctxguard._support.words import count
from ctxguard.core.passages import weight_of
from ctxguard.core.policies import ExpectedUtilityPolicy, Policy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.types import FloatArray
from ctxguard.errors import CalibrationError
from ctxguard.measure.contexts import JudgedRequests
from ctxguard.measure.corrected import FOLDS
from ctxguard.measure.interval import Interval
from ctxguard.measure.metrics import Metric
from ctxguard.measure.rows import IntArray

KS = (1, 3, 5, 10, 20)
MOST_PROBABLE = 0.99
"""The highest threshold."""
METRICS: Mapping[str, Metric] = {
    "precision": Metric.PRECISION,
    "mrr": Metric.SERVED_MRR,
    "udcg": Metric.UDCG,
    "recall": Metric.POOLED_RECALL,
}
"""Metrics of the table by k. Recall counts the relevant candidates among those that could be
judged."""


@dataclass(frozen=True)
class JudgedCandidates(JudgedRequests):
    """Judged requests with all of their candidates.

    Attributes:
        pools: In the order of the decision; a row's position is its place in its pool.
        is_exact: Whether the judge knows people's labels, which stand for grades of everything.
    """

    pools: Pools
    is_exact: bool = False

    @property
    def in_words(self) -> str:
        """Says whose figures the estimates are."""
        judged = f"{count(len(self.pools), 'request')} judged"
        n = int(self.is_graded.sum())
        if self.is_exact:
            return f"{judged} by known labels"
        if self.is_corrected:
            return f"{judged}, corrected by {count(n, 'grade')} of people on {self.n_graded}"
        return f"the judge's own view, uncorrected: {judged}, {count(n, 'grade')} of people"

    @cached_property
    def features(self) -> FloatArray:
        """Features of P(relevant), shape (m, n_features); NaN where a leg has no score."""
        starts, rows = np.cumsum(self.pools.lengths) - self.pools.lengths, self.rows
        return np.asarray(
            pool_features(self.pools)[starts[rows.request] + rows.passages["position"]]
        )


def fitted_policy(
    judged: JudgedCandidates, settings: Settings, without: int | None = None
) -> ExpectedUtilityPolicy:
    """Fit P(relevant), and keep candidates while they are worth it by the utilities.

    The context bounds what is kept (`_threshold`). No threshold is tuned on grades: that would tune
    it to the judge's errors.

    Args:
        settings: ``utilities``, ``min_keep``, ``context`` and ``serving_k`` are used.
        without: A fold whose requests have no part in it; None to use all.

    Raises:
        CalibrationError: no candidate has all features.
    """
    rows, passages = judged.rows, judged.rows.passages
    chosen = ~np.isnan(judged.features).any(axis=1) & (passages["size"] > 0.0)
    fold = None
    if without is not None:
        chosen &= judged.fold[rows.request] != without
        fold = np.full(len(judged.pools), without)
    if not chosen.any():
        raise CalibrationError("no judged candidate has the scores that P(relevant) is made of")
    by_judge = judged.model.of(rows, fold)
    relevance = np.where(judged.is_graded, passages["people_grade"] > 0, by_judge)[chosen]
    weight = (passages["size"] / rows.requests["probability"][rows.request])[chosen]
    # They sum to the effective number of equal weights (Kish, 1965, §8.2).
    weight *= weight.sum() / (weight**2).sum()
    inputs, n = judged.features[chosen], relevance.size
    # Each candidate counts as relevant and as not, by its probability.
    model = fit_model(
        judged.pools,
        np.concatenate([inputs, inputs]),
        np.arange(2 * n) < n,
        np.concatenate([weight * relevance, weight * (1.0 - relevance)]),
    )
    gain, cost = max(judged.model.gain, 1e-6), max(-settings.utilities.irrelevant, 0.0)
    used = np.arange(len(judged.pools)) if fold is None else np.flatnonzero(judged.fold != without)
    threshold = _threshold(judged, model, used, settings, cost / (cost + gain))
    return ExpectedUtilityPolicy(
        model,
        k=min(JUDGED_DEPTH, int(passages["position"][passages["size"] > 0.0].max()) + 1),
        cost=threshold * gain / (1.0 - threshold),
        gain=gain,
        min_keep=settings.min_keep,
        per_token=judged.pools.tokens is not None and settings.context != "utility",
    )


def _threshold(
    judged: JudgedCandidates,
    model: RelevanceModel,
    used: IntArray,
    settings: Settings,
    least: float,
) -> float:
    """Return the least P, weighed by length, of a candidate that is kept: ``least`` or more.

    On the mean over the used requests, contexts then have at most today's tokens, or twice as many
    where they may be richer. The leanest hold as many relevant passages as today's by P.
    """
    if settings.context == "utility":
        return least
    pools = judged.pools.rows(used)
    depth = min(JUDGED_DEPTH, pools.scores.shape[1])
    weight = 1.0 / judged.rows.requests["probability"][used, None]
    sizes = np.ones(pools.scores.shape) if pools.tokens is None else pools.sizes
    p = np.nan_to_num(predicted(model, pools))[:, :depth]
    tokens, expected = weight * sizes[:, :depth], weight * p
    worth = p if pools.tokens is None else p * weight_of(sizes[:, :depth])
    order = np.argsort(-worth, axis=None, kind="stable")
    of_today = slice(settings.serving_k)
    within = RICHEST if settings.context == "richer" else 1.0
    n = np.searchsorted(
        tokens.ravel()[order].cumsum(), within * tokens[:, of_today].sum(), side="right"
    )
    if settings.context == "leaner":
        found = expected.ravel()[order].cumsum()
        n = min(n, np.searchsorted(found, expected[:, of_today].sum()) + 1)
    ranked = worth.ravel()[order]
    return float(np.clip(ranked[min(max(int(n), 1), ranked.size) - 1], least, MOST_PROBABLE))


def first_k(pools: Pools, k: int) -> IntArray:
    """Return the ranks of contexts of the first k of each pool, as of ``Rows.served``."""
    place = np.arange(pools.scores.shape[1])
    return np.where(place < np.minimum(k, pools.lengths)[:, None], place + 1, 0)


def decided(pools: Pools, policy: Policy) -> IntArray:
    """Return the ranks of the contexts that the guard would serve by a policy."""
    order, kept = contexts(pools, policy)
    ranks = np.zeros_like(order)
    np.put_along_axis(ranks, order, kept * np.arange(1, order.shape[1] + 1), axis=1)
    return ranks


def decided_by_others(judged: JudgedCandidates, settings: Settings) -> IntArray:
    """Decide on each request by the policy fitted without its fold."""
    ranks = np.zeros(judged.pools.scores.shape, np.intp)
    for fold in range(FOLDS):
        rows = np.flatnonzero(judged.fold == fold)
        if rows.size:
            policy = fitted_policy(judged, settings, fold)
            ranks[rows] = decided(judged.pools.rows(rows), policy)
    return ranks


def difference(judged: JudgedRequests, new: IntArray, old: IntArray) -> Mapping[str, Interval]:
    """Estimate how much contexts gain over others, in pairs.

    Returns:
        ``recall``, pooled, its lower bound with half a lost request added, and ``udcg``, its mean
        difference.
    """
    found = judged.differences(new, old)
    udcg, recall = found[Metric.UDCG], found[Metric.POOLED_RECALL]
    if recall.value is not None and recall.bounds is not None:
        n = float(judged.n_graded)
        lower = (recall.bounds[0] * n - LOST_QUERIES) / (n + LOST_QUERIES)
        recall = Interval(recall.value, lower, recall.bounds[1], recall.n)
    return {"recall": recall, "udcg": Interval(udcg.value, udcg.lower, udcg.upper, udcg.n)}


def table_by_k(judged: JudgedCandidates) -> Mapping[int, Mapping[str, Interval]]:
    """Estimate the metrics of the first k, with intervals where people's grades correct the judge.

    Any k could be served: judging always gives at least this table.
    """
    table = {}
    for k in KS:
        found = judged.estimates(first_k(judged.pools, k))
        own = {name: found[metric] for name, metric in METRICS.items()}
        table[k] = {name: Interval(e.value, e.lower, e.upper, e.n) for name, e in own.items()}
    return table
