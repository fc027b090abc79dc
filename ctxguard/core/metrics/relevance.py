"""Measures of relevance for one query: recall, precision, RR, DCG and nDCG.

``ranked_grades`` are the grades of the retrieved passages in rank order, 0 if a passage is not
relevant or was not judged; ``judged_grades`` are those of all passages judged for the query, in
any order. A grade of at least ``min_grade`` counts as relevant. Pure: no I/O, no clock, no
logging.
"""

from collections.abc import Sequence
from typing import Literal

from ctxguard.core.metrics.arithmetic import check_k, discounted_sum, share
from ctxguard.errors import ConfigurationError

Gain = Literal["linear", "exponential"]


def recall_at_k(
    ranked_grades: Sequence[int],
    judged_grades: Sequence[int],
    k: int | None = None,
    *,
    min_grade: int = 1,
) -> float | None:
    """Share of the relevant passages that the top k holds.

    Args:
        ranked_grades: Grades in rank order.
        judged_grades: Grades of all passages judged for the query, in any order.
        k: Cut-off, ≥ 1; None for the recall of a whole context, which is 0 if it is empty.
        min_grade: The least grade that counts as relevant.

    Returns:
        A share in [0, 1]; None if no passage is relevant.

    Raises:
        ConfigurationError: k < 1, or more relevant passages ranked than judged (repeated ids).

    >>> recall_at_k([1, 0, 1, 0, 1, 0, 0, 0, 0, 1], [1, 1, 1, 1], k=3), recall_at_k([2], [2, 1, 0])
    (0.5, 0.5)
    >>> recall_at_k([0, 0], [0], k=2) is None
    True
    """
    ranks = _relevant_ranks(_top(ranked_grades, k), min_grade)
    return share(len(ranks), _n_relevant(ranked_grades, judged_grades, min_grade))


def precision_at_k(
    ranked_grades: Sequence[int], k: int | None = None, *, min_grade: int = 1
) -> float | None:
    """Share of the top k that is relevant.

    Args:
        ranked_grades: Grades in rank order.
        k: Cut-off, ≥ 1; a ranking shorter than k counts as padded with irrelevant passages, as
            trec_eval does. None takes the length of the ranking: the precision of a context.
        min_grade: The least grade that counts as relevant.

    Returns:
        A share in [0, 1]; None for an empty context if k is None.

    >>> precision_at_k([1, 0], k=4), precision_at_k([1, 0]), precision_at_k([])
    (0.25, 0.5, None)
    """
    ranks = _relevant_ranks(_top(ranked_grades, k), min_grade)
    return share(len(ranks), len(ranked_grades) if k is None else k)


def reciprocal_rank(
    ranked_grades: Sequence[int],
    judged_grades: Sequence[int],
    k: int | None = None,
    *,
    min_grade: int = 1,
) -> float | None:
    """1 / rank of the first relevant passage; its mean over queries is the MRR.

    Args:
        ranked_grades: Grades in rank order.
        judged_grades: Grades of all passages judged for the query, in any order.
        k: Cut-off, ≥ 1; passages beyond it count as not found. None disables it.
        min_grade: The least grade that counts as relevant.

    Returns:
        A value in [0, 1]; 0 if relevant passages exist but none was found; None if none exists.

    >>> reciprocal_rank([0, 0, 1], [1]), reciprocal_rank([0, 0, 1], [1], k=2)
    (0.3333333333333333, 0.0)
    >>> reciprocal_rank([0], []) is None
    True
    """
    ranks = _relevant_ranks(_top(ranked_grades, k), min_grade)
    if not _n_relevant(ranked_grades, judged_grades, min_grade):
        return None
    return 1.0 / ranks[0] if ranks else 0.0


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
    if not _n_relevant(ranked_grades, judged_grades, min_grade=1):
        return None
    ideal = sorted(judged_grades, reverse=True)
    return dcg(ranked_grades, k, gain=gain) / dcg(ideal, k, gain=gain)


def _top(ranked_grades: Sequence[int], k: int | None) -> Sequence[int]:
    if k is None:
        return ranked_grades
    check_k(k)
    return ranked_grades[:k]


def _relevant_ranks(ranked_grades: Sequence[int], min_grade: int) -> list[int]:
    return [rank for rank, grade in enumerate(ranked_grades, start=1) if grade >= min_grade]


def _n_relevant(ranked_grades: Sequence[int], judged_grades: Sequence[int], min_grade: int) -> int:
    n_relevant = sum(grade >= min_grade for grade in judged_grades)
    n_ranked = sum(grade >= min_grade for grade in ranked_grades)
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
