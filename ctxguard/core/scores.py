"""Defines score kinds, with their ranges and directions, and scores relative to a ranking's best.

The relative score is r_i = exp(−(φ(s_top) − φ(s_i)) / T), where φ depends on the kind of score
(DESIGN.md §4). A retriever's order is evidence of the direction: distances declared as ``cosine``
would serve the worst passages first. Pure: no I/O, no clock, no logging.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from operator import lt
from typing import cast

import numpy as np

from ctxguard.core.types import FloatArray, Ranking, ScoreKind
from ctxguard.errors import ConfigurationError

INVALID_MAGNITUDE = 1e37
"""Scores at or beyond this are padding, not scores: faiss pads with −3.4e38."""

_ROUNDING = 1e-4
"""How far single-precision rounding may take a cosine or probability out of its range."""

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

LEAST_CONCORDANT = 0.25
"""The share of concordant pairs up to which an order contradicts the scores.

It is 0 where scores have the wrong direction, and a half where they have nothing to do with the
order. Lists that were fused or reranked, and show another score than the one that ordered them, lie
above a half on the mean, and below a quarter now and then.
"""

MOST_COMPARED = 100
"""The most candidates of a list to compare, so that time does not grow with the square of its
length; their 4,950 pairs are enough."""

_TIE = 1e-4
"""Scores that differ by no more than this share of the largest count as equal: with quantised
vectors or single precision, an engine's order may differ from that of the scores it shows."""

_SIMILARITIES = (ScoreKind.COSINE, ScoreKind.RATIO, ScoreKind.INNER_PRODUCT)


def is_valid(score: object) -> bool:
    """Return whether a value is a usable score: a finite number of sane magnitude."""
    if isinstance(score, str | bytes):  # float() would read digits
        return False
    try:
        return -INVALID_MAGNITUDE < float(score) < INVALID_MAGNITUDE  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False


def all_valid(scores: Sequence[object]) -> bool:
    """Return whether every value is a usable score; plain numbers take three passes in C."""
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
    """Return whether scores that span [lowest, highest] can be of this kind."""
    low, high = DOMAIN[kind]
    return low <= lowest and highest <= high


def log_odds(probabilities: FloatArray | float) -> FloatArray:
    """Return ln(p / (1 − p)) of probabilities of any shape, finite at 0 and 1, NaN for NaN.

    >>> log_odds(np.array([0.5, 1.0])).round(1).tolist()
    [0.0, 20.7]
    """
    clipped = np.clip(probabilities, _PROBABILITY_EDGE, 1.0 - _PROBABILITY_EDGE)
    return np.asarray(np.log(clipped / (1.0 - clipped)))


def logistic(odds: FloatArray | float) -> FloatArray:
    """Return 1 / (1 + exp(−x)) of log-odds of any shape, the inverse of ``log_odds``."""
    with np.errstate(over="ignore"):
        return np.asarray(1.0 / (1.0 + np.exp(np.negative(odds))))


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
            "scores of kind 'rank' (reciprocal-rank fusion) carry only order, so a relative "
            "filter on them measures the fusion constant; set min_ratio to 0, or use convex "
            "fusion or a reranker, whose scores can be compared"
        )
    exp = math.exp
    if kind is ScoreKind.PROBABILITY:
        scores = log_odds(np.asarray(scores, np.float64)).tolist()
        top = max(scores)
    return [1.0 if score >= top else exp((score - top) / temperature) for score in scores]


@lru_cache(maxsize=256)
def discounts(depth: int) -> FloatArray:
    """Return the rank discounts of UDCG and nDCG: 1 / log2(rank + 1) for ranks 1 … depth."""
    # numpy's logarithm differs by processor in the last digit.
    found = np.array([1.0 / math.log2(rank + 1) for rank in range(1, depth + 1)])
    found.setflags(write=False)
    return found


def concordance(
    scores: Sequence[float | None], ranks: Sequence[int | None] | None = None
) -> float | None:
    """Return the share of pairs in which the candidate with the better rank has the better score.

    Pairs with equal scores or ranks, and candidates without a usable score or rank, do not count.

    Args:
        scores: Shape (n,), higher is better.
        ranks: Shape (n,), 1 is best; None if the candidates are in rank order.

    Returns:
        In [0, 1]; None if no pair counts.

    >>> concordance([0.9, 0.5, 0.1]), concordance([0.1, 0.5, 0.9]), concordance([0.5, 0.5])
    (1.0, 0.0, None)
    >>> concordance([0.9, 0.5], ranks=[2, 1])
    0.0
    """
    rows = [
        (score, rank)
        for score, rank in zip(scores, range(len(scores)) if ranks is None else ranks, strict=False)
        if rank is not None and score is not None and is_valid(score)
    ][:MOST_COMPARED]
    if len(rows) < 2:
        return None
    values, places = np.array(rows, dtype=np.float64).T
    higher = values[:, None] - values
    higher[np.abs(higher) <= _TIE * np.abs(values).max()] = 0.0
    agrees = np.sign(higher) * np.sign(places - places[:, None])
    told = np.count_nonzero(agrees)
    return float(np.count_nonzero(agrees > 0.0) / told) if told else None


def differ(scores: Sequence[float]) -> bool:
    """Return whether any two usable scores differ, so that they define an order."""
    lowest, highest = min(scores, default=0.0), max(scores, default=0.0)
    return highest - lowest > _TIE * max(abs(lowest), abs(highest))


def is_opposed(scores: Sequence[float | None], ranks: Sequence[int | None] | None = None) -> bool:
    """Return whether an order contradicts the scores; the arguments are those of `concordance`."""
    with suppress(TypeError):  # some are not numbers
        numbers = cast(Sequence[float], scores)
        # Nearly always they fall; a third of the time of pairs compared one by one. NaN sorts
        # anywhere, and shows in the sum.
        if (
            sorted(numbers, reverse=True) == [*numbers]
            and math.isfinite(sum(numbers))
            and (ranks is None or all(map(lt, ranks, islice(ranks, 1, None))))  # type: ignore[arg-type]
        ):
            return False
    share = concordance(scores, ranks)
    return share is not None and share <= LEAST_CONCORDANT


def is_contradicted(ranking: Ranking) -> bool:
    """Return whether the engine's order, by its ranks or else as given, contradicts the scores."""
    known = ranking.contradicted
    return is_opposed(ranking.scores, ranking.ranks) if known is None else known


def direction_advice(kind: ScoreKind, lowest: float, highest: float) -> str:
    """Explain how to pass scores of a declared kind that rise from the best rank to the worst.

    >>> direction_advice(ScoreKind.COSINE, 0.1, 0.7)
    "these look like distances: return -distance, and declare score_kind='distance'"
    """
    if kind is ScoreKind.DISTANCE and within_domain(kind, lowest, highest):
        fits = [each for each in _SIMILARITIES if within_domain(each, -highest, -lowest)]
        return (
            "these look like similarities whose sign was reversed as if they were distances: "
            "return them as the engine gives them, and declare what they are, such as "
            + " or ".join(f"score_kind={each.value!r}" for each in fits)
        )
    if lowest >= 0.0:
        declare = "" if kind is ScoreKind.DISTANCE else ", and declare score_kind='distance'"
        return f"these look like distances: return -distance{declare}"
    if highest <= 0.0:
        return (
            "these look like similarities with the opposite sign, as Milvus Lite gives BM25: "
            "return -score, and declare score_kind='ratio' for BM25"
        )
    return (
        "no score_kind fits: return -score if lower is better, or hits without scores, so that "
        "only their order counts"
    )
