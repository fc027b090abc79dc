"""The second pass: the resemblance of each candidate to the pooled ranker's best.

With r the ranker's scores, w = softmax(r), and S and L the cosines of the passages' vectors and of
their term vectors:

- ``term_support_3``, ``vector_support_3``: mean L, mean S to the 3 best others;
- ``term_support``: Σ_{j≠i} w_j L_ij / Σ_{j≠i} w_j;
- ``smoothed_by_vectors``, ``smoothed_by_terms``: r averaged over the candidates with the weights
  exp((S_ij − 1) / 0.1) and L_ij² + 10⁻⁶, where S_ii = L_ii = 0 (score regularisation; Diaz, CIKM
  2005);
- ``vector_redundancy``, ``term_redundancy``: the highest S, L to a better candidate.

This is relevance feedback from the list itself, without a second search (Lavrenko and Croft, SIGIR
2001).
"""

import numpy as np

from ctxguard.core.types import FloatArray
from ctxguard.retrieval.signals.candidates import best_first, highest_to_better, mean_of_best

NAMES = (
    "term_support_3",
    "term_support",
    "vector_support_3",
    "smoothed_by_vectors",
    "smoothed_by_terms",
    "vector_redundancy",
    "term_redundancy",
)
"""The signals of the second pass."""

_WIDTH = 0.1
_FLOOR = 1e-6


def second_pass(
    cosines: FloatArray, term_cosines: FloatArray, scores: FloatArray
) -> dict[str, FloatArray]:
    """Compute the signals of the second pass by name, shape (n,) each.

    A single candidate has 0 everywhere, and its own score for the smoothed ones.

    Args:
        cosines: S of each candidate with those that it is compared with, shape (n, m): the same, or
            the first of them. Those of a candidate with itself are not read.
        term_cosines: L, likewise.
        scores: r, shape (n,), finite.
    """
    n, m = cosines.shape
    itself = np.eye(n, m, dtype=np.bool_)
    s, terms = np.where(itself, 0.0, cosines), np.where(itself, 0.0, term_cosines)
    order = best_first(scores)
    ranks = np.argsort(order)
    compared = order[order < m]
    weights = np.where(itself, 0.0, np.exp(scores[:m] - scores.max(initial=-np.inf)))
    total = weights.sum(axis=1)
    signals = (
        mean_of_best(terms, compared, 3),
        # If one score is higher by hundreds, the others weigh nothing.
        np.divide((weights * terms).sum(axis=1), total, out=np.zeros(n), where=total > 0.0),
        mean_of_best(s, compared, 3),
        _smoothed(np.exp((s - 1.0) / _WIDTH), np.exp(-1.0 / _WIDTH), scores),
        _smoothed(np.square(terms) + _FLOOR, _FLOOR, scores),
        highest_to_better(s, ranks),
        highest_to_better(terms, ranks),
    )
    return dict(zip(NAMES, signals, strict=True))


def _smoothed(weights: FloatArray, own: float, scores: FloatArray) -> FloatArray:
    """Average scores by the weights of the first m; a candidate behind them also weighs ``own``."""
    n, m = weights.shape
    own_weights = np.where(np.arange(n) < m, 0.0, own)
    totals = (weights * scores[:m]).sum(axis=1) + own_weights * scores
    smoothed: FloatArray = totals / (weights.sum(axis=1) + own_weights)
    return smoothed
