"""Defines the record of a sampled request, with what judging, labelling and calibration require.

The passages to judge are chosen when the record is made, and the rates are kept with it: only the
chosen passages need their texts, and inclusion probabilities stay correct when settings change.
Pure, except that ``record_of`` reads passages from their source, and ``Privacy.apply`` calls the
given redactor.
"""

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from ctxguard.core.context import Context
from ctxguard.core.metadata_filter import Where
from ctxguard.core.passages import TOKENS, passage_tokens, read_passages
from ctxguard.core.signals import transforms_of
from ctxguard.core.types import (
    Flag,
    FloatArray,
    Leg,
    Mode,
    Passage,
    PassagesBy,
    Ranking,
    Route,
    ScoreKind,
)
from ctxguard.errors import ConfigurationError, DataError
from ctxguard.measure.worth import Negative
from ctxguard.monitor.redaction import Redactor, redact, redacted, redacted_once
from ctxguard.monitor.sampling.sampler import DEFAULT_RATES, HashSampler, JudgingRates

FORMAT = 7

Kept = Literal["stored", "omitted"]

MOST_TEXT_CHARS = 50_000
"""Longest stored text of a passage in characters; judges and people read no more."""

MOST_BYTES = 64 * 2**20
"""Largest record in bytes, uncompressed. A typical one takes a hundredth of a percent of it."""


class TokenAccount(NamedTuple):
    """Estimated tokens of one request's candidates, titles included (`passage_tokens`).

    The first three add up to all that was retrieved. Outside enforce, kept and dropped are what
    enforcing would keep and drop.
    """

    kept: int = 0
    dropped_in_assembly: int = 0
    """Tokens of passages that assembly left out, and of the parts it cut off."""
    dropped_by_policy: int = 0
    today: int = 0
    """Tokens that the retriever would serve without a guard."""

    @property
    def in_words(self) -> str:
        """Say how many tokens are kept, retrieved, and served today."""
        retrieved = self.kept + self.dropped_in_assembly + self.dropped_by_policy
        return f"about {self.kept:,} kept of {retrieved:,} retrieved; today's: {self.today:,}"

    def counts(self, mode: Mode, weight: float = 1.0) -> dict[tuple[str, ...], float]:
        """Count them by name and labels, for a request in this mode that stands for ``weight``
        requests."""
        *fates, (_, today) = self._asdict().items()
        counts: dict[tuple[str, ...], float] = {
            ("candidate_tokens", mode.value, fate): weight * n for fate, n in fates
        }
        return {**counts, ("today_tokens", mode.value): weight * today}

    def saved_cost(self, price_per_million: float | None) -> float | None:
        """Return the cost of the tokens that were saved; None without a price."""
        saved = self.today - self.kept
        return None if price_per_million is None else saved * price_per_million / 1e6


_NO_TOKENS = TokenAccount()


@dataclass(frozen=True, slots=True)
class Judgment:
    """One judge's or person's grade of one passage for one query.

    Attributes:
        grade: 0 for irrelevant, higher for more relevant.
        negative: How a passage of grade 0 is known to mislead; None if it is not known to.
        judged: False if grade 0 stands for a missing label, in a set that also labels irrelevant
            passages: the passage is then worth ``Utilities.unjudged``.
        score: The judge's own probability that the passage is relevant, in [0, 1]; None from a
            judge that gives grades alone. It need not be calibrated: estimates learn its worth from
            people's grades.
    """

    passage_id: str
    grade: int
    negative: Negative | None = None
    judged: bool = True
    score: float | None = None


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One sampled request.

    Positions are those of the retriever's candidates in its own order, from 0.

    Attributes:
        request_id: The guard's id of the request. Need not be unique: a retried request may be
            sampled twice.
        time_seconds: When it was answered, in seconds since the epoch.
        probability: π, the probability with which it was sampled; 0.0 for one added by hand.
        label_order: A hash in [0, 1): draws for labelling take the lowest.
        route: The stages that answered.
        query: None where it is not stored.
        scores: Shape (n,), float32; NaN where there was garbage.
        legs: Each stage's own scores, float32.
        served: Positions of the served passages, best first.
        dropped: Positions of the rest of the pool, best first.
        kept: How many the policy kept, before assembly.
        sampled: Those of ``dropped`` that are judged individually.
        full_pool: Whether all of ``dropped`` is judged.
        full_pool_if_no_hit: Whether all of it is if nothing relevant was served.
        baseline: Whether all of the retriever's first ``rates.baseline_k`` are judged.
        rates: The rates with which these were chosen.
        passages: Titles and texts of the passages that may be judged, by position; without texts
            where they are not stored.
        profile_id: The profile that decided; None without one.
        signals: The named signals that a model may use, float32.
        where: The filter of the request; None without one, and where it is withheld.
        where_withheld: Whether there was a filter that could not be stored.
        copies: Positions of candidates whose text repeats another's, with that one's position. Only
            the best of those that were not served is in ``dropped``, and none whose text was
            served.
    """

    request_id: str
    time_seconds: float
    probability: float
    label_order: float
    session_id: str | None
    route: Route
    mode: Mode
    query: str | None
    passage_ids: tuple[str, ...]
    scores: np.ndarray[Any, np.dtype[np.float32]] = field(compare=False)
    kind: ScoreKind
    legs: Mapping[str, Leg] = field(compare=False)
    served: tuple[int, ...]
    dropped: tuple[int, ...]
    kept: int
    sampled: tuple[int, ...]
    full_pool: bool
    full_pool_if_no_hit: bool
    baseline: bool
    rates: JudgingRates
    passages: Mapping[int, Passage]
    flags: tuple[str, ...] = ()
    profile_id: str | None = None
    signals: Mapping[str, FloatArray] = field(default_factory=dict, compare=False)
    where: Where | None = None
    where_withheld: bool = False
    tokens: TokenAccount = _NO_TOKENS
    copies: Mapping[int, int] = field(default_factory=dict)

    def passage(self, position: int) -> Passage:
        """Return the passage at a position, without title and text if they were not stored."""
        passage = self.passages.get(position)
        return Passage(self.passage_ids[position], "") if passage is None else passage

    def grade(self, grades: Mapping[str, Judgment], position: int) -> int | None:
        """Return a candidate's grade from ``grades``; None if it has none."""
        judgment = grades.get(self.passage_ids[position])
        return None if judgment is None else judgment.grade

    def has_hit(self, grades: Mapping[str, Judgment]) -> bool:
        """Return whether a served passage is or may be relevant, according to ``grades``.

        It may be while it has no grade: whole pools are judged once it is certain that none is.
        """
        return not {self.grade(grades, position) for position in self.served} <= {0}

    def has_full_pool(self, *, has_hit: bool) -> bool:
        """Return whether all of ``dropped`` is judged by design, given whether a served one is
        relevant."""
        is_all = not self.dropped or self.rates.dropped_rate == 1.0
        return is_all or self.full_pool or (self.full_pool_if_no_hit and not has_hit)

    def to_judge(self, grades: Mapping[str, Judgment] | None = None) -> tuple[int, ...]:
        """Return the judged positions: the served ones by rank, then the others, best first.

        ``grades`` holds those of the served passages, as far as they are known; None returns all
        positions that may be judged, whatever these are.
        """
        if self.has_full_pool(has_hit=grades is not None and self.has_hit(grades)):
            return (*self.served, *self.dropped)
        wanted = {*self.sampled, *(self.first(self.rates.baseline_k) if self.baseline else ())}
        return (*self.served, *[position for position in self.dropped if position in wanted])

    def judging_chances(self, grades: Mapping[str, Judgment]) -> dict[int, float]:
        """Return the probability with which each candidate of the pool is judged, by position."""
        has_hit, first = self.has_hit(grades), set(self.first(self.rates.baseline_k))
        of_dropped = {
            each: self.rates.dropped_probability(has_hit=has_hit, in_baseline=each)
            for each in (False, True)
        }
        dropped = {position: of_dropped[position in first] for position in self.dropped}
        return {**dict.fromkeys(self.served, 1.0), **dropped}

    def first(self, k: int) -> tuple[int, ...]:
        """Return the positions of the first k of the pool, in the retriever's own order."""
        return tuple(sorted((*self.served, *self.dropped)))[:k]

    def judges_first(self, k: int) -> bool:
        """Return whether the first k of the pool are all judged, whatever was served.

        Pools that are judged because nothing relevant was served would make a loss look larger.
        """
        is_chosen = self.baseline and len(self.first(k)) <= self.rates.baseline_k
        return self.full_pool or self.rates.dropped_rate == 1.0 or is_chosen

    def ranking(self) -> Ranking:
        """Return the candidates as the retriever returned them, for another decision."""
        return Ranking(
            passage_ids=self.passage_ids,
            scores=tuple(self.scores.astype(np.float64).tolist()),
            kind=self.kind,
            passages=PassagesBy(self.passage),
            route=self.route,
            legs=self.legs,
            signals=self.signals,
            copies=self.copies,
            contradicted=Flag.SCORES_CONTRADICTED.value in self.flags,
        )

    def to_bytes(self) -> bytes:
        """Write the record as compressed JSON; a DataError if it exceeds ``MOST_BYTES``."""
        document = {
            **{one.name: getattr(self, one.name) for one in fields(self)},
            "format": FORMAT,
            "scores": _packed(self.scores),
            "legs": {
                name: [leg.kind.value, _packed(leg.scores)] for name, leg in self.legs.items()
            },
            "signals": {name: _packed(values) for name, values in self.signals.items()},
            "rates": asdict(self.rates),
            "where": None if self.where is None else self.where.allowed,
            "copies": [*self.copies.items()],
            "passages": [
                [position, passage.title, passage.text]
                for position, passage in self.passages.items()
            ],
        }
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        # Lone surrogates, which UTF-8 cannot hold, are replaced.
        encoded = text.encode("utf-8", "replace")
        if len(encoded) > MOST_BYTES:
            raise DataError(f"a sample has {len(encoded):,} bytes, but the limit is {MOST_BYTES:,}")
        # The fastest level of compression makes texts a third as large, and releases the
        # interpreter's lock.
        return zlib.compress(encoded, 1)

    @classmethod
    def from_bytes(cls, payload: bytes) -> "SampleRecord":
        """Read the output of ``to_bytes``; a DataError for anything else, or another format."""
        try:
            decompressor = zlib.decompressobj()
            text = decompressor.decompress(payload, MOST_BYTES + 1)
            if not decompressor.eof:
                # A few bytes may stand for gigabytes.
                raise DataError(f"a sample is truncated, or has more than {MOST_BYTES:,} bytes")
            data = json.loads(text)
            if (version := data.pop("format")) != FORMAT:
                raise DataError(
                    f"a sample has format {version!r}, but this release reads {FORMAT}: use the "
                    "release that wrote it"
                )
            sequences = ("passage_ids", "served", "dropped", "sampled", "flags")
            ids = data["passage_ids"]
            where = data["where"]
            converted = {
                **{name: tuple(data[name]) for name in sequences},
                "route": Route(data["route"]),
                "mode": Mode(data["mode"]),
                "kind": ScoreKind(data["kind"]),
                "scores": _unpacked(data["scores"]),
                "legs": {
                    name: Leg(_unpacked(scores).astype(np.float64), ScoreKind(kind))
                    for name, (kind, scores) in data["legs"].items()
                },
                "signals": {
                    name: _unpacked(values).astype(np.float64)
                    for name, values in data["signals"].items()
                },
                "rates": _rates(**data["rates"]),
                "tokens": TokenAccount(*data["tokens"]),
                "where": None if where is None else Where(where),
                "copies": dict(data["copies"]),
                "passages": {
                    position: Passage(ids[position], text, title)
                    for position, title, text in data["passages"]
                },
            }
            return _checked(cls(**{**data, **converted}))
        except DataError:
            raise
        except Exception as error:
            # A damaged record may hold anything: endless numbers, lists a million deep.
            raise DataError(f"a sample cannot be read: {type(error).__name__}") from error


# Nearly all records of a store have the same.
_rates = lru_cache(JudgingRates)


def _checked(record: SampleRecord) -> SampleRecord:
    """Refuse a record that contradicts itself, because judging it would always fail."""
    n = len(record.passage_ids)
    positions = (*record.served, *record.dropped, *record.sampled, *record.passages)
    positions += (*record.copies, *record.copies.values())
    texts = [*record.passage_ids, record.request_id]
    texts += [text for one in record.passages.values() for text in (one.title, one.text)]
    optional = (record.query, record.session_id, record.profile_id)
    if not set(map(type, positions)) <= {int} or not set(positions) <= set(range(n)):
        raise DataError("a sample names candidates that it does not have")
    lengths = [len(record.scores), *map(len, record.signals.values())]
    lengths += [len(leg.scores) for leg in record.legs.values()]
    if any(length != n for length in lengths):
        raise DataError("a sample does not have one score per candidate")
    if not set(map(type, texts)) <= {str}:
        raise DataError("a sample has an id or a text that is not a string")
    if not set(map(type, optional)) <= {str, type(None)}:
        raise DataError("a sample has a query or a name that is not a string")
    if not (0.0 <= record.probability <= 1.0 and math.isfinite(record.time_seconds)):
        raise DataError("a sample has an impossible probability or time")
    tokens = record.tokens
    if set(map(type, tokens)) != {int} or not 0 <= min(tokens) <= max(tokens) < 2**53:
        raise DataError("a sample has an impossible number of tokens")
    return record


@cache
def _samplers(seed: str) -> tuple[HashSampler, ...]:
    return tuple([HashSampler(what, seed) for what in ("labels", "dropped", "pool", "baseline")])


def record_of(
    context: Context,
    probability: float,
    time_seconds: float,
    rates: JudgingRates = DEFAULT_RATES,
    *,
    seed: str = "",
) -> SampleRecord:
    """Make the record of a sampled request; an unreadable passage or score raises its own error.

    Served passages are kept, whatever they contain. A dropped one that cannot be read is kept
    without its text; its missing grade is counted. The seed is that of the choice of dropped
    passages to judge.
    """
    ranking = context.decision.ranking
    request_id, (labels, alone, pool, first) = context.request_id, _samplers(seed)
    passage_ids = tuple(ranking.passage_ids)
    read = read_passages(ranking.passages, range(len(passage_ids)))
    readable = dict(zip(read.positions, read.passages, strict=True))
    copies = read.copies
    served, dropped = _pool(context, copies)
    record = SampleRecord(
        request_id=request_id,
        time_seconds=time_seconds,
        probability=probability,
        label_order=labels.uniform(request_id),
        session_id=context.session_id,
        route=ranking.route,
        mode=context.mode,
        query=context.query,
        passage_ids=passage_ids,
        scores=_finite(ranking.scores),
        kind=ranking.kind,
        legs={
            name: Leg(np.asarray(leg.scores, np.float64), leg.kind)
            for name, leg in ranking.legs.items()
        },
        signals={
            name: np.asarray(values, np.float64)
            for name, values in ranking.signals.items()
            if transforms_of(name) or name == TOKENS
        },
        served=tuple(served),
        dropped=dropped,
        kept=context.decision.n_kept,
        sampled=tuple(
            [
                position
                for position in dropped
                if alone.selects(f"{request_id}\0{passage_ids[position]}", rates.dropped_rate)
            ]
        ),
        full_pool=pool.selects(request_id, rates.full_pool_rate),
        full_pool_if_no_hit=pool.selects(request_id, rates.full_pool_rate_if_no_hit),
        baseline=first.selects(request_id, rates.baseline_rate),
        rates=rates,
        passages={},
        flags=tuple([flag.value for flag in context.flags]),
        profile_id=context.profile_id,
        where=context.where,
        tokens=_token_account(context, readable),
        copies=copies,
    )
    passages = {position: as_written(passage) for position, passage in served.items()}
    for position in record.to_judge():
        if position in readable and position not in passages:
            passages[position] = as_written(readable[position])
    return replace(record, passages=passages)


def _token_account(context: Context, readable: Mapping[int, Passage]) -> TokenAccount:
    """Count a request's tokens; unreadable passages count as 0."""
    counts = {position: passage_tokens(passage) for position, passage in readable.items()}
    decision = context.decision
    by_policy = sum([counts.get(position, 0) for position in decision.kept])
    if context.mode is Mode.ENFORCE:
        kept = sum(map(passage_tokens, context.passages))
    else:
        out = [counts.get(drop.position, 0) for drop in context.dropped_in_assembly]
        kept = by_policy - sum(out)
    today = sum([counts.get(position, 0) for position in range(context.today_k)])
    # Served in place of an unreadable passage, or no longer readable.
    by_policy = max(by_policy, kept)
    retrieved = max(sum(counts.values()), by_policy)
    return TokenAccount(kept, by_policy - kept, retrieved - by_policy, today)


def _pool(
    context: Context, copies: Mapping[int, int]
) -> tuple[dict[int, Passage], tuple[int, ...]]:
    """Return the served passages by position, best first, and the other positions of the pool.

    Best first is the decision's order, also where assembly puts the best at both ends; where the
    bare retriever's passages were served (shadow, off) it is the retriever's. Candidates that
    were neither served nor usable (garbage scores) are not part of the pool, nor are those whose
    text was served, or comes earlier among the others.
    """
    decision = context.decision
    passage_ids = decision.ranking.passage_ids
    by_id = {passage.passage_id: passage for passage in context.passages}
    order: Sequence[int]
    if context.mode is Mode.ENFORCE:
        order = decision.order
    else:
        usable = set(decision.order)
        everything = enumerate(passage_ids)
        order = [place for place, name in everything if place in usable or name in by_id]
    served: dict[int, Passage] = {}
    dropped: list[int] = []
    seen: set[str] = set()
    for position in order:
        passage_id = passage_ids[position]
        if passage_id in seen:
            continue
        seen.add(passage_id)
        if passage_id in by_id:
            served[int(position)] = by_id[passage_id]
        else:
            dropped.append(int(position))
    if copies:
        texts = {copies.get(position, position) for position in served}
        first = {copies.get(position, position): position for position in reversed(dropped)}
        dropped = [
            each
            for each in dropped
            if (text := copies.get(each, each)) not in texts and first[text] == each
        ]
    return served, tuple(dropped)


@dataclass(frozen=True, slots=True)
class Privacy:
    """How much of a request's text is stored.

    The filter of a request is stored as it is, because a search with a changed one would find what
    the request could not see. One in which the redactor finds something is withheld.

    Attributes:
        redactor: Applied to every text before it is written; None for no redaction. If it
            raises, the sample is lost, never written unredacted.
        query: Whether queries are stored or omitted.
        passages: As ``query``, for titles and texts of passages. A judge that reads texts needs
            them: where they are omitted, give the monitor the index. Without it, and without a
            query, samples are not judged and counted as ``incomplete``.

    Raises:
        ConfigurationError: at construction, for another way to keep a text.
    """

    redactor: Redactor | None = redact
    query: Kept = "stored"
    passages: Kept = "stored"

    def __post_init__(self) -> None:
        for name in ("query", "passages"):
            if (given := getattr(self, name)) not in get_args(Kept):
                raise ConfigurationError(f"{name} {given!r} must be one of {get_args(Kept)}")

    def apply(self, record: SampleRecord) -> SampleRecord:
        """Remove the parts of the record that may not be stored.

        Raises:
            RedactionError: the redactor failed, or returned something other than text.
        """
        query = None
        if self.query == "stored" and record.query is not None:
            query = redacted(record.query, self.redactor)
        passages = {
            position: Passage(
                passage.passage_id,
                redacted_once(passage.text, self.redactor),
                redacted_once(passage.title, self.redactor),
            )
            for position, passage in record.passages.items()
            if self.passages == "stored"
        }
        withheld = record.where is not None and self._is_secret(record.where)
        return replace(
            record,
            query=query,
            passages=passages,
            where=None if withheld else record.where,
            where_withheld=withheld or record.where_withheld,
        )

    def _is_secret(self, where: Where) -> bool:
        """Return whether a filter may not be written, or cannot be written unchanged."""
        texts = [str(value) for values in where.allowed.values() for value in values]
        return any(
            text != text.encode("utf-8", "replace").decode()
            or redacted(text, self.redactor) != text
            for text in (*texts, *where.fields)
        )


DEFAULT_PRIVACY = Privacy()


def as_written(passage: Passage) -> Passage:
    """Cut the passage to what is stored: id and title as rendered, and the start of the text."""
    return Passage(
        f"{passage.passage_id}",
        passage.text[:MOST_TEXT_CHARS],
        f"{passage.title or ''}"[:MOST_TEXT_CHARS],
    )


def _finite(scores: Sequence[float | None]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Convert scores to float32, with NaN for invalid or out-of-range values."""
    with np.errstate(over="ignore"):
        values = np.array(scores, dtype=np.float64).astype(np.float32)
    values[~np.isfinite(values)] = np.nan
    return values


def _packed(values: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")


def _unpacked(text: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.frombuffer(base64.b64decode(text), "<f4").astype(np.float32)
