"""Fits what the choice of a policy needs: fusion weight, temperature, P(relevant).

Pure, except that `fit_model` keeps native libraries to one thread meanwhile. It, and what calls it,
needs the extra `calibrate`.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from calibration.pools import LabelledPools, Pools
from ctxguard._support.extras import require
from ctxguard.core.fusion import Fusion, fuse
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.scores import log_odds
from ctxguard.core.signals import RANKING, feature_names, features, is_free, legs_of, named_features
from ctxguard.core.types import FloatArray, Leg, ScoreKind
from ctxguard.errors import CalibrationError
from ctxguard.measure.metrics import ndcg
from ctxguard.measure.rows import BoolArray, IntArray

WEIGHTS: tuple[float, ...] = tuple(round(step * 0.05, 2) for step in range(21))
"""The weights of the dense leg that are tried in convex fusion."""

_TEMPERATURE_RANK = 10
_TEMPERATURE_SHARE = 0.1


def significant(value: float, digits: int = 6) -> float:
    """Round to a few digits, still more than labels support, so that files stay short.

    >>> significant(0.123456789), significant(1234.5678, 5)
    (0.123457, 1234.6)
    """
    return float(f"{value:.{digits}g}")


def fit_fusion(pools: LabelledPools) -> Fusion:
    """Fit the convex fusion whose order has the highest mean nDCG@10 on a hybrid replay.

    Among equally good weights it takes the middle one, so that no single query decides.

    Raises:
        CalibrationError: no query has a relevant passage.
    """
    some = pools.n_relevant > 0
    if not some.any():
        raise CalibrationError(
            "no calibration query has a relevant passage, so no fusion can be fitted"
        )
    legs = [ranking.legs for ranking in pools.rankings()]
    quality = np.array([_ndcg(pools, legs, weight)[some].mean() for weight in WEIGHTS])
    plateau = np.flatnonzero(quality >= quality.max() - 1e-9)
    return Fusion("convex", WEIGHTS[int(plateau[len(plateau) // 2])])


def _ndcg(pools: LabelledPools, legs: Sequence[Mapping[str, Leg]], weight: float) -> FloatArray:
    """Return every query's nDCG@10 under convex fusion, shape (n_q,); NaN without an answer."""
    fused = np.full(pools.scores.shape, np.nan)
    for row, own in enumerate(legs):
        fused[row, : pools.lengths[row]] = fuse(own, Fusion("convex", weight))
    order = np.argsort(-fused, axis=1, kind="stable")
    return ndcg(np.take_along_axis(pools.grades, order, axis=1), pools.best_grades)


def fit_temperature(pools: Pools) -> float:
    """Fit the temperature that spreads the relative scores of a route over (0, 1].

    On a ratio scale it is 1, so that a relative score is a share of the top score. On other
    scales the tenth candidate of the median query has r = 0.1, rounded to three digits; scaling
    scores and temperature together changes nothing (DESIGN.md §4).
    """
    if pools.kind in (ScoreKind.RATIO, ScoreKind.RANK):
        return 1.0
    scores = pools.scores
    if pools.kind is ScoreKind.PROBABILITY:
        scores = log_odds(scores)
    column = min(_TEMPERATURE_RANK, scores.shape[1]) - 1
    gaps = scores[:, 0] - scores[:, column]
    gaps = gaps[~np.isnan(gaps) & (gaps > 0.0)]
    if gaps.size == 0:
        return 1.0
    return significant(np.median(gaps) / -math.log(_TEMPERATURE_SHARE), 3)


FOLDS = 5
_DIGITS = 8
"""Significant digits of a coefficient in a profile: more than the labels support."""

REGULARISATION = 0.03
"""The regression's C. In nested cross-validation on five collections 0.03 and 0.1 were equal, and
better than 1 by 0.004 to 0.009 mean UDCG."""

_CLIP = 8.0
"""Standardised features are clipped to this, so that no single outlier decides."""

_FREE = 5.0
"""Scale of the age of a column of metadata and of whether the query names its value, which somebody
chose as telling: the penalty on their coefficients is a 25th. Nothing was lost by a column without
worth (`benchmarks.stale`)."""

_MAX_ITERATIONS = 1_000
_COLUMNS = 8


def pool_features(pools: Pools) -> FloatArray:
    """Return the features of every candidate, query by query, as the guard computes them.

    Shape (n_candidates, n_features).
    """
    named = named_features(pools.signals)
    table, end = np.empty((pools.lengths.sum(), len(_names(pools)))), 0
    for ranking in pools.rankings():
        start, end = end, end + len(ranking)
        own = legs_of(ranking, range(len(ranking)))
        table[start:end] = features(own, ranking.signals, named).T
    return table


def _names(pools: Pools) -> tuple[str, ...]:
    return feature_names(pools.legs or (RANKING,), named_features(pools.signals))


def fit_relevance(pools: LabelledPools) -> RelevanceModel:
    """Fit P(relevant), an L2 logistic regression over the features (DESIGN.md §5).

    A candidate without a label counts as not relevant.

    Raises:
        CalibrationError: a feature is NaN, or all or none of the candidates are relevant.
    """
    inputs, relevant = pool_features(pools), pools.relevant[pools.retrieved]
    if np.isnan(inputs).any():
        raise CalibrationError(
            "a candidate lacks a leg's score, so its features are undefined: score every "
            "candidate in every leg, or calibrate with policy = ratio"
        )
    if relevant.all() or not relevant.any():
        raise CalibrationError(
            f"{int(relevant.sum())} of the {relevant.size} candidates of {len(pools)} queries are "
            "relevant; a model needs some that are and some that are not. Use policy = ratio, or "
            "label more queries"
        )
    return fit_model(pools, inputs, relevant)


def fit_model(
    pools: Pools, inputs: FloatArray, relevant: BoolArray, weights: FloatArray | None = None
) -> RelevanceModel:
    """Fit the regression to candidates with the legs and signals of these pools.

    Args:
        inputs: Shape (n, n_features), finite; overwritten.
        relevant: Shape (n,), of both kinds.
        weights: Shape (n,), ≥ 0, how much each counts; None where all count 1.
    """
    free = np.array([_FREE if is_free(name) else 1.0 for name in _names(pools)])
    linear_model = require("sklearn.linear_model", "calibrate")
    regression = linear_model.LogisticRegression(C=REGULARISATION, max_iter=_MAX_ITERATIONS)
    # The number of threads changes the order of sums, and so the last digits of a coefficient.
    with require("threadpoolctl", "calibrate").threadpool_limits(1):
        x, means, scales = standardised(inputs)
        x *= free
        regression.fit(x, relevant, sample_weight=weights)
    rounded = partial(significant, digits=_DIGITS)
    return RelevanceModel(
        legs=tuple(sorted(pools.legs or (RANKING,))),
        coefficients=tuple(map(rounded, regression.coef_[0] * free)),
        means=tuple(map(rounded, means)),
        scales=tuple(map(rounded, scales)),
        intercept=rounded(regression.intercept_[0]),
        features=named_features(pools.signals),
        clip=_CLIP,
    )


def standardised(inputs: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Scale features in place to mean 0 and deviation 1, and clip; also return means and scales."""
    # A few columns at a time: numpy copies its input to compute the deviation.
    parts = np.array_split(inputs, max(inputs.shape[1] // _COLUMNS, 1), axis=1)
    means, scales = inputs.mean(axis=0), np.concatenate([part.std(axis=0) for part in parts])
    scales[scales < 1e-12] = 1.0
    inputs -= means
    inputs /= scales
    return inputs.clip(-_CLIP, _CLIP, out=inputs), means, scales


def predicted(model: RelevanceModel, pools: Pools) -> FloatArray:
    """Compute P(relevant) of every candidate, shape (n_q, depth), as the guard does.

    It is NaN beyond a pool's end, and where a query lacks a feature.
    """
    values = np.full(pools.scores.shape, np.nan)
    own = np.split(pool_features(pools), np.cumsum(pools.lengths)[:-1])
    for row, inputs in zip(range(len(pools)), own, strict=False):
        found = model.from_features(inputs.T)
        if found is not None:
            values[row, : len(inputs)] = found
    return values


def out_of_fold(pools: LabelledPools, model: RelevanceModel) -> FloatArray:
    """Compute P(relevant) as `predicted` does, with a model that was not fitted to the query.

    A threshold tuned on a model's own training queries is too high. Questions that are nearly the
    same share a fold. The model of all queries is taken where the others leave nothing to fit on.
    """
    inputs, relevant = pool_features(pools), pools.relevant[pools.retrieved]
    fold = np.repeat(fold_numbers(pools.groups), pools.lengths)
    values, found = np.full(pools.scores.shape, np.nan), np.full(relevant.size, np.nan)
    for number in np.unique(fold):
        own, others = fold == number, fold != number
        fits = relevant[others].any() and not relevant[others].all()
        fitted = fit_model(pools, inputs[others], relevant[others]) if fits else model
        probabilities = fitted.from_features(inputs[own].T)
        found[own] = np.nan if probabilities is None else probabilities
    values[pools.retrieved] = found
    return values


def fold_numbers(groups: Sequence[str] | NDArray[np.str_]) -> IntArray:
    """Deal queries into up to `FOLDS` folds, numbered from 0, with about equally many groups.

    The names of their groups alone decide, not the order of the file.
    """
    names, place = np.unique(np.array(groups, dtype=str), return_inverse=True)
    digests = [hashlib.sha256(name.encode()).digest() for name in names.tolist()]
    rank = np.empty(names.size, dtype=np.int64)
    rank[sorted(range(names.size), key=digests.__getitem__)] = np.arange(names.size)
    numbers: IntArray = (rank % FOLDS)[place]
    return numbers


def folds(groups: Sequence[str] | NDArray[np.str_]) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield the positions of each fold's queries and of all others, using `fold_numbers`."""
    fold = fold_numbers(groups)
    for number in np.unique(fold):
        yield np.flatnonzero(fold == number), np.flatnonzero(fold != number)
