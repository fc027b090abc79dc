"""Records of passages: bytes from which the signals are those of an index of the same texts."""

import numpy as np
import pytest

from ctxguard.core.corpus_sketch import CorpusSketch
from ctxguard.retrieval.analysers import as_analyser
from ctxguard.retrieval.analysers.reading import Reading
from ctxguard.retrieval.index import records as records_module
from ctxguard.retrieval.index.forward import ForwardIndex, named_signals
from ctxguard.retrieval.index.lexical import Bm25sIndex
from ctxguard.retrieval.index.records import CorpusCounts, Records, TermCounts, weighed_words
from tests.doubles import WordTokenEmbedder

TEXTS = [
    "Red foxes run. The dogs wait_for the red fox!",
    "the sea",
    "Dogs and foxes\nFoxes and dogs. Dogs bark at 3 a.m.",
    "",
]
QUERY = "do foxes wait for dogs, dogs?"


def _read(language: str = "en", *, with_sentences: bool = False) -> tuple[Reading, Records]:
    analyser = as_analyser(language)
    reading, encoder = Reading.of(analyser), WordTokenEmbedder().token_encoder()
    lengths = [len(analyser.analyse(text)) for text in TEXTS]
    sentences = encoder.encode_passages(TEXTS)[1] if with_sentences else None
    written = Records.read(reading, TEXTS, lengths, sentences).to_bytes()
    return reading, Records.from_bytes(written, with_sentences=with_sentences)


@pytest.mark.parametrize("language", ["en", "de", "cjk"])
def test_a_record_has_the_words_stems_and_lexical_scores_of_an_index(
    language: str, computed_by: str
) -> None:
    reading, read = _read(language)
    analyser = as_analyser(language)
    forward, counts = ForwardIndex.build(TEXTS, analyser), CorpusCounts.of([read])
    rows = np.array([2, 0, 3])
    some = Records.from_bytes([read.to_bytes()[row] for row in rows], with_sentences=False)
    found = weighed_words(some, QUERY, reading, counts)
    places = np.arange(rows.size)
    for name, values in named_signals(found.passages, found.query, places).items():
        assert values == pytest.approx(forward.text_signals(QUERY, rows)[name]), name
    hits = Bm25sIndex.build(TEXTS, analyser).search(QUERY, 4)
    terms, mean = analyser.analyse(QUERY), read.lengths.mean()
    bm25 = counts.bm25(read, reading, terms, mean)
    assert bm25 == pytest.approx(hits.all_scores.astype(float), abs=1e-6)


def test_sentences_are_written_and_read_as_they_are() -> None:
    _, read = _read(with_sentences=True)
    expected = WordTokenEmbedder().token_encoder().encode_passages(TEXTS)[1]
    assert read.sentences is not None
    for own, given in zip(read.sentences, expected, strict=True):
        assert own.dtype == given.dtype
        assert own.tolist() == given.tolist()


@pytest.mark.parametrize("with_sentences", [False, True])
@pytest.mark.parametrize("cut", [0, 3, 9, -1])
def test_what_is_no_record_is_refused(cut: int, with_sentences: bool) -> None:
    whole = _read(with_sentences=True)[1].to_bytes()[0]
    spoilt = [b"\xff" * 40, whole[:cut]] if with_sentences or cut != -1 else [b"\xff" * 40]
    for record in spoilt:
        with pytest.raises(ValueError, match=r"record|sentences"):
            Records.from_bytes([record], with_sentences=with_sentences)


def test_a_record_holds_no_more_words_than_allowed() -> None:
    reading = Reading.of(as_analyser("en"))
    read = Records.read(reading, ["red " * (records_module.MOST_WORDS + 5)])
    assert read.words.size == read.stems.size == records_module.MOST_WORDS


def test_counts_of_a_corpus_are_those_of_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "_MERGED_FROM", 4)
    _, read = _read(with_sentences=True)
    n = len(WordTokenEmbedder().token_encoder().token_table())
    written = read.to_bytes()
    pages = [Records.from_bytes([each], with_sentences=True) for each in written]
    sketch = CorpusSketch.of(range(4))
    for counts in (CorpusCounts.of([read], n), CorpusCounts.of(pages, n)):
        stored, counted_over = CorpusCounts.from_bytes(counts.to_bytes(sketch))
        assert counted_over == sketch
        assert (stored.n_passages, stored.n_words) == (4, read.words.size)
        foxes = records_module.numbers_of(["fox", "foxes", "sea", "unheard"])
        assert stored.words.of(foxes).tolist() == [1, 2, 1, 0]
        assert stored.stems.of(foxes).tolist() == [2, 0, 1, 0]
        assert stored.pieces.tolist() == CorpusCounts.of([read], n).pieces.tolist()
    with pytest.raises(ValueError, match="not counts"):
        CorpusCounts.from_bytes(b"no counts")


def test_the_terms_of_fewest_passages_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "MOST_TERMS", 2)
    numbers = np.array([3, 5, 9], np.int32)
    kept = TermCounts.summed([TermCounts(numbers, np.array([7, 1, 4], np.int32))])
    assert (kept.numbers.tolist(), kept.passages.tolist()) == ([3, 9], [7, 4])
