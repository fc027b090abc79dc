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

Import this module through `ctxguard._support.extras.require`: numba comes with an extra.
"""

import numpy as np

from ctxguard._support.compiled import compiled
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
        cosines: S, shape (n, n); the diagonal is not read.
        term_cosines: L, shape (n, n); the diagonal is not read.
        scores: r, shape (n,), finite.
    """
    return dict(zip(NAMES, _second_pass(cosines, term_cosines, scores), strict=True))


@compiled()
def _weighted_mean(cosines: FloatArray, scores: FloatArray) -> FloatArray:
    """Compute each candidate's mean cosine to the others, weighted by softmax(scores)."""
    n = scores.size
    means = np.zeros(n, np.float64)
    if n > 1:
        weights = np.exp(scores - scores.max())
        for position in range(n):
            total = weight = 0.0
            for other in range(n):
                if other != position:
                    total += weights[other] * cosines[position, other]
                    weight += weights[other]
            # If one score is higher by hundreds, the others weigh nothing.
            means[position] = total / weight if weight > 0.0 else 0.0
    return means


@compiled()
def _smoothed_by_vectors(cosines: FloatArray, scores: FloatArray) -> FloatArray:
    own = np.exp(-1.0 / _WIDTH)
    totals, weights = own * scores, np.full(scores.size, own)
    for position in range(scores.size):
        for other in range(position):
            # A power takes longer than everything else here: once for both.
            weight = np.exp((cosines[position, other] - 1.0) / _WIDTH)
            totals[position] += weight * scores[other]
            totals[other] += weight * scores[position]
            weights[position] += weight
            weights[other] += weight
    means: FloatArray = totals / weights
    return means


@compiled()
def _smoothed_by_terms(cosines: FloatArray, scores: FloatArray) -> FloatArray:
    means = np.empty(scores.size, np.float64)
    for position in range(scores.size):
        total, weights = _FLOOR * scores[position], _FLOOR
        for other in range(scores.size):
            if other != position:
                weight = cosines[position, other] ** 2 + _FLOOR
                total += weight * scores[other]
                weights += weight
        means[position] = total / weights
    return means


@compiled()
def _second_pass(
    cosines: FloatArray, term_cosines: FloatArray, scores: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]:
    order = best_first(scores)
    return (
        mean_of_best(term_cosines, order, 3),
        _weighted_mean(term_cosines, scores),
        mean_of_best(cosines, order, 3),
        _smoothed_by_vectors(cosines, scores),
        _smoothed_by_terms(term_cosines, scores),
        highest_to_better(cosines, order),
        highest_to_better(term_cosines, order),
    )
