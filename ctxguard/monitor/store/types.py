"""The values that go into the store and come out of it: frozen data, no database.

Payloads, grades and blocks are opaque here; their formats belong to those who write and read
them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ctxguard.errors import ConfigurationError

DEFAULT_MAX_AGE_SECONDS = 30 * 86_400.0
DEFAULT_MAX_BYTES = 2 * 2**30
HOUR_SECONDS = 3600.0

Counts = Mapping[tuple[str, ...], float]
"""Counts by name and label values."""

MOST_UNCOVERED = 0.02
"""Labels represent requests if at most this share of them had no chance of being graded."""

NO_PICK = 2**62
"""Greater than the number of any pick."""


class State(StrEnum):
    """The state of a sample. A closed set: it labels a metric."""

    PENDING = "pending"
    JUDGED = "judged"
    INCOMPLETE = "incomplete"
    """A passage has no grade: its call failed, and the next run asks about it again; or the judge
    knows nothing of the question."""
    UNREADABLE = "unreadable"
    """The sample cannot be read, or its result cannot be stored."""
    SKIPPED = "skipped"
    """Left out at random to keep within the judging budget: others stand for it."""
    FORCED = "forced"
    """Added by hand: stored, never judged, in no estimate."""


FINAL_STATES = frozenset({State.JUDGED, State.INCOMPLETE, State.UNREADABLE, State.SKIPPED})


@dataclass(frozen=True, slots=True)
class Entry:
    """A sampled request to store.

    Attributes:
        request_id: Need not be unique: a retried request may be sampled twice.
        time_seconds: When it was answered, in seconds since the epoch.
        probability: π, in (0, 1]; 0 for a request added by hand.
        label_order: A hash in [0, 1); picks for labelling take the lowest.
        payload: The record of the request.
    """

    request_id: str
    time_seconds: float
    probability: float
    label_order: float
    payload: bytes


class LostReason(StrEnum):
    """Why a sample was never stored. A closed set: it labels a metric."""

    QUEUE_FULL = "queue_full"
    CLOSED = "closed"
    """Still waiting when the process ended, or offered later."""
    UNREADABLE = "unreadable"
    """A passage or a score raised when it was read."""
    REDACTION_FAILED = "redaction_failed"
    """The redactor raised, so that nothing was written."""
    STORE_FAILED = "store_failed"
    """The store failed until the process ended."""


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """The counts of one writing process since its last report.

    Attributes:
        sampled: Samples of ``hour``, stored or not.
        lost: Lost samples, by reason.
        pending: Samples in its memory now, neither stored nor lost.
        hour: The present hour, in hours since the epoch; None for that of the store's clock.
        earlier: Samples of other hours, by hour, which waited while the store was away.
    """

    sampled: int
    lost: Mapping[LostReason, int] = field(default_factory=dict)
    pending: int = 0
    hour: int | None = None
    earlier: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Accounts:
    """Counts of the samples of one or many processes, each counted by itself.

    Attributes:
        sampled: All samples.
        stored: Those that were stored.
        pending: Those in the memory of processes.
        lost: Those that will never be stored, by reason.
    """

    sampled: int
    stored: int
    pending: int
    lost: Mapping[LostReason, int]

    @property
    def unaccounted(self) -> int:
        """Samples that processes held when they were killed; 0 for a living process.

        Negative if some are counted twice.

        >>> Accounts(10, 7, 1, {LostReason.QUEUE_FULL: 1}).unaccounted
        1
        """
        return self.sampled - self.stored - self.pending - sum(self.lost.values())


@dataclass(frozen=True, slots=True)
class StoredShares:
    """The share of each hour's samples that was stored.

    A stored sample stands for those of its hour that were lost: multiply its probability by the
    share.

    Attributes:
        by_hour: By hours since the epoch, in (0, 1); all samples of any other hour were stored.
    """

    by_hour: Mapping[int, float] = field(default_factory=dict)

    def at(self, time_seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the share at the times of some requests, of the same shape.

        >>> StoredShares({1: 0.5}).at(np.array([0.0, 3600.0, 7199.0, 7200.0])).tolist()
        [1.0, 0.5, 0.5, 1.0]
        """
        if not self.by_hour:
            return np.ones(time_seconds.shape)
        hours, place = np.unique(np.floor(time_seconds / HOUR_SECONDS), return_inverse=True)
        shares = np.array([self.by_hour.get(int(hour), 1.0) for hour in hours.tolist()])
        return shares[place]


@dataclass(frozen=True, slots=True)
class StoredSample:
    """A sample and how far it came; for the other fields see ``Entry``.

    Attributes:
        state: Its state in the judges' queue.
        has_text: Whether its payload is kept; the oldest are deleted to bound the store's size.
        series: The series that judged it; None where it was not judged.
    """

    sample_id: int
    request_id: str
    time_seconds: float
    probability: float
    state: State
    has_text: bool
    series: str | None


@dataclass(frozen=True, slots=True)
class LossRow:
    """The losses of one judged request, which alarms compare with a profile's promises.

    Attributes:
        time_seconds: When the request was answered.
        profile_id: The profile that served it.
        route: The stages that answered.
        session: A number for its session; 0 without one.
        question: A number for its question; repeats of a question have the same.
        probability: Probability with which it was sampled and taken up for judging, in (0, 1].
        recall_probability: The same, and that its recall loss was judged.
        recall_loss: In [0, 1]; None if it was not judged or is undefined.
        harm: ≥ 0.
    """

    time_seconds: float
    profile_id: str
    route: str
    session: int
    question: int
    probability: float
    recall_probability: float
    recall_loss: float | None
    harm: float | None


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of a sample.

    Attributes:
        state: ``JUDGED``, ``INCOMPLETE``, ``UNREADABLE`` or ``SKIPPED``.
        grades: JSON for people to read; it may quote passages, and is deleted with the payload.
        block: The part of a judged request that estimates need; empty if nothing is known of it.
        n_failed: Passages without a grade, because a call of the judge failed.
        rejected: (passage id, reason, raw reply) of the grades that were not valid.
        loss: The losses that alarms compare; None for a request of another profile, or without
            alarms.
        counts: Its additions to the counts of its series, by name and label values.
    """

    sample_id: int
    state: State
    grades: str = ""
    block: bytes = b""
    n_failed: int = 0
    rejected: tuple[tuple[str, str, str], ...] = ()
    loss: LossRow | None = None
    counts: Mapping[tuple[str, ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.state not in FINAL_STATES:
            raise ConfigurationError(
                f"a sample cannot be finished as {self.state!r}; use one of "
                f"{', '.join(sorted(FINAL_STATES))}"
            )
        if self.state is State.JUDGED and not self.block:
            raise ConfigurationError(
                f"sample {self.sample_id} is finished as {self.state.value!r} with a block of "
                "0 bytes; judged samples have one"
            )


@dataclass(frozen=True, slots=True)
class JudgedRows:
    """The judged requests of a series, ordered by time, then by sample id.

    Attributes:
        sample_ids: Shape (n,), int64.
        time_seconds: Shape (n,), float64.
        first_pick: Shape (n,), int64, the first pick for labels that could have taken each;
            ``NO_PICK`` where none could so far.
        blocks: All n of them (``measure.rows``).
    """

    sample_ids: NDArray[np.int64]
    time_seconds: NDArray[np.float64]
    first_pick: NDArray[np.int64]
    blocks: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.sample_ids)


class PickKind(StrEnum):
    """Why people are asked about a passage."""

    RUN = "run"
    """The request is opened, and graded down to its first relevant passage."""
    FIRST = "first"
    """The request is opened, and graded only at its first passage and where coins say so."""
    COIN = "coin"
    """The passage is graded whatever the grades of the others."""


@dataclass(frozen=True, slots=True)
class PickedPassage:
    """A passage that a draw asks people about, or a request that it opens.

    Attributes:
        position: Position among the retriever's candidates; −1 for an opened request.
        probability: The coin's probability; for an opened request, the probability of grading on
            below an irrelevant first passage.
        pick_id: The draw; 0 before it is saved.
        asked: The tenant whose file it was written to first; empty for a file of all tenants, None
            where nobody was asked so far.
        question: A number of the question, uniform in [0, 1): its place in files.
    """

    sample_id: int
    kind: PickKind
    position: int
    probability: float
    pick_id: int = 0
    asked: str | None = None
    question: float = 0.0


OPENED = frozenset({PickKind.RUN, PickKind.FIRST})


@dataclass(frozen=True, slots=True)
class GradedBlock:
    """The block of a sample with people's grades of it.

    Attributes:
        block: See ``measure.rows``.
        route: The stages that answered.
        is_graded: Whether it holds a grade of people.
        disagreements: Passages on whose relevance annotators disagree.
        last_label_id: The newest label in it.
    """

    sample_id: int
    block: bytes
    route: str
    is_graded: bool
    disagreements: int
    last_label_id: int


@dataclass(frozen=True, slots=True)
class GradedRows:
    """Samples of a series that people have graded, by ascending id; n of them.

    Attributes:
        sample_ids, time_seconds, first_pick: Shape (n,), as of ``JudgedRows``.
        routes, blocks: Of each, as of ``GradedBlock``.
        draws: The draws that stand for all that they could have taken.
        disagreements: Passages on whose relevance annotators disagree.
    """

    sample_ids: NDArray[np.int64]
    time_seconds: NDArray[np.float64]
    first_pick: NDArray[np.int64]
    routes: tuple[str, ...]
    blocks: tuple[bytes, ...]
    draws: frozenset[int]
    disagreements: int


@dataclass(frozen=True, slots=True)
class LabelRow:
    """One person's label of one passage for one request.

    Attributes:
        grade: 0 for irrelevant, higher for more relevant; None takes this annotator's labels of
            the passage up to that time back.
        negative: How a passage of grade 0 misleads; None where it does not.
        annotator: The person's name.
        time_seconds: When it was given, in seconds since the epoch.
    """

    request_id: str
    passage_id: str
    grade: int | None
    negative: str | None
    annotator: str
    time_seconds: float


@dataclass(frozen=True, slots=True)
class Added:
    """The result of adding labels.

    Attributes:
        added: Number of labels added.
        unknown: Request ids without a sample in the store; theirs were left out.
        duplicates: Labels left out because the annotator's last one was the same.
    """

    added: int
    unknown: tuple[str, ...]
    duplicates: int


@dataclass(frozen=True, slots=True)
class PickedSample:
    """A sample that was picked for labels.

    Attributes:
        question: As in ``PickedPassage``.
        n_labels: How many labels of that request were added, including those taken back.
    """

    sample_id: int
    request_id: str
    question: float
    n_labels: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on how much the store keeps.

    Attributes:
        max_age_seconds: Age at which samples are deleted, > 0; None for no limit. Measured by the
            clock of the process that cleans.
        max_bytes: Total bytes of payload above which the oldest are deleted, > 0; None for no
            limit.

    Raises:
        ConfigurationError: at construction, for a limit out of range.
    """

    max_age_seconds: float | None = DEFAULT_MAX_AGE_SECONDS
    max_bytes: int | None = DEFAULT_MAX_BYTES

    def __post_init__(self) -> None:
        if self.max_age_seconds is not None and not 0.0 < self.max_age_seconds < math.inf:
            raise ConfigurationError(f"max_age_seconds {self.max_age_seconds!r} must be > 0")
        if self.max_bytes is not None and self.max_bytes <= 0:
            raise ConfigurationError(f"max_bytes {self.max_bytes!r} must be > 0")


DEFAULT_LIMITS = Limits()
