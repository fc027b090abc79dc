"""Judged requests as rows.

A row a judged request, a row a judged passage, with the probabilities with which they were judged
and graded. One request and its passages are a block of bytes, which the store keeps beyond the
texts; every estimate reads blocks.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.words import count
from ctxguard.core.types import FloatArray
from ctxguard.errors import DataError

IntArray = NDArray[np.intp]
BoolArray = NDArray[np.bool_]

NO, YES, MISSING, FAILED = 0, 1, 2, 3
"""A judge's grade of a passage: not relevant, relevant, without a label in what it knows, or none
yet because its call failed. A failed passage is unjudged in every figure until it is asked about
again."""

MOST_FAILED = 0.02
"""Figures stand for requests if at most this share of them has passages whose call failed: which
calls fail may depend on the passage."""


def failed_in_words(requests: int, passages: int) -> str:
    """Say that passages have no grade, what that does to figures, and how they get one."""
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
1 and is 0 for a dropped one; ``group`` is that of ``rank_group``,
or ``NEAR`` or ``FAR``; ``score`` the judge's log-odds of relevance, 0 where it gave none; ``worth``
its utility; ``size`` 1 / the probability of being judged. ``grade`` and ``people_worth`` are
people's, and ``chance`` the probability with which a draw asked for that grade, given the grades of
the passages above; 0 where none did."""


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
        return self.total(served * 1.0) == 0.0, self.total(failed * 1.0) == 0.0

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
        """Return the same with people's grades in place of the judge's verdicts."""
        passages = self.passages.copy()
        passages["verdict"] = np.where(
            passages["grade"] == UNGRADED, MISSING, np.where(passages["grade"] > 0, YES, NO)
        )
        passages["worth"] = passages["people_worth"]
        return Rows(self.requests, passages, self.request)

    def total(self, values: FloatArray) -> FloatArray:
        """Add up values of passages, shape (m,), by request, shape (n,)."""
        return np.asarray(np.bincount(self.request, values, len(self.requests)), np.float64)

    def by_rank(self, values: FloatArray) -> FloatArray:
        """Spread values of the served passages, shape (m,), over ranks, shape (n, k)."""
        served = self.passages["rank"] > 0
        table = np.zeros((len(self.requests), int(self.requests["n_served"].max(initial=0))))
        table[self.request[served], self.passages["rank"][served] - 1] = values[served]
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
