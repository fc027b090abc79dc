"""Computes a candidate's features, the model's inputs, from its scores and named signals.

For each leg that scored the candidates: its value, the gap to the leg's best, its z-score in
the list, the logarithm of its rank, and the leg's best value; with several legs, the sum of
reciprocal ranks and whether every leg matched; and for each named signal the transforms that
``TRANSFORMS`` lists (DESIGN.md §5). Pure; needs only numpy.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.fusion import RECIPROCAL_RANK_CONSTANT
from ctxguard.core.scores import INVALID_MAGNITUDE, log_odds
from ctxguard.core.types import FloatArray, Leg, Ranking, ScoreKind
from ctxguard.errors import ConfigurationError

PER_LEG = ("value", "gap", "z", "log_rank", "top")
ACROSS_LEGS = ("reciprocal_ranks", "in_all_legs")

RANKING = "ranking"
"""The name used in place of a leg's for the scores of a ranking without legs."""

TRANSFORMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "match": ("raw", "z", "gap"),
        "vector_match": ("raw", "z", "gap"),
        "length": ("raw", "z"),
        "tokens": (),
        "redundancy": (),
        "similarity_3": (),
        "similarity_10": (),
        "term_similarity_3": (),
        "ranker": ("raw", "z", "gap", "log_rank"),
        "term_support_3": ("raw", "z"),
        "term_support": ("raw", "z"),
        "vector_support_3": ("raw", "z"),
        "smoothed_by_vectors": ("z",),
        "smoothed_by_terms": ("z",),
        "vector_redundancy": ("raw",),
        "term_redundancy": ("raw",),
    }
)
"""The transforms of each signal that a model may use; the ranker's own signal has none."""

OTHER_TRANSFORMS = ("raw", "z", "gap")
"""Transforms of any other signal, such as a wrapped retriever's own."""

_SUFFIXES = ("z", "gap", "log_rank")
_BLOCKS = (("raw", "value"), ("gap",), ("z",), ("top",))
NO_SIGNALS: Mapping[str, FloatArray] = MappingProxyType({})


def named_features(signals: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the features of named signals, sorted by signal.

    A feature's name is that of its signal, followed by a full stop and the transform unless it is
    the raw value: ``z`` is the z-score in the list, ``gap`` the value minus the list's highest, and
    ``log_rank`` the logarithm of the rank.

    >>> named_features(["vector_redundancy", "freshness"])
    ('freshness', 'freshness.z', 'freshness.gap', 'vector_redundancy')
    """
    return tuple(
        name if transform == "raw" else f"{name}.{transform}"
        for name in sorted(signals)
        for transform in transforms_of(name)
    )


def transforms_of(name: str) -> tuple[str, ...]:
    """Return a signal's transforms; signals from metadata already compare the candidates."""
    return TRANSFORMS.get(name, ("raw",) if ":" in name else OTHER_TRANSFORMS)


def is_free(signal: str) -> bool:
    """Return whether a column's signal compares candidates, rather than marking one source."""
    return signal.endswith((":age", ":named"))


def signal_of(feature: str) -> str:
    """Return the signal of a named feature; raise a `ConfigurationError` for any other name."""
    return _parsed(feature)[0]


def _parsed(feature: str) -> tuple[str, str]:
    """Split a named feature into signal and transform; errors as for `signal_of`."""
    name, dot, suffix = feature.partition(".")
    if not name or (dot and suffix not in _SUFFIXES):
        raise ConfigurationError(
            f"{feature!r} is not a feature: it must be a signal's name, without a full stop, "
            f"or such a name followed by .{', .'.join(_SUFFIXES)}"
        )
    return name, suffix or "raw"


def feature_names(legs: Iterable[str], named: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of the features for a set of legs, in the order of the rows of ``features``.

    Those of named signals are appended unchanged.

    >>> feature_names(["dense"], ["ranker.z"])
    ('dense.value', 'dense.gap', 'dense.z', 'dense.log_rank', 'dense.top', 'ranker.z')
    """
    legs = sorted(legs)
    names = [f"{leg}.{feature}" for leg in legs for feature in PER_LEG]
    return (*names, *(ACROSS_LEGS if len(legs) > 1 else ()), *named)


@lru_cache(maxsize=256)
def _plan(
    legs: tuple[str, ...], named: tuple[str, ...]
) -> tuple[tuple[str, ...], int, NDArray[np.intp]]:
    """Find the position of each feature among the rows that `features` computes.

    The rows are four blocks with a row for each value, the logarithms of ranks, and the features
    across legs.

    Returns:
        The named signals, which follow the legs as values; the number of leading values that have
        a rank; and the positions, shape (n_features,).
    """
    parsed = [_parsed(feature) for feature in named]
    ranked = dict.fromkeys(name for name, transform in parsed if transform == "log_rank")
    signals = tuple(ranked | dict.fromkeys(name for name, _ in parsed))
    n_values, n_ranked = len(legs) + len(signals), len(legs) + len(ranked)
    across = len(_BLOCKS) * n_values + n_ranked
    begin = {each: at * n_values for at, blocks in enumerate(_BLOCKS) for each in blocks}
    begin["log_rank"] = len(_BLOCKS) * n_values
    rows = [begin[feature] + leg for leg in range(len(legs)) for feature in PER_LEG]
    if len(legs) > 1:
        rows += range(across, across + len(ACROSS_LEGS))
    rows += [begin[each] + len(legs) + signals.index(name) for name, each in parsed]
    return signals, n_ranked, np.array(rows, dtype=np.intp)


@lru_cache(maxsize=64)
def _tables(n: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the tables for lists of n candidates: weights for means, and transforms of ranks.

    Returns:
        1 / n, shape (n,); then the logarithm of a value's rank, and its reciprocal as those of
        several legs are added up, by how many values are at most that one: shape (n + 1,). A
        missing value has 0, and no rank.
    """
    rank = np.arange(n + 1.0, 0.0, -1.0)
    rank[0] = np.nan
    return np.full(n, 1.0 / n), np.log(rank), 1.0 / (RECIPROCAL_RANK_CONSTANT + rank)


def features(
    legs: Mapping[str, Leg],
    signals: Mapping[str, FloatArray] = NO_SIGNALS,
    named: Sequence[str] = (),
) -> FloatArray:
    """Compute the features of every candidate of one ranking.

    Args:
        legs: Each stage's scores, shape (n,) each. A missing or garbage score makes its leg's gap
            and top NaN for every candidate, since the leg's best is then unknown: a missing score
            is another set of features, with its own model.
        signals: Named signals, shape (n,) each, with the same rule.
        named: The features of named signals to compute, as ``named_features`` names them.

    Returns:
        Shape (n_features, n), rows in the order of ``feature_names``.

    Raises:
        ConfigurationError: a leg's scores carry rank only, or a name is not that of a feature.
        KeyError: a named signal is missing.

    >>> legs = {"dense": Leg(np.array([0.9, 0.5]), ScoreKind.COSINE)}
    >>> features(legs).round(2).tolist()
    [[0.9, 0.5], [0.0, -0.4], [1.0, -1.0], [0.0, 0.69], [0.9, 0.9]]
    >>> features({}, {"freshness": np.array([3.0, 1.0])}, ["freshness.gap"]).tolist()
    [[0.0, -2.0]]
    """
    names = tuple(sorted(legs))
    own_signals, n_ranked, positions = _plan(names, tuple(named))
    columns = [legs[name].scores for name in names]
    columns += [signals[name] for name in own_signals]
    n_values, n = len(columns), len(columns[0]) if columns else 0
    if n == 0:
        return np.empty((positions.size, 0))
    # Few calls, and reductions by their plain names: on so few numbers a call is what takes time.
    in_blocks = len(_BLOCKS) * n_values
    rows = np.empty((in_blocks + n_ranked + len(ACROSS_LEGS), n))
    values, gaps, z, tops = rows[:in_blocks].reshape(len(_BLOCKS), n_values, n)
    log_ranks, across = rows[in_blocks : -len(ACROSS_LEGS)], rows[-len(ACROSS_LEGS) :]
    np.concatenate(columns, out=values.reshape(-1))
    magnitudes = np.abs(values)
    is_complete = np.maximum.reduce(magnitudes, axis=None) < INVALID_MAGNITUDE  # no NaN is less
    if not is_complete:
        values[magnitudes >= INVALID_MAGNITUDE] = np.nan
    for value, name in zip(values, names, strict=False):
        _make_additive(value, legs[name].kind)
    share, log_rank, reciprocal_rank = _tables(n)
    tops[:] = np.maximum.reduce(values, axis=1, keepdims=True)
    np.subtract(values, tops, out=gaps)
    # From the gaps, which are 0 where all values are equal: their own mean may be rounded.
    np.subtract(gaps, gaps.dot(share)[:, None], out=z)
    spread = np.sqrt((z * z).dot(share))
    spread[spread == 0.0] = np.inf
    np.divide(z, spread[:, None], out=z)
    ascending = values[:n_ranked].copy()
    ascending.sort()
    at_most = np.empty((n_ranked, n), np.intp)
    for row, value, ordered in zip(at_most, values, ascending, strict=False):
        row[:] = ordered.searchsorted(value, "right")
    if not is_complete:
        at_most[np.isnan(values[:n_ranked])] = 0
    log_rank.take(at_most, out=log_ranks, mode="clip")
    if len(names) > 1:
        reciprocal_ranks, in_all_legs = across
        by_leg = reciprocal_rank.take(at_most[: len(names)])
        np.add.reduce(by_leg, axis=0, out=reciprocal_ranks)
        in_all_legs.fill(1.0)
        for value, name in zip(values, names, strict=False):
            if legs[name].kind is ScoreKind.RATIO:
                in_all_legs *= np.sign(value)
    return rows.take(positions, axis=0)


def _make_additive(scores: FloatArray, kind: ScoreKind) -> None:
    """Put scores, in place, on a scale where equal differences have equal meaning."""
    if kind is ScoreKind.RATIO:
        np.log1p(np.maximum(scores, 0.0), out=scores)
    elif kind is ScoreKind.PROBABILITY:
        scores[:] = log_odds(scores)
    elif kind is ScoreKind.RANK:
        raise ConfigurationError(
            "scores of kind 'rank' carry only order, so no feature can be made from them; pass "
            "each leg's scores separately"
        )


def legs_of(ranking: Ranking, order: Sequence[int]) -> Mapping[str, Leg]:
    """Return the legs of a ranking, or its own scores as the leg ``RANKING`` if it has none.

    If the scores carry only order, the leg is minus the logarithm of the rank, by the positions of
    the usable candidates, best first.
    """
    if ranking.legs:
        return ranking.legs
    if ranking.kind is ScoreKind.RANK:
        scores = np.full(len(ranking), np.nan)
        scores[list(order)] = -np.log(np.arange(1, len(order) + 1))
        return {RANKING: Leg(scores, ScoreKind.LOGIT)}
    return {RANKING: Leg(np.array(ranking.scores, dtype=np.float64), ranking.kind)}
