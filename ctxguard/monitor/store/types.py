"""Defines the values that go into and come out of the store, as frozen data. Pure: no database."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ctxguard._support.checks import check_positive
from ctxguard.measure.rows import Rows
from ctxguard.monitor.sampling.record import Judgment, SampleRecord
from ctxguard.monitor.sampling.sampler import LostReason

Counts = Mapping[tuple[str, ...], float]
"""Counts by name and label values."""

MOST_UNCOVERED = 0.02
"""Labels represent the requests if at most this share of them had no chance of being graded."""


class State(StrEnum):
    """The state of a sample. A closed set: it labels a metric."""

    PENDING = "pending"
    JUDGED = "judged"
    INCOMPLETE = "incomplete"
    """A passage has no grade: its call failed, and the next run asks about it again; or the judge
    knows nothing of the question."""
    UNREADABLE = "unreadable"
    """The sample cannot be read, or its result could not be stored."""
    SKIPPED = "skipped"
    """Skipped at random to keep within the judging budget; others stand for it."""
    FORCED = "forced"
    """Added by hand: it is stored but never judged, and is part of no estimate."""


FINAL_STATES = frozenset({State.JUDGED, State.INCOMPLETE, State.UNREADABLE, State.SKIPPED})


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples of one writing process, with its counts since its last batch.

    Attributes:
        samples: Records, each with its ``to_bytes``; may be empty, to report the counts alone.
        sampled: Samples of ``hour``, stored or not.
        lost: Lost samples, by reason.
        pending: Samples in its memory now, neither stored nor lost.
        hour: The present hour, in hours since the epoch; None for that of the store's clock.
        earlier: Samples of other hours, by hour, which waited while the store was away.
        number: Higher than all before. A batch that the store holds already changes nothing, so
            that it may be sent again where the answer was lost; 0 for one that never is.
    """

    samples: Sequence[tuple[SampleRecord, bytes]]
    sampled: int
    lost: Mapping[LostReason, int] = field(default_factory=dict)
    pending: int = 0
    hour: int | None = None
    earlier: Mapping[int, int] = field(default_factory=dict)
    number: int = 0


@dataclass(frozen=True, slots=True)
class StoredSample:
    """A sample and how far it got; for the other fields see ``SampleRecord``.

    Attributes:
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
class Finished:
    """The result of a sample.

    Attributes:
        state: One of ``FINAL_STATES``.
        grades: By passage id; they may quote passages, and are deleted with the sample's text.
        rows: What estimates and alarms need of a judged request; None if nothing is known of it.
        rejected: (passage id, reason, raw reply) of the grades that were not valid.
        counts: Its additions to the counts of its series.
    """

    sample_id: int
    state: State
    grades: Mapping[str, Judgment] = field(default_factory=dict)
    rows: Rows | None = None
    rejected: tuple[tuple[str, str, str], ...] = ()
    counts: Counts = field(default_factory=dict)


class PickKind(StrEnum):
    """Why people are asked about a passage."""

    RUN = "run"
    """The request is opened, and graded down to its first relevant passage."""
    FIRST = "first"
    """The request is opened, but only its first passage and those that coins pick are graded."""
    COIN = "coin"
    """The passage is graded whatever the grades of the others."""


@dataclass(frozen=True, slots=True)
class PickedPassage:
    """A passage that a draw asks people about, or a request that a draw opens.

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
class LabelRow:
    """One person's label of one passage for one request.

    Attributes:
        grade: 0 for irrelevant, higher for more relevant; None takes this annotator's labels of
            the passage up to that time back.
        negative: How a passage of grade 0 misleads; None where it does not.
    """

    request_id: str
    passage_id: str
    grade: int | None
    negative: str | None
    annotator: str
    time_seconds: float


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

    max_age_seconds: float | None = 30 * 86_400.0
    max_bytes: int | None = 2 * 2**30

    def __post_init__(self) -> None:
        check_positive(max_age_seconds=self.max_age_seconds, max_bytes=self.max_bytes)
