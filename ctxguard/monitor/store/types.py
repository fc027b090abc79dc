"""What goes into the store and comes out of it: frozen data, no database.

Payloads, verdicts, summaries and grades are opaque here; their formats belong to those who write
and read them.
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
DEFAULT_RESERVE_BYTES = 8 * 2**20


class State(StrEnum):
    """Where a sample is on its way. A closed set: it labels a metric."""

    PENDING = "pending"
    CLAIMED = "claimed"
    """A monitor has it, until its lease ends."""
    JUDGED = "judged"
    INCOMPLETE = "incomplete"
    """A served passage got no valid verdict."""
    FAILED = "failed"
    """The judge could not be asked, however often it was tried, or the sample cannot be read."""
    SKIPPED = "skipped"
    """Passed over at random to keep within the judging budget: others stand for it."""
    FORCED = "forced"
    """Put in by hand: stored, never claimed for judging, in no estimate."""


RANDOM = "random"
"""Why a sample is labelled that was picked by its label order alone."""

WEIGHED = "weighed"
"""Why one is that was picked by its label order over a weight (``ppi.label_weight``)."""

PICKED = (RANDOM, WEIGHED)

FINAL_STATES = frozenset({State.JUDGED, State.INCOMPLETE, State.FAILED, State.SKIPPED})


@dataclass(frozen=True, slots=True)
class Entry:
    """A sampled request, as its writer hands it over.

    Attributes:
        request_id: Need not be unique: a retried request may be sampled twice.
        time_seconds: When it was answered, in seconds since the epoch.
        probability: π, in (0, 1]; 0 for a request that was put in by hand.
        session_id: None where the request belongs to none.
        label_order: In [0, 1), a hash: random picks for labelling take the lowest.
        payload: The request itself.
    """

    request_id: str
    time_seconds: float
    probability: float
    session_id: str | None
    label_order: float
    payload: bytes


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """What one writing process has counted since it began.

    Attributes:
        sampled: Every sample, whatever became of it.
        lost: By reason.
    """

    sampled: int
    lost: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A writing process, as the store knows it.

    Attributes:
        pid: Of the process on ``host`` that wrote first.
        started_seconds: When it first wrote, by that process's clock.
        seen_seconds: When it last wrote.
        sampled: As the process counted at its last write.
        stored: Samples that the store took from it, exact through the sudden death of either.
        lost: By reason, as the process counted at its last write.
        closed: Whether its counts are final.
    """

    worker_id: str
    host: str
    pid: int
    started_seconds: float
    seen_seconds: float
    sampled: int
    stored: int
    lost: Mapping[str, int]
    closed: bool


@dataclass(frozen=True, slots=True)
class Claimed:
    """A sample that a monitor has for itself until its lease ends.

    Attributes:
        attempts: How often it was claimed before without being finished.
    """

    sample_id: int
    request_id: str
    time_seconds: float
    probability: float
    session_id: str | None
    payload: bytes
    attempts: int


@dataclass(frozen=True, slots=True)
class Finished:
    """What became of a claimed sample.

    Attributes:
        time_seconds: Which time windows it counts in: when the request was answered.
        state: ``JUDGED``, ``INCOMPLETE``, ``FAILED`` or ``SKIPPED``.
        verdicts: JSON text, for people to look at; may quote passages, and so is deleted with
            the payload.
        summary: What estimates need of a judged request; of one size in a series, and empty
            unless ``JUDGED``.
        grades: What else of the judgments is kept as long as the summary; of any size.
        rejected: (passage id, reason, raw reply) of the verdicts that were not valid.
    """

    sample_id: int
    time_seconds: float
    state: State
    verdicts: str = ""
    summary: bytes = b""
    grades: bytes = b""
    rejected: tuple[tuple[str, str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.state not in FINAL_STATES:
            raise ConfigurationError(
                f"a sample cannot be finished as {self.state!r}; give it back, or use one of "
                f"{', '.join(sorted(FINAL_STATES))}"
            )
        if bool(self.summary) is not (self.state is State.JUDGED):
            raise ConfigurationError(
                f"sample {self.sample_id} is finished as {self.state.value!r} with a summary of "
                f"{len(self.summary)} bytes; judged samples have one, others none"
            )


@dataclass(frozen=True, slots=True)
class FinishedEach:
    """What became of samples that were finished together, each for itself.

    Attributes:
        accepted: Ids of those that were put down; those that are neither here nor refused were
            finished before, deleted or forced.
        refused: By id, why what a sample's end holds could not be written.
    """

    accepted: frozenset[int]
    refused: Mapping[int, Exception] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JudgedRows:
    """The judged requests of a series, ordered by time, then by sample id.

    Attributes:
        sample_ids: Shape (n,), int64.
        time_seconds: Shape (n,), float64.
        summaries: All n of them, one after the other; of one size.
        grades: One per request; None where they were not asked for.
    """

    sample_ids: NDArray[np.int64]
    time_seconds: NDArray[np.float64]
    summaries: bytes
    grades: list[bytes] | None = None

    def __len__(self) -> int:
        return len(self.sample_ids)


@dataclass(frozen=True, slots=True)
class LabelRow:
    """One person's word on one passage for one request.

    Attributes:
        grade: 0 for irrelevant, higher for more relevant.
        negative: How a passage of grade 0 misleads; None where it does not.
        annotator: Who said so.
        time_seconds: When, in seconds since the epoch.
        source: Where the label comes from.
    """

    request_id: str
    passage_id: str
    grade: int
    negative: str | None
    annotator: str
    time_seconds: float
    source: str = "human"


@dataclass(frozen=True, slots=True)
class LabelsAdded:
    """What became of labels that were handed in.

    Attributes:
        added: Kept. ``added + duplicates`` and the labels of unknown requests are all of them.
        duplicates: Left out: that annotator's word on that passage already.
        disagreeing: Those among the added that contradict a label that was there.
        unknown: Request ids of which the store has no sample; their labels were left out.
    """

    added: int
    duplicates: int
    disagreeing: int
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FeedbackRow:
    """What a user showed of an answer. Sees only what was served: never a judgment.

    Attributes:
        kind: ``thumb_up``, ``thumb_down`` or ``cited``.
        passage_ids: Those concerned; empty where the whole answer is.
    """

    request_id: str
    kind: str
    passage_ids: tuple[str, ...]
    time_seconds: float

    def __post_init__(self) -> None:
        if self.kind not in FEEDBACK_KINDS:
            raise ConfigurationError(
                f"feedback kind {self.kind!r} is unknown; use one of {', '.join(FEEDBACK_KINDS)}"
            )


FEEDBACK_KINDS = ("thumb_up", "thumb_down", "cited")


@dataclass(frozen=True, slots=True)
class FeedbackAdded:
    """What became of feedback that was handed in.

    Attributes:
        unknown: Request ids of which the store has no sample; their feedback was left out.
    """

    added: int
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is kept, and how much space is held back.

    Attributes:
        max_age_seconds: Samples older than this are deleted; None for no limit. By the clock of
            the process that cleans: a clock set forward ages every sample by as much.
        max_bytes: Payloads beyond this many bytes in all are deleted, oldest first; None for no
            limit.
        reserve_bytes: Held back on a SQLite store's disk, so that a full disk can be cleaned.

    Raises:
        ConfigurationError: a limit out of range.
    """

    max_age_seconds: float | None = DEFAULT_MAX_AGE_SECONDS
    max_bytes: int | None = DEFAULT_MAX_BYTES
    reserve_bytes: int = DEFAULT_RESERVE_BYTES

    def __post_init__(self) -> None:
        if self.max_age_seconds is not None and not 0.0 < self.max_age_seconds < math.inf:
            raise ConfigurationError(f"max_age_seconds {self.max_age_seconds!r} must be > 0")
        if self.max_bytes is not None and self.max_bytes <= 0:
            raise ConfigurationError(f"max_bytes {self.max_bytes!r} must be > 0")
        if self.reserve_bytes < 0:
            raise ConfigurationError(f"reserve_bytes {self.reserve_bytes!r} must be ≥ 0")


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What cleaning took away.

    Attributes:
        expired: Samples that had reached the age limit.
        by_size: Samples whose payload went because of the size limit.
        unjudged: Those among both that nobody had judged yet: a judge that cannot keep up.
    """

    expired: int
    by_size: int
    unjudged: int

    def __add__(self, other: "Cleaned") -> "Cleaned":
        return Cleaned(
            self.expired + other.expired,
            self.by_size + other.by_size,
            self.unjudged + other.unjudged,
        )
