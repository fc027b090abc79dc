"""The forward index: what it holds, saved, joined and edited, as one built anew does."""

import threading
from pathlib import Path

import numpy as np
import pytest

from ctxguard.core.types import Hit, Passage
from ctxguard.errors import ConfigurationError, DataError
from ctxguard.retrieval.analysers import LANGUAGES, analyser_for
from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.analysers.reading import LONGEST_SENTENCE, Reading
from ctxguard.retrieval.index.forward import ForwardIndex
from ctxguard.retrieval.index.hybrid_index import HybridIndex
from ctxguard.retrieval.text_signals import TextSignals
from tests.doubles import WordHashEmbedder

QUERY = "the red foxes wait for dogs quagga"


def passages_of(corpus: dict[str, str]) -> list[Passage]:
    return [Passage(passage_id, text) for passage_id, text in corpus.items()]


def build(corpus: dict[str, str], **settings: str) -> HybridIndex:
    return HybridIndex.build(
        passages_of(corpus),
        embedder=WordHashEmbedder(),
        **{"signals": "text", **settings},  # type: ignore[arg-type]
    )


def test_words_are_kept_in_order_with_the_starts_of_sentences() -> None:
    index = ForwardIndex.build(["The wait_for. Wait\nfoxes", "", "the fox"])
    assert list(index.vocabulary) == ["the", "wait_for", "wait", "for", "foxes", "fox"]
    # ~n marks the first word of a sentence.
    assert index.ordered.words.tolist() == [~0, 1, 2, 3, ~2, ~4, ~0, 5]
    assert index.ordered.starts.tolist() == [0, 6, 6, 8]
    assert index.words_with.tolist() == [2, 1, 1, 1, 1, 1]
    assert list(index.stems) == ["the", "wait_for", "wait", "for", "fox"]
    assert index.stems_with.tolist() == [2, 1, 1, 1, 2]


def test_sentences_end_at_marks_and_lines_and_long_ones_are_cut() -> None:
    sentences = Reading.of(ENGLISH).sentences
    assert sentences("One two? Three! “Four.” Five") == [
        ["one", "two"],
        ["three"],
        ["four"],
        ["five"],
    ]
    assert sentences("os.path 3.14") == [["os", "path", "14"]]
    assert sentences("\n\n . \n") == []
    assert [len(each) for each in sentences("word " * 150)] == [LONGEST_SENTENCE] * 2 + [22]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language_can_be_read(language: str) -> None:
    reading = Reading.of(analyser_for(language))
    words = reading.words("Größe 東京都 Сидели läsa")
    assert words
    assert len(reading.stems(words)) == len(words)


def test_an_analyser_of_ones_own_gives_words_that_are_their_own_stems() -> None:
    class Letters:
        name, fingerprint, scripts = "letters", "each letter", None

        def analyse(self, text: str) -> list[str]:
            return [letter for letter in text if letter.isalpha()]

    index = ForwardIndex.build(["ab. ca"], Letters())
    assert list(index.vocabulary) == list(index.stems) == ["a", "b", "c"]
    assert index.text_signals("cb", np.array([0]))["sentence_coverage"].tolist() == [0.5]


def test_an_index_without_words_stays_without(tmp_path: Path) -> None:
    """So do folders of older releases, which have the same files."""
    build({"a": "red fox", "b": "sea"}, signals="none").save(tmp_path)
    index, _ = HybridIndex.load(tmp_path).upserted(passages_of({"c": "dog"}), WordHashEmbedder())
    assert index.forward is None
    assert index.signals == "none"


# Passages that are given with the query.


PASSAGES = [
    Passage("a", "Red foxes run. The dogs wait_for", "Foxes"),
    Passage("b", "the sea"),
    Passage("c", ""),
    Passage("d", "red dogs"),
]


def test_given_passages_have_the_signals_of_an_index_of_the_corpus() -> None:
    signals = TextSignals(corpus=PASSAGES)
    index = HybridIndex.build(PASSAGES, embedder=WordHashEmbedder(), signals="text")
    assert index.passages.ids == ("a", "b", "d")
    forward = ForwardIndex.build(
        ["Foxes\nRed foxes run. The dogs wait_for", "the sea", "", "red dogs"]
    )
    rows = np.array([3, 2, 0])
    for _ in range(2):
        found = signals.text_signals(QUERY, [PASSAGES[row] for row in rows])
        for name, values in forward.text_signals(QUERY, rows).items():
            assert found[name] == pytest.approx(values), name


def test_without_a_corpus_the_candidates_are_counted() -> None:
    texts = [f"{each.title}\n{each.text}" for each in PASSAGES]
    forward, rows = ForwardIndex.build(texts), np.arange(4)
    hits = [Hit(each.passage_id, 1.0, each.text, each.title) for each in PASSAGES]
    signals = TextSignals()
    for name, values in signals.text_signals(QUERY, hits).items():
        assert values == pytest.approx(forward.text_signals(QUERY, rows)[name]), name
    assert signals.text_signals(QUERY, [])["coverage"].shape == (0,)


def test_a_passage_with_another_text_is_read_again() -> None:
    signals = TextSignals(corpus=PASSAGES)
    for text, coverage in (("sea", 1.0), ("fox", 0.0), ("sea", 1.0)):
        found = signals.text_signals("sea", [Passage("b", text)])
        assert found["coverage"].tolist() == [coverage]


def test_no_more_words_are_kept_than_allowed() -> None:
    """What is no longer kept is read again; passages without words take memory too."""
    signals = TextSignals(corpus=PASSAGES, max_words=400)
    for n in range(50):
        many = [Passage(f"{n}.{at}", "red " * at) for at in range(30)]
        assert signals.text_signals("red", many)["coverage"].tolist() == [0.0] + [1.0] * 29
        assert 0 < signals._size <= 400
        assert signals._size == sum(words.words.size + 32 for _, words in signals._kept.values())
    huge = Passage("huge", "red " * 1_000)
    assert signals.text_signals("red", [huge])["coverage"].tolist() == [1.0]


def test_threads_that_share_the_words_kept_find_the_same() -> None:
    signals = TextSignals(corpus=PASSAGES, max_words=100)
    expected = {name: x.tolist() for name, x in signals.text_signals(QUERY, PASSAGES).items()}
    wrong = []

    def ask() -> None:
        for _ in range(100):
            found = signals.text_signals(QUERY, PASSAGES)
            if {name: x.tolist() for name, x in found.items()} != expected:
                wrong.append(found)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_words is 0"):
        TextSignals(max_words=0)
    with pytest.raises(ConfigurationError, match="no analyser for the language 'xx'"):
        TextSignals("xx")
    with pytest.raises(DataError, match="the corpus is empty"):
        TextSignals(corpus=[])
