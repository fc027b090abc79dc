"""Data types that every other module shares: passages, hits, rankings, routes, decisions.

Frozen data. Pure, except that `id_text` converts foreign objects and `PassagesBy` calls the
caller's function, which may run anyone's code. Imports nothing from the package but errors.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, cast
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from ctxguard.errors import ConfigurationError

FloatArray = NDArray[np.float64]

DEFAULT_DEPTH = 100
DEFAULT_K = 5


class Route(StrEnum):
    """The stages that answered a query. Each has its own policy: thresholds do not transfer."""

    HYBRID_RERANK = "hybrid+rerank"
    HYBRID = "hybrid"
    LEXICAL_RERANK = "lexical+rerank"
    LEXICAL = "lexical"
    DENSE_RERANK = "dense+rerank"
    DENSE = "dense"
    EXTERNAL = "external"
    """A wrapped retriever; its stages are unknown."""


RouteName = Literal[
    "hybrid+rerank", "hybrid", "lexical+rerank", "lexical", "dense+rerank", "dense", "external"
]
"""The name of a ``Route``, accepted wherever a route is."""


class ScoreKind(StrEnum):
    """The kind of a score, which decides how two scores may be compared (DESIGN.md §4)."""

    RATIO = "ratio"
    """Non-negative with a true zero, such as BM25, or convex fusion in [0, 1]."""
    COSINE = "cosine"
    INNER_PRODUCT = "inner_product"
    LOGIT = "logit"
    DISTANCE = "distance"
    """A distance with its sign turned, ``-distance``, so that higher is better here too."""
    PROBABILITY = "probability"
    RANK = "rank"
    """Carries only order (reciprocal-rank fusion): no relative filter is possible."""


ScoreKindName = Literal[
    "ratio", "cosine", "inner_product", "logit", "distance", "probability", "rank"
]
"""The name of a ``ScoreKind``, accepted wherever a kind is."""


class Mode(StrEnum):
    """How the guard applies its decision."""

    ENFORCE = "enforce"
    SHADOW = "shadow"
    """Decide, assemble and record, but serve the bare retriever's top k."""
    OFF = "off"


ModeName = Literal["enforce", "shadow", "off"]
"""The name of a ``Mode``, accepted wherever a mode is."""


_Member = TypeVar("_Member", bound=StrEnum)


def member_of(enumeration: type[_Member], value: str, name: str) -> _Member:
    """Return the member that is ``value`` or has that name; errors call the setting ``name``.

    Raises:
        ConfigurationError: no member has that name; the message lists them all.

    >>> member_of(Mode, "shadow", "mode")
    <Mode.SHADOW: 'shadow'>
    """
    try:
        return enumeration(value)
    except ValueError:
        names = ", ".join(member.value for member in enumeration)
        raise ConfigurationError(f"{name} {value!r} is unknown; use one of {names}") from None


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
    """Its text could not be read; the others are served without it."""
    INSUFFICIENT = "insufficient"
    """The whole context was called insufficient, and assembly is set to abstain in that case."""


class Flag(StrEnum):
    """A flag of an answer. A closed set: it labels a metric."""

    UNCALIBRATED = "uncalibrated"
    """No profile is in force."""
    PROFILE_MISMATCH = "profile_mismatch"
    """The profile was made for another system or another kind of score; only its k was applied."""
    CORPUS_CHANGED = "corpus_changed"
    """More of the corpus has changed since calibration than the profile allows; it was applied."""
    UNVERIFIED = "unverified"
    """Nothing shows whether the profile was made for this system and corpus; it was applied."""
    ROUTE_UNCALIBRATED = "route_uncalibrated"
    """The profile has no policy for the stages that answered."""
    DOMAIN_VIOLATION = "domain_violation"
    """A score is impossible for the ranking's kind of score; only k was applied."""
    INVALID_SCORES = "invalid_scores"
    """Candidates without a usable score were dropped; if none had one, only k was applied."""
    SCORES_CONTRADICTED = "scores_contradicted"
    """The engine's order contradicts the scores; the order was kept, and only k was applied."""
    RANK_ONLY = "rank_only"
    """The policy compares scores, but these give only an order; only k was applied."""
    MISSING_SIGNALS = "missing_signals"
    """The policy's model lacks a leg or a score that it was fitted on; only k was applied."""
    DEGRADED = "degraded"
    """A stage was left out; see ``Ranking.failures``."""
    EMPTY_RETRIEVAL = "empty_retrieval"
    """The retriever returned no candidate."""
    TRUNCATED = "truncated"
    """No kept passage is within assembly's limits; the best one was cut."""
    OVER_BUDGET = "over_budget"
    """No kept passage is within assembly's limits, and none was cut: the context is empty."""
    UNREADABLE = "unreadable"
    """No kept passage could be read; the next readable one was served."""
    INSUFFICIENT = "insufficient"
    """Probably no kept passage is relevant; see ``Context.sufficient``."""


def id_text(value: object) -> str:
    """Return an engine's id as the string that identifies the passage or query in ctxguard.

    It is a string, a whole number (numpy's too) or a UUID: 7 and ``"7"`` are the same id.

    Raises:
        ConfigurationError: it is of another type, which labels might write differently.

    >>> id_text(7), id_text(UUID(int=1)), id_text("kettle-2")
    ('7', '00000000-0000-0000-0000-000000000001', 'kettle-2')
    """
    if isinstance(value, str | UUID):
        return str(value)
    if not isinstance(value, bool):
        with suppress(TypeError):
            return str(operator.index(value))  # type: ignore[arg-type]
    shown = repr(value)
    raise ConfigurationError(
        f"an id of type {type(value).__name__} ({shown[:40]}{'…' * (len(shown) > 40)}) must be "
        "a string, a whole number or a UUID: pass the string that your labels use, as in "
        "Hit(str(row.id), …)"
    )


@dataclass(frozen=True, slots=True)
class Passage:
    """A unit of text that a retriever returns and a context holds.

    Attributes:
        passage_id: Identifies it in the corpus; whole numbers and UUIDs become strings.
        title: The model reads it above the text; empty if it has none.
        metadata: Fields that filters compare, such as its tenant; None without metadata.
    """

    passage_id: str
    text: str
    title: str = ""
    metadata: Mapping[str, object] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if type(self.passage_id) is not str:
            object.__setattr__(self, "passage_id", id_text(self.passage_id))


@dataclass(frozen=True, slots=True)
class Hit:
    """One retrieved passage with its score, higher is better.

    Attributes:
        score: Higher is better. None if there are no scores: the hits' order is then their rank
            (``score_kind`` ``rank``). Among hits with scores, one whose score is None, NaN or
            infinite is dropped.
        rank: The engine's 1-based rank, which breaks ties of score. None if unknown; ties are
            then broken by ``passage_id``.
        signals: Named numbers that a calibrated model may use beside the score, such as
            ``freshness`` or another reranker's score, higher or lower is better; None without any.
    """

    passage_id: str
    score: float | None = None
    text: str = ""
    title: str = ""
    rank: int | None = None
    metadata: Mapping[str, object] | None = field(default=None, hash=False)
    signals: Mapping[str, float] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if type(self.passage_id) is not str:
            object.__setattr__(self, "passage_id", id_text(self.passage_id))


class PassageSource(Protocol):
    """The passages of a ranking, by position from 0; only the kept ones are read."""

    def __getitem__(self, position: int, /) -> Passage: ...


class ReadTogether:
    """A source that reads several passages in one call without running foreign code."""

    __slots__ = ()

    def many(self, positions: Sequence[int]) -> list[Passage]:
        """Read the passages at these positions."""
        raise NotImplementedError

    def __getitem__(self, position: int, /) -> Passage:
        return self.many([position])[0]


@dataclass(frozen=True, slots=True)
class CheckedPassages(ReadTogether):
    """Passages that are built, when read, from fields that were already checked.

    Attributes:
        columns: `Passage`'s fields in order, all or the first few, shape (n,) each.
    """

    columns: tuple[Sequence[Any], ...] = field(repr=False)

    def many(self, positions: Sequence[int]) -> list[Passage]:
        columns = [map(column.__getitem__, positions) for column in self.columns]
        return [*map(Passage, *columns)]


@dataclass(frozen=True, slots=True)
class HitPassages(ReadTogether):
    """Passages that are built from hits when read."""

    hits: Sequence[Hit] = field(repr=False)

    def many(self, positions: Sequence[int]) -> list[Passage]:
        passages: list[Passage] = []
        for position in positions:
            hit = self.hits[position]
            passages.append(Passage(hit.passage_id, hit.text, hit.title, hit.metadata))
        return passages


@dataclass(frozen=True, slots=True)
class PassagesBy:
    """Passages that a function builds from their positions when they are read."""

    make: Callable[[int], Passage] = field(repr=False)

    def __getitem__(self, position: int, /) -> Passage:
        return self.make(position)


# A leg or a ranking compares by identity: arrays neither compare to one bool nor hash.
@dataclass(frozen=True, slots=True, eq=False)
class Leg:
    """One stage's own scores for the candidates of a ranking.

    Attributes:
        scores: Shape (n,), in the ranking's order, higher is better; NaN where this stage has
            no score for a candidate.
        kind: In a ranking the name of a kind becomes the kind.
    """

    scores: FloatArray
    kind: ScoreKind


class FailureKind(StrEnum):
    """Why a stage was left out of an answer. A closed set: it labels a metric."""

    ERROR = "error"
    TIMEOUT = "timeout"
    GARBAGE = "garbage"
    """It returned NaN, or an array of the wrong shape."""
    SATURATED = "saturated"
    """None of its threads was free in time."""
    CIRCUIT_OPEN = "circuit_open"
    """It was not called because it had failed repeatedly just before."""
    OUT_OF_MEMORY = "out_of_memory"


@dataclass(frozen=True, slots=True)
class StageFailure:
    """A stage that was left out of an answer; ``cause`` quotes neither the query nor a passage."""

    stage: str
    cause: str
    kind: FailureKind = FailureKind.ERROR


class StageTiming(NamedTuple):
    """When a stage ran for one request, whether or not it answered; starts in epoch time."""

    stage: str
    start_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Ranking:
    """A retriever's result: the columns of its candidates, best first.

    It holds columns, not objects, because a request compares a hundred candidates and keeps five:
    only those five are read from ``passages``.

    Attributes:
        passage_ids: Shape (n,); whole numbers and UUIDs become their text.
        scores: Shape (n,), higher is better. None, NaN and infinities are allowed here;
            ``decide`` sets them aside.
        ranks: Shape (n,), the engine's 1-based ranks, which break ties of score. None if there
            are none; ties are then broken by passage id, never by the order of the columns.
        legs: Each stage's own scores, by the stage's name (``lexical``, ``dense``, ``rerank``).
        failures: Stages that were left out of this answer.
        signals: Further values of the candidates, by the signal's name (DESIGN.md §5), shape
            (n,) each, in the ranking's order; NaN if unknown for a candidate.
        copies: Positions of candidates whose text repeats another's, with that one's position
            (``ctxguard.core.passages``); empty without copies, or if texts were not compared.
        contradicted: Whether the engine's order contradicts the scores (``core.scores``); if so,
            that order is kept and the scores are ignored. None if not compared.

    Raises:
        ConfigurationError: at construction, for an unknown kind, of a leg too, or route, or an id
            that `id_text` refuses. Names of kinds and routes become members.
    """

    passage_ids: Sequence[str]
    scores: Sequence[float | None]
    kind: ScoreKind
    passages: PassageSource
    route: Route = Route.EXTERNAL
    ranks: Sequence[int | None] | None = None
    legs: Mapping[str, Leg] = field(default_factory=dict)
    failures: tuple[StageFailure, ...] = ()
    signals: Mapping[str, FloatArray] = field(default_factory=dict)
    timings: tuple[StageTiming, ...] = ()
    copies: Mapping[int, int] = field(default_factory=dict)
    contradicted: bool | None = None

    def __post_init__(self) -> None:
        if not {str}.issuperset(map(type, self.passage_ids)):
            object.__setattr__(self, "passage_ids", _id_texts(self.passage_ids))
        # Adapters may give names, and members are compared by identity from here on.
        if type(self.kind) is not ScoreKind:
            kind = member_of(ScoreKind, self.kind, "the kind of a ranking")
            object.__setattr__(self, "kind", kind)
        if not isinstance(self.legs, Mapping):
            raise ConfigurationError(
                f"a ranking's legs must be a mapping from names to legs, not "
                f"{type(self.legs).__name__}"
            )
        for leg in self.legs.values():
            if type(leg.kind) is not ScoreKind:
                legs = {
                    name: Leg(leg.scores, member_of(ScoreKind, leg.kind, "the kind of a leg"))
                    for name, leg in self.legs.items()
                }
                object.__setattr__(self, "legs", legs)
                break
        if type(self.route) is not Route:
            route = member_of(Route, self.route, "the route of a ranking")
            object.__setattr__(self, "route", route)

    def __len__(self) -> int:
        return len(self.passage_ids)

    def __repr__(self) -> str:
        # No texts: printed objects end in logs and error trackers.
        return (
            f"Ranking(passage_ids={listed(self.passage_ids)}, kind={self.kind.value!r}, "
            f"route={self.route.value!r}, legs=[{', '.join(self.legs)}], "
            f"failures=[{', '.join(failure.stage for failure in self.failures)}])"
        )

    @classmethod
    def from_hits(
        cls,
        hits: Iterable[Hit],
        kind: ScoreKind | ScoreKindName | None = None,
        route: Route | RouteName = Route.EXTERNAL,
    ) -> "Ranking":
        """Build a ranking from hits, in the given order.

        Args:
            kind: The kind of their scores; None for hits without any, which become kind ``rank``.

        Raises:
            ConfigurationError: as at construction; or there are scores but no kind, or ``hits``
                holds anything else: a string may be an id or a passage, and the second item of a
                tuple a score or a text.
        """
        # An empty string or mapping is iterable too, and must not pass for an empty result.
        if not isinstance(hits, Iterable) or isinstance(hits, str | bytes | Mapping):
            raise ConfigurationError(
                f"expected a Ranking or a list of Hits, got a {type(hits).__name__}"
            )
        given, hits = type(hits).__name__, tuple(hits)
        kinds = set(map(type, hits))
        others = kinds - {Hit} and {each for each in kinds if not issubclass(each, Hit)}
        if others:
            held = [f"{each.__module__}.{each.__name__}" for each in others]
            held = [each.removeprefix("builtins.") for each in held]
            raise ConfigurationError(
                f"expected a Ranking or a list of Hits, got a {given} that holds "
                f"{', '.join(sorted(held))}; make each item a ctxguard.Hit, as in Hit(passage_id, "
                "score, text), or Hit(passage_id, text=text) without scores"
            )
        if kind is None:
            if any(hit.score is not None for hit in hits):
                raise ConfigurationError(
                    "plain hits require score_kind (the key score-kind): give the kind of the "
                    "scores, one of " + ", ".join(each.value for each in ScoreKind)
                )
            kind = ScoreKind.RANK
        ranks = tuple([hit.rank for hit in hits])
        signals = [hit.signals for hit in hits]
        names = sorted({name for each in signals for name in each or ()}) if any(signals) else ()
        return cls(
            passage_ids=tuple([hit.passage_id for hit in hits]),
            scores=tuple([hit.score for hit in hits]),
            kind=cast(ScoreKind, kind),  # a name becomes the member at construction
            passages=HitPassages(hits),
            route=cast(Route, route),
            ranks=None if ranks.count(None) == len(ranks) else ranks,
            signals={
                name: np.array([_number((each or {}).get(name)) for each in signals])
                for name in names
            }
            if names
            else {},
        )


def _id_texts(values: Sequence[object]) -> tuple[str, ...]:
    texts = []
    for rank, value in enumerate(values, start=1):
        try:
            texts.append(id_text(value))
        except ConfigurationError as error:
            raise ConfigurationError(f"candidate {rank} of {len(values)}: {error}") from None
    return tuple(texts)


def _number(value: object) -> float:
    """Convert to float; NaN if it is not a number, as adapters pass engines' values unchecked."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def listed(passage_ids: Sequence[str]) -> str:
    """List the first 10 ids, and say how many others there are, for ``repr``."""
    shown = [*map(repr, passage_ids[:10])]
    if len(passage_ids) > 10:
        shown.append(f"{len(passage_ids) - 10} more")
    return f"[{', '.join(shown)}]"


class Threshold(NamedTuple):
    """A setting, and the value at which a dropped passage would have been kept."""

    setting: str
    value: float


class CandidateDecision(NamedTuple):
    """Whether one candidate was kept, and why.

    A tuple, as ``Threshold`` is: a request has a hundred of them, and building a tuple takes a
    quarter of a frozen data class's time.

    Attributes:
        rank: 1-based in the decision's order; None for a candidate that was set aside.
        relative_score: In (0, 1], against the top of its ranking; None if these scores cannot be
            compared.
        probability: Calibrated P(relevant); None if no model applied.
        reason: Why it was dropped; None for a kept passage.
        kept_if: Every setting that would have to change to keep it, with the value that suffices;
            empty for a kept passage, or if no setting would help.
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


class AssemblyDrop(NamedTuple):
    """A candidate that the decision kept and assembly left out.

    Attributes:
        position: Position in the ranking, from 0.
        kept_if: The setting and value that would have kept it; empty if none would, or if the
            budget was full and the passage too long to be counted.
    """

    position: int
    reason: DropReason
    kept_if: tuple[Threshold, ...] = ()
