"""The contribution of one judged request to each metric: a row per request, a column per number.

A request is packed into a row once, when its verdicts are in. The store keeps the row's bytes, and
every estimate reads rows as columns. Pure: no I/O, no clock, no logging.
"""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.metrics import precision_at_k, udcg
from ctxguard.core.types import FloatArray
from ctxguard.errors import DataError
from ctxguard.monitor.estimation.relevance import MOST_SERVED


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


@dataclass(frozen=True, slots=True)
class JudgedRequest:
    """The verdicts on one request, reduced to the numbers that estimates need.

    Attributes:
        probability: π, the probability with which the request was sampled, in (0, 1].
        grades: Grades of the served passages, in the order of the decision; 0 for one without a
            valid verdict.
        utilities: Utilities of the served passages, in the same order.
        dropped_relevant: Relevant passages among the dropped ones that were judged, each divided
            by its probability of being judged: an estimate of how many were dropped. None if
            dropped passages were to be judged and none of them got a verdict.
        dropped_probability: The probability with which a dropped passage was judged, in [0, 1]; 1
            if none was dropped.
        pool_relevant: Relevant passages in the full pool, if all of it was judged by
            design; otherwise None.
        full_pool_probability: The probability with which the full pool was to be judged, in
            [0, 1].
        session_id: Requests of one session are not independent and are counted as one cluster.
        recall_loss: Share of the relevant among the retriever's first few that was not served;
            None if they were not all judged by design, or none is relevant.
        partial_pool_relevant: Relevant passages among the judged ones of a pool that was to be
            judged in full but lacks verdicts; otherwise None.
        missing: Positions in ``grades`` of the passages without a valid verdict.
        dropped: Judged dropped passages, each divided by its probability of being judged: the
            nearer ones that are not relevant and that are, then the same of the farther ones.
        scores: The judge's P(relevant) of the served passages, in (0, 1), None where it gave none;
            empty of a judge that gives none.
        recall: Share of the pool's relevant passages that was served; None if the pool was not
            judged in full, would not have been had something relevant been served, or holds nothing
            relevant.
    """

    probability: float
    grades: tuple[int, ...]
    utilities: tuple[float, ...]
    dropped_relevant: float | None
    dropped_probability: float
    pool_relevant: int | None
    full_pool_probability: float
    session_id: str | None = None
    recall_loss: float | None = None
    partial_pool_relevant: int | None = None
    missing: tuple[int, ...] = ()
    dropped: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    scores: tuple[float | None, ...] = ()
    recall: float | None = None

    @property
    def kept_relevant(self) -> int:
        """Number of relevant passages served."""
        return sum(grade > 0 for grade in self.grades)

    def to_row(self) -> bytes:
        """Pack the request into one row of ``ROW``: ``ROW.itemsize`` bytes."""
        worth = udcg(self.utilities)
        relevant = [place for place, grade in enumerate(self.grades) if grade > 0]
        derived = {
            "reciprocal_rank": 1.0 / (relevant[0] + 1) if relevant else 0.0,
            "gain": worth.gain,
            "harm": worth.harm,
            "precision": precision_at_k(self.grades),
            "n_served": min(len(self.grades), MOST_SERVED),
            **dict(zip(DROPPED, self.dropped, strict=True)),
        }
        numbers = [derived[each] if each in derived else getattr(self, each) for each in _NUMBERS]
        return _PACKED.pack(
            *[math.nan if number is None else float(number) for number in numbers],
            _bits(relevant),
            _bits(self.missing),
            session_number(self.session_id),
            bytes(map(_level, self.scores[:MOST_SCORED])),
        )


def _level(score: float | None) -> int:
    """Return the level of a probability's log-odds, from 1 to 255; 0 for none."""
    if score is None:
        return 0
    odds = min(max(score, 1e-6), 1.0 - 1e-6)
    return min(max(round(_ZERO_LEVEL + _LEVELS * math.log(odds / (1.0 - odds))), 1), 255)


def scores_of(table: "Table", k: int) -> FloatArray:
    """Read the judge's log-odds of the first k served passages, 0 where it gave none.

    >>> row = JudgedRequest(1.0, (1, 0), (1.0, 0.0), None, 0.0, None, 0.0, scores=(0.5, 0.9))
    >>> scores_of(table_of(row.to_row()), 3).round(1).tolist()
    [[0.0, 2.2, 0.0]]
    """
    levels = table["scores"][:, :k]
    found = np.where(levels > 0, (levels - float(_ZERO_LEVEL)) / _LEVELS, 0.0)
    return np.pad(found, ((0, 0), (0, k - levels.shape[1])))


def _bits(places: Sequence[int]) -> int:
    return sum([1 << place for place in places if place < MOST_SERVED])


MOST_SCORED = 16
"""Served passages of a request whose scores are kept."""
_LEVELS, _ZERO_LEVEL = 16, 128
"""Levels of a unit of log-odds, and the level of 0."""

DROPPED = ("near_no", "near_yes", "far_no", "far_yes")
"""Judged dropped passages by nearness and verdict, each divided by its probability of that."""

_NUMBERS = (
    "probability",
    "kept_relevant",
    "reciprocal_rank",
    "gain",
    "harm",
    "precision",
    "dropped_relevant",
    "dropped_probability",
    "pool_relevant",
    "full_pool_probability",
    "recall_loss",
    "partial_pool_relevant",
    "recall",
    "n_served",
    *DROPPED,
)
ROW = np.dtype(
    [
        *((name, "<f8") for name in _NUMBERS),
        *((name, "<i8") for name in ("yes", "missing", "session")),
        ("scores", "u1", (MOST_SCORED,)),
    ]
)
"""One judged request; NaN is None. The bits of ``yes`` and ``missing`` are the served passages that
the judge called relevant, and those without a verdict; ``scores`` are levels of the judge's
log-odds of the first served passages. ``session`` is a hash, 0 for a request by itself."""

_PACKED = struct.Struct(f"<{len(_NUMBERS)}d3q{MOST_SCORED}s")
_MOST = 1e9
"""Upper bound of a request's numbers and of 1 / probability; sums of squares stay finite."""

Table = NDArray[np.void]
"""Judged requests as rows of ``ROW``, shape (n,)."""


def session_number(session_id: str | None) -> int:
    """Hash a session to a whole number; 0 for a request without one."""
    if session_id is None:
        return 0
    hashed = blake2b(session_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(hashed, "little", signed=True) or 1


def table_of(rows: bytes | Sequence[bytes], n: int | None = None) -> Table:
    """Read packed rows, one after another, as a table.

    Args:
        n: Required number of rows; None for any number.

    Raises:
        DataError: their length is not a multiple of a row's, their number is not ``n``, or a
            request cannot have one of the numbers.
    """
    joined = rows if isinstance(rows, bytes) else b"".join(rows)
    if len(joined) % ROW.itemsize:
        raise DataError(
            f"{len(joined)} bytes of judged requests are not a multiple of {ROW.itemsize}: they "
            "were written by another release"
        )
    table = np.frombuffer(joined, ROW)
    if n is not None and len(table) != n:
        raise DataError(f"there are {len(table)} rows of {n} judged requests: the store is damaged")
    for name in _NUMBERS:
        column = np.abs(table[name])
        if (column > _MOST).any() or (
            "probability" in name and (column < 1.0 / _MOST)[column > 0.0].any()
        ):
            raise DataError(f"a judged request has an impossible {name}: the store is damaged")
    return table


METRICS = tuple(Metric)
_Columns = tuple[FloatArray | float, FloatArray | float, FloatArray | float]


def term(metric: Metric, table: Table) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Compute what n requests add to a metric before weighting by 1/π.

    Returns:
        Numerators and denominators, shape (n,) each, NaN if the metric is not defined or was not
        observed; and the probability with which a value unlike the others' would have been
        observed: below 1 if a part of each request is judged with a probability only.

    >>> request = JudgedRequest(0.1, (0, 1), (-0.5, 1.0), 5.0, 0.2, None, 0.0)
    >>> table = table_of(request.to_row())
    >>> [column.tolist() for column in term(Metric.POOLED_RECALL, table)]
    [[1.0], [6.0], [0.2]]
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        found = _TERMS[metric](table) if metric in _TERMS else (table[metric.value], 1.0, 1.0)
    numerator, denominator, chance = (np.broadcast_to(each, len(table)) for each in found)
    return numerator, denominator, chance


def request_terms(table: Table) -> tuple[FloatArray, FloatArray]:
    """Compute the terms of n requests in all metrics, weighted by 1/π, as columns to be added up.

    Returns:
        Shape (n, 2 · metrics), numerator and denominator of each metric, 0 if it is undefined, such
        as recall without a relevant passage. Shape (n, metrics), the probability with which a
        value unlike the others' would have been observed; 0 if it is undefined.
    """
    values = np.zeros((len(table), 2 * len(METRICS)))
    inclusion = np.zeros((len(table), len(METRICS)))
    for place, metric in enumerate(METRICS):
        numerator, denominator, chance = term(metric, table)
        defined = ~np.isnan(numerator) & (denominator > 0.0)
        values[defined, 2 * place] = numerator[defined]
        values[defined, 2 * place + 1] = denominator[defined]
        inclusion[defined, place] = chance[defined]
    return values / table["probability"][:, None], inclusion


def _recall(table: Table) -> _Columns:
    # A whole pool stands for those that were not chosen to be judged in full.
    chance = table["full_pool_probability"]
    weight = np.where(np.isnan(table["recall"]), np.nan, 1.0 / chance)
    return weight * table["recall"], weight, chance


def _pooled_recall(table: Table) -> _Columns:
    kept = table["kept_relevant"]
    return kept, kept + table["dropped_relevant"], table["dropped_probability"]


def _served_reciprocal_rank(table: Table) -> _Columns:
    served = np.where(np.isnan(table["precision"]), np.nan, 1.0)
    return served * table["reciprocal_rank"], served, 1.0


_TERMS: Mapping[Metric, Callable[[Table], _Columns]] = {
    Metric.RECALL: _recall,
    Metric.POOLED_RECALL: _pooled_recall,
    Metric.SERVED_MRR: _served_reciprocal_rank,
    Metric.UDCG: lambda table: (table["gain"] - table["harm"], 1.0, 1.0),
}
"""The metrics that are not the mean of a column of their own name."""
