"""The sentences of an index: what it holds, saved, joined and edited, as one built anew does."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxguard.core.types import Passage, Ranking
from ctxguard.errors import ConfigurationError
from ctxguard.retrieval import HybridRetriever
from ctxguard.retrieval.index.hybrid_index import HybridIndex
from ctxguard.retrieval.models.sentences import sentence_lengths, sentences_of
from ctxguard.retrieval.nibbles import packed
from ctxguard.retrieval.protocols import QueryTokens, Sentences
from tests.doubles import WordHashEmbedder, WordTokenEmbedder

QUERY = "Which red fox sleeps?"
TEXTS = {
    "a": "The red fox sleeps under the tree. It dreams of a large and quiet sea.",
    "b": "A dog. It barks at the old fox all night long!\nNobody in the house can sleep.",
    "c": "Nothing of the kind",
    "d": "word " * 10_000,
}
N_PIECES = 997


def passages_of(corpus: dict[str, str]) -> list[Passage]:
    return [Passage(passage_id, text) for passage_id, text in corpus.items()]


def build(corpus: dict[str, str]) -> HybridIndex:
    return HybridIndex.build(passages_of(corpus), embedder=WordTokenEmbedder(), signals="full")


def tokens_of(query: str) -> QueryTokens:
    return WordTokenEmbedder().token_encoder().encode_query(query)


def token_table() -> np.ndarray:
    return WordTokenEmbedder().token_encoder().token_table()


def signals_of(index: HybridIndex, query: str = QUERY) -> dict[str, list[float]]:
    assert index.sentences is not None
    rows = np.arange(len(index.passages))[::-1].copy()
    found = index.sentences.signals(tokens_of(query), rows, token_table())
    return {name: values.tolist() for name, values in found.items()}


def starts_of(text: str) -> list[int]:
    """Where each word begins."""
    return [
        at for at, letter in enumerate(text) if letter != " " and (not at or text[at - 1] in " \n")
    ]


class TestSentencesOfATextInPieces:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", []),
            ("one", [1]),
            ("one two three four five. six seven eight nine ten", [5, 5]),
            ("A title\none two three four five six", [8]),
            ("one two three four five. last one", [7]),
            ("p. 3 is one two three four five six", [9]),
            ("w " * 64, [64]),
            ("w " * 65, [33, 32]),
            ("w " * 200, [50, 50, 50, 50]),
        ],
    )
    def test_short_ones_are_joined_and_long_ones_cut(self, text: str, expected: list[int]) -> None:
        assert sentence_lengths(text, starts_of(text)).tolist() == expected

    def test_scripts_without_spaces_have_sentences_too(self) -> None:
        text = "東京は日本の首都です。人口はとても多いです。"
        assert sentence_lengths(text, range(len(text))).tolist() == [11, 11]

    @given(st.text(alphabet="ab.?! \n。", max_size=300))
    @settings(max_examples=200, deadline=None)
    def test_every_piece_is_in_one_of_5_to_64_unless_there_are_fewer(self, text: str) -> None:
        starts = [at for at, letter in enumerate(text) if not letter.isspace()]
        lengths = sentence_lengths(text, starts)
        assert int(lengths.sum()) == len(starts)
        assert (lengths <= 64).all()
        assert (lengths >= min(5, len(starts))).all()

    def test_a_sentence_has_the_direction_of_its_sum_and_each_piece_once(self) -> None:
        sums = np.array([[3.0, 0.0], [0.0, 0.0], [0.0, -2.0]], np.float32)
        lengths = [np.array([3, 1], np.uint8), np.array([2], np.uint8)]
        found = sentences_of(sums, lengths, np.array([7, 5, 7, 5, 6, 5]), 997)
        expected = packed(np.array([[1.0, 0.0], [0.0, 0.0], [0.0, -1.0]], np.float32))
        assert found.vectors.tolist() == expected.tolist()
        assert found.lengths.tolist() == [2, 1, 2]
        assert found.pieces.tolist() == [5, 7, 5, 5, 6]
        assert found.starts.tolist() == [[0, 0], [2, 3], [3, 5]]


def test_an_index_without_sentences_has_none_and_loads(tmp_path: Path) -> None:
    index = HybridIndex.build(passages_of(TEXTS), embedder=WordTokenEmbedder(), signals="text")
    index.save(tmp_path / "index")
    loaded = HybridIndex.load(tmp_path / "index")
    assert (loaded.sentences, loaded.signals) == (None, "text")
    assert not list(tmp_path.rglob("sentences.*"))


def test_an_embedder_without_states_cannot_keep_sentences() -> None:
    with pytest.raises(ConfigurationError, match=r"word-hash.*signals \"text\""):
        HybridIndex.build(passages_of(TEXTS), embedder=WordHashEmbedder(), signals="full")


def test_an_embedder_without_states_cannot_add_to_sentences() -> None:
    with pytest.raises(ConfigurationError, match="gives no states of word pieces"):
        build(TEXTS).upserted([Passage("e", "more")], WordHashEmbedder())


def test_vectors_are_the_same_with_sentences() -> None:
    plain = HybridIndex.build(passages_of(TEXTS), embedder=WordTokenEmbedder())
    rows = np.arange(len(TEXTS))
    assert build(TEXTS).dense.vectors_at(rows).tolist() == plain.dense.vectors_at(rows).tolist()


def test_the_passage_that_says_it_in_one_sentence_is_first() -> None:
    for values in signals_of(build(TEXTS)).values():
        # In the order of rows turned round, a is last.
        assert max(values) == values[-1]


def test_a_passage_and_a_query_without_a_word_are_unknown() -> None:
    index = build({"a": "words", "b": "\u200b"})
    assert all(np.isnan(values).tolist() == [True, False] for values in signals_of(index).values())
    assert np.isnan(list(signals_of(index, "\u200b").values())).all()


def test_a_rare_word_weighs_more() -> None:
    """Both passages hold one of the two words; the word of fewer passages decides."""
    corpus = {f"c{n}": "common thing here again today" for n in range(8)}
    corpus["a"] = "rare thing here again today"
    match = signals_of(build(corpus), "common rare")["token_match"]
    # Rows by id, turned round.
    assert match[-1] == max(match)
    assert match[-1] > match[0]


def test_a_change_of_metadata_alone_encodes_nothing() -> None:
    class Refuses(WordTokenEmbedder):
        def token_encoder(self):  # type: ignore[no-untyped-def]
            encoder = super().token_encoder()
            return replace(encoder, embedder=self)

        def encode_passages(self, texts, progress=None):  # type: ignore[no-untyped-def]
            assert not texts
            return super().encode_passages(texts, progress)

    index = build(TEXTS)
    changed, changes = index.upserted([Passage("b", TEXTS["b"], metadata={"n": 1})], Refuses())
    assert (changes.changed, changes.encoded) == (1, 0)
    assert signals_of(changed) == signals_of(index)


def test_the_table_of_word_pieces_is_the_models_and_not_in_the_index(tmp_path: Path) -> None:
    """Two indexes of one model need it once."""
    index = build(TEXTS)
    index.save(tmp_path / "index")
    names = {file.name for file in tmp_path.rglob("sentences.*")}
    assert names == {f"sentences.{name}.npy" for name in (*Sentences._fields, "frequencies")}
    assert not list(tmp_path.rglob("table*"))
    assert index.sentences is not None
    with pytest.raises(ConfigurationError, match=r"the token table of shape \(996, 18\)"):
        index.sentences.signals(tokens_of(QUERY), np.arange(2), token_table()[:-1])


@pytest.mark.parametrize(
    "tokens",
    [
        QueryTokens(np.ones(64, np.float32), np.ones((2, 7), np.float32), np.array([1, 2])),
        QueryTokens(np.ones(64, np.float32), np.ones((1, 32), np.float32), np.array([1, 2])),
        QueryTokens(np.ones(64, np.float32), np.ones((1, 32), np.float32), np.array([N_PIECES])),
        QueryTokens(np.ones(64, np.float32), np.ones((1, 32), np.float32), np.array([-1])),
    ],
)
def test_a_query_of_another_model_is_refused(tokens: QueryTokens) -> None:
    sentences = build(TEXTS).sentences
    assert sentences is not None
    with pytest.raises(ConfigurationError, match="the index's embedder"):
        sentences.signals(tokens, np.arange(2), token_table())


class TestTheQueryOfARetriever:
    @pytest.fixture
    def retriever(self) -> HybridRetriever:
        return HybridRetriever(build(TEXTS), embedder=WordTokenEmbedder())

    def test_it_is_encoded_with_its_pieces_where_there_are_sentences(
        self, retriever: HybridRetriever
    ) -> None:
        encoded = retriever.encode_query(QUERY)
        assert isinstance(encoded, QueryTokens)
        assert encoded.states.shape == (5, 32)

        def scores(ranking: Ranking) -> list[float]:
            return list(ranking.scores)

        expected = scores(retriever.retrieve(QUERY))
        assert scores(retriever.retrieve(QUERY, query_vector=encoded)) == expected
        assert scores(retriever.retrieve(QUERY, query_vector=encoded.vector)) == expected

    def test_its_pieces_are_encoded_when_only_its_vector_is_given(
        self, retriever: HybridRetriever
    ) -> None:
        vector = WordTokenEmbedder().encode_query(QUERY)
        search = retriever._search(QUERY, 10, query_vector=2.0 * vector)
        tokens = search.query_tokens()
        assert tokens is not None
        assert tokens.pieces.tolist() == tokens_of(QUERY).pieces.tolist()
        assert search.unit_vector() == pytest.approx(vector, abs=1e-6)

    def test_pieces_of_another_length_of_vector_are_the_callers_error(
        self, retriever: HybridRetriever
    ) -> None:
        short = tokens_of(QUERY)._replace(vector=np.ones(3, np.float32))
        with pytest.raises(ConfigurationError, match=r"shape \(3,\)"):
            retriever.retrieve(QUERY, query_vector=short)

    def test_without_sentences_or_an_embedder_of_states_it_is_a_vector(self) -> None:
        plain = HybridIndex.build(passages_of(TEXTS), embedder=WordTokenEmbedder())
        for index, embedder in ((plain, WordTokenEmbedder()), (build(TEXTS), WordHashEmbedder())):
            encoded = HybridRetriever(index, embedder=embedder).encode_query(QUERY)
            assert isinstance(encoded, np.ndarray)
