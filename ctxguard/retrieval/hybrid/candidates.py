"""The candidates of one search: their stages, their scores, and the union of several legs. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ctxguard.core.decision import candidate_order
from ctxguard.core.fusion import Fusion, fuse
from ctxguard.core.types import (
    FloatArray,
    Leg,
    Passage,
    PassageSource,
    Ranking,
    Route,
    ScoreKind,
)
from ctxguard.errors import StageError
from ctxguard.retrieval.protocols import RowArray
from ctxguard.retrieval.signals import RANKER_SIGNAL

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


@dataclass(frozen=True, slots=True)
class Candidates:
    """Rows with their scores, best first, ties by row and so by passage id.

    Attributes:
        rows: Shape (n,).
        scores: Shape (n,), higher is better.
        kind: The kind of the scores.
        answered: The stages that answered, in their order.
        legs: Each stage's own scores of the same rows, by stage.
        signals: Further values of the same rows, by the signal's name.
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
        """Add signals, shape (n,) each; if both legs answered, order by the ranker's."""
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
    """Passages that legs returned, by row.

    Attributes:
        ids: The id of each row.
        places: For each row, a ranking that contains the passage and its position there.
    """

    ids: Sequence[str]
    places: Sequence[tuple[Ranking, int]]

    def __getitem__(self, row: int, /) -> Passage:
        ranking, position = self.places[row]
        return ranking.passages[position]

    def select(self, rows: RowArray) -> tuple[tuple[str, ...], PassageSource]:
        """Return the ids of rows, in their order, and their passages, read when accessed."""
        at = rows.tolist()
        ids = tuple([self.ids[row] for row in at])
        return ids, Pool(ids, [self.places[row] for row in at])


def united(
    rankings: Mapping[str, Ranking], depth: int, fusion: Fusion | None = None
) -> tuple[Pool, Candidates]:
    """Unite the candidates of several legs by passage id, with each leg's scores.

    A leg without scores gets minus the logarithm of the rank. A candidate that a leg did not return
    gets that leg's lowest returned score, an upper bound of its own; for kind ``ratio`` it gets 0,
    no match. A leg whose scores cannot be of its kind gives ranks only.

    Args:
        rankings: The ranking of each leg that answered.
        depth: Maximum number of candidates.
        fusion: Orders them; None for reciprocal ranks. ``convex`` is for ``lexical`` and ``dense``.

    Returns:
        The passages, whose rows are in ascending order of their ids, and the best candidates.
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
        if problem is None:
            own: FloatArray = (
                -np.log(ranks)
                if ranking.kind is ScoreKind.RANK
                else np.array([ranking.scores[at] for at in order], dtype=np.float64)
            )
            leg = _leg(own, found, ranking.kind, len(ids))
            if leg is not None:
                legs[name] = leg
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


def _leg(own: FloatArray, found: RowArray, kind: ScoreKind, n: int) -> Leg | None:
    """Return a leg's scores of all ``n`` candidates; None if it has no lowest score."""
    if kind is not ScoreKind.RATIO and not own.size:
        return None
    scores = np.full(n, 0.0 if kind is ScoreKind.RATIO else float(own.min()))
    scores[found] = own
    return Leg(scores, ScoreKind.LOGIT if kind is ScoreKind.RANK else kind)


def check_finite(stage: str, scores: FloatArray) -> None:
    """Raise a `StageError` if a score is NaN or infinite."""
    if not np.isfinite(scores).all():
        raise StageError(stage, "gave NaN or an infinity for a passage")
