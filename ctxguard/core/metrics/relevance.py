"""Measures of relevance for one query: recall, precision, RR, DCG and nDCG.

``ranked_grades`` are the grades of the retrieved passages in rank order, 0 if a passage is not
relevant or was not judged; ``judged_grades`` are those of all passages judged for the query, in
any order. A grade above 0 is relevant. Pure: no I/O, no clock, no logging.
"""

from collections.abc import Sequence
from typing import Literal

from ctxguard.core.metrics.arithmetic import discounted_sum, share
from ctxguard.errors import ConfigurationError

Gain = Literal["linear", "exponential"]


def recall(ranked_grades: Sequence[int], judged_grades: Sequence[int]) -> float | None:
    """Share of the relevant passages that are ranked.

    Args:
        ranked_grades: Grades in rank order.
        judged_grades: Grades of all passages judged for the query, in any order.

    Returns:
        A share in [0, 1]; None if no passage is relevant.

    Raises:
        ConfigurationError: more relevant passages ranked than judged (repeated ids).

    >>> recall([1, 0, 1], [1, 1, 1, 1]), recall([0, 0], [0])
    (0.5, None)
    """
    n_relevant = _n_relevant(ranked_grades, judged_grades)
    return share(sum(grade > 0 for grade in ranked_grades), n_relevant)


def precision(ranked_grades: Sequence[int]) -> float | None:
    """Share of the ranked passages that are relevant; None if none is ranked.

    >>> precision([1, 0]), precision([])
    (0.5, None)
    """
    return share(sum(grade > 0 for grade in ranked_grades), len(ranked_grades))


def reciprocal_rank(ranked_grades: Sequence[int], judged_grades: Sequence[int]) -> float | None:
    """1 / rank of the first relevant passage; its mean over queries is the MRR.

    Returns:
        A value in [0, 1]; 0 if relevant passages exist but none was found; None if none exists.

    >>> reciprocal_rank([0, 0, 1], [1]), reciprocal_rank([0], [1]), reciprocal_rank([0], [])
    (0.3333333333333333, 0.0, None)
    """
    if not _n_relevant(ranked_grades, judged_grades):
        return None
    return next((1.0 / rank for rank, grade in enumerate(ranked_grades, 1) if grade > 0), 0.0)


def dcg(ranked_grades: Sequence[int], k: int | None = None, *, gain: Gain = "linear") -> float:
    """Discounted cumulative gain: Σ gain(grade_i) / log2(i + 1) over the 1-based ranks i.

    Järvelin and Kekäläinen, TOIS 2002. ``linear`` gain is the grade itself; ``exponential`` is
    2^grade − 1 (Burges et al., ICML 2005). A grade below 0 gains nothing.

    >>> round(dcg([3, 2, 3, 0, 1]), 4), round(dcg([3, 2], gain="exponential"), 4)
    (6.1487, 8.8928)
    """
    return discounted_sum([_gain(grade, gain) for grade in _top(ranked_grades, k)])


def ndcg(
    ranked_grades: Sequence[int],
    judged_grades: Sequence[int],
    k: int | None = None,
    *,
    gain: Gain = "linear",
) -> float | None:
    """DCG divided by that of the best possible order of all judged passages.

    Args:
        ranked_grades: Grades in rank order.
        judged_grades: Grades of all passages judged for the query, in any order.
        k: Cut-off of both, ≥ 1; None disables it.
        gain: ``linear`` or ``exponential``.

    Returns:
        A value in [0, 1]; None if no judged passage has a positive grade.

    >>> round(ndcg([0, 1, 0, 1, 1], [1, 1, 1]), 4)
    0.6797
    """
    if not _n_relevant(ranked_grades, judged_grades):
        return None
    ideal = sorted(judged_grades, reverse=True)
    return dcg(ranked_grades, k, gain=gain) / dcg(ideal, k, gain=gain)


def _top(ranked_grades: Sequence[int], k: int | None) -> Sequence[int]:
    if k is None:
        return ranked_grades
    if k < 1:
        raise ConfigurationError(f"k {k!r} must be at least 1: ranks start at 1")
    return ranked_grades[:k]


def _n_relevant(ranked_grades: Sequence[int], judged_grades: Sequence[int]) -> int:
    n_relevant = sum(grade > 0 for grade in judged_grades)
    n_ranked = sum(grade > 0 for grade in ranked_grades)
    if n_ranked > n_relevant:
        raise ConfigurationError(
            f"{n_ranked} relevant passages are ranked but only {n_relevant} were judged; pass "
            "the grades of all judged passages, and rank each passage once"
        )
    return n_relevant


def _gain(grade: int, gain: Gain) -> float:
    if gain == "linear":
        return float(max(grade, 0))
    if gain == "exponential":
        return 2.0 ** max(grade, 0) - 1.0
    raise ConfigurationError(f"gain {gain!r} is unknown; use 'linear' or 'exponential'")
