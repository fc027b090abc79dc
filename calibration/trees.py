"""Fit gradient-boosted trees of relevance, and write them down as the profile keeps them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.weights import significant
from ctxguard._support.extras import require
from ctxguard.core.trees import MAX_LEAVES, Trees
from ctxguard.core.types import FloatArray

SETTINGS: dict[str, Any] = {
    "max_iter": 80,
    "max_leaf_nodes": MAX_LEAVES,
    "learning_rate": 0.06,
    "min_samples_leaf": 20,
    "l2_regularization": 5.0,
    "max_features": 0.4,
    "early_stopping": False,
    "random_state": 0,
}
_DIGITS = 8


def fit_trees(
    features: FloatArray, relevant: NDArray[np.bool_], weights: FloatArray | None
) -> Trees:
    """Boosted trees of relevance; the caller limits the number of threads.

    Args:
        features: Shape (n, n_features), finite.
        relevant: Shape (n,), of both kinds.
        weights: Shape (n,); None where all are 1, which is several times faster.
    """
    ensemble = require("sklearn.ensemble", "calibrate")
    model = ensemble.HistGradientBoostingClassifier(**SETTINGS)
    model.fit(features, relevant, sample_weight=weights)
    trees = [_flattened(stage[0].nodes) for stage in model._predictors]
    columns = zip(*trees, strict=True)
    base = significant(model._baseline_prediction.item(), _DIGITS)
    return Trees(base, *(tuple(own) for own in columns))


def _flattened(nodes: NDArray[np.void]) -> tuple[tuple[Any, ...], ...]:
    """One tree's features, thresholds, masks and values, as ``Trees`` describes them."""
    features: list[int] = []
    thresholds: list[float] = []
    masks: list[int] = []
    values: list[float] = []

    def visit(node: np.void) -> None:
        if node["is_leaf"]:
            values.append(significant(float(node["value"]), _DIGITS))
            return
        first, at = len(values), len(masks)
        features.append(int(node["feature_idx"]))
        thresholds.append(significant(float(node["num_threshold"]), _DIGITS))
        masks.append(0)
        visit(nodes[node["left"]])
        masks[at] = (1 << len(values)) - (1 << first)
        visit(nodes[node["right"]])

    visit(nodes[0])
    return tuple(features), tuple(thresholds), tuple(masks), tuple(values)
