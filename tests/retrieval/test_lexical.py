"""Both lexical engines keep one contract; each agrees with its own library."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxguard.errors import ConfigurationError
from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.index.hybrid_index import HybridIndex
from ctxguard.retrieval.index.lexical import K1, B, Bm25sIndex, RankBm25Index
from tests.doubles import WordHashEmbedder

words = st.sampled_from(["red", "dog", "fox", "rose", "cat", "sun"])
texts = st.lists(st.lists(words, max_size=8).map(" ".join), min_size=1, max_size=30)


Build = Callable[[Sequence[str]], Bm25sIndex]


@pytest.fixture(params=[Bm25sIndex, RankBm25Index])
def index_of(request: pytest.FixtureRequest) -> Build:
    """Indexes texts, one per row."""
    return lambda texts: request.param.build(texts, ENGLISH)


TEXTS = (
    "the red fox jumps over the dog",
    "a red, red rose",
    "the dog sleeps",
    "nothing of interest here",
    "a red, red rose",
    "wait_for a task",
    "clouds over hills",
    "snow on roads",
    "rain in autumn",
)


def test_best_match_first_unmatched_out(index_of: Build) -> None:
    """The best match comes first and passages without a match stay out."""
    hits = index_of(TEXTS).search("red rose", 10)
    assert (hits.rows.tolist()[:2], set(hits.rows.tolist())) == ([1, 4], {0, 1, 4})
    assert (hits.scores > 0.0).all()
    assert (np.diff(hits.scores) <= 0.0).all()


def test_ties_at_cut_keep_lowest_rows(index_of: Build) -> None:
    index = index_of(["apple pie"] * 50 + ["pear"] * 80)
    assert index.search("apple", 7).rows.tolist() == list(range(7))


def test_every_row_has_a_score(index_of: Build) -> None:
    hits = index_of(TEXTS).search("red dog", 2)
    assert hits.scores_of(hits.rows).tolist() == hits.scores.tolist()
    assert hits.scores_of(np.array([3])).tolist() == [0.0]


@pytest.mark.parametrize(
    ("texts", "query", "rows"),
    [
        (TEXTS, "red", [0, 1, 4]),
        (TEXTS, "wait_for", [5]),
        (TEXTS, "wait", [5]),
        (TEXTS, "zebra quagga", []),
        (TEXTS, "the of !? \U0001f98a", []),
        (["", "...", "a word here", "other things there"], "word", [2]),
        (["...", ""], "word", []),
        ([], "word", []),
    ],
)
def test_passages_with_a_known_word_are_found(
    texts: Sequence[str], query: str, rows: list[int], index_of: Build
) -> None:
    """However many are asked for; and passages without words do no harm."""
    assert sorted(index_of(texts).search(query, 1000).rows.tolist()) == rows


def test_word_of_all_passages_is_never_negative(index_of: Build) -> None:
    """Its weight is none by rank-bm25, whose inverse document frequency would be below 0."""
    index = index_of(["common word", "common thing", "common place"])
    assert (index.scores("common") >= 0.0).all()
    found = index.search("common", 3).rows.size
    assert found == (0 if index.engine == "rank-bm25" else 3)


def test_words_times_passages_exceed_32_bits() -> None:
    n = 50_000
    index = Bm25sIndex.build((f"common word{row}" for row in range(n)), ENGLISH)
    for row in (0, 43_000, n - 1):
        assert index.search(f"word{row}", 2).rows.tolist() == [row]


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
    assert Bm25sIndex.build(texts, ENGLISH).scores(query) == pytest.approx(expected, abs=1e-5)


@given(texts=texts, k=st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_search_keeps_what_sorting_keeps(texts: list[str], k: int) -> None:
    index = Bm25sIndex.build(texts, ENGLISH)
    scores = index.scores("red fox sun").tolist()
    everything = sorted((-score, row) for row, score in enumerate(scores) if score > 0)
    assert index.search("red fox sun", k).rows.tolist() == [row for _, row in everything[:k]]


def test_positive_rank_bm25_scores_are_original() -> None:
    rank_bm25 = pytest.importorskip("rank_bm25")
    texts = ["red fox", "blue fox sleeps", "green dog", "a red dog runs", "sun"]
    expected = rank_bm25.BM25Okapi([ENGLISH.analyse(text) for text in texts]).get_scores(["red"])
    scores = RankBm25Index.build(texts, ENGLISH).scores("red")
    assert scores == pytest.approx(expected, rel=1e-6)


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'lucene' is unknown; use 'bm25s' or 'rank-bm25'"):
        HybridIndex.build([], embedder=WordHashEmbedder(), engine="lucene")  # type: ignore[arg-type]
