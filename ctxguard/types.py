"""The nouns: passages, rankings, routes, decisions' verdicts. Frozen data, no behaviour to fail.

Pure: imports nothing from the package but errors.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

DEFAULT_DEPTH = 100
DEFAULT_K = 5


class Route(StrEnum):
    """The stages that answered a query. Each is calibrated by itself: scores do not transfer."""

    HYBRID_RERANK = "hybrid+rerank"
    HYBRID = "hybrid"
    LEXICAL_RERANK = "lexical+rerank"
    LEXICAL = "lexical"
    DENSE_RERANK = "dense+rerank"
    DENSE = "dense"
    EXTERNAL = "external"
    """A wrapped retriever that says nothing of its stages."""


class ScoreKind(StrEnum):
    """What a score means, and so how two scores may be compared (DESIGN.md §4)."""

    RATIO = "ratio"
    """Non-negative with a true zero: BM25, convex fusion in [0, 1]."""
    COSINE = "cosine"
    INNER_PRODUCT = "inner_product"
    LOGIT = "logit"
    DISTANCE = "distance"
    """A distance already turned round, that is ``-distance``: higher is better here too."""
    PROBABILITY = "probability"
    RANK = "rank"
    """Carries order only (reciprocal-rank fusion): no relative filter is possible."""


class Mode(StrEnum):
    """What the guard does with its decision."""

    ENFORCE = "enforce"
    SHADOW = "shadow"
    """Decide and record, but return the bare retriever's top k."""
    OFF = "off"


class DropReason(StrEnum):
    """Why a candidate did not reach the context. A closed set: it labels a metric."""

    BELOW_RATIO = "below_ratio"
    BELOW_PROBABILITY = "below_probability"
    BEYOND_K = "beyond_k"
    INVALID_SCORE = "invalid_score"
    DUPLICATE_ID = "duplicate_id"
    DUPLICATE_TEXT = "duplicate_text"
    OVER_BUDGET = "over_budget"
    UNREADABLE = "unreadable"
    """Its text could not be fetched or rendered; the others are served without it."""


class Flag(StrEnum):
    """Why an answer is not an ordinary one. A closed set: it labels a metric."""

    UNCALIBRATED = "uncalibrated"
    PROFILE_MISMATCH = "profile_mismatch"
    ROUTE_UNCALIBRATED = "route_uncalibrated"
    """The profile has no policy for the stages that answered."""
    DOMAIN_VIOLATION = "domain_violation"
    INVALID_SCORES = "invalid_scores"
    RANK_ONLY = "rank_only"
    """A relative filter was asked of scores that carry rank only; only k applied."""
    MISSING_SIGNALS = "missing_signals"
    DEGRADED = "degraded"
    """A stage was left out; see ``Ranking.failures``."""
    EMPTY_RETRIEVAL = "empty_retrieval"


@dataclass(frozen=True, slots=True)
class Passage:
    """A unit of text that a retriever returns and a context holds."""

    passage_id: str
    text: str
    title: str = ""
    metadata: Mapping[str, object] | None = field(default=None, hash=False)


@dataclass(frozen=True, slots=True)
class Hit:
    """One retrieved passage with its score, higher is better.

    Attributes:
        rank: The 1-based rank that the upstream engine gave it, which breaks ties of score.
            None where unknown; ties are then broken by ``passage_id``.
    """

    passage_id: str
    score: float | None
    text: str = ""
    title: str = ""
    rank: int | None = None
    metadata: Mapping[str, object] | None = field(default=None, hash=False)


class PassageSource(Protocol):
    """Where a ranking finds its passages, by position; read only for those that are kept."""

    def __getitem__(self, position: int, /) -> Passage: ...


@dataclass(frozen=True, slots=True)
class HitPassages:
    """Passages built from hits when they are read."""

    hits: Sequence[Hit]

    def __getitem__(self, position: int, /) -> Passage:
        hit = self.hits[position]
        return Passage(hit.passage_id, hit.text, hit.title, hit.metadata)


@dataclass(frozen=True, slots=True)
class Leg:
    """One stage's own scores for the candidates of a ranking.

    Attributes:
        scores: Shape (n,), in the ranking's order, higher is better; NaN where this stage has
            no score for a candidate.
        kind: What the scores mean.
    """

    scores: FloatArray
    kind: ScoreKind


class FailureKind(StrEnum):
    """What became of a stage that was left out. A closed set: it labels a metric."""

    ERROR = "error"
    TIMEOUT = "timeout"
    GARBAGE = "garbage"
    """It answered with NaN, or in another shape than was asked for."""
    SATURATED = "saturated"
    """No thread of its pool was free."""
    CIRCUIT_OPEN = "circuit_open"
    """It was not asked: it failed too often just before."""
    OUT_OF_MEMORY = "out_of_memory"


@dataclass(frozen=True, slots=True)
class StageFailure:
    """A stage that was left out of an answer, and why: in words, and as a label."""

    stage: str
    cause: str
    kind: FailureKind = FailureKind.ERROR


@dataclass(frozen=True, slots=True)
class Ranking:
    """What a retriever returns: candidates as columns, best first.

    Columns rather than objects, because a request looks at a hundred candidates and keeps five:
    passages are read through ``passages`` only for those that are kept.

    Attributes:
        passage_ids: Shape (n,).
        scores: Shape (n,), higher is better. Garbage (None, NaN, infinities) is allowed here;
            ``decide`` quarantines it.
        kind: What the scores mean; a ranking has one kind.
        passages: The passage at a position.
        route: The stages that answered.
        ranks: The upstream engine's 1-based ranks, which break ties of score. None where there
            are none; ties are then broken by passage id, never by the order of the columns.
        legs: Each stage's own scores, by name (``lexical``, ``dense``, ``rerank``).
        failures: Stages that were left out of this answer.
    """

    passage_ids: Sequence[str]
    scores: Sequence[float | None]
    kind: ScoreKind
    passages: PassageSource
    route: Route = Route.EXTERNAL
    ranks: Sequence[int | None] | None = None
    legs: Mapping[str, Leg] = field(default_factory=dict)
    failures: tuple[StageFailure, ...] = ()

    def __len__(self) -> int:
        return len(self.passage_ids)

    @classmethod
    def from_hits(
        cls, hits: Iterable[Hit], kind: ScoreKind, route: Route = Route.EXTERNAL
    ) -> "Ranking":
        """Columns from hits, in the order given.

        >>> ranking = Ranking.from_hits([Hit("a", 2.0), Hit("b", 1.0)], ScoreKind.RATIO)
        >>> ranking.passage_ids, ranking.scores
        (('a', 'b'), (2.0, 1.0))
        """
        hits = tuple(hits)
        ranks = tuple([hit.rank for hit in hits])
        return cls(
            passage_ids=tuple([hit.passage_id for hit in hits]),
            scores=tuple([hit.score for hit in hits]),
            kind=kind,
            passages=HitPassages(hits),
            route=route,
            ranks=None if ranks.count(None) == len(ranks) else ranks,
        )


class Threshold(NamedTuple):
    """A setting and the value of it that would have kept a dropped passage."""

    setting: str
    value: float


class Verdict(NamedTuple):
    """What became of one candidate, and why.

    A tuple, as ``Threshold`` is: a request has a hundred of them, and a tuple is built in a
    quarter of a frozen data class's time.

    Attributes:
        rank: 1-based in the decision's order; None for a candidate with no usable score.
        score: As the ranking gave it.
        relative_score: In (0, 1] against the top of its own ranking; None where the kind of
            score has none.
        probability: Calibrated P(relevant); None where the policy has no model.
        reason: Why it was dropped; None for a kept passage.
        kept_if: Every setting that would have to change for it to be kept, each with the value
            that would do; empty for a kept passage and where no setting would help.
    """

    passage_id: str
    rank: int | None
    score: float | None
    relative_score: float | None
    probability: float | None
    reason: DropReason | None
    kept_if: tuple[Threshold, ...] = ()

    @property
    def kept(self) -> bool:
        return self.reason is None
