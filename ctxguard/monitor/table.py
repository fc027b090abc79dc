"""Judged requests as columns: a million of them are estimated from in a second.

One row is one ``JudgedRequest``, reduced to what its terms need and packed into bytes of one size,
which is how the store keeps it. Pure: no I/O, no clock, no logging.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from ctxguard.errors import DataError
from ctxguard.metrics import distractor_rate, precision_at_k, udcg
from ctxguard.monitor.estimates import JudgedRequest, Metric, RatioSums
from ctxguard.types import FloatArray

_NUMBERS = (
    "probability",
    "kept_relevant",
    "reciprocal_rank",
    "gain",
    "harm",
    "precision",
    "distractor_rate",
    "dropped_relevant",
    "dropped_probability",
    "pool_relevant",
    "pool_probability",
    "unanswered_probability",
    "recall_loss",
    "missed_relevant",
    "audit_probability",
    "pool_found",
)
ROW = np.dtype([*((name, "<f8") for name in _NUMBERS), ("session", "<i8")])
"""One judged request; NaN is None. ``session`` is a hash, 0 for a request by itself."""

_PACKED = struct.Struct(f"<{len(_NUMBERS)}dq")
_SERVED = struct.Struct("<hd")

Table = NDArray[np.void]
Boolean = NDArray[np.bool_]
_NAN = float("nan")


def summary(request: JudgedRequest) -> bytes:
    """One row, ``ROW.itemsize`` bytes."""
    worth = udcg(request.utilities)
    numbers = (
        request.probability,
        request.kept_relevant,
        next((1.0 / rank for rank, grade in enumerate(request.grades, 1) if grade > 0), 0.0),
        worth.gain,
        worth.harm,
        precision_at_k(request.grades),
        distractor_rate(request.utilities),
        request.dropped_relevant,
        request.dropped_probability,
        request.pool_relevant,
        request.pool_probability,
        request.unanswered_probability,
        request.recall_loss,
        request.missed_relevant,
        request.audit_probability,
        request.pool_found,
    )
    return _PACKED.pack(
        *[_NAN if number is None else float(number) for number in numbers],
        session_number(request.session_id),
    )


def session_number(session_id: str | None) -> int:
    """A session as a whole number; 0 for none."""
    if session_id is None:
        return 0
    hashed = blake2b(session_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(hashed, "little", signed=True) or 1


def table_of(summaries: bytes | Sequence[bytes]) -> Table:
    """The rows of concatenated summaries.

    Raises:
        DataError: their length is no multiple of a row's.
    """
    joined = summaries if isinstance(summaries, bytes) else b"".join(summaries)
    if len(joined) % ROW.itemsize:
        raise DataError(
            f"{len(joined)} bytes of judged requests are no multiple of {ROW.itemsize}: they were "
            "written by another release"
        )
    return np.frombuffer(joined, ROW)


def served_bytes(request: JudgedRequest) -> bytes:
    """Grades and utilities of what was served, in order: what a single number loses."""
    pairs = zip(request.grades, request.utilities, strict=True)
    return b"".join([_SERVED.pack(grade, utility) for grade, utility in pairs])


def request_of(row: np.void, served: bytes) -> JudgedRequest:
    """The judged request that a row and its served passages were made from.

    The session is told by its number, which clusters as well as its name.
    """
    pairs = list(_SERVED.iter_unpack(served))
    pool_relevant = _optional(row["pool_relevant"])
    pool_found = _optional(row["pool_found"])
    session = int(row["session"])
    return JudgedRequest(
        probability=float(row["probability"]),
        grades=tuple([grade for grade, _ in pairs]),
        utilities=tuple([utility for _, utility in pairs]),
        dropped_relevant=_optional(row["dropped_relevant"]),
        dropped_probability=float(row["dropped_probability"]),
        pool_relevant=None if pool_relevant is None else int(pool_relevant),
        pool_probability=float(row["pool_probability"]),
        unanswered_probability=float(row["unanswered_probability"]),
        session_id=str(session) if session else None,
        recall_loss=_optional(row["recall_loss"]),
        missed_relevant=_optional(row["missed_relevant"]),
        audit_probability=float(row["audit_probability"]),
        pool_found=None if pool_found is None else int(pool_found),
    )


def _optional(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def sums_of(metric: Metric, table: Table) -> RatioSums:
    """The same sums as ``estimates.ratio_sums``, of columns.

    >>> request = JudgedRequest(0.5, (1,), (1.0,), 1.0, 1.0, None, 0.0, 0.5)
    >>> sums_of(Metric.RECALL, table_of([summary(request)] * 2))
    RatioSums(n=2, a=4.0, b=8.0, aa=8.0, ab=16.0, bb=32.0, seen=2.0)
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        a, b, seen = _TERMS[metric](table)
        a, b = a / table["probability"], b / table["probability"]
    defined = ~(np.isnan(a) | np.isnan(b))
    session = table["session"][defined]
    a, b, seen = a[defined], b[defined], seen[defined]
    if session.any():
        a, b, seen = _by_session(session, a, b, seen)
    weighted = b > 0.0
    a, b, seen = a[weighted], b[weighted], seen[weighted]
    return RatioSums(
        n=len(a),
        a=float(a.sum()),
        b=float(b.sum()),
        aa=float(a @ a),
        ab=float(a @ b),
        bb=float(b @ b),
        seen=float(seen.sum()),
    )


def _by_session(
    session: NDArray[np.int64], a: FloatArray, b: FloatArray, seen: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    alone = session == 0
    _, cluster = np.unique(session[~alone], return_inverse=True)
    most = np.zeros(cluster.max(initial=-1) + 1)
    np.maximum.at(most, cluster, seen[~alone])
    return (
        np.concatenate([a[alone], np.bincount(cluster, a[~alone])]),
        np.concatenate([b[alone], np.bincount(cluster, b[~alone])]),
        np.concatenate([seen[alone], most]),
    )


_Columns = tuple[FloatArray, FloatArray, FloatArray]


def _mean(column: str) -> Callable[[Table], _Columns]:
    def terms(table: Table) -> _Columns:
        ones = np.ones(len(table))
        return table[column], ones, ones

    return terms


def _recall(table: Table) -> _Columns:
    kept = table["kept_relevant"]
    return kept, kept + table["dropped_relevant"], table["dropped_probability"]


def _recall_per_request(table: Table) -> _Columns:
    weight = 1.0 / table["pool_probability"]
    pool = np.where(table["pool_relevant"] > 0, table["pool_relevant"], np.nan)
    return weight * table["kept_relevant"] / pool, weight, table["pool_probability"]


def _reciprocal_rank(table: Table) -> _Columns:
    answered = table["kept_relevant"] > 0
    probability = table["pool_probability"]
    found = (table["pool_relevant"] > 0) | (table["pool_found"] > 0)
    judged_zero = np.where(found, 1.0 / probability, 0.0)
    unanswered = np.where(probability > 0.0, judged_zero, np.nan)
    a = np.where(answered, table["reciprocal_rank"], 0.0)
    return a, np.where(answered, 1.0, unanswered), table["unanswered_probability"]


def _udcg(table: Table) -> _Columns:
    ones = np.ones(len(table))
    return table["gain"] - table["harm"], ones, ones


def _retriever_miss(table: Table) -> _Columns:
    probability = np.where(table["audit_probability"] > 0.0, table["audit_probability"], np.nan)
    missed = table["missed_relevant"]
    found = table["dropped_relevant"] + table["kept_relevant"]
    return missed / probability, (missed + found) / probability, np.ones(len(table))


_TERMS: Mapping[Metric, Callable[[Table], _Columns]] = {
    Metric.RECALL: _recall,
    Metric.RECALL_PER_REQUEST: _recall_per_request,
    Metric.MRR: _reciprocal_rank,
    Metric.UDCG: _udcg,
    Metric.GAIN: _mean("gain"),
    Metric.HARM: _mean("harm"),
    Metric.PRECISION: _mean("precision"),
    Metric.DISTRACTOR_RATE: _mean("distractor_rate"),
    Metric.RECALL_LOSS: _mean("recall_loss"),
    Metric.RETRIEVER_MISS: _retriever_miss,
}
