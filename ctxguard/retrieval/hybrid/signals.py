"""The signals of a search's candidates, and their order by the pooled ranker (DESIGN.md §5)."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from time import perf_counter
from typing import Any

from ctxguard._support.extras import require
from ctxguard.core.types import FloatArray, ScoreKind
from ctxguard.errors import StageError
from ctxguard.retrieval.hybrid.search import DENSE, LEXICAL, Candidates, Search
from ctxguard.retrieval.signals.ranker import RANKER_SIGNAL, Ranker

SIGNALS = "signals"

_Step = Callable[[dict[str, FloatArray]], dict[str, FloatArray]]

_NO_SIGNALS = "the index holds nothing to compute signals from; build it again"


def with_signals(search: Search, candidates: Candidates, ranker: Ranker) -> Candidates:
    """Candidates with their signals; those of both legs in the order of the ranker.

    Those of one leg keep its order and have the signals of the text family alone: the others need
    both legs.

    Raises:
        StageError: the index holds nothing to compute signals from.
        Exception: whatever the embedder raises.
    """
    signals: dict[str, FloatArray] = {}
    for _, step in _steps(search, candidates, ranker):
        signals |= step(signals)
    signalled = replace(candidates, signals=signals)
    scores = signals.get(RANKER_SIGNAL)
    return signalled if scores is None else signalled.ordered_by(scores, ScoreKind.LOGIT)


def milliseconds(search: Search, candidates: Candidates, ranker: Ranker) -> dict[str, float]:
    """What each step of `with_signals` takes, by the first family that it computes.

    Coverage and position are computed with stems, the second pass with the ranker. The query's word
    pieces are encoded before: they come from the pass that gives its vector.
    """
    search.query_tokens()
    signals: dict[str, FloatArray] = {}
    taken = {}
    for family, step in _steps(search, candidates, ranker):
        start = perf_counter()
        signals |= step(signals)
        taken[family] = 1e3 * (perf_counter() - start)
    return taken


def _steps(search: Search, candidates: Candidates, ranker: Ranker) -> Iterator[tuple[str, _Step]]:
    """The steps in their order, each from the signals before it."""
    forward, sentences, rows = search.index.forward, search.index.sentences, candidates.rows
    if forward is None:
        raise StageError(SIGNALS, _NO_SIGNALS)
    yield "stems", lambda _: forward.text_signals(search.query, rows)
    if not candidates.legs.keys() >= {LEXICAL, DENSE}:
        return
    tokens = search.query_tokens()
    if sentences is not None and tokens is not None:
        yield "sentences", lambda _: sentences.signals(tokens, rows)
    yield (
        "ranker",
        lambda signals: _pooled().rank_candidates(
            candidates.legs,
            signals,
            search.index.dense.vectors_at(rows),
            forward.term_cosines(rows),
            ranker,
        ),
    )


@cache
def _pooled() -> Any:
    return require("ctxguard.retrieval.signals.pooled", "embedded")
