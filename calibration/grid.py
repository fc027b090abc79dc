"""Evaluates every policy of a family, (k, threshold), over all queries at once.

A policy keeps a prefix: a candidate is kept by (k, threshold) if its rank is at most k, and its
own value and those of all candidates before it reach the threshold. So the number of candidates it
keeps of a query determines its context, and sums along the ranks give any figure of every policy.
Pure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from calibration.fit import fit_temperature, significant
from calibration.pools import LabelledPools, Pools
from ctxguard.core.passages import weight_of
from ctxguard.core.policies import ExpectedUtilityPolicy, Policy, RatioPolicy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.scores import discounts, relative_scores, within_domain
from ctxguard.core.types import FloatArray, ScoreKind
from ctxguard.measure.metrics import discounted, share
from ctxguard.measure.rows import BoolArray, IntArray

RATIOS: FloatArray = np.round(np.arange(0, 100) / 100, 2)
PROBABILITIES: FloatArray = np.concatenate([[0.0], np.geomspace(0.002, 0.9, 60).round(4)])
"""Thresholds on P(relevant), each a tenth above the last: most candidates are far below 0.05."""

EXPECTED = 0.5
"""The weight of estimates by P(relevant) in the figures by which policies are chosen. On 60 splits
of five collections the mean recall of the chosen policy looked 0.006 too high, by labels alone
0.019; at 0.65 the same is served."""

_LEAST_SUM = 1e-9
"""The smallest sum of probabilities that is scaled."""

GridIndex = tuple[int, int]
"""A policy's place in a grid: the index of its k and that of its threshold."""


def thresholds_reached(
    values: FloatArray,
    thresholds: FloatArray,
    *,
    min_keep: int = 1,
    always: BoolArray | None = None,
) -> IntArray:
    """Count the thresholds that keep each candidate, shape (n_q, depth), −1 beyond the pool.

    Args:
        values: Same shape, to compare with the thresholds (a relative score, a probability),
            non-increasing along ranks, NaN beyond the pool.
        thresholds: Ascending.
        min_keep: How many candidates every threshold keeps.
        always: Shape (n_q,): queries to which no threshold applies.
    """
    reached = np.searchsorted(thresholds, values.ravel(), side="right").reshape(values.shape)
    reached[:, :min_keep] = thresholds.size
    if always is not None:
        reached[always] = thresholds.size
    reached[np.isnan(values)] = -1
    return reached


@dataclass(frozen=True)
class Grid:
    """Policies of one family over one set of queries.

    Attributes:
        pools: The labelled candidates, with P(relevant) where it is known.
        ks: Sizes of context, ascending, ≥ 1.
        thresholds: Ascending.
        reached: As from `thresholds_reached`, in this order.
        make: Makes the policy of a k and a threshold.
        order: Shape (n_q, depth), the columns of the pools in the order in which policies keep
            them.
        places: Shape (n_q, depth), the rank of each candidate by P, from 0, where the order is
            not that of P; None where it is.
    """

    pools: LabelledPools
    ks: Sequence[int]
    thresholds: FloatArray
    reached: IntArray
    make: Callable[[int, float], Policy]
    order: IntArray
    places: IntArray | None = None

    def settings(self, index: GridIndex) -> tuple[int, float]:
        """Return the k and the threshold of a policy."""
        return self.ks[index[0]], float(self.thresholds[index[1]])

    def policy(self, index: GridIndex) -> Policy:
        """Return the policy at a place in the grid."""
        return self.make(*self.settings(index))

    def kept(self, indices: Sequence[GridIndex]) -> IntArray:
        """Count how many passages of each query these policies keep, shape (n_q, n_indices)."""
        sizes, thresholds = np.array(indices, dtype=np.int64).reshape(-1, 2).T
        counts: IntArray = np.minimum(self._above[:, thresholds], np.array(self.ks)[sizes])
        return counts

    def contexts(
        self, index: GridIndex, rows: BoolArray | slice = slice(None)
    ) -> tuple[IntArray, BoolArray]:
        """Find the contexts that a policy serves to some queries.

        Returns the columns of the pools, shape (n_rows, depth), those kept first and in the order
        in which they are served; and whether each is kept.
        """
        order = self.order[rows]
        depth = order.shape[1]
        kept = np.arange(depth) < self.kept([index])[rows]
        if self.places is not None:
            served = np.argsort(np.where(kept, self.places[rows], depth), axis=1, kind="stable")
            order = np.take_along_axis(order, served, axis=1)
        return order, kept

    @cached_property
    def _above(self) -> IntArray:
        """How many candidates of each query each threshold keeps, shape (n_q, n_t)."""
        n_queries, n_bins = len(self.reached), self.thresholds.size + 2
        bins = (self.reached + 1 + np.arange(n_queries)[:, None] * n_bins).ravel()
        counts = np.bincount(bins, minlength=n_queries * n_bins).reshape(n_queries, n_bins)
        # Column j holds what reaches j − 1; threshold t keeps what reaches t + 1 or more.
        above: IntArray = counts[:, ::-1].cumsum(axis=1)[:, ::-1][:, 2:]
        return above

    @property
    def today(self) -> float:
        """Mean UDCG of the baseline, which is served today, over at least one query."""
        return float((self.pools.utilities * self._todays_discounts).sum(axis=1).mean())

    @property
    def _todays_discounts(self) -> FloatArray:
        """The discount of each candidate's rank in the baseline, 0 if it is not in the baseline."""
        return np.asarray(discounts(self.order.shape[1]) * self.pools.in_baseline)

    @cached_property
    def means(self) -> tuple[FloatArray, FloatArray]:
        """Mean UDCG, and recall loss over queries that define it, of each policy: (n_k, n_t).

        Mean recall loss is NaN where no query defines it; there is at least one query.
        """
        rows = []
        for size in range(len(self.ks)):
            udcg, loss = self.at([(size, place) for place in range(self.thresholds.size)])
            known = loss[self.pools.at_stake.any(axis=1)]
            mean = known.mean(axis=0) if len(known) else np.full(self.thresholds.size, np.nan)
            rows.append((udcg.mean(axis=0), mean))
        udcgs, losses = zip(*rows, strict=True)
        return np.stack(udcgs), np.stack(losses)

    def at(self, indices: Sequence[GridIndex]) -> tuple[FloatArray, FloatArray]:
        """Return every query's UDCG and recall loss under these policies, (n_q, n_indices) each.

        Recall loss is the share of the baseline's relevant passages that a policy drops, NaN where
        the baseline has none.
        """
        n_kept, (running, at_stake) = self.kept(indices), self._running
        udcg, served = (np.take_along_axis(each, n_kept, axis=1) for each in (running, at_stake))
        return udcg, share(at_stake[:, -1:] - served, at_stake[:, -1:])

    @cached_property
    def _running(self) -> tuple[FloatArray, FloatArray]:
        """UDCG of the first n = 0 … depth candidates, and how many of them recall loss counts."""
        return self._udcg(self.pools.utilities), self._sums(self.pools.at_stake.astype(np.float64))

    @cached_property
    def beyond_today(self) -> FloatArray:
        """The first n candidates' figures minus those of today's first k, for n = 0 … depth.

        Half of it is by the labels and half as P(relevant) expects, where that is known: by few
        labels alone the best of many policies is often the luckiest. A composite of a direct and
        a model's estimate (Rao and Molina, Small Area Estimation, 2015, §3.3).

        Returns:
            Shape (3, n_q, depth + 1): share of all relevant passages of a query, 0 where it has
            none; UDCG; and tokens, or passages where tokens are unknown.
        """
        relevant, worth = with_expected(self.pools, EXPECTED)
        recall = np.nan_to_num(share(relevant, self.pools.n_relevant[:, None]))
        sizes, baseline = self.pools.sizes, self.pools.in_baseline
        today = np.stack([recall * baseline, worth * self._todays_discounts, sizes * baseline])
        running = np.stack([self._sums(recall), self._udcg(worth), self._sums(sizes)])
        beyond: FloatArray = running - today.sum(axis=2, keepdims=True)
        return beyond

    def _sums(self, values: FloatArray) -> FloatArray:
        """Sum a table over the first n of the order, n = 0 … depth, shape (n_q, depth + 1)."""
        ordered = np.take_along_axis(values, self.order, axis=1)
        return np.pad(ordered.cumsum(axis=1), ((0, 0), (1, 0)))

    def _udcg(self, worth: FloatArray) -> FloatArray:
        """Return UDCG of the first n candidates, as they are served, shape (n_q, depth + 1)."""
        ordered, depth = np.take_along_axis(worth, self.order, axis=1), worth.shape[1]
        found = np.zeros((len(worth), depth + 1))
        if self.places is None:
            found[:, 1:] = discounted(ordered).cumsum(axis=1)
            return found
        discount, earlier = discounts(depth), np.tri(depth, dtype=bool)
        for row, places in enumerate(self.places):
            # Of the first n, how many are served before each.
            before = (places[:, None] < places).cumsum(axis=0)
            found[row, 1:] = np.where(earlier, discount[before], 0.0) @ ordered[row]
        return found


def with_expected(pools: LabelledPools, part: float) -> tuple[FloatArray, FloatArray]:
    """Replace part of every label with its expectation under P(relevant), if that is known.

    Each query is expected to have as many relevant candidates as its labels name; P says which.
    Returns how relevant each candidate is, in [0, 1], and its worth.
    """
    kind, own_worth = pools.relevant, pools.utilities
    relevant = kind.astype(np.float64)
    if pools.probabilities is None:
        return relevant, own_worth
    likely = np.nan_to_num(pools.probabilities)
    scale = relevant.sum(axis=1) / np.maximum(likely.sum(axis=1), _LEAST_SUM)
    expected = np.minimum(likely * scale[:, None], 1.0)
    # If a candidate were of the other kind, it would be worth as much as the mean of that kind.
    other = pools.retrieved & ~kind
    right = np.where(kind, own_worth, own_worth.sum(where=kind) / max(kind.sum(), 1))
    wrong = np.where(other, own_worth, own_worth.sum(where=other) / max(other.sum(), 1))
    worth = np.where(pools.retrieved, expected * right + (1.0 - expected) * wrong, 0.0)
    own = 1.0 - part
    return own * relevant + part * expected, own * own_worth + part * worth


def ratio_grid(
    pools: LabelledPools,
    *,
    temperature: float | None = None,
    ks: Sequence[int] | None = None,
    ratios: FloatArray = RATIOS,
    min_keep: int = 1,
) -> Grid:
    """Make a grid of every (k, min_ratio); min_ratio is always 0 if scores carry only rank.

    Args:
        temperature: Fitted to these pools unless given.
        ks: Sizes of context; ``sizes`` up to the depth unless given.
    """
    chosen = fit_temperature(pools) if temperature is None else temperature
    values, outside = relative_values(pools, chosen)
    ratios = np.zeros(1) if pools.kind is ScoreKind.RANK else ratios
    n, depth = values.shape
    return Grid(
        pools,
        ks or sizes(depth),
        ratios,
        thresholds_reached(values, ratios, min_keep=min_keep, always=outside),
        lambda k, ratio: RatioPolicy(
            k=k, min_ratio=ratio, temperature=chosen, min_keep=min(min_keep, k)
        ),
        np.tile(np.arange(depth), (n, 1)),
    )


def relative_values(pools: Pools, temperature: float) -> tuple[FloatArray, BoolArray]:
    """Return every pool's relative scores, and which pools have scores outside their domain.

    ``decide`` skips the relative filter in these, so that each of their relative scores is 1.
    """
    values = np.where(np.isnan(pools.scores), np.nan, 1.0)
    outside = np.ones(len(pools), dtype=bool)
    if pools.kind is ScoreKind.RANK:
        return values, outside
    for row, n in enumerate(pools.lengths.tolist()):
        scores = pools.scores[row, :n].tolist()
        outside[row] = n > 0 and not within_domain(pools.kind, min(scores), max(scores))
        if not outside[row]:
            values[row, :n] = relative_scores(pools.kind, scores, temperature)
    return values, outside


def utility_grid(
    pools: LabelledPools,
    probabilities: FloatArray,
    model: RelevanceModel,
    *,
    ks: Sequence[int] | None = None,
    thresholds: FloatArray = PROBABILITIES,
    min_keep: int = 1,
    per_token: bool = True,
) -> Grid:
    """Make a grid of every (k, cost) of expected-utility policies with one model.

    Args:
        probabilities: Shape (n_q, depth), from the model; out of fold if a threshold is chosen
            on the queries that the model was fitted to.
        ks: Sizes of context; ``sizes`` up to the depth unless given.
        thresholds: On P(relevant), ascending, in [0, 1).
        per_token: Weigh P by length, as far as tokens are known.
    """
    per_token &= pools.tokens is not None
    weighed = probabilities * weight_of(pools.sizes) if per_token else probabilities
    order = np.argsort(-weighed, axis=1, kind="stable")
    places = None
    if per_token:
        ordered = np.take_along_axis(probabilities, order, axis=1)
        places = np.argsort(np.argsort(-ordered, axis=1, kind="stable"), axis=1, kind="stable")
    return Grid(
        replace(pools, probabilities=probabilities),
        ks or sizes(pools.scores.shape[1]),
        thresholds,
        thresholds_reached(
            np.take_along_axis(weighed, order, axis=1), thresholds, min_keep=min_keep
        ),
        lambda k, threshold: ExpectedUtilityPolicy(
            model=model,
            k=k,
            cost=significant(threshold / (1.0 - threshold), 8),
            min_keep=min(min_keep, k),
            per_token=per_token,
        ),
        order,
        places,
    )


def sizes(largest: int) -> list[int]:
    """Return the context sizes to choose from: all up to 16, then each a tenth above the last.

    Among many sizes that differ little, the best on few labels is merely the luckiest.

    >>> sizes(3), sizes(30)[14:]
    ([1, 2, 3], [15, 16, 18, 20, 22, 24, 26, 29, 30])
    """
    ks = [1]
    while ks[-1] < largest:
        ks.append(min(max(ks[-1] + 1, round(1.1 * ks[-1])), largest))
    return ks
