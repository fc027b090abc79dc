"""Measures of relevance for one query: recall, precision, hit rate, RR, AP, DCG and nDCG.

``ranked_grades`` are the grades of the retrieved passages in rank order, 0 if a passage is not
relevant or was not judged; ``judged_grades`` are those of all passages judged for the query, in
any order. A grade of at least ``min_grade`` counts as relevant. Pure: no I/O, no clock, no
logging.
"""

import math
from collections.abc import Sequence
from typing import Literal

from ctxguard.core.metrics.arithmetic import check_k, discounted_sum, share
from ctxguard.errors import ConfigurationError

Gain = Literal["linear", "exponential"]


def recall_at_k(
    ranked_grades: Sequence[int], judged_grades: Sequence[int], k: int, *, min_grade: int = 1
) -> float | None:
    """Return the share of the relevant passages that the top k holds.

    Args:
        ranked_grades: Grades in rank order.
        judged_grades: Grades of all passages judged for the query, in any order.
        k: Cut-off, ≥ 1.
        min_grade: The least grade that counts as relevant.

    Returns:
        A share in [0, 1]; None if no passage is relevant.

    Raises:
        ConfigurationError: k < 1, or more relevant passages ranked than judged (repeated ids).

    >>> recall_at_k([1, 0, 1, 0, 1, 0, 0, 0, 0, 1], [1, 1, 1, 1], k=3)
    0.5
    >>> recall_at_k([0, 0], [0], k=2) is None
    True
    """
    ranks = _relevant_ranks(_top(ranked_grades, k), min_grade)
    return share(len(ranks), _n_relevant(ranked_grades, judged_grades, min_grade))


def context_recall(
    ranked_grades: Sequence[int], judged_grades: Sequence[int], *, min_grade: int = 1
) -> float | None:
    """Return the share of the relevant passages that the context holds, whatever its size.

    Returns:
        A share in [0, 1]; None if no passage is relevant; otherwise 0 for an empty context.

    >>> context_recall([2, 0], [2, 1, 0])
    0.5
    """
    ranks = _relevant_ranks(ranked_grades, min_grade)
    return share(len(ranks), _n_relevant(ranked_grades, judged_grades, min_grade))


def precision_at_k(
    ranked_grades: Sequence[int], k: int | None = None, *, min_grade: int = 1
) -> float | None:
    """Return the share of the top k that is relevant.

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


def judged_precision(
    ranked_grades: Sequence[int], judged: Sequence[bool], *, min_grade: int = 1
) -> float | None:
    """Return the share of the context's judged passages that is relevant, as in ``trec_eval -J``.

    ``precision_at_k`` counts a passage that was not judged as not relevant. The two are equal if
    all passages are judged. Sakai, "Alternatives to Bpref", SIGIR 2007, on such condensed lists.

    Args:
        ranked_grades: Grades in rank order.
        judged: Whether each passage has a label, as long as ``ranked_grades``.
        min_grade: The least grade that counts as relevant.

    Returns:
        A share in [0, 1]; None if the context has no judged passage.

    Raises:
        ConfigurationError: lengths differ.

    >>> judged_precision([1, 0, 0], [True, False, True]), judged_precision([0], [False])
    (0.5, None)
    """
    if len(judged) != len(ranked_grades):
        raise ConfigurationError(
            f"judged has {len(judged)} values for {len(ranked_grades)} passages"
        )
    condensed = [grade for grade, known in zip(ranked_grades, judged, strict=True) if known]
    return precision_at_k(condensed, min_grade=min_grade)


def hit_rate_at_k(
    ranked_grades: Sequence[int], judged_grades: Sequence[int], k: int, *, min_grade: int = 1
) -> float | None:
    """Return 1.0 if the top k holds a relevant passage, else 0.0; None if none is relevant.

    >>> hit_rate_at_k([0, 1], [1], k=2), hit_rate_at_k([0, 1], [1], k=1)
    (1.0, 0.0)
    """
    ranks = _relevant_ranks(_top(ranked_grades, k), min_grade)
    return float(bool(ranks)) if _n_relevant(ranked_grades, judged_grades, min_grade) else None


def reciprocal_rank(
    ranked_grades: Sequence[int],
    judged_grades: Sequence[int],
    k: int | None = None,
    *,
    min_grade: int = 1,
) -> float | None:
    """Return 1 / rank of the first relevant passage; its mean over queries is the MRR.

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


def average_precision(
    ranked_grades: Sequence[int],
    judged_grades: Sequence[int],
    k: int | None = None,
    *,
    min_grade: int = 1,
) -> float | None:
    """Sum precision@i over the ranks i of relevant passages, divided by all relevant ones.

    Returns:
        A value in [0, 1]; None if no passage is relevant.

    >>> average_precision([1, 0, 1], [1, 1])
    0.8333333333333333
    """
    ranks = _relevant_ranks(_top(ranked_grades, k), min_grade)
    return share(_precision_sum(ranks), _n_relevant(ranked_grades, judged_grades, min_grade))


def context_precision(ranked_grades: Sequence[int], *, min_grade: int = 1) -> float | None:
    """Return the mean of precision@i over the ranks i of the context's own relevant passages.

    Depends on the order and ignores relevant passages outside the context, as defined by tools
    that judge RAG contexts; ``average_precision`` divides by all relevant passages instead.

    Returns:
        A value in [0, 1]; 0 if the context holds no relevant passage; None if it is empty.

    >>> context_precision([1, 0, 1]), context_precision([0, 1, 1])
    (0.8333333333333333, 0.5833333333333333)
    """
    if not ranked_grades:
        return None
    ranks = _relevant_ranks(ranked_grades, min_grade)
    return _precision_sum(ranks) / max(len(ranks), 1)


def dcg(ranked_grades: Sequence[int], k: int | None = None, *, gain: Gain = "linear") -> float:
    """Return the discounted cumulative gain: Σ gain(grade_i) / log2(i + 1) over the ranks i.

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
    """Divide DCG by that of the best possible order of all judged passages.

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


def _precision_sum(relevant_ranks: Sequence[int]) -> float:
    return math.fsum(count / rank for count, rank in enumerate(relevant_ranks, start=1))


def _gain(grade: int, gain: Gain) -> float:
    if gain == "linear":
        return float(max(grade, 0))
    if gain == "exponential":
        return 2.0 ** max(grade, 0) - 1.0
    raise ConfigurationError(f"gain {gain!r} is unknown; use 'linear' or 'exponential'")
