"""Score kinds: the range of each, and the comparison of a score with the best of its ranking.

The relative score is r_i = exp(−(φ(s_top) − φ(s_i)) / T), where φ depends on the kind of score
(DESIGN.md §4). Pure: no I/O, no clock, no logging.
"""

import math
from collections.abc import Sequence
from typing import cast

from ctxguard.core.types import ScoreKind
from ctxguard.errors import ConfigurationError

INVALID_MAGNITUDE = 1e37
"""Scores at or beyond this are padding, not scores: faiss pads with −3.4e38."""

_ROUNDING = 1e-4
"""Distance by which single-precision rounding may leave the range of cosine or probability."""

_PROBABILITY_EDGE = 1e-9
"""Probabilities are clipped this far from 0 and 1, whose log-odds are infinite."""

DOMAIN: dict[ScoreKind, tuple[float, float]] = {
    ScoreKind.RATIO: (0.0, INVALID_MAGNITUDE),
    ScoreKind.COSINE: (-1.0 - _ROUNDING, 1.0 + _ROUNDING),
    ScoreKind.INNER_PRODUCT: (-INVALID_MAGNITUDE, INVALID_MAGNITUDE),
    ScoreKind.LOGIT: (-INVALID_MAGNITUDE, INVALID_MAGNITUDE),
    ScoreKind.DISTANCE: (-INVALID_MAGNITUDE, _ROUNDING),
    ScoreKind.PROBABILITY: (-_ROUNDING, 1.0 + _ROUNDING),
    ScoreKind.RANK: (-INVALID_MAGNITUDE, INVALID_MAGNITUDE),
}
"""The range of each kind of score."""


def is_valid(score: object) -> bool:
    """Tell whether a value is a usable score: a finite number of sane magnitude.

    >>> is_valid(0.3), is_valid(float("nan")), is_valid(None), is_valid(-3.4e38)
    (True, False, False, False)
    """
    if isinstance(score, str | bytes):  # float() would read digits
        return False
    try:
        return -INVALID_MAGNITUDE < float(score) < INVALID_MAGNITUDE  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False


def all_valid(scores: Sequence[object]) -> bool:
    """Tell whether every value is a usable score; for plain numbers, three passes in C.

    >>> all_valid([0.3, 7]), all_valid([0.3, float("nan")]), all_valid([])
    (True, False, True)
    """
    numbers = cast(Sequence[float], scores)
    try:
        # A NaN hides from min and max, never from the sum.
        if (
            min(numbers) > -INVALID_MAGNITUDE
            and max(numbers) < INVALID_MAGNITUDE
            and math.isfinite(sum(numbers))
        ):
            return True
    except (TypeError, ValueError, ArithmeticError):
        pass
    return all(map(is_valid, scores))


def within_domain(kind: ScoreKind, lowest: float, highest: float) -> bool:
    """Tell whether a ranking whose scores span [lowest, highest] can be of this kind.

    >>> within_domain(ScoreKind.RATIO, -0.2, 3.0)
    False
    """
    low, high = DOMAIN[kind]
    return low <= lowest and highest <= high


def is_relative(kind: ScoreKind) -> bool:
    """Tell whether scores of this kind can be compared with the top by more than rank."""
    return kind is not ScoreKind.RANK


def _logit(probability: float) -> float:
    if not _PROBABILITY_EDGE <= probability <= 1.0 - _PROBABILITY_EDGE:
        probability = min(max(probability, _PROBABILITY_EDGE), 1.0 - _PROBABILITY_EDGE)
    return math.log(probability / (1.0 - probability))


def relative_scores(
    kind: ScoreKind, scores: Sequence[float], temperature: float = 1.0
) -> list[float]:
    """Compute the relative score r in [0, 1] of each passage against the top of its own ranking.

    On ``ratio`` scores with temperature 1 it is exactly ``score / top``. An all-zero ranking
    has r = 1 throughout: no passage is worse than the top.

    Args:
        kind: The kind of the scores.
        scores: The valid scores of one ranking, the best among them, in any order.
        temperature: T > 0; larger is more forgiving.

    Returns:
        r of each, in the order given; 0 only for a zero score on a ratio scale, or by underflow.

    Raises:
        ConfigurationError: for ``rank``, whose scores carry no distances, unless all are equal.

    >>> relative_scores(ScoreKind.RATIO, [10.0, 7.0])
    [1.0, 0.7]
    >>> round(relative_scores(ScoreKind.LOGIT, [2.0, 1.0])[1], 4)
    0.3679
    """
    if len(scores) == 0:  # an array has no truth value
        return []
    top = max(scores)
    if kind is ScoreKind.RATIO:
        ratios = [1.0 if score >= top else score / top for score in scores]
        return ratios if temperature == 1.0 else [ratio ** (1.0 / temperature) for ratio in ratios]
    if kind is ScoreKind.RANK and any(score < top for score in scores):
        raise ConfigurationError(
            "scores of kind 'rank' (reciprocal-rank fusion) carry order only, so a relative "
            "filter on them measures the fusion constant; set min_ratio to 0, or use convex "
            "fusion or a reranker, whose scores can be compared"
        )
    exp, log = math.exp, math.log
    if kind is ScoreKind.PROBABILITY:
        if top > 1.0 - _PROBABILITY_EDGE or min(scores) < _PROBABILITY_EDGE:
            scores = [_logit(score) for score in scores]
        else:
            # Inlined: a call for each of a hundred scores takes four times as long.
            scores = [log(score / (1.0 - score)) for score in scores]
        top = max(scores)
    return [1.0 if score >= top else exp((score - top) / temperature) for score in scores]
