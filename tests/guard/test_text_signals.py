"""Text signals beside a wrapped retriever's scores."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from ctxguard import ContextGuard, Hit, Passage, Ranking, Route, ScoreKind, TextSignals, Where
from ctxguard.core.corpus_sketch import CorpusSketch
from ctxguard.errors import ConfigurationError
from ctxguard.guard.with_text_signals import WithTextSignals
from ctxguard.guard.wrapped_retriever import calls_of
from ctxguard.retrieval.signals import NAMES as ALL
from tests.doubles import WordTokenEmbedder

pytest.importorskip("Stemmer")

NAMES = (
    *("bm25", "length", "term_similarity_3", "ranker", "term_support_3", "term_support"),
    *("smoothed_by_terms", "term_redundancy"),
)

HITS = [
    Hit("a", 0.9, "A harbour is a place where ships land."),
    Hit("b", 0.8, "The lighthouse keeper counts ships.", signals={"freshness": 3.0}),
]


def plain(query: str, *, depth: int) -> list[Hit]:
    return HITS[:depth]


async def awaited(query: str, *, depth: int) -> list[Hit]:
    return HITS[:depth]


class Both:
    route = Route.DENSE

    def retrieve(self, query: str, *, depth: int, where: Where | None = None) -> list[Hit]:
        return HITS[:depth]

    async def aretrieve(self, query: str, *, depth: int, where: Where | None = None) -> list[Hit]:
        return HITS[:depth]

    def fingerprint(self) -> dict[str, str]:
        return {"engine": "e"}

    def corpus_sketch(self) -> CorpusSketch:
        return CorpusSketch.of([1, 2])


def with_signals(retriever: Any, **more: Any) -> WithTextSignals:
    return WithTextSignals(retriever, TextSignals(**more), score_kind=ScoreKind.COSINE)


def found(retriever: Any) -> Ranking:
    ranking: Ranking = with_signals(retriever).retrieve("lighthouse ships", depth=9)
    return ranking


def test_candidates_have_their_texts_signals() -> None:
    ranking = found(plain)
    assert set(ranking.signals) == {*NAMES, "freshness"}
    expected = TextSignals().signals("lighthouse ships", HITS)
    for name in NAMES:
        assert ranking.signals[name].tolist() == expected[name].tolist()
    assert ranking.signals["bm25"][1] > ranking.signals["bm25"][0]


def test_embedder_gives_all_signals() -> None:
    ranking = with_signals(plain, embedder=WordTokenEmbedder()).retrieve(
        "lighthouse ships", depth=9
    )
    assert set(ranking.signals) == {*ALL, "bm25", "cosine", "freshness"}
    assert ranking.signals["cosine"][1] > ranking.signals["cosine"][0]


@pytest.mark.parametrize("retriever", [awaited, Both()])
def test_asynchronous_calls_stay_asynchronous(retriever: Any) -> None:
    calls = calls_of(with_signals(retriever))
    assert calls.acall is not None
    ranking: Any = asyncio.run(_result(calls.acall))
    assert "bm25" in ranking.signals


async def _result(call: Callable[..., Awaitable[Any]]) -> Any:
    return await call("ships", depth=2)


def test_guard_sees_what_retriever_takes() -> None:
    assert calls_of(with_signals(Both())).can_filter
    assert not calls_of(with_signals(plain)).can_filter
    assert calls_of(with_signals(plain)).acall is None


def test_answers_for_the_retriever_it_wraps() -> None:
    wrapped = with_signals(Both())
    assert wrapped.route is Route.DENSE
    assert wrapped.corpus_sketch() == Both().corpus_sketch()
    assert with_signals(plain).corpus_sketch() is None


def test_splitter_is_in_the_fingerprint() -> None:
    english, german = with_signals(Both()).fingerprint(), with_signals(Both(), analyser="de")
    assert english["engine"] == "e"
    assert english != german.fingerprint()
    # Otherwise a profile would look verified for any retriever.
    assert with_signals(plain).fingerprint() == {}


@dataclass
class Unreadable:
    """A source whose second passage cannot be read."""

    hits: Sequence[Hit]

    def __getitem__(self, position: int, /) -> Passage:
        if position:
            raise OSError("gone")
        return Passage("a", "ships")


def test_unreadable_text_leaves_signals_out() -> None:
    ranking = Ranking(("a", "b"), (0.9, 0.8), ScoreKind.COSINE, Unreadable(HITS))
    assert found(lambda query, *, depth: ranking).signals == {}


def test_through_the_guard() -> None:
    guard = ContextGuard(with_signals(plain))
    context = guard.retrieve("lighthouse ships")
    assert [passage.passage_id for passage in context.passages] == ["a", "b"]
    assert set(NAMES) <= set(context.decision.ranking.signals)


def test_what_is_no_retriever_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="not a retriever"):
        with_signals(3)
