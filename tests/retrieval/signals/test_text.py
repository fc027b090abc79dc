"""The text family and the cosines of term vectors give what their formulas say."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxguard.core.types import FloatArray
from ctxguard.retrieval.analysers import analyser_for
from ctxguard.retrieval.index.forward import ForwardIndex
from ctxguard.retrieval.signals.term_vectors import term_cosines
from ctxguard.retrieval.signals.text import LEAD, NAMES, REACH

pytestmark = pytest.mark.usefixtures("computed_by")

Texts = Sequence[str]

# Words of two letters or more; mean length (6 + 2 + 2) / 3.
FABLES = ["Red foxes run. The dog sleeps", "a red dog", "the sea"]

WORDS = ["fox", "foxes", "dog", "dogs", "sea", "run", "running", "the", "x_ray", "quagga"]
STEMS = {"foxes": "fox", "dogs": "dog", "running": "run", "x_ray": "x_ray"}

sentences = st.lists(st.sampled_from(WORDS[:-1]), max_size=12).map(" ".join)
passages = st.lists(sentences, max_size=4).map(". ".join)
corpora = st.lists(passages, min_size=1, max_size=7)
queries = st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join)


def signals_of(
    texts: Texts, query: str, rows: Sequence[int] | None = None
) -> dict[str, FloatArray]:
    at = np.arange(len(texts)) if rows is None else np.array(rows, np.int64)
    return ForwardIndex.build(texts).text_signals(query, at)


def cosines_of(texts: Texts, rows: Sequence[int] | None = None) -> FloatArray:
    at = np.arange(len(texts)) if rows is None else np.array(rows, np.int64)
    index = ForwardIndex.build(texts)
    return term_cosines(index.passage_words(at), index.stem_weights, at)


def test_words_and_stems_on_a_corpus_worked_by_hand() -> None:
    found = signals_of(FABLES, "red fox runs")
    # Of 3 passages 2 have "red": ln(1 + 1.5 / 2.5). None has "fox" or "runs": ln(3 + 1.5) each.
    red, unknown = math.log(1.6), math.log(4.5)
    share = red / (red + 2 * unknown)
    assert found["coverage"] == pytest.approx([share, share, 0.0])
    assert found["sentence_coverage"] == pytest.approx([share, share, 0.0])
    assert found["lead_coverage"] == pytest.approx([share, share, 0.0])
    # The stems "red", "fox" and "run" are in 2, 1 and 1 passages: ln(1 + 2.5 / 1.5) for 1.
    fox = math.log(1 + 2.5 / 1.5)
    assert found["stem_coverage"] == pytest.approx([1.0, red / (red + 2 * fox), 0.0])
    # Lengths 6 and 2 add 1.5 (0.25 + 0.75 · 6 / (10 / 3)) = 2.4 and 1.05 to a count of 1.
    scores = [(red + 2 * fox) / 3.4, red / 2.05, 0.0]
    assert found["stem_bm25"] == pytest.approx(np.log1p(scores))
    assert found["length"] == pytest.approx(np.log1p([6, 2, 2]))
    # No passage has both words of a pair.
    assert found["bigram_coverage"].tolist() == [0.0, 0.0, 0.0]


def test_sentences_and_pairs_on_a_corpus_worked_by_hand() -> None:
    found = signals_of(FABLES, "dog red dog")
    # "red" and "dog" are in 2 passages each; the first passage has them in two sentences.
    assert found["coverage"] == pytest.approx([1.0, 1.0, 0.0])
    assert found["sentence_coverage"] == pytest.approx([0.5, 1.0, 0.0])
    # Of (dog, red) and (red, dog), the second passage has one as "red" directly before "dog", the
    # other as "dog" after "red". In the first, "dog" is 4 words after "red".
    assert found["bigram_coverage"] == pytest.approx([0.0, 1.0, 0.0])


def test_the_lead_is_the_first_words() -> None:
    filler = " ".join(["sea"] * (LEAD - 1))
    found = signals_of([f"{filler} fox", f"{filler} sea fox"], "fox")
    assert found["lead_coverage"].tolist() == [1.0, 0.0]


def test_the_cosine_of_term_vectors_worked_by_hand() -> None:
    # Of 3 passages of 2 words each, all add 1.5 to counts. "fox" is in 2: it weighs
    # ln 1.6 = 0.470 there; "dog" and "sea" in 1: ln(8/3) = 0.981.
    cosines = cosines_of(["fox dog", "foxes sea", "run run"])
    fox, other = math.log(1.6), math.log(8 / 3)
    expected = fox**2 / (fox**2 + other**2)
    assert cosines == pytest.approx(
        np.array([[1.0, expected, 0.0], [expected, 1.0, 0.0], [0.0, 0.0, 1.0]]), abs=1e-6
    )


# The formulas once more, from words in plain Python.


def words_of(text: str) -> list[str]:
    return [word for sentence in read(text) for word in sentence]


def read(text: str) -> list[list[str]]:
    split = [
        [part for word in s.split() for part in ([word, "ray"] if word == "x_ray" else [word])]
        for s in text.split(". ")
    ]
    return [sentence for sentence in split if sentence]


def stem(word: str) -> str:
    return STEMS.get(word, word)


def idf(n: int, df: int) -> float:
    return math.log(1 + (n - df + 0.5) / (df + 0.5))


def norm(texts: Texts, length: int) -> float:
    mean = sum(len(words_of(text)) for text in texts) / len(texts) or 1.0
    return 1.5 * (0.25 + 0.75 * length / mean)


def expected_signals(texts: Texts, query: str) -> dict[str, list[float]]:
    n = len(texts)
    documents = [words_of(text) for text in texts]
    asked = words_of(query)

    def weight(word: str) -> float:
        df = sum(word in document for document in documents)
        return idf(n, df) if df else math.log(n + 1.5)

    def stem_df(each: str) -> int:
        return sum(each in map(stem, document) for document in documents)

    def stem_weight(each: str) -> float:
        return idf(n, stem_df(each)) if stem_df(each) else math.log(n + 1)

    def share(there: list[str]) -> float:
        total = sum(map(weight, set(asked)))
        return sum(weight(word) for word in set(asked) & set(there)) / total if total else 0.0

    rows: dict[str, list[float]] = {name: [] for name in NAMES}
    for text, words in zip(texts, documents, strict=True):
        counts = Counter(map(stem, words))
        score = sum(
            stem_weight(each) * counts[each] / (counts[each] + norm(texts, len(words)))
            for each in map(stem, asked)
        )
        distinct = set(map(stem, asked))
        stem_total = sum(map(stem_weight, distinct))
        covered = sum(stem_weight(each) for each in distinct & counts.keys())
        pairs = set(pairwise(asked))
        found = {
            (a, b)
            for a, b in pairs
            for i, j in ((i, i + step) for i in range(len(words)) for step in (-1, 1, 2, REACH))
            if 0 <= j < len(words) and (words[i], words[j]) == (a, b)
        }
        pair_total = sum(weight(a) + weight(b) for a, b in pairs)
        rows["stem_bm25"].append(math.log1p(score))
        rows["stem_coverage"].append(covered / stem_total if stem_total else 0.0)
        rows["coverage"].append(share(words))
        rows["sentence_coverage"].append(max((share(s) for s in read(text)), default=0.0))
        rows["lead_coverage"].append(share(words[:LEAD]))
        rows["length"].append(math.log1p(len(words)))
        rows["bigram_coverage"].append(
            sum(weight(a) + weight(b) for a, b in found) / pair_total if pair_total else 0.0
        )
    return rows


def expected_cosines(texts: Texts) -> FloatArray:
    documents = [Counter(map(stem, words_of(text))) for text in texts]
    stems = sorted(set().union(*documents))
    vectors = np.zeros((len(texts), len(stems) + 1))
    for i, counts in enumerate(documents):
        for j, each in enumerate(stems):
            df = sum(each in other for other in documents)
            part = counts[each] / (counts[each] + norm(texts, counts.total()))
            vectors[i, j] = idf(len(texts), df) * part
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(lengths > 0.0, lengths, 1.0)
    return np.einsum("it,jt->ij", unit, unit)


@given(corpora, queries)
@settings(max_examples=200, deadline=None)
def test_any_corpus_gives_what_plain_loops_give(texts: list[str], query: str) -> None:
    found, expected = signals_of(texts, query), expected_signals(texts, query)
    assert tuple(found) == NAMES
    for name in NAMES:
        assert found[name] == pytest.approx(expected[name], abs=1e-12), name
    assert cosines_of(texts) == pytest.approx(expected_cosines(texts), abs=1e-5)


@given(corpora, queries, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_a_candidates_signals_do_not_depend_on_the_others(
    texts: list[str], query: str, chance: object
) -> None:
    rows = list(range(len(texts)))
    chance.shuffle(rows)  # type: ignore[attr-defined]
    some = rows[: max(1, len(rows) // 2)]
    everything, cosines = signals_of(texts, query), cosines_of(texts)
    for those in (rows, some):
        for name, values in signals_of(texts, query, those).items():
            assert values.tolist() == everything[name][those].tolist()
        assert cosines_of(texts, those).tolist() == cosines[np.ix_(those, those)].tolist()


def test_equal_passages_have_equal_signals_wherever_their_words_stand() -> None:
    """Rounding in the order of the words would tell them apart, and a z-score would show it."""
    words = [f"word{n}" for n in range(12)]
    rest = [" ".join(words[n:]) for n in range(1, 12)]
    found = signals_of([" ".join(words), " ".join(reversed(words)), *rest], " ".join(words))
    for name in ("stem_bm25", "stem_coverage", "coverage", "sentence_coverage"):
        assert found[name][0] == found[name][1]


@pytest.mark.parametrize("query", ["", "?!", "a", "quagga okapi"])
def test_a_query_without_words_or_of_unknown_words_has_only_lengths(query: str) -> None:
    found = signals_of(FABLES, query)
    for name in set(NAMES) - {"length"}:
        assert found[name].tolist() == [0.0, 0.0, 0.0]
    assert found["length"] == pytest.approx(np.log1p([6, 2, 2]))


def test_empty_passages_and_no_candidates() -> None:
    found = signals_of(["", "...", "fox"], "fox")
    assert found["coverage"].tolist() == [0.0, 0.0, 1.0]
    assert found["length"] == pytest.approx([0.0, 0.0, math.log(2)])
    assert cosines_of(["", "...", "fox"]).tolist() == np.diag([0.0, 0.0, 1.0]).tolist()
    assert signals_of(FABLES, "fox", [])["coverage"].shape == (0,)
    assert cosines_of(FABLES, []).shape == (0, 0)
    assert signals_of([""], "fox")["coverage"].tolist() == [0.0]


def test_ten_thousand_words_and_a_query_as_long() -> None:
    words = [f"word{n}" for n in range(10_000)]
    found = signals_of([" ".join(words), "word3"], " ".join(words))
    assert found["coverage"][0] == 1.0
    assert found["bigram_coverage"].tolist() == [1.0, 0.0]
    assert found["length"][0] == pytest.approx(math.log(10_001))
    # "word3" is in both of 2 passages, every other word in one.
    expected = math.log(1.2) / math.hypot(math.log(1.2), math.log(2) * math.sqrt(9_999))
    assert cosines_of([" ".join(words), "word3"])[0, 1] == pytest.approx(expected, abs=1e-5)


def test_scripts_without_spaces_have_sentences() -> None:
    texts = ["東京は雨。京都は晴れ。", "東京 晴れ"]
    index = ForwardIndex.build(texts, analyser_for("cjk"))
    found = index.text_signals("東京は晴れ", np.array([0, 1]))
    assert found["coverage"][0] > found["sentence_coverage"][0] > 0.0
    assert found["stem_coverage"][0] > found["stem_coverage"][1] > 0.0


def test_other_languages_have_their_own_stems() -> None:
    index = ForwardIndex.build(["Die Katzen schlafen"], analyser_for("de"))
    found = index.text_signals("Katze", np.array([0]))
    assert found["stem_coverage"].tolist() == [1.0]
    assert found["coverage"].tolist() == [0.0]
