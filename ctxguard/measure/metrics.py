"""Defines the formula of every metric.

Formulas take tables by rank, shape (n, k): n contexts of labelled queries or of live requests. A
metric of judged requests is a ratio of two weighted sums of what each request adds to it. Pure.
"""

import math
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.words import count
from ctxguard.core.scores import discounts
from ctxguard.core.types import FloatArray
from ctxguard.errors import ConfigurationError
from ctxguard.measure.rows import FAILED, YES, Rows

NDCG_CUTOFF = 10


def share(part: NDArray[Any], whole: NDArray[Any]) -> FloatArray:
    """Divide; return NaN if the whole is 0, because a share of nothing is undefined.

    >>> share(np.array([1.0, 0.0]), np.array([4.0, 0.0])).tolist()
    [0.25, nan]
    """
    part, whole = np.broadcast_arrays(part, whole)
    undefined = np.full(part.shape, np.nan)
    return np.asarray(np.divide(part, whole, out=undefined, where=whole > 0))


def row_sums(values: FloatArray) -> FloatArray:
    """Sum each row, rounding once, so that every processor gives the same last digit."""
    return np.array([*map(math.fsum, values.tolist())])


def discounted(values: NDArray[Any]) -> FloatArray:
    """Discount values by rank as UDCG and nDCG do: value / log2(rank + 1)."""
    return np.asarray(values * discounts(values.shape[-1]))


def udcg(utilities: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Compute utility- and distraction-aware cumulative gain (docs/glossary.md): gain − harm.

    Args:
        utilities: Shape (n, k), by rank; 0 beyond the end of a context.

    Returns:
        Gain and harm, shape (n,) each: the discounted sums of the positive utilities, and of the
        negative ones as a positive number.

    >>> gain, harm = udcg(np.array([[1.0, 0.5, -0.5]]))
    >>> gain.round(4).tolist(), harm.tolist(), (gain - harm).round(4).tolist()
    ([1.3155], [0.25], [1.0655])
    """
    own = discounted(utilities)
    return row_sums(np.maximum(own, 0.0)), row_sums(np.maximum(-own, 0.0))


def ndcg(gains: NDArray[Any], best: NDArray[Any]) -> FloatArray:
    """Compute nDCG@10; NaN if there is nothing to gain.

    Args:
        gains: Shape (n, k), by rank.
        best: Shape (n, 10), the highest possible gains, descending.
    """
    found = row_sums(discounted(gains[:, :NDCG_CUTOFF]))
    return share(found, row_sums(discounted(best)))


def precision_sums(relevant: NDArray[np.bool_]) -> FloatArray:
    """Sum precision at the ranks of the relevant passages, the numerator of average precision.

    >>> precision_sums(np.array([[True, False, True]])).round(3).tolist()
    [1.667]
    """
    precision = relevant.cumsum(axis=1) / np.arange(1, relevant.shape[1] + 1)
    return row_sums(relevant * precision)


def reciprocal_ranks(relevance: FloatArray) -> FloatArray:
    """Compute mean reciprocal ranks, assuming that passages are independent.

    Args:
        relevance: Shape (n, k), P(relevant) by rank; 0 or 1 where it is known.

    >>> reciprocal_ranks(np.array([[0.5, 1.0, 1.0], [0.0, 0.0, 1.0]])).round(3).tolist()
    [0.75, 0.333]
    """
    n, k = relevance.shape
    above = np.cumprod(np.column_stack([np.ones(n), 1.0 - relevance])[:, :k], axis=1)
    return np.asarray((relevance * above / np.arange(1, k + 1)).sum(axis=1))


def pair_share(above: FloatArray, below: FloatArray) -> float:
    """Return AUROC: the share of pairs in which the first value is higher, ties counting half.

    >>> pair_share(np.array([2.0, 1.0]), np.array([1.0]))
    0.75
    """
    wins = sum(np.searchsorted(np.sort(below), above, side).sum() for side in ("left", "right"))
    return float(wins / 2.0 / (above.size * below.size))


MOST_FAILED = 0.02
"""Figures stand for requests if at most this share of them has passages whose call failed: which
calls fail may depend on the passage."""


def failed_in_words(requests: int, passages: int) -> str:
    """Say that passages lack a grade, how this affects the figures, and how to grade them."""
    return (
        f"{count(passages, 'passage')} of {count(requests, 'request')} got no grade because calls "
        "to the judge failed: they are left out of the judge's figures, and a figure is not shown "
        f"at all if more than {MOST_FAILED:.0%} of its requests lack a grade; the next run of "
        "`ctxguard judge` or `ctxguard monitor` asks about them again"
    )


class Metric(StrEnum):
    """An estimated metric. A closed set: it labels a metric."""

    RECALL = "recall"
    """Mean over requests of the share of the pool's relevant passages that was served, from the
    requests whose whole pool was judged. People's grades of single passages do not correct it."""
    POOLED_RECALL = "pooled_recall"
    """Share of the pools' relevant passages that were served, all requests taken together."""
    SERVED_MRR = "served_mrr"
    """Mean reciprocal rank of the served passages over requests that were served any; 0 where none
    of them is relevant, whether the pool held one or not."""
    UDCG = "udcg"
    GAIN = "gain"
    HARM = "harm"
    PRECISION = "precision"
    RECALL_LOSS = "recall_loss"
    """Mean share of the relevant passages among the retriever's first few that were not served;
    certificates bound it."""


METRICS = tuple(Metric)
OF_DROPPED = frozenset({Metric.RECALL, Metric.POOLED_RECALL, Metric.RECALL_LOSS})
"""Metrics that also depend on grades of dropped passages."""

PRECISION, RANK, GAIN, HARM, KEPT, POOL = range(6)
"""Quantities of a request: precision, reciprocal rank, gain, harm, relevant served, relevant in the
pool."""
N_QUANTITIES = 6


def quantities(rows: Rows, relevant: FloatArray, gain: FloatArray, harm: FloatArray) -> FloatArray:
    """Compute the quantities of n requests, shape (n, N_QUANTITIES); passages count by their size.

    Args:
        rows: m passages.
        relevant: Shape (m,), whether each is relevant, or how probably.
        gain, harm: Shape (m,), the positive and the negative part of its utility, both ≥ 0.
    """
    size = rows.passages["size"]
    n_found = rows.by_rank(relevant * size).sum(axis=1)
    return np.column_stack(
        [
            n_found / np.maximum(rows.requests["n_served"], 1),
            reciprocal_ranks(rows.by_rank(relevant)),
            discounted(rows.by_rank(gain * size)).sum(axis=1),
            discounted(rows.by_rank(harm * size)).sum(axis=1),
            n_found,
            rows.total(relevant * size),
        ]
    )


def never_judged(rows: Rows) -> FloatArray:
    """Compute the harm of served passages that could not be judged, by request, shape (n,)."""
    is_never = rows.passages["size"] == 0.0
    harm = rows.by_rank(np.maximum(-rows.passages["worth"], 0.0) * is_never)
    return np.asarray(discounted(harm).sum(axis=1))


def terms(rows: Rows) -> Mapping[Metric, tuple[FloatArray, FloatArray, FloatArray]]:
    """Compute the unweighted contributions of n requests to every metric, from the judge's grades.

    A request contributes nothing to a metric that depends on a passage without a grade.

    Returns:
        Numerators and denominators, shape (n,) each, 0 where the metric is not defined or was not
        observed; and the probability with which a value unlike the others' would have been
        observed: below 1 if a part of each request is judged with a probability only.
    """
    requests, n, is_yes = rows.requests, len(rows.requests), rows.passages["judge_grade"] == YES
    worth = rows.passages["worth"].astype(np.float64)
    found = quantities(rows, is_yes * 1.0, np.maximum(worth, 0.0), np.maximum(-worth, 0.0))
    found[:, HARM] += never_judged(rows)
    served_judged, all_judged = rows.without_failed
    ones = served_judged * 1.0
    served = (requests["n_served"] > 0) * ones
    probability = requests["dropped_probability"] * (found[:, POOL] > 0.0) * all_judged
    in_pool = rows.total(is_yes * 1.0)
    is_whole = requests["has_recall"] & (in_pool > 0.0)
    # A fully judged pool stands for those not chosen for full judging.
    of_pool = np.where(is_whole, requests["pool_probability"], 0.0)
    recall = np.nan_to_num(share(found[:, KEPT], in_pool * is_whole))
    weight = np.nan_to_num(share(np.ones(n), of_pool))
    counted = is_yes & rows.passages["in_baseline"]
    first = rows.total(counted * 1.0) * requests["has_baseline"]
    lost = rows.total(counted * (rows.passages["rank"] == 0) * 1.0)
    loss = np.nan_to_num(share(lost, first))
    is_observed = (probability > 0.0) * 1.0
    return {
        Metric.RECALL: (weight * recall, weight, of_pool),
        Metric.POOLED_RECALL: (
            found[:, KEPT] * is_observed,
            found[:, POOL] * is_observed,
            probability,
        ),
        Metric.SERVED_MRR: (found[:, RANK] * ones, served, served),
        Metric.UDCG: ((found[:, GAIN] - found[:, HARM]) * ones, ones, ones),
        Metric.GAIN: (found[:, GAIN] * ones, ones, ones),
        Metric.HARM: (found[:, HARM] * ones, ones, ones),
        Metric.PRECISION: (found[:, PRECISION] * ones, served, served),
        Metric.RECALL_LOSS: (loss, (first > 0.0) * 1.0, (first > 0.0) * 1.0),
    }


N_TERMS = 2 * len(METRICS) + 3
"""The number of columns of ``weighted_terms``."""


def weighted_terms(rows: Rows) -> tuple[FloatArray, FloatArray]:
    """Compute the columns that n requests add to the sums, weighted by 1/π.

    Returns:
        Shape (n, N_TERMS): numerator and denominator of each metric, then the request itself, if
        it has a failed served passage, and if it has any; and shape (n, metrics), the probabilities
        of ``terms``.
    """
    found = terms(rows)
    table = np.array([*map(found.__getitem__, METRICS)])  # (metrics, 3, n)
    # UDCG counts every request without a failed served passage.
    served_failed = found[Metric.UDCG][1] == 0.0
    any_failed = rows.total(rows.passages["judge_grade"] == FAILED) > 0.0
    failed = np.stack([np.ones(len(any_failed)), served_failed, any_failed])
    columns = np.concatenate([table[:, :2].reshape(2 * len(METRICS), -1), failed])
    values = columns / rows.requests["probability"]
    return np.ascontiguousarray(values.T), np.ascontiguousarray(table[:, 2].T)


def shown_metrics(totals: FloatArray) -> frozenset[Metric]:
    """Return the metrics for which few enough requests lack a grade, given the columns' sums."""
    requests, served_failed, any_failed = totals[-3:].tolist()
    if served_failed > MOST_FAILED * requests:
        return frozenset()
    return frozenset(Metric) - (OF_DROPPED if any_failed > MOST_FAILED * requests else frozenset())


def losses(rows: Rows) -> dict[Metric, FloatArray]:
    """Compute recall loss and harm of each request, shape (n,); an undefined loss is NaN."""
    found = terms(rows)
    loss, harm = found[Metric.RECALL_LOSS], found[Metric.HARM]
    return {Metric.RECALL_LOSS: share(*loss[:2]), Metric.HARM: share(*harm[:2])}


def keyword_first_ranks(keywords: Sequence[str], texts: Sequence[str]) -> list[int | None]:
    """Return, for each keyword, the 1-based rank of the first text with it; None if there is none.

    Matches whole words, ignoring case; any white space may separate the words of a phrase.

    Raises:
        ConfigurationError: a keyword is empty.

    >>> keyword_first_ranks(["cat", "tom cat"], ["Concatenate", "Tom\\n Cat and CAT"])
    [2, 2]
    """
    folded = [text.casefold() for text in texts]
    ranks: list[int | None] = []
    for keyword in keywords:
        words = keyword.casefold().split()
        if not words:
            raise ConfigurationError(f"keyword {keyword!r} is empty; leave it out")
        whole = re.compile(r"(?<!\w)" + r"\s+".join(map(re.escape, words)) + r"(?!\w)")
        ranks.append(
            next((rank for rank, text in enumerate(folded, 1) if whole.search(text)), None)
        )
    return ranks
