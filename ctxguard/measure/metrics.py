"""The formula of every metric, and the rows of judged requests from which estimates are made.

The formulas take tables by rank, shape (n, k): n contexts of labelled queries or of live requests.

A row a judged request, a row a judged passage, with the probabilities with which they were judged
and graded. One request and its passages are a block of bytes, which the store keeps beyond the
texts; every estimate reads blocks. A metric is a ratio of two weighted sums of what each request
adds to it.
"""

import math
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.words import count
from ctxguard.core.scores import discounts
from ctxguard.core.types import FloatArray
from ctxguard.errors import ConfigurationError, DataError

IntArray = NDArray[np.intp]
BoolArray = NDArray[np.bool_]

NDCG_CUTOFF = 10


def share(part: NDArray[Any], whole: NDArray[Any]) -> FloatArray:
    """Divide, with NaN where there is no whole: a share of nothing is undefined.

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

    An empty context scores 0: it neither helps nor harms.

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
    """Compute nDCG@10; NaN without anything to gain.

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
    """Compute mean reciprocal ranks, with passages taken to be independent.

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


NO, YES, MISSING, FAILED = 0, 1, 2, 3
"""A judge's grade of a passage: not relevant, relevant, without a label in what it knows, or none
yet because its call failed. A failed passage is unjudged in every figure until it is asked about
again."""

MOST_FAILED = 0.02
"""Figures stand for requests if at most this share of them has passages whose call failed: which
calls fail may depend on the passage."""


def failed_in_words(requests: int, passages: int) -> str:
    """Say that passages lack a grade, how that affects figures, and how to get one."""
    return (
        f"{count(passages, 'passage')} of {count(requests, 'request')} got no grade, because calls "
        "of the judge failed: they are in no figure of the judge, and more than "
        f"{MOST_FAILED:.0%} of requests without a grade leave a figure out; the next run of "
        "`ctxguard judge` or `ctxguard monitor` asks about them again"
    )


N_GROUPS = 5
NEAR, FAR = 3, 4
"""Groups of dropped passages: the first ``NEAR_DROPPED`` of them, and the others."""
NEAR_DROPPED = 5

UNGRADED = -1
"""The grade of a passage that people have not graded."""

REQUEST = np.dtype(
    [
        ("n_passages", "<u2"),
        ("n_served", "<u2"),
        ("probability", "<f8"),
        ("session", "<i8"),
        ("dropped_chance", "<f8"),
        ("pool_chance", "<f8"),
        ("has_recall", "?"),
        ("has_baseline", "?"),
        ("draw", "<i8"),
        ("goes_on", "?"),
        ("run_chance", "<f8"),
    ]
)
"""One judged request.

``probability`` is that of being sampled and then judged; ``session`` a hash, 0 for a request by
itself; ``dropped_chance`` the lowest probability with which a dropped passage was judged, 0 where
none can stand for the others; ``pool_chance`` the probability with which the whole pool was to be
judged, NaN where it was not. ``has_recall`` tells that all of it has grades and is not a pool that
was judged for its lack of hits alone; ``has_baseline`` that the retriever's first few were all
judged by design, and have grades. ``draw`` is the draw that opened the request for people, once all
that it asked is graded, else 0; ``goes_on`` whether it is graded on below an irrelevant first
passage, and ``run_chance`` the probability of that."""

PASSAGE = np.dtype(
    [
        ("position", "<u2"),
        ("rank", "<u2"),
        ("group", "u1"),
        ("in_baseline", "?"),
        ("verdict", "u1"),
        ("grade", "<i2"),
        *[(name, "<f8") for name in ("score", "worth", "size", "people_worth", "chance")],
    ]
)
"""One judged passage, the served ones first, by rank.

``position`` is its place among the retriever's candidates, from 0; ``rank`` counts the served from
1 and is 0 for a dropped one; ``group`` is that of ``rank_group``, or ``NEAR`` or ``FAR``, in the
context that was served; ``score`` the judge's log-odds of relevance, 0 where it gave none;
``worth`` its utility; ``size`` 1 / the probability of being judged, and 0 of a candidate that could
not be judged, whose worth is not the judge's. ``grade`` and ``people_worth`` are people's, and
``chance`` the probability with which a draw asked for that grade, given the grades of the passages
above; 0 where none did."""


class Rows(NamedTuple):
    """Judged requests, n of them, with their m judged passages.

    Attributes:
        requests: Shape (n,), of ``REQUEST``.
        passages: Shape (m,), of ``PASSAGE``, those of one request after those of another.
        request: Shape (m,), the request of each, below n.
    """

    requests: NDArray[np.void]
    passages: NDArray[np.void]
    request: IntArray

    @property
    def without_failed(self) -> tuple[BoolArray, BoolArray]:
        """Whether no served passage of each request, and none at all, has failed; shape (n,)."""
        failed = self.passages["verdict"] == FAILED
        served = failed & (self.passages["rank"] > 0)
        return self.total(served) == 0.0, self.total(failed) == 0.0

    @classmethod
    def of(cls, requests: NDArray[np.void], passages: NDArray[np.void]) -> "Rows":
        """Join the two tables."""
        n = requests["n_passages"].astype(np.intp)
        return cls(requests, passages, np.repeat(np.arange(len(requests)), n))

    @classmethod
    def read(cls, blocks: Sequence[bytes]) -> "Rows":
        """Read blocks of ``to_block``.

        Raises:
            DataError: a block has another size than it says, or holds an impossible number.
        """
        size = REQUEST.itemsize
        try:
            requests = np.frombuffer(b"".join([each[:size] for each in blocks]), REQUEST).copy()
            passages = np.frombuffer(b"".join([each[size:] for each in blocks]), PASSAGE)
            rows = cls.of(requests, passages)
        except ValueError as error:
            raise DataError("rows of judged requests were written by another release") from error
        if len(requests) != len(blocks) or len(rows.request) != len(passages):
            raise DataError("rows of judged requests are cut off: the store is damaged")
        most = requests["n_served"][rows.request]
        if (passages["rank"] > most).any() or (passages["group"] >= N_GROUPS).any():
            raise DataError("a judged passage has an impossible rank: the store is damaged")
        for name, table, least in (
            ("probability", requests, 1.0 / _MOST),
            ("dropped_chance", requests, 0.0),
            ("size", passages, 1.0),
            ("worth", passages, -_MOST),
            ("people_worth", passages, -_MOST),
            ("chance", passages, 0.0),
        ):
            column = table[name]
            # The comparison is false of NaN too.
            if not ((column >= least * (1.0 - 1e-6)) & (column <= _MOST)).all():
                raise DataError(f"a judged request has an impossible {name}: the store is damaged")
        return rows

    def take(self, chosen: BoolArray) -> "Rows":
        """Return some of the requests, with their passages."""
        return Rows.of(self.requests[chosen], self.passages[chosen[self.request]])

    def by_people(self) -> "Rows":
        """Return these rows with people's grades in place of the judge's verdicts."""
        passages = self.passages.copy()
        passages["verdict"] = np.where(
            passages["grade"] == UNGRADED, MISSING, np.where(passages["grade"] > 0, YES, NO)
        )
        passages["worth"] = passages["people_worth"]
        return Rows(self.requests, passages, self.request)

    def served(self, ranks: IntArray) -> "Rows":
        """Return the same requests as if each had been served another context.

        What was judged and graded stays, with its probability; a coin may have left out a passage
        that is served now. People graded on below an irrelevant first passage in the context that
        was served: ``run_chance`` is 0 where another one begins otherwise.

        Args:
            ranks: Shape (n, depth), by ``position`` the rank in the context, from 1; 0 for a
                candidate that is not in it.
        """
        requests, passages = self.requests.copy(), self.passages.copy()
        rank = ranks[self.request, passages["position"]]
        passages["rank"], is_served, size = rank, rank > 0, passages["size"]
        n_served = (ranks > 0).sum(axis=1)
        never = self.total(is_served & (size == 0.0)).astype(np.intp)
        requests["n_served"] = n_served - never
        followed = is_served & (rank == self.passages["rank"])
        requests["run_chance"] *= self.total(followed) == n_served
        # The judged candidates stand for all that could be judged.
        chance = np.divide(1.0, size, out=np.ones(size.shape), where=size > 0.0)
        requests["dropped_chance"] = 1.0
        np.minimum.at(requests["dropped_chance"], self.request, chance)
        return Rows(requests, passages, self.request)

    @property
    def has_ranks(self) -> bool:
        """Whether every served passage was judged with certainty, so that no rank is a gap."""
        is_served, size = self.passages["rank"] > 0, self.passages["size"]
        n_certain = self.total(is_served & (size == 1.0))
        is_gap = is_served & (size == 0.0)
        return not is_gap.any() and bool((n_certain == self.requests["n_served"]).all())

    def total(self, values: FloatArray | BoolArray) -> FloatArray:
        """Add up values of passages, shape (m,), by request, shape (n,)."""
        return np.asarray(np.bincount(self.request, values, len(self.requests)), np.float64)

    def by_rank(self, values: FloatArray) -> FloatArray:
        """Spread values of the served passages, shape (m,), over ranks, shape (n, k)."""
        rank = self.passages["rank"]
        served = rank > 0
        table = np.zeros((len(self.requests), int(rank.max(initial=0))))
        table[self.request[served], rank[served] - 1] = values[served]
        return table


_MOST = 1e9
"""Upper bound of a request's numbers and of 1 / probability; sums of squares stay finite."""


def rank_group(rank: NDArray[np.int64]) -> IntArray:
    """Return the group of served ranks, 1-based: the first, the next two, the rest.

    >>> rank_group(np.array([1, 2, 3, 4, 9])).tolist()
    [0, 1, 1, 2, 2]
    """
    return np.where(rank <= 1, 0, np.where(rank <= 3, 1, 2))


def to_block(request: NDArray[np.void], passages: NDArray[np.void]) -> bytes:
    """Pack a request, shape (1,), and its passages."""
    return request.tobytes() + passages.tobytes()


def session_number(session_id: str | None) -> int:
    """Hash a session to a whole number; 0 for a request without one."""
    if session_id is None:
        return 0
    hashed = blake2b(session_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(hashed, "little", signed=True) or 1


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
    """Mean share of the relevant among the retriever's first few that was not served, which a
    certificate bounds."""


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
        gain, harm: Shape (m,), its utility, and the same below 0.
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


def shown_metrics(weights: FloatArray) -> frozenset[Metric]:
    """Return the metrics for which few enough requests lack a grade.

    Args:
        weights: Shape (3,), as of ``failed_weights``.
    """
    requests, served_failed, any_failed = weights.tolist()
    if served_failed > MOST_FAILED * requests:
        return frozenset()
    return frozenset(Metric) - (OF_DROPPED if any_failed > MOST_FAILED * requests else frozenset())


def failed_weights(rows: Rows) -> FloatArray:
    """Weigh by 1/π all requests, those with a failed served passage, and those with any.

    Returns:
        Shape (n, 3).
    """
    served_judged, all_judged = rows.without_failed
    parts = np.column_stack([np.ones(len(rows.requests)), ~served_judged, ~all_judged])
    return np.asarray(parts / rows.requests["probability"][:, None])


def terms(rows: Rows) -> Mapping[Metric, tuple[FloatArray, FloatArray, FloatArray]]:
    """Compute what n requests add to every metric by the judge's grades, before weighting by 1/π.

    A request contributes nothing to a metric that depends on a passage without a grade.

    Returns:
        Numerators and denominators, shape (n,) each, 0 where the metric is not defined or was not
        observed; and the probability with which a value unlike the others' would have been
        observed: below 1 if a part of each request is judged with a probability only.
    """
    requests, n, is_yes = rows.requests, len(rows.requests), rows.passages["verdict"] == YES
    worth = rows.passages["worth"].astype(np.float64)
    found = quantities(rows, is_yes * 1.0, np.maximum(worth, 0.0), np.maximum(-worth, 0.0))
    found[:, HARM] += never_judged(rows)
    served_judged, all_judged = rows.without_failed
    ones = served_judged * 1.0
    served = (requests["n_served"] > 0) * ones
    chance = requests["dropped_chance"] * (found[:, POOL] > 0.0) * all_judged
    in_pool = rows.total(is_yes * 1.0)
    is_whole = requests["has_recall"] & (in_pool > 0.0)
    # A fully judged pool stands for those not chosen for full judging.
    pool_chance = np.where(is_whole, requests["pool_chance"], 0.0)
    recall = np.nan_to_num(share(found[:, KEPT], in_pool * is_whole))
    weight = np.nan_to_num(share(np.ones(n), pool_chance))
    counted = is_yes & rows.passages["in_baseline"]
    first = rows.total(counted * 1.0) * requests["has_baseline"]
    lost = rows.total(counted * (rows.passages["rank"] == 0) * 1.0)
    loss = np.nan_to_num(share(lost, first))
    is_observed = (chance > 0.0) * 1.0
    return {
        Metric.RECALL: (weight * recall, weight, pool_chance),
        Metric.POOLED_RECALL: (found[:, KEPT] * is_observed, found[:, POOL] * is_observed, chance),
        Metric.SERVED_MRR: (found[:, RANK] * ones, served, served),
        Metric.UDCG: ((found[:, GAIN] - found[:, HARM]) * ones, ones, ones),
        Metric.GAIN: (found[:, GAIN] * ones, ones, ones),
        Metric.HARM: (found[:, HARM] * ones, ones, ones),
        Metric.PRECISION: (found[:, PRECISION] * ones, served, served),
        Metric.RECALL_LOSS: (loss, (first > 0.0) * 1.0, (first > 0.0) * 1.0),
    }


def weighted_terms(rows: Rows) -> tuple[FloatArray, FloatArray]:
    """Put the terms of n requests, weighted by 1/π, into columns for summation.

    Returns:
        Shape (n, 2 · metrics), numerator and denominator of each metric; and shape (n, metrics),
        the probabilities.
    """
    table = np.array([*map(terms(rows).__getitem__, METRICS)])  # (metrics, 3, n)
    values = table[:, :2].reshape(2 * len(METRICS), -1) / rows.requests["probability"]
    return np.ascontiguousarray(values.T), np.ascontiguousarray(table[:, 2].T)


def losses(rows: Rows) -> dict[Metric, FloatArray]:
    """Compute recall loss and harm of each request, shape (n,); an undefined loss is NaN."""
    found = terms(rows)
    loss, harm = found[Metric.RECALL_LOSS], found[Metric.HARM]
    return {Metric.RECALL_LOSS: share(*loss[:2]), Metric.HARM: share(*harm[:2])}


def keyword_first_ranks(keywords: Sequence[str], texts: Sequence[str]) -> list[int | None]:
    """Return the 1-based rank of the first text that holds each keyword; None if none does.

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
