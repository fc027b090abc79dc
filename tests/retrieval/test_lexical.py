"""Both lexical engines keep one contract; each agrees with its own library."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxguard.errors import ConfigurationError
from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.index.lexical import K1, B, Bm25sIndex, RankBm25Index, lexical_index
from tests.doubles import LexicalContract

words = st.sampled_from(["red", "dog", "fox", "rose", "cat", "sun"])
texts = st.lists(st.lists(words, max_size=8).map(" ".join), min_size=1, max_size=30)


class TestBm25s(LexicalContract):
    def build(self, texts: Sequence[str]) -> Bm25sIndex:
        return Bm25sIndex.build(texts, ENGLISH)

    def test_words_times_passages_may_exceed_32_bits(self) -> None:
        n = 50_000
        index = Bm25sIndex.build((f"common word{row}" for row in range(n)), ENGLISH)
        for row in (0, 43_000, n - 1):
            assert index.search(f"word{row}", 2).rows.tolist() == [row]


class TestRankBm25(LexicalContract):
    def build(self, texts: Sequence[str]) -> RankBm25Index:
        return RankBm25Index.build(texts, ENGLISH)


@given(texts=texts, query=st.sampled_from(["red dog", "sun", "red red cat", "fox rose sun"]))
@settings(max_examples=40, deadline=None)
def test_bm25s_scores_are_the_librarys_own(texts: list[str], query: str) -> None:
    bm25s = pytest.importorskip("bm25s")
    words = [ENGLISH.analyse(text) for text in texts]
    if not any(words):
        return
    engine = bm25s.BM25(k1=K1, b=B, method="lucene")
    engine.index(words, show_progress=False)
    known = [word for word in ENGLISH.analyse(query) if word in engine.vocab_dict]
    expected = engine.get_scores(known) if known else np.zeros(len(texts))
    assert Bm25sIndex.build(texts, ENGLISH).search(query, 5).all_scores == pytest.approx(
        expected, abs=1e-5
    )


@given(texts=texts, k=st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_the_search_keeps_what_sorting_everything_would_keep(texts: list[str], k: int) -> None:
    hits = Bm25sIndex.build(texts, ENGLISH).search("red fox sun", k)
    everything = sorted(
        (-score, row) for row, score in enumerate(hits.all_scores.tolist()) if score > 0
    )
    assert hits.rows.tolist() == [row for _, row in everything[:k]]


def test_rank_bm25_scores_are_the_librarys_own_where_they_are_positive() -> None:
    rank_bm25 = pytest.importorskip("rank_bm25")
    texts = ["red fox", "blue fox sleeps", "green dog", "a red dog runs", "sun"]
    expected = rank_bm25.BM25Okapi([ENGLISH.analyse(text) for text in texts]).get_scores(["red"])
    scores = RankBm25Index.build(texts, ENGLISH).search("red", 5).all_scores
    assert scores == pytest.approx(expected, rel=1e-6)


def test_a_negative_score_of_rank_bm25_is_no_hit() -> None:
    texts = ["fox dog", "fox cat", "fox sun"]
    assert RankBm25Index.build(texts, ENGLISH).search("fox", 3).rows.size == 0


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'lucene' is unknown; use 'bm25s' or 'rank-bm25'"):
        lexical_index("lucene")  # type: ignore[arg-type]
