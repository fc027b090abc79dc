"""Holds judged requests and passages as rows, the basis of every estimate, and packs them.

A row has the probabilities with which it was judged and graded, and no text. The rows of one
request are a block of bytes, which the store keeps longer than the texts. Pure.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import FloatArray, Route
from ctxguard.errors import DataError

IntArray = NDArray[np.intp]
BoolArray = NDArray[np.bool_]

NO, YES, MISSING, FAILED = 0, 1, 2, 3
"""A judge's grade of a passage: not relevant, relevant, none because the judge knows no label, or
none yet because its call failed. A failed passage is unjudged in every figure until it is asked
about again."""

N_GROUPS = 5
NEAR, FAR = 3, 4
"""Groups of dropped passages: the first ``NEAR_DROPPED`` of them, and the others."""
NEAR_DROPPED = 5

UNGRADED = -1
"""The grade of a passage that people have not graded."""

ROUTES = tuple(Route)
NO_PICK = 2**62
"""A number greater than that of any pick."""

REQUEST = np.dtype(
    [
        ("sample_id", "<i8"),
        ("time_seconds", "<f8"),
        ("first_pick", "<i8"),
        ("route", "u1"),
        ("n_passages", "<u2"),
        ("n_served", "<u2"),
        ("probability", "<f8"),
        ("session", "<i8"),
        ("question", "<i8"),
        ("dropped_probability", "<f8"),
        ("pool_probability", "<f8"),
        ("has_recall", "?"),
        ("has_baseline", "?"),
        ("draw", "<i8"),
        ("is_run", "?"),
        ("run_probability", "<f8"),
        ("is_graded", "?"),
        ("disagreements", "<u2"),
        ("last_label", "<i8"),
        ("profile", "<i8"),
        ("recall_loss", "<f8"),
        ("loss_probability", "<f8"),
    ]
)
"""One judged request, or a labelled query, to which the columns about samples do not apply.

``sample_id``, ``time_seconds`` and ``first_pick`` are those of its sample; the last is the first
pick for labels that could have taken it, ``NO_PICK`` where none could so far. ``route`` is the
place in ``ROUTES`` of the stages that answered.

``probability`` is that of being sampled and then judged; ``session`` a hash, 0 for a request by
itself; ``question`` a hash too; ``dropped_probability`` the lowest with which a dropped passage was
judged, 0 where none can stand for the others; ``pool_probability`` that with which the whole pool
was to be judged, NaN where it was not. ``has_recall`` tells that all of it has grades, and that it
was not judged only because nothing served was relevant; ``has_baseline`` that the retriever's first
few were all judged by design, and have grades.

``draw`` is the draw that opened the request for people, once all that it asked is graded, else 0;
``is_run`` whether people grade on below an irrelevant first passage, and ``run_probability`` the
probability of that. ``is_graded`` tells whether people graded any of it, ``disagreements`` on how
many passages' relevance they disagree, and ``last_label`` is the newest label in it.

``profile`` is a hash of the profile whose policy served it, 0 where alarms do not compare it with
its promises. ``recall_loss`` is the loss that the profile promises to bound, NaN where it is
undefined, and ``loss_probability`` that with which it is known of a judged request, 0 where no
promise is about it."""

PASSAGE = np.dtype(
    [
        ("position", "<u2"),
        ("rank", "<u2"),
        ("group", "u1"),
        ("in_baseline", "?"),
        ("judge_grade", "u1"),
        ("people_grade", "<i2"),
        *[(name, "<f8") for name in ("score", "worth", "size", "people_worth")],
        ("asked_probability", "<f8"),
    ]
)
"""One judged passage; the served ones come first, by rank.

``position`` is its place among the retriever's candidates, from 0; ``rank`` counts the served from
1 and is 0 for a dropped one; ``group`` is that of ``rank_group``, or ``NEAR`` or ``FAR``, in the
context that was served; ``judge_grade`` one of ``NO`` to ``FAILED``; ``score`` the judge's log-odds
of relevance, 0 where it gave none; ``worth`` the utility by that grade; ``size`` 1 / the
probability of being judged, and 0 for a candidate that could not be judged, whose worth does not
come from the judge. ``people_worth`` is the utility by people's grade, and ``asked_probability``
that with which a draw asked for it, given the grades of the passages above; 0 if none did."""

_MOST = 1e9
"""Upper bound of a request's numbers and of 1 / probability; sums of squares stay finite."""


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
        failed = self.passages["judge_grade"] == FAILED
        served = failed & (self.passages["rank"] > 0)
        return self.total(served) == 0.0, self.total(failed) == 0.0

    @classmethod
    def of(cls, requests: NDArray[np.void], passages: NDArray[np.void]) -> "Rows":
        """Make rows from the two tables."""
        n = requests["n_passages"].astype(np.intp)
        return cls(requests, passages, np.repeat(np.arange(len(requests)), n))

    @classmethod
    def joined(cls, parts: Sequence["Rows"]) -> "Rows":
        """Concatenate rows; the result is empty if there are no parts."""
        requests = [np.empty(0, REQUEST), *[part.requests for part in parts]]
        passages = [np.empty(0, PASSAGE), *[part.passages for part in parts]]
        return cls.of(np.concatenate(requests), np.concatenate(passages))

    @classmethod
    def read(cls, blocks: Sequence[bytes]) -> "Rows":
        """Read the blocks of requests.

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
            raise DataError("rows of judged requests are truncated: the store is damaged")
        most = requests["n_served"][rows.request]
        if (passages["rank"] > most).any() or (passages["group"] >= N_GROUPS).any():
            raise DataError("a judged passage has an impossible rank: the store is damaged")
        for name, table, least in (
            ("probability", requests, 1.0 / _MOST),
            ("dropped_probability", requests, 0.0),
            ("size", passages, 1.0),
            ("worth", passages, -_MOST),
            ("people_worth", passages, -_MOST),
            ("asked_probability", passages, 0.0),
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
        """Return these rows with people's grades instead of the judge's."""
        passages, grade = self.passages.copy(), self.passages["people_grade"]
        passages["judge_grade"] = np.where(grade == UNGRADED, MISSING, np.where(grade > 0, YES, NO))
        passages["worth"] = passages["people_worth"]
        return Rows(self.requests, passages, self.request)

    def served(self, ranks: IntArray) -> "Rows":
        """Return the same requests as if each had been served another context.

        What was judged and graded stays, with its probability; a coin may have left out a passage
        that is served now. People graded on below an irrelevant first passage in the context that
        was served: ``run_probability`` is 0 where another one begins otherwise.

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
        requests["run_probability"] *= self.total(followed) == n_served
        # The judged candidates stand for all that could be judged.
        probability = np.divide(1.0, size, out=np.ones(size.shape), where=size > 0.0)
        requests["dropped_probability"] = 1.0
        np.minimum.at(requests["dropped_probability"], self.request, probability)
        return Rows(requests, passages, self.request)

    @property
    def has_ranks(self) -> bool:
        """Whether every served passage was judged with certainty, so that no rank is missing."""
        is_served, size = self.passages["rank"] > 0, self.passages["size"]
        n_certain = self.total(is_served & (size == 1.0))
        is_gap = is_served & (size == 0.0)
        return not is_gap.any() and bool((n_certain == self.requests["n_served"]).all())

    def total(self, values: FloatArray | BoolArray) -> FloatArray:
        """Add up values of passages, shape (m,), by request, shape (n,)."""
        return np.asarray(np.bincount(self.request, values, len(self.requests)), np.float64)

    def by_rank(self, values: FloatArray) -> FloatArray:
        """Arrange values of the served passages, shape (m,), by rank, shape (n, k)."""
        rank = self.passages["rank"]
        served = rank > 0
        table = np.zeros((len(self.requests), int(rank.max(initial=0))))
        table[self.request[served], rank[served] - 1] = values[served]
        return table


def rank_group(rank: NDArray[np.int64]) -> IntArray:
    """Return the groups of 1-based served ranks: the first, the next two, the rest.

    >>> rank_group(np.array([1, 2, 3, 4, 9])).tolist()
    [0, 1, 1, 2, 2]
    """
    return np.where(rank <= 1, 0, np.where(rank <= 3, 1, 2))


def to_blocks(rows: Rows) -> list[bytes]:
    """Pack each request with its passages."""
    passages = np.split(rows.passages, rows.requests["n_passages"].cumsum()[:-1])
    pairs = zip(rows.requests, passages, strict=False)
    return [request.tobytes() + own.tobytes() for request, own in pairs]


def hash_number(text: str) -> int:
    """Hash a string to a signed 64-bit number."""
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def session_number(session_id: str | None) -> int:
    """Hash a session to a number; 0 for a request without one."""
    return 0 if session_id is None else hash_number(session_id) or 1
