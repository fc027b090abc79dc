"""A sampled request as the store keeps it: all that judging, labelling and recalibration need.

What is to be judged is chosen when the record is made, by hashes of the ids, and the rates are
kept with it: only the passages chosen need their texts, and the inclusion probabilities stay true
when the settings change (DESIGN.md §8).
"""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ctxguard.errors import ConfigurationError, DataError
from ctxguard.monitor.chance import Draw, check_probability
from ctxguard.monitor.sampler import Sample
from ctxguard.types import Leg, Mode, Passage, PassageSource, Ranking, Route, ScoreKind

FORMAT = 1

MOST_TEXT_CHARS = 50_000
"""Of a passage; no judge and no person reads more, and a store should not be filled by one."""


@dataclass(frozen=True, slots=True)
class JudgingRates:
    """How much of what was dropped is judged, beside all that was served. All in [0, 1].

    Attributes:
        dropped: The probability with which each dropped passage is judged. Recall rests on it.
        pool: The probability with which all of a request's are. Recall per request rests on it.
        unanswered_pool: The same for a request that was served nothing relevant, no lower than
            ``pool``. MRR rests on it: whether such a request counts as 0 or not at all can only
            be told from its whole pool. These requests are few; below 1 each stands for others,
            and the interval widens and covers less well.
        baseline: The probability with which all of the retriever's first ``baseline_k`` are. The
            recall loss that a certificate speaks of, and so the alarm, rests on it.
        baseline_k: What the certificate's recall loss is relative to, ≥ 1.
    """

    dropped: float = 0.2
    pool: float = 0.05
    unanswered_pool: float = 1.0
    baseline: float = 0.2
    baseline_k: int = 10

    def __post_init__(self) -> None:
        for name in ("dropped", "pool", "unanswered_pool", "baseline"):
            check_probability(f"judging rate {name}", getattr(self, name))
        if self.unanswered_pool < self.pool:
            raise ConfigurationError(
                f"judging rate unanswered_pool {self.unanswered_pool!r} must be at least "
                f"pool {self.pool!r}"
            )
        if self.baseline_k < 1:
            raise ConfigurationError(f"judging baseline_k {self.baseline_k!r} must be at least 1")


DEFAULT_RATES = JudgingRates()


@dataclass(frozen=True, slots=True)
class Record:
    """One sampled request.

    Positions are those of the retriever's candidates in its own order, from 0.

    Attributes:
        request_id: As the guard knew it.
        time_seconds: When it was answered, in seconds since the epoch.
        probability: π, with which it was sampled; 0.0 for one put in by hand.
        session_id: What it belongs to; None for a request by itself.
        segment: As the request named it.
        route: The stages that answered.
        mode: The guard's.
        query: The question; a keyed hash of it, or None where it is not kept.
        passage_ids: Of all candidates.
        scores: Shape (n,), float32; NaN where there was garbage.
        kind: What the scores mean.
        legs: Each stage's own scores, float32.
        served: Positions of what was served, best first.
        dropped: Positions of the rest of the pool, best first.
        kept: How many the policy kept, before assembly.
        picked: Those of ``dropped`` that are judged by themselves.
        whole: All of ``dropped`` is judged.
        whole_if_unanswered: All of it is, if nothing relevant was served.
        baseline: All of the retriever's first ``rates.baseline_k`` are judged.
        rates: With which these were chosen.
        passages: Title and text by position, of whatever may be judged; without texts where they
            are not kept.
        flags: What was unusual about the answer.
        profile_id: Of the profile that decided; None without one.
    """

    request_id: str
    time_seconds: float
    probability: float
    session_id: str | None
    segment: str | None
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
    picked: tuple[int, ...]
    whole: bool
    whole_if_unanswered: bool
    baseline: bool
    rates: JudgingRates
    passages: Mapping[int, Passage]
    flags: tuple[str, ...] = ()
    profile_id: str | None = None

    def passage(self, position: int) -> Passage:
        """The passage at a position; without title and text where they were not kept."""
        found = self.passages.get(position)
        return Passage(self.passage_ids[position], "") if found is None else found

    def to_judge(self, *, answered: bool) -> tuple[int, ...]:
        """Positions of the dropped passages that are judged, best first."""
        if self.whole or (self.whole_if_unanswered and not answered):
            return self.dropped
        wanted = set(self.picked)
        if self.baseline:
            wanted.update(self.in_baseline)
        return tuple([position for position in self.dropped if position in wanted])

    @property
    def in_baseline(self) -> tuple[int, ...]:
        """Positions of the first ``rates.baseline_k`` of the pool in the retriever's own order."""
        return tuple(sorted((*self.served, *self.dropped)))[: self.rates.baseline_k]

    def ranking(self) -> Ranking:
        """The candidates as the retriever gave them, to decide on again."""
        return Ranking(
            passage_ids=self.passage_ids,
            scores=tuple(self.scores.astype(np.float64).tolist()),
            kind=self.kind,
            passages=_Kept(self),
            route=self.route,
            legs=self.legs,
        )

    def to_bytes(self) -> bytes:
        """Compressed JSON: strict, and readable for as long as ``FORMAT`` is."""
        text = json.dumps(
            {
                "format": FORMAT,
                "request_id": _text(self.request_id),
                "time": self.time_seconds,
                "probability": self.probability,
                "session_id": _text(self.session_id),
                "segment": _text(self.segment),
                "route": self.route.value,
                "mode": self.mode.value,
                "query": _text(self.query),
                "ids": [_text(passage_id) for passage_id in self.passage_ids],
                "scores": _packed(self.scores),
                "kind": self.kind.value,
                "legs": {
                    name: [leg.kind.value, _packed(leg.scores)] for name, leg in self.legs.items()
                },
                "served": self.served,
                "dropped": self.dropped,
                "kept": self.kept,
                "picked": self.picked,
                "whole": self.whole,
                "whole_if_unanswered": self.whole_if_unanswered,
                "baseline": self.baseline,
                "rates": [
                    self.rates.dropped,
                    self.rates.pool,
                    self.rates.unanswered_pool,
                    self.rates.baseline,
                    self.rates.baseline_k,
                ],
                "passages": [
                    [position, _text(passage.title), _text(passage.text)]
                    for position, passage in self.passages.items()
                ],
                "flags": self.flags,
                "profile_id": self.profile_id,
            },
            ensure_ascii=False,
            separators=(",", ":"),
            allow_nan=False,
        )
        # The quickest level: it makes texts a third as large, outside of the interpreter's lock.
        return zlib.compress(text.encode(), 1)

    @classmethod
    def from_bytes(cls, payload: bytes) -> "Record":
        """Read what ``to_bytes`` wrote.

        Raises:
            DataError: bytes that are no record, or one of a newer format.
        """
        try:
            data = json.loads(zlib.decompress(payload))
            if data["format"] != FORMAT:
                raise DataError(
                    f"a sample of format {data['format']!r}; this release reads {FORMAT}: "
                    "upgrade ctxguard where it is read"
                )
            ids = tuple(data["ids"])
            return cls(
                request_id=data["request_id"],
                time_seconds=data["time"],
                probability=data["probability"],
                session_id=data["session_id"],
                segment=data["segment"],
                route=Route(data["route"]),
                mode=Mode(data["mode"]),
                query=data["query"],
                passage_ids=ids,
                scores=_unpacked(data["scores"]),
                kind=ScoreKind(data["kind"]),
                legs={
                    name: Leg(_unpacked(scores).astype(np.float64), ScoreKind(kind))
                    for name, (kind, scores) in data["legs"].items()
                },
                served=tuple(data["served"]),
                dropped=tuple(data["dropped"]),
                kept=data["kept"],
                picked=tuple(data["picked"]),
                whole=data["whole"],
                whole_if_unanswered=data["whole_if_unanswered"],
                baseline=data["baseline"],
                rates=JudgingRates(*data["rates"]),
                passages={
                    position: Passage(ids[position], text, title)
                    for position, title, text in data["passages"]
                },
                flags=tuple(data["flags"]),
                profile_id=data["profile_id"],
            )
        except (KeyError, TypeError, ValueError, IndexError, zlib.error) as error:
            raise DataError(f"a sample that cannot be read: {type(error).__name__}") from error


@dataclass(frozen=True, slots=True)
class _Kept:
    record: Record

    def __getitem__(self, position: int, /) -> Passage:
        return self.record.passage(position)


class Choices:
    """Chooses what of a sample is judged.

    Args:
        rates: How much.
        seed: Of the choices.
    """

    def __init__(self, rates: JudgingRates = DEFAULT_RATES, *, seed: str = "") -> None:
        self.rates = rates
        self._dropped = Draw("dropped", seed)
        self._pool = Draw("pool", seed)
        self._baseline = Draw("baseline", seed)

    def record(self, sample: Sample) -> Record:
        """The record of a sample; raises what an unreadable passage or score raises.

        Passages that are served are kept, whatever they hold; a dropped one that cannot be read
        is kept without its text, and gets no verdict, which is counted.
        """
        context, rates = sample.context, self.rates
        ranking = context.decision.ranking
        request_id = context.request_id
        served, dropped = _pool(sample)
        # Sources outside our types number their passages, or have no title.
        passage_ids = tuple(map(str, ranking.passage_ids))
        picked = tuple(
            [
                position
                for position in dropped
                if self._dropped.chooses(f"{request_id}\0{passage_ids[position]}", rates.dropped)
            ]
        )
        record = Record(
            request_id=request_id,
            time_seconds=sample.time_seconds,
            probability=sample.probability,
            session_id=context.session_id,
            segment=context.segment,
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
            served=tuple(served),
            dropped=dropped,
            kept=context.decision.n_kept,
            picked=picked,
            whole=self._pool.chooses(request_id, rates.pool),
            whole_if_unanswered=self._pool.chooses(request_id, rates.unanswered_pool),
            baseline=self._baseline.chooses(request_id, rates.baseline),
            rates=rates,
            passages={},
            flags=tuple([flag.value for flag in context.flags]),
            profile_id=context.profile_id,
        )
        kept = {position: _in_text(passage) for position, passage in served.items()}
        for position in {*record.to_judge(answered=False), *record.to_judge(answered=True)}:
            found = _readable(ranking.passages, position)
            if found is not None:
                kept[position] = found
        return replace(record, passages=kept)


def _pool(sample: Sample) -> tuple[dict[int, Passage], tuple[int, ...]]:
    """The served passages best first by position, and the positions of the pool's others.

    Best first is the decision's order, also where assembly puts the best at both ends; where the
    bare retriever's passages were served (shadow, off) it is the retriever's. Candidates that
    were neither served nor usable (garbage scores) are no part of the pool.
    """
    context = sample.context
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
    return served, tuple(dropped)


def _readable(passages: PassageSource, position: int) -> Passage | None:
    """A passage that can be written down; None where it raises, or its text is none."""
    try:
        passage = passages[position]
        return _in_text(passage) if isinstance(passage.text, str) else None
    except Exception:
        return None


def _in_text(passage: Passage) -> Passage:
    """The passage as it is written: id and title as they are rendered, the text's beginning."""
    return Passage(
        f"{passage.passage_id}",
        passage.text[:MOST_TEXT_CHARS],
        f"{passage.title or ''}"[:MOST_TEXT_CHARS],
    )


def _finite(scores: Sequence[float | None]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Scores as float32; garbage, and what that type cannot hold, is NaN."""
    with np.errstate(over="ignore"):
        values = np.array(scores, dtype=np.float64).astype(np.float32)
    values[~np.isfinite(values)] = np.nan
    return values


def _packed(values: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")


def _unpacked(text: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.frombuffer(base64.b64decode(text), "<f4").astype(np.float32)


def _text(value: str | None) -> str | None:
    """Text that UTF-8 can carry: half a surrogate pair is replaced."""
    return None if value is None else value.encode("utf-8", "replace").decode()
