"""The signals of a search's candidates, and their order by the pooled ranker (DESIGN.md §5)."""

from dataclasses import replace
from functools import cache
from typing import Any

from ctxguard._support.extras import require
from ctxguard.core.types import ScoreKind
from ctxguard.errors import StageError
from ctxguard.retrieval.hybrid.search import DENSE, LEXICAL, Candidates, Search
from ctxguard.signals.ranker import Ranker

SIGNALS = "signals"

_NO_SIGNALS = "the index holds nothing to compute signals from; build it again"


def with_signals(search: Search, candidates: Candidates, ranker: Ranker) -> Candidates:
    """Candidates with their signals; those of both legs in the order of the ranker.

    Those of one leg keep its order and have the signals of the text family alone: the others need
    both legs.

    Raises:
        StageError: the index holds nothing to compute signals from.
        Exception: whatever the embedder raises.
    """
    index, rows = search.index, candidates.rows
    if index.forward is None:
        raise StageError(SIGNALS, _NO_SIGNALS)
    signals = index.forward.text_signals(search.query, rows)
    if not candidates.legs.keys() >= {LEXICAL, DENSE}:
        return replace(candidates, signals=signals)
    tokens = search.query_tokens()
    if index.sentences is not None and tokens is not None:
        signals |= index.sentences.signals(tokens, rows)
    vectors, term_cosines = index.dense.vectors_at(rows), index.forward.term_cosines(rows)
    pooled = _pooled()
    signals |= pooled.rank_candidates(candidates.legs, signals, vectors, term_cosines, ranker)
    scores = signals[pooled.RANKER_SIGNAL]
    return replace(candidates, signals=signals).ordered_by(scores, ScoreKind.LOGIT)


@cache
def _pooled() -> Any:
    return require("ctxguard.signals.pooled", "embedded")
