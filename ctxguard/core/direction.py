"""Compares the order of a list with its scores: a retriever's order is evidence of their direction.

Handed over as ``cosine``, distances would serve the worst passages first. Pure: no I/O, no clock,
no logging.
"""

from collections.abc import Sequence
from itertools import islice
from operator import ge, lt

import numpy as np

from ctxguard.core.scores import is_valid, within_domain
from ctxguard.core.types import Ranking, ScoreKind

LEAST_CONCORDANT = 0.25
"""The share of concordant pairs up to which an order contradicts the scores.

It is 0 where scores have the wrong direction, and a half where they have nothing to do with the
order. Lists that were fused or reranked, and show another score than the one that ordered them, lie
above a half on the mean, and below a quarter now and then.
"""

MOST_COMPARED = 100
"""Candidates of a list that are compared, so that time does not grow with the square of its length;
these 4,950 pairs tell enough."""

_TIE = 1e-4
"""Scores that differ by no more than this share of the largest are equal: quantised vectors, and
single precision, order them otherwise than they are shown."""


def concordance(
    scores: Sequence[float | None], ranks: Sequence[int | None] | None = None
) -> float | None:
    """Return the share of pairs in which the candidate of the better rank has the better score.

    Pairs of equal scores or ranks, and candidates without a usable score or a rank, tell nothing.

    Args:
        scores: Shape (n,), higher is better.
        ranks: Shape (n,), 1 is best; None where the candidates are in their order.

    Returns:
        In [0, 1]; None where no pair tells anything.

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
    return np.count_nonzero(agrees > 0.0) / told if told else None


def is_contradicted(ranking: Ranking) -> bool:
    """Tell whether the engine's order contradicts the scores: its ranks, else that of the columns.

    >>> from ctxguard.core.types import Hit
    >>> is_contradicted(Ranking.from_hits([Hit("a", 0.1), Hit("b", 0.7)], "cosine"))
    True
    """
    if ranking.contradicted is not None:
        return ranking.contradicted
    scores, ranks = ranking.scores, ranking.ranks
    if _falls(scores) and (ranks is None or isinstance(ranks, range) or _rises(ranks)):
        return False
    share = concordance(scores, ranks)
    return share is not None and share <= LEAST_CONCORDANT


def _falls(scores: Sequence[float | None]) -> bool:
    try:
        return all(map(ge, scores, islice(scores, 1, None)))  # type: ignore[arg-type]
    except TypeError:
        return False


def _rises(ranks: Sequence[int | None]) -> bool:
    try:
        return all(map(lt, ranks, islice(ranks, 1, None)))  # type: ignore[arg-type]
    except TypeError:
        return False


def direction_advice(kind: ScoreKind, lowest: float, highest: float) -> str:
    """Say how scores that rise from the best rank to the worst are to be handed over.

    Args:
        kind: The kind that was declared.
        lowest: The lowest of the scores.
        highest: The highest.

    >>> direction_advice(ScoreKind.COSINE, 0.1, 0.7)
    "these look like distances: hand over -distance, and declare score_kind='distance'"
    """
    if kind is ScoreKind.DISTANCE and within_domain(kind, lowest, highest):
        fits = [each for each in _SIMILARITIES if within_domain(each, -highest, -lowest)]
        return (
            "these look like similarities whose sign was turned round as if they were distances: "
            "hand them over as the engine gives them, and declare what they are, such as "
            + " or ".join(f"score_kind={each.value!r}" for each in fits)
        )
    if lowest >= 0.0:
        declare = "" if kind is ScoreKind.DISTANCE else ", and declare score_kind='distance'"
        return f"these look like distances: hand over -distance{declare}"
    if highest <= 0.0:
        return (
            "these look like similarities of the opposite sign, as Milvus Lite gives BM25: hand "
            "over -score, and declare score_kind='ratio' for BM25"
        )
    return (
        "no score_kind fits: hand over -score if a lower one is better, or hits without scores, "
        "whose order alone then counts"
    )


_SIMILARITIES = (ScoreKind.COSINE, ScoreKind.RATIO, ScoreKind.INNER_PRODUCT)
