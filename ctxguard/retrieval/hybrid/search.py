"""Runs one search of a hybrid retriever: its legs, the union of their candidates, their signals.

If one leg fails, the other's candidates are the answer. Reads the index's files, calls the
embedder, and may use the legs' threads.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from ctxguard._support.checks import check_at_least
from ctxguard.core.decision import candidate_order
from ctxguard.core.fusion import Fusion, fuse
from ctxguard.core.types import (
    FailureKind,
    FloatArray,
    Leg,
    Passage,
    PassageSource,
    Ranking,
    Route,
    ScoreKind,
    StageFailure,
)
from ctxguard.errors import (
    ConfigurationError,
    FilterViolationError,
    OverloadedError,
    StageError,
    StageUnavailableError,
)
from ctxguard.resilience.breaker import FORCED
from ctxguard.resilience.deadlines import Budget, Deadlines
from ctxguard.resilience.stage import Stage, attempt
from ctxguard.retrieval.index.hybrid_index import HybridIndex
from ctxguard.retrieval.index.passages import PassageTable
from ctxguard.retrieval.protocols import (
    Embedder,
    Float32Array,
    LegHits,
    QueryStates,
    Reranker,
    RowArray,
    TokenEncoder,
)
from ctxguard.retrieval.signals import (
    RANKER_SIGNAL,
    CandidateFeatures,
    QueryPieces,
    Ranker,
    signals,
)

LEXICAL = "lexical"
DENSE = "dense"
RERANK = "rerank"
SIGNALS = "signals"
SEARCH = "search"
"""Both legs as one stage of a trace: they run in one call, or side by side."""

LEG_KINDS = {LEXICAL: ScoreKind.RATIO, DENSE: ScoreKind.COSINE}
"""The legs, and the kinds of their scores: BM25, and cosines."""

STAGES: Mapping[Route, tuple[str, ...]] = {
    Route.HYBRID_RERANK: (LEXICAL, DENSE, RERANK),
    Route.HYBRID: (LEXICAL, DENSE),
    Route.LEXICAL_RERANK: (LEXICAL, RERANK),
    Route.LEXICAL: (LEXICAL,),
    Route.DENSE_RERANK: (DENSE, RERANK),
    Route.DENSE: (DENSE,),
}

ROUTES = {stages: route for route, stages in STAGES.items()}

DEFAULT_RERANK_DEPTH = 50
DEFAULT_MAX_QUERY_CHARS = 10_000

RERANK_WORKERS = 4
"""How many rerank calls run at once: few, because models are slow and hold a lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """The settings of one view; see `ctxguard.retrieval.hybrid.retriever.HybridOptions`.

    Attributes:
        embedder: The model that made the index's vectors.
        rerank_stage: The reranker's thread pool and circuit breaker.
        stages: The stages to run, one of the values of ``STAGES``.
        leg_fusion: Finds the candidates: ``fusion``, or reciprocal ranks for ``ranker``.
        with_signals: Whether the candidates' signals are computed, which the ranker reads.

    Raises:
        ConfigurationError: a setting is out of range.
    """

    embedder: Embedder
    fusion: Fusion
    reranker: Reranker | None = None
    rerank_depth: int = DEFAULT_RERANK_DEPTH
    rerank_stage: Stage = field(default_factory=partial(Stage, RERANK, workers=RERANK_WORKERS))
    max_query_chars: int = DEFAULT_MAX_QUERY_CHARS
    deadlines: Deadlines | None = None
    stages: tuple[str, ...] = STAGES[Route.HYBRID]
    ranker: Ranker = field(default_factory=Ranker.default)
    leg_fusion: Fusion = field(init=False)
    with_signals: bool = field(init=False)

    def __post_init__(self) -> None:
        check_at_least(1, rerank_depth=self.rerank_depth, max_query_chars=self.max_query_chars)
        by_ranker = self.fusion.method == "ranker"
        found_by = replace(self.fusion, method="reciprocal_rank") if by_ranker else self.fusion
        object.__setattr__(self, "leg_fusion", found_by)
        object.__setattr__(self, "with_signals", by_ranker)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Rows with their scores, shape (n,) each, best first, ties by row and so by passage id.

    ``answered`` names the stages that answered, in their order, and ``legs`` has each one's own
    scores of the same rows. ``signals`` has further values of the rows, by the signal's name.
    """

    rows: RowArray
    scores: FloatArray
    kind: ScoreKind
    answered: tuple[str, ...]
    legs: Mapping[str, Leg] = field(default_factory=dict)
    signals: Mapping[str, FloatArray] = field(default_factory=dict)

    def best(self, n: int) -> "Candidates":
        """Return at most the ``n`` best."""
        return self if n >= self.rows.size else self.at(slice(n))

    def reranked(self, logits: FloatArray) -> "Candidates":
        """Order by a reranker's logits, shape (n,)."""
        legs = {**self.legs, RERANK: Leg(logits, ScoreKind.LOGIT)}
        answered = (*self.answered, RERANK)
        return replace(self, legs=legs, answered=answered).ordered_by(logits, ScoreKind.LOGIT)

    def signalled(self, signals: Mapping[str, FloatArray]) -> "Candidates":
        """Add signals, shape (n,) each; if both legs answered, order by the ranker's signal."""
        found = replace(self, signals=signals)
        if not LEG_KINDS.keys() <= self.legs.keys():
            return found
        return found.ordered_by(signals[RANKER_SIGNAL], ScoreKind.LOGIT)

    def ordered_by(self, scores: FloatArray, kind: ScoreKind, n: int | None = None) -> "Candidates":
        """Order by other scores, best first, ties by row; keep at most the ``n`` best."""
        ordered = replace(self, scores=scores, kind=kind)
        return ordered.at(np.lexsort((self.rows, -scores))[:n])

    def at(self, positions: RowArray | slice) -> "Candidates":
        """Return the candidates at some positions, in their order."""
        legs, signals = dict[str, Leg](), dict[str, FloatArray]()
        for name, leg in self.legs.items():
            legs[name] = Leg(leg.scores[positions], leg.kind)
        for name, values in self.signals.items():
            signals[name] = values[positions]
        rows, scores = self.rows[positions], self.scores[positions]
        return Candidates(rows, scores, self.kind, self.answered, legs, signals)


@dataclass(frozen=True, slots=True)
class Pool:
    """Passages that legs returned, by row, each with its position in one of the rankings."""

    ids: Sequence[str]
    places: Sequence[tuple[Ranking, int]]

    def __getitem__(self, row: int, /) -> Passage:
        ranking, position = self.places[row]
        return ranking.passages[position]

    def select(self, rows: RowArray) -> tuple[tuple[str, ...], PassageSource]:
        """Return rows' ids, in their order, and their passages, which are read when accessed."""
        at = rows.tolist()
        ids = tuple([self.ids[row] for row in at])
        return ids, Pool(ids, [self.places[row] for row in at])


@dataclass(eq=False, kw_only=True)
class LegSearch(ABC):
    """One checked query over one generation of an index.

    Attributes:
        query: Without lone surrogates.
        depth: Maximum number of candidates of each leg and of their fusion, ≥ 1.
        given: The caller's vector of the query, shape (dimension,), of any norm, optionally with
            its word pieces; None to encode the query.
        dimension: Length of the index's vectors.
        encoder: Reads the query's word pieces; None if there are no signals of them.
        passages: By row, once the legs have been searched.
    """

    settings: SearchSettings
    query: str
    depth: int
    given: Float32Array | QueryStates | None = None
    dimension: int
    encoder: TokenEncoder | None = None
    passages: Pool | PassageTable = field(default=Pool((), ()))

    @abstractmethod
    def legs(self, budget: Budget | None) -> tuple[Candidates, list[StageFailure]]:
        """Search the legs; return their fused candidates, and the failures of legs.

        Raises:
            StageUnavailableError: no leg answered.
            OverloadedError: no leg had a free thread.
        """

    @abstractmethod
    def signalled(self, candidates: Candidates) -> Candidates:
        """Add the candidates' signals; if both legs answered, order by the ranker.

        Errors of the embedder are raised.
        """

    @cached_property
    def states(self) -> QueryStates | None:
        """The query's word pieces, as given or encoded once; None without an encoder."""
        if isinstance(self.given, QueryStates):
            return self.given
        return None if self.encoder is None else self.encoder.query(self.query)

    def unit_vector(self) -> Float32Array:
        """Return the query's vector at unit length, shape (dimension,).

        Raises:
            StageError: the embedder gave no usable vector; its own errors are raised too.
            ConfigurationError: the given one has no direction.
        """
        found = self.given
        if found is None and self.encoder is not None and self.settings.with_signals:
            found = self.states
        if found is None:
            found = self.settings.embedder.encode_query(self.query)
        if isinstance(found, QueryStates):
            found = found.vector
        vector = np.ascontiguousarray(found, np.float32)
        if vector.shape != (self.dimension,):
            raise StageError(
                DENSE,
                f"the query's vector has shape {vector.shape}, but the index has "
                f"({self.dimension},)",
            )
        length = float(np.linalg.norm(vector))
        if not 0.0 < length < np.inf:
            message = f"the query's vector has length {length}, so it has no direction"
            raise StageError(DENSE, message) if self.given is None else ConfigurationError(message)
        return vector / np.float32(length)


@dataclass(eq=False, kw_only=True)
class Search(LegSearch):
    """A search of one generation of an index, on the threads and circuit breaker of each leg.

    Only the rows of ``allowed``, which ascend, may be candidates; None allows all.
    """

    index: HybridIndex
    stages: Mapping[str, Stage]
    allowed: RowArray | None = None

    def legs(self, budget: Budget | None) -> tuple[Candidates, list[StageFailure]]:
        """Search the legs under their time limits and circuit breakers; see `LegSearch`."""
        failures: list[StageFailure] = []
        hits: dict[str, LegHits] = {}
        for leg, answer in self._answers(budget).items():
            if isinstance(answer, StageFailure):
                failures.append(answer)
            else:
                hits[leg] = answer
        if not hits:
            is_overload = all(failure.kind is FailureKind.SATURATED for failure in failures)
            raise (OverloadedError if is_overload else StageUnavailableError)(
                " and ".join([failure.stage for failure in failures]),
                "; ".join([failure.cause for failure in failures]),
            )
        is_whole = len(hits) == len(LEG_KINDS)
        found = attempt(DENSE, self._fused, hits[LEXICAL], hits[DENSE]) if is_whole else None
        if isinstance(found, StageFailure):
            failures.append(found)
        if not isinstance(found, Candidates):
            leg, (rows, scores, _) = next(iter(hits.items()))
            legs = {leg: Leg(scores, LEG_KINDS[leg])}
            found = Candidates(rows, scores, LEG_KINDS[leg], (leg,), legs)
        allowed = self.allowed
        if allowed is not None and not np.isin(found.rows, allowed, assume_unique=True).all():
            raise FilterViolationError(
                "filter",
                "the search returned a passage that `where` excludes: this is a bug, please report "
                "it",
            )
        return found, failures

    def _answers(self, budget: Budget | None) -> dict[str, LegHits | StageFailure]:
        """Search the legs, the lexical one first; return each leg's hits or its failure."""
        stages, answers = self.stages, dict[str, LegHits | StageFailure]()
        limits: dict[str, float | None] = dict.fromkeys(LEG_KINDS)
        if budget is not None:
            limits = {leg: budget(leg) for leg in LEG_KINDS}
        works: dict[str, Callable[[], LegHits]] = {LEXICAL: self.lexical, DENSE: self.dense}
        is_limited = limits[LEXICAL] is not None or limits[DENSE] is not None
        if is_limited and works.keys() <= {*self.settings.stages}:
            # Side by side, the dense leg on its own threads.
            call = attempt(DENSE, stages[DENSE].submit, self.dense, limits[DENSE])
            answers[LEXICAL] = attempt(LEXICAL, stages[LEXICAL].call, self.lexical, limits[LEXICAL])
            answers[DENSE] = call if isinstance(call, StageFailure) else attempt(DENSE, call.result)
        else:
            # On this thread: side by side would save an eighth of the time over a million passages,
            # and cost a third of the throughput with as many clients as cores.
            for leg, work in works.items():
                if leg in self.settings.stages:
                    answers[leg] = attempt(leg, stages[leg].call, work, limits[leg])
        for leg, answer in answers.items():
            if isinstance(answer, LegHits):
                continue
            # Skipped only while the other leg answers: overload may have opened both circuits.
            is_alone = not any(isinstance(each, LegHits) for each in answers.values())
            if is_alone and answer.kind is FailureKind.CIRCUIT_OPEN:
                left = None if budget is None else budget(leg)
                answers[leg] = attempt(leg, stages[leg].call, works[leg], left, probe=FORCED)
        return answers

    def lexical(self) -> LegHits:
        """Search the lexical leg; raises a `StageError` if a score is NaN or infinite."""
        hits = self.index.lexical.search(self.query, self.depth, self.allowed)
        check_finite(LEXICAL, hits.scores)
        return hits

    def dense(self) -> LegHits:
        """Search the dense leg; errors as for `LegSearch.unit_vector` and `lexical`."""
        hits = self.index.dense.search(self.unit_vector(), self.depth, self.allowed)
        check_finite(DENSE, hits.scores)
        return hits

    def _fused(self, lexical: LegHits, dense: LegHits) -> Candidates:
        """Unite the rows of both legs, score each row in both, and keep the best after fusion."""
        rows = np.union1d(lexical.rows, dense.rows)
        cosines = dense.scores_of(rows)
        check_finite(DENSE, cosines)
        legs = {
            LEXICAL: Leg(lexical.scores_of(rows), ScoreKind.RATIO),
            DENSE: Leg(cosines, ScoreKind.COSINE),
        }
        fused, kind = fuse(legs, self.settings.leg_fusion), self.settings.leg_fusion.kind
        return Candidates(rows, fused, kind, (LEXICAL, DENSE), legs).ordered_by(
            fused, kind, self.depth
        )

    def signalled(self, candidates: Candidates) -> Candidates:
        """See `LegSearch`; raises a `StageError` if the index was built without signals."""
        index, rows, pieces = self.index, candidates.rows, self.index.pieces
        if index.signals == "none":
            raise StageError(SIGNALS, "the index was built without signals; build it again")
        query = None
        # Without the dense leg the query is not encoded.
        if pieces is not None and self.encoder is not None and DENSE in candidates.legs:
            states = self.states
            if states is not None:
                query = QueryPieces.of(states, pieces.weights, self.encoder.piece_table)
        fused = candidates.scores
        if candidates.kind is not ScoreKind.RANK:
            fused = fuse(candidates.legs, self.settings.leg_fusion)
        features = CandidateFeatures(
            index.lexical.terms.lengths[rows].astype(np.float64),
            *index.lexical.term_vectors(rows),
            index.dense.vectors[rows],
            None if pieces is None else pieces.rows.taken(rows)[0],
        )
        return candidates.signalled(
            signals(features, candidates.legs, fused, query, self.settings.ranker)
        )


def united(
    rankings: Mapping[str, Ranking], depth: int, fusion: Fusion | None = None
) -> tuple[Pool, Candidates]:
    """Unite the candidates of several legs by passage id, with each leg's scores.

    A leg without scores gets minus the logarithm of the rank. A candidate that a leg did not return
    gets that leg's lowest returned score, an upper bound of its own; for kind ``ratio`` it gets 0,
    no match. A leg whose scores cannot be of its kind gives ranks only. Returns the passages, whose
    rows are in ascending order of their ids, and the ``depth`` best candidates by ``fusion``, by
    default reciprocal ranks; ``convex`` is for ``lexical`` and ``dense``.
    """
    fusion = Fusion() if fusion is None else fusion
    orders = {name: candidate_order(ranking) for name, ranking in rankings.items()}
    place_of: dict[str, tuple[Ranking, int]] = {}
    for name, ranking in rankings.items():
        for at in orders[name][0]:
            place_of.setdefault(ranking.passage_ids[at], (ranking, at))
    ids = sorted(place_of)
    row_of = {passage_id: row for row, passage_id in enumerate(ids)}
    fused = np.zeros(len(ids))
    legs: dict[str, Leg] = {}
    for name, ranking in rankings.items():
        order, _, problem = orders[name]
        found = np.array([row_of[ranking.passage_ids[at]] for at in order], dtype=np.intp)
        ranks = np.arange(1.0, len(order) + 1.0)
        fused[found] += 1.0 / (fusion.constant + ranks)
        is_ratio, by_rank = ranking.kind is ScoreKind.RATIO, ranking.kind is ScoreKind.RANK
        # Without candidates, only a leg of ratios has a lowest score.
        if problem is None and (is_ratio or len(order)):
            own = [ranking.scores[at] for at in order]
            given = -np.log(ranks) if by_rank else np.array(own, np.float64)
            scores = np.full(len(ids), 0.0 if is_ratio else float(given.min()))
            scores[found] = given
            legs[name] = Leg(scores, ScoreKind.LOGIT if by_rank else ranking.kind)
    kind = ScoreKind.RANK
    if fusion.method == "convex" and (len(legs) == len(rankings) or not ids):
        fused, kind = fuse(legs, fusion) if ids else fused, fusion.kind
    candidates = Candidates(np.arange(len(ids)), fused, kind, tuple(rankings), legs)
    pool = Pool(ids, [place_of[passage_id] for passage_id in ids])
    return pool, candidates.ordered_by(fused, kind, depth)


def alone(leg: str, ranking: Ranking, depth: int) -> tuple[Pool, Candidates]:
    """Return at most ``depth`` candidates of a single leg, in its own order."""
    rows = np.arange(min(len(ranking), depth))
    scores = np.array(ranking.scores[: rows.size], np.float64)
    places = [(ranking, position) for position in rows.tolist()]
    legs = {leg: Leg(scores, ranking.kind)}
    return Pool(ranking.passage_ids, places), Candidates(rows, scores, ranking.kind, (leg,), legs)


def check_finite(stage: str, scores: FloatArray) -> None:
    """Raise a `StageError` if a score is NaN or infinite."""
    if not np.isfinite(scores).all():
        raise StageError(stage, "returned NaN or an infinity for a passage")
