"""The features of a candidate: the model's inputs, from its scores and named signals.

For each leg that scored the candidates: its value, the gap to the leg's best, its z-score in
the list, the logarithm of its rank, and the leg's best value; with several legs, the sum of
reciprocal ranks and whether every leg matched; and for each named signal the transforms that
``TRANSFORMS`` lists (DESIGN.md §5). Pure; numpy alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.fusion import RECIPROCAL_RANK_CONSTANT
from ctxguard.core.scores import INVALID_MAGNITUDE
from ctxguard.core.types import FloatArray, Leg, Ranking, ScoreKind
from ctxguard.errors import ConfigurationError

PER_LEG = ("value", "gap", "z", "log_rank", "top")
ACROSS_LEGS = ("reciprocal_ranks", "in_all_legs")

RANKING = "ranking"
"""Stands for a leg's name: the scores of a ranking without legs."""

TRANSFORMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "match": ("raw", "z", "gap"),
        "vector_match": ("raw", "z", "gap"),
        "length": ("raw", "z"),
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
"""Transforms of each signal that a model may use; none for the ranker's."""

OTHER_TRANSFORMS = ("raw", "z", "gap")
"""Transforms of any other signal, such as a wrapped retriever's own."""

_OF_A_COLUMN = ("raw",)

_SUFFIXES = ("z", "gap", "log_rank")
_BLOCKS = {"raw": 0, "value": 0, "gap": 1, "z": 2, "log_rank": 3, "top": 4}
_PROBABILITY_EDGE = 1e-9
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
    """Return the transforms of a signal; those of metadata compare the candidates already.

    >>> transforms_of("updated_at:age"), transforms_of("freshness")
    (('raw',), ('raw', 'z', 'gap'))
    """
    return TRANSFORMS.get(name, _OF_A_COLUMN if ":" in name else OTHER_TRANSFORMS)


def signal_of(feature: str) -> str:
    """Return the signal that a named feature is made from.

    >>> signal_of("ranker.log_rank"), signal_of("ranker")
    ('ranker', 'ranker')
    """
    return _parsed(feature)[0]


def _parsed(feature: str) -> tuple[str, str]:
    """Split a named feature into signal and transform.

    Raises:
        ConfigurationError: it is not the name of a feature.
    """
    name, dot, suffix = feature.partition(".")
    if not name or (dot and suffix not in _SUFFIXES):
        raise ConfigurationError(
            f"{feature!r} is no feature: it must be the name of a signal, which has no full stop, "
            f"alone or followed by .{', .'.join(_SUFFIXES)}"
        )
    return name, suffix or "raw"


def feature_names(legs: Iterable[str], named: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of the features of a set of legs, in the order of ``features``' rows.

    Args:
        legs: Names of legs.
        named: Features of named signals, which follow as they are.

    >>> feature_names(["dense"], ["ranker.z"])
    ('dense.value', 'dense.gap', 'dense.z', 'dense.log_rank', 'dense.top', 'ranker.z')
    """
    legs = sorted(legs)
    names = [f"{leg}.{feature}" for leg in legs for feature in PER_LEG]
    return (*names, *(ACROSS_LEGS if len(legs) > 1 else ()), *named)


class _Plan(NamedTuple):
    """The position of each feature in the block of all transforms of all values.

    Attributes:
        signals: The named signals, which follow the legs as values.
        ranked: The values whose rank is needed.
        rows: Shape (n_features,), rows of the block.
    """

    signals: tuple[str, ...]
    ranked: tuple[int, ...]
    rows: NDArray[np.intp]


@lru_cache(maxsize=256)
def _plan(legs: tuple[str, ...], named: tuple[str, ...]) -> _Plan:
    parsed = [_parsed(feature) for feature in named]
    signals = tuple(dict.fromkeys(name for name, _ in parsed))
    at = {name: len(legs) + row for row, name in enumerate(signals)}
    wanted = [(leg, feature) for leg in range(len(legs)) for feature in PER_LEG]
    named_at = [(at[name], transform) for name, transform in parsed]
    n = len(legs) + len(signals)
    across = [len(PER_LEG) * n, len(PER_LEG) * n + 1] if len(legs) > 1 else []
    return _Plan(
        signals,
        (*range(len(legs)), *[row for row, transform in named_at if transform == "log_rank"]),
        np.array(
            [_BLOCKS[feature] * n + row for row, feature in wanted]
            + across
            + [_BLOCKS[transform] * n + row for row, transform in named_at],
            dtype=np.intp,
        ),
    )


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
    plan = _plan(names, tuple(named))
    columns = [legs[name].scores for name in names]
    columns += [signals[name] for name in plan.signals]
    n_values, n = len(columns), len(columns[0]) if columns else 0
    if n == 0:
        return np.empty((plan.rows.size, 0))
    block = np.empty((len(PER_LEG) * n_values + len(ACROSS_LEGS), n))
    values, gaps, z, log_ranks, tops = block[: len(PER_LEG) * n_values].reshape(-1, n_values, n)
    np.concatenate(columns, out=values.reshape(-1))
    garbage = np.abs(values) >= INVALID_MAGNITUDE
    if np.logical_or.reduce(garbage, axis=None):
        values[garbage] = np.nan
    for value, name in zip(values, names, strict=False):
        _make_additive(value, legs[name].kind)
    # The reductions by their plain names: methods of arrays take twice as long on so few numbers.
    top = np.maximum.reduce(values, axis=1, keepdims=True)
    tops[:] = top
    np.subtract(values, top, out=gaps)
    np.subtract(values, np.add.reduce(values, axis=1, keepdims=True) / n, out=z)
    spread = np.sqrt(np.add.reduce(z * z, axis=1, keepdims=True) / n)
    # Rounding alone would spread equal values.
    lowest = np.minimum.reduce(values, axis=1, keepdims=True)
    spread[(lowest == top) | (spread == 0.0)] = np.inf
    np.divide(z, spread, out=z)
    for row in plan.ranked:
        value, rank = values[row], log_ranks[row]
        ascending = value.copy()
        ascending.sort()
        np.subtract(n + 1.0, ascending.searchsorted(value, "right"), out=rank)
        if top[row, 0] != top[row, 0]:
            rank += 0.0 * value  # no value, no rank
    if len(names) > 1:
        reciprocal, matched = block[-2], block[-1]
        by_leg = 1.0 / (RECIPROCAL_RANK_CONSTANT + log_ranks[: len(names)])
        np.add.reduce(by_leg, axis=0, out=reciprocal)
        matched[:] = 1.0
        for value, name in zip(values, names, strict=False):
            if legs[name].kind is ScoreKind.RATIO:
                matched *= value > 0.0
    for row in plan.ranked:
        np.log(log_ranks[row], out=log_ranks[row])
    return block.take(plan.rows, axis=0)


def _make_additive(scores: FloatArray, kind: ScoreKind) -> None:
    """Put scores on a scale where equal differences have equal meaning."""
    if kind is ScoreKind.RATIO:
        np.log1p(np.maximum(scores, 0.0), out=scores)
    elif kind is ScoreKind.PROBABILITY:
        clipped = np.clip(scores, _PROBABILITY_EDGE, 1.0 - _PROBABILITY_EDGE)
        np.log(clipped / (1.0 - clipped), out=scores)
    elif kind is ScoreKind.RANK:
        raise ConfigurationError(
            "scores of kind 'rank' carry order only and give no feature; hand the legs over apart"
        )


def legs_of(ranking: Ranking, order: Sequence[int]) -> Mapping[str, Leg]:
    """Return the legs of a ranking, or its own scores as the leg ``RANKING`` if it has none.

    If the scores carry order only, the leg is minus the logarithm of the rank.

    Args:
        ranking: The ranking.
        order: Positions of the usable candidates, best first.

    Returns:
        Legs whose scores are in the ranking's own order.
    """
    if ranking.legs:
        return ranking.legs
    if ranking.kind is ScoreKind.RANK:
        scores = np.full(len(ranking), np.nan)
        scores[list(order)] = -np.log(np.arange(1, len(order) + 1))
        return {RANKING: Leg(scores, ScoreKind.LOGIT)}
    return {RANKING: Leg(np.array(ranking.scores, dtype=np.float64), ranking.kind)}
