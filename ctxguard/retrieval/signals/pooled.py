"""The pooled ranker on one pool of candidates: its inputs, its scores, the second pass.

Import this module through `ctxguard._support.extras.require`: numba comes with an extra.
"""

from collections.abc import Mapping

import numpy as np

from ctxguard._support.compiled import compiled
from ctxguard.core.fusion import Fusion, fuse
from ctxguard.core.types import FloatArray, Leg
from ctxguard.retrieval.signals.candidates import (
    Float32Array,
    best_first,
    cosines_between,
    list_signals,
)
from ctxguard.retrieval.signals.ranker import CLIP, INPUTS, RANKER_SIGNAL, Ranker, RankerLevel
from ctxguard.retrieval.signals.second_pass import second_pass

_BY_RANKS = Fusion()
_VALUES = {level: [name.rpartition(".")[0] for name in names] for level, names in INPUTS.items()}
_N_SCORES = {level: sum(name.endswith(".z") for name in INPUTS[level]) for level in INPUTS}


def rank_candidates(
    legs: Mapping[str, Leg],
    signals: Mapping[str, FloatArray],
    vectors: Float32Array,
    term_cosines: FloatArray,
    ranker: Ranker,
) -> dict[str, FloatArray]:
    """Score the candidates of one query, and compare each with the highest-scoring ones.

    Args:
        legs: ``lexical`` and ``dense``, shape (n,) each.
        signals: The text signals, and the sentence signals if there are any, shape (n,) each.
        vectors: The passages' unit vectors, shape (n, dimension).
        term_cosines: The cosines of the passages' term vectors, shape (n, n).
        ranker: The weights; of level ``full`` if there are sentence signals.

    Returns:
        The list signals, ``ranker`` (finite; higher is better) and the signals of the second pass
        by name, shape (n,) each, in the order of the input.

    Raises:
        KeyError: an input of the ranker is missing.
    """
    cosines = cosines_between(vectors)
    fused = fuse(legs, _BY_RANKS)
    lists = list_signals(cosines, term_cosines, best_first(fused))
    scores = ranker_scores(legs, {**signals, **lists}, ranker, fused)
    return {**lists, RANKER_SIGNAL: scores, **second_pass(cosines, term_cosines, scores)}


def ranker_scores(
    legs: Mapping[str, Leg],
    signals: Mapping[str, FloatArray],
    ranker: Ranker,
    fused: FloatArray | None = None,
) -> FloatArray:
    """Compute the ranker's score of every candidate, shape (n,); arguments as `ranker_inputs`."""
    level = level_of(signals)
    weights = np.fromiter(map(ranker.weights(level).__getitem__, INPUTS[level]), np.float64)
    return _weighted_sums(ranker_inputs(legs, signals, level, fused), weights)


def level_of(signals: Mapping[str, FloatArray]) -> RankerLevel:
    """Return the ranker's level for which these signals suffice."""
    return "full" if "sentence_match" in signals else "text"


def ranker_inputs(
    legs: Mapping[str, Leg],
    signals: Mapping[str, FloatArray],
    level: RankerLevel,
    fused: FloatArray | None = None,
) -> FloatArray:
    """Compute the inputs of a level, shape (number of inputs, n), rows in the order of ``INPUTS``.

    A z-score is 0 if all values are equal; an unknown value (NaN) also has z-score 0, and the
    rank after all others.

    Args:
        legs: ``lexical`` and ``dense``, shape (n,) each.
        signals: The raw signals by name, list signals included, shape (n,) each.
        level: The level, which chooses the inputs.
        fused: The reciprocal ranks of the legs, shape (n,); None to fuse them here.

    Raises:
        KeyError: a signal is missing.
    """
    values = {
        **signals,
        "dense": legs["dense"].scores,
        "lexical": np.log1p(np.maximum(legs["lexical"].scores, 0.0)),
        "reciprocal_ranks": fuse(legs, _BY_RANKS) if fused is None else fused,
    }
    rows = np.array(list(map(values.__getitem__, _VALUES[level])))
    _transform(rows, _N_SCORES[level], CLIP)
    return rows


@compiled()
def _transform(rows: FloatArray, n_scores: int, most: float) -> None:
    """Replace the first rows by clipped z-scores, and the others by half the log of their rank."""
    for row in range(len(rows)):
        if row < n_scores:
            _standardise(rows[row], most)
        else:
            _log_ranks(rows[row])


@compiled()
def _standardise(values: FloatArray, most: float) -> None:
    known, total, lowest, highest = 0, 0.0, np.inf, -np.inf
    for value in values:
        if not np.isnan(value):
            known += 1
            total += value
            lowest, highest = min(lowest, value), max(highest, value)
    # Rounding alone would spread equal values.
    if not highest > lowest:
        values[:] = 0.0
        return
    mean = total / known
    squares = 0.0
    for value in values:
        if not np.isnan(value):
            squares += (value - mean) ** 2
    spread = np.sqrt(squares / known)
    for i in range(values.size):
        z = (values[i] - mean) / spread
        values[i] = 0.0 if np.isnan(z) else min(max(z, -most), most)


@compiled()
def _log_ranks(values: FloatArray) -> None:
    given = values.copy()
    for i in range(given.size):
        rank = 1
        for other in given:
            # NaN fails every comparison.
            rank += other > given[i] or (np.isnan(given[i]) and not np.isnan(other))
        values[i] = 0.5 * np.log(rank)


@compiled()
def _weighted_sums(rows: FloatArray, weights: FloatArray) -> FloatArray:
    sums = np.zeros(rows.shape[1], np.float64)
    for row in range(len(rows)):
        for i in range(sums.size):
            sums[i] += weights[row] * rows[row, i]
    return sums
