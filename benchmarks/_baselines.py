"""The policies that are compared, each fitted on some queries and applied to others.

Every policy keeps a prefix of one order. Policies with settings use those of highest mean strict
UDCG on the queries that they are fitted on, without a certificate, and contexts of at most
``MAX_K`` passages, or for ours the depth. All but perfect knowledge keep at least one passage.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks._collection import View
from calibration.calibrate_route import FEWEST_LABELS
from calibration.fit import fit_relevance, out_of_fold
from calibration.grid import (
    RATIOS,
    Grid,
    GridIndex,
    ratio_grid,
    thresholds_reached,
    utility_grid,
)
from calibration.objectives import keep_recall
from calibration.pool_labels import IntArray, PoolLabels
from ctxguard.core.decision import decide
from ctxguard.core.policies import Policy, RatioPolicy
from ctxguard.core.types import FloatArray
from ctxguard.profile.describe import describe_policy

MAX_K = 20
"""The largest context of the policies that are compared with ours."""

SCORES: FloatArray = np.round(np.arange(0, 101) / 100, 2)
"""Thresholds on the fused score, which lies in [0, 1]."""

MASSES: FloatArray = np.round(1.0 - np.arange(99, 0, -1) / 100, 2)
"""1 − p for the masses p of top-p, ascending."""

TEMPERATURES = (0.02, 0.05, 0.1, 0.2, 0.5)
"""Of the softmax over fused scores."""


@dataclass(frozen=True)
class Contexts:
    """What a policy keeps of every query.

    Attributes:
        order: Shape (n_q, depth), columns of the pools, best first.
        kept: Shape (n_q,), how many of them are kept.
        choice: The settings that were chosen, for people.
    """

    order: IntArray
    kept: IntArray
    choice: str


Rule = Callable[[View, View], Contexts]


def _as_ranked(view: View) -> IntArray:
    n, depth = view.pools.scores.shape
    return np.tile(np.arange(depth), (n, 1))


def _capped(view: View, kept: IntArray, choice: str, k: int = MAX_K) -> Contexts:
    return Contexts(_as_ranked(view), np.minimum(np.minimum(kept, k), view.pools.lengths), choice)


def fixed(k: int) -> Rule:
    """The first k, whatever their scores."""
    return lambda _fitted, applied: _capped(
        applied, np.full(len(applied.pools), k, dtype=np.int64), f"k={k}", k
    )


def ratio(ks: tuple[int, ...] | None = None, ratios: FloatArray = RATIOS) -> Rule:
    """(k, min_ratio), each calibrated unless given."""

    def rule(fitted: View, applied: View) -> Contexts:
        index = ratio_grid(fitted.pools, fitted.labels, ks=ks, ratios=ratios).means.best()
        grid = ratio_grid(applied.pools, applied.labels, ks=ks, ratios=ratios)
        k, min_ratio = grid.settings(index)
        kept = grid.kept([index])[:, 0]
        return Contexts(_as_ranked(applied), kept, f"k={k} min_ratio={min_ratio:g}")

    return rule


def _tuned(
    labels: PoolLabels, values: FloatArray, thresholds: FloatArray
) -> tuple[float, GridIndex]:
    """Mean strict UDCG of the best (k, threshold) on values in rank order, and its index."""
    reached = thresholds_reached(values, thresholds)
    means = Grid(labels, range(1, MAX_K + 1), thresholds, reached, RatioPolicy).means
    index = means.best()
    return float(means.udcg_strict[index]), index


def _applied(values: FloatArray, thresholds: FloatArray, index: GridIndex) -> IntArray:
    above = (thresholds_reached(values, thresholds) > index[1]).sum(axis=1)
    return np.asarray(np.minimum(above, index[0] + 1))


def absolute(fitted: View, applied: View) -> Contexts:
    """(k, least fused score), both calibrated."""
    _, index = _tuned(fitted.labels, fitted.pools.scores, SCORES)
    kept = _applied(applied.pools.scores, SCORES, index)
    return _capped(applied, kept, f"k={index[0] + 1} min_score={SCORES[index[1]]:g}")


def top_p(fitted: View, applied: View) -> Contexts:
    """The fewest passages whose softmax mass reaches p; k, p and the temperature calibrated."""
    best = max(
        (*_tuned(fitted.labels, _mass_left(fitted, temperature), MASSES), temperature)
        for temperature in TEMPERATURES
    )
    _, index, temperature = best
    kept = _applied(_mass_left(applied, temperature), MASSES, index)
    choice = f"k={index[0] + 1} p={1.0 - MASSES[index[1]]:.2g} T={temperature:g}"
    return _capped(applied, kept, choice)


def _mass_left(view: View, temperature: float) -> FloatArray:
    """Softmax mass of a candidate and all below it: above 1 − p while p is not reached yet."""
    scores = view.pools.scores
    weights = np.exp((np.nan_to_num(scores, nan=-np.inf) - scores[:, :1]) / temperature)
    weights /= weights.sum(axis=1, keepdims=True)
    left = weights[:, ::-1].cumsum(axis=1)[:, ::-1]
    return np.where(np.isnan(scores), np.nan, left)


def autocut(_fitted: View, applied: View) -> Contexts:
    """Cut at the first jump, as Weaviate's autocut with limit 1.

    Scores and ranks are both scaled to [0, 1] over the list; a jump is a local maximum of the
    fall of the score beyond the straight line.
    """
    kept = [
        first_jump(row[:n])
        for row, n in zip(applied.pools.scores, applied.pools.lengths, strict=True)
    ]
    return _capped(applied, np.array(kept, dtype=np.int64), "first jump")


def first_jump(scores: FloatArray) -> int:
    """How many candidates lie before the first jump of scores in descending order.

    >>> first_jump(np.array([0.9, 0.88, 0.5, 0.49, 0.48]))
    2
    >>> first_jump(np.array([0.5, 0.5])), first_jump(np.array([0.5]))
    (2, 1)
    """
    n = scores.size
    if n < 3 or scores[0] == scores[-1]:
        return n
    fall = (scores[0] - scores) / (scores[0] - scores[-1]) - np.linspace(0.0, 1.0, n)
    peaks = np.flatnonzero((fall[1:-1] > fall[:-2]) & (fall[1:-1] > fall[2:])) + 1
    return int(peaks[0]) if peaks.size else n


def largest_gap(_fitted: View, applied: View) -> Contexts:
    """Cut at the largest fall of the score among the best ``MAX_K`` + 1 (Adaptive-k)."""
    gaps = -np.diff(applied.pools.scores[:, : MAX_K + 1], axis=1)
    kept = np.nan_to_num(gaps, nan=-1.0).argmax(axis=1) + 1
    return _capped(applied, kept, "largest gap")


def expected_utility(fitted: View, applied: View) -> Contexts:
    """Logistic P(relevant), tuned on predictions out of fold as ``calibrate`` does."""
    model = fit_relevance(fitted.pools, fitted.labels)
    own = out_of_fold(fitted.pools, fitted.labels)
    grid = utility_grid(fitted.pools, fitted.labels, own, model)
    return _decided(grid.policy(grid.means.best()), applied)


def _decided(policy: Policy, applied: View) -> Contexts:
    """What ``decide`` itself keeps, so that what is measured is what runs."""
    order = _as_ranked(applied)
    kept = np.zeros(len(applied.pools), dtype=np.int64)
    for row, ranking in enumerate(applied.pools.rankings()):
        decision = decide(ranking, policy)
        order[row, : len(ranking)] = decision.order
        kept[row] = decision.n_kept
    return Contexts(order, kept, describe_policy(policy))


def keeping_recall(k: int) -> Rule:
    """The default objective of ``calibrate``: the least harm at the recall of the first k."""

    def rule(fitted: View, applied: View) -> Contexts:
        labels = fitted.labels.with_baseline(k)
        if labels.n_answerable >= FEWEST_LABELS:
            model = fit_relevance(fitted.pools, labels)
            own = out_of_fold(fitted.pools, labels)
            grid = utility_grid(fitted.pools, labels, own, model)
        else:
            grid = ratio_grid(fitted.pools, labels)
        index = keep_recall(grid, k)
        if index is None:
            return fixed(k)(fitted, applied)
        return _decided(grid.policy(index), applied)

    return rule


def perfect(_fitted: View, applied: View) -> Contexts:
    """Exactly the pool's passages of positive worth, the worthiest first; none where none is."""
    worth = applied.labels.utilities
    return Contexts(
        np.argsort(-worth, axis=1, kind="stable"),
        (worth > 0.0).sum(axis=1),
        "the labels",
    )


RULES: Mapping[str, Rule] = {
    "k 3": fixed(3),
    "k 5": fixed(5),
    "k 10": fixed(10),
    "k calibrated": ratio(ratios=np.zeros(1)),
    "seed rule": ratio((3,), np.array([0.7])),
    "ratio": ratio(),
    "absolute": absolute,
    "autocut": autocut,
    "largest gap": largest_gap,
    "top-p": top_p,
    "expected utility": expected_utility,
    "keep recall 5": keeping_recall(5),
    "keep recall 10": keeping_recall(10),
    "perfect": perfect,
}

OVER_SIGNALS: Mapping[str, Rule] = {
    "ranker, k 5": fixed(5),
    "ranker, ratio": ratio(),
    "signals": expected_utility,
}
"""Over the candidates in the order of the pooled ranker, with its signals."""
