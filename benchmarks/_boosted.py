"""P(relevant) from boosted trees over the signals and the cheap text features."""

from typing import Any

import numpy as np

from benchmarks._collection import View
from calibration.fit import FOLDS, fold_of
from calibration.pool_labels import IntArray
from ctxguard.core.types import FloatArray

SETTINGS = {
    "max_iter": 100,
    "learning_rate": 0.05,
    "max_leaf_nodes": 8,
    "min_samples_leaf": 20,
    "l2_regularization": 1.0,
    "early_stopping": False,
    "random_state": 0,
}


def boosted_probabilities(fitted: View, applied: View) -> FloatArray:
    """P(relevant) of every candidate, shape (n_q, depth), NaN beyond a pool's end."""
    return _predicted(_fit(fitted, np.arange(len(fitted.pools))), applied)


def boosted_out_of_fold(view: View) -> FloatArray:
    """The same from models that never saw the query, on the folds that calibration uses."""
    fold = np.array([fold_of(query_id) for query_id in view.pools.query_ids])
    values = np.full(view.pools.scores.shape, np.nan)
    for number in range(FOLDS):
        inside, outside = np.flatnonzero(fold == number), np.flatnonzero(fold != number)
        if inside.size:
            values[inside] = _predicted(_fit(view, outside), view.rows(inside))
    return values


def _features(view: View) -> FloatArray:
    return np.concatenate([view.signals, view.text], axis=2)


def _fit(view: View, rows: IntArray) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier

    inside = ~np.isnan(view.pools.scores[rows])
    model = HistGradientBoostingClassifier(**SETTINGS)
    return model.fit(_features(view)[rows][inside], view.labels.relevant[rows][inside])


def _predicted(model: Any, view: View) -> FloatArray:
    inside = ~np.isnan(view.pools.scores)
    values = np.full(inside.shape, np.nan)
    if inside.any():
        # One column only where the model saw a single class.
        values[inside] = (
            model.predict_proba(_features(view)[inside])[:, 1]
            if len(model.classes_) == 2
            else float(model.classes_[0])
        )
    return values
