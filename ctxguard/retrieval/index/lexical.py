"""The lexical indexes: BM25 as bm25s scores it (the default) or as rank-bm25 does."""

import json
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, cast

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.extras import require
from ctxguard.core.types import FloatArray
from ctxguard.errors import ConfigurationError, IndexFolderError
from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.index.part_files import ALTERED, PartFiles
from ctxguard.retrieval.index.row_map import RowMap
from ctxguard.retrieval.protocols import (
    Analyser,
    Float32Array,
    LexicalHits,
    LexicalIndex,
    RowArray,
)

LexicalEngine = Literal["bm25s", "rank-bm25"]
Postings = tuple[Float32Array, NDArray[np.int32], NDArray[np.int64]]

K1 = 1.5
B = 0.75

_MAX_COUNT = np.iinfo(np.uint16).max
"""Words that a passage has more often count as often as this: their score differs by 1e-5."""

_VOCABULARY = "lexical.vocabulary.json"


class Counted(NamedTuple):
    """How often each passage has each word, by word, and how long the passages are.

    Attributes:
        counts: How often, shape (n_postings,).
        rows: In which passage, ascending for each word, shape (n_postings,).
        starts: The postings of word w are those from ``starts[w]`` to ``starts[w + 1]``.
        lengths: Words of each passage, shape (n_passages,).
    """

    counts: NDArray[np.uint16]
    rows: NDArray[np.int32]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int32]


def build_lexical(engine: LexicalEngine, texts: Iterable[str], analyser: Analyser) -> LexicalIndex:
    """Index texts, one per row.

    Raises:
        ConfigurationError: an engine that does not exist.
    """
    return _engine(engine).build(texts, analyser)


def load_lexical(engine: LexicalEngine, files: PartFiles, analyser: Analyser) -> LexicalIndex:
    """Read what ``save`` wrote.

    Args:
        engine: The one that built it.
        files: Where it was saved.
        analyser: The one that it was built with.

    Raises:
        ConfigurationError: an engine that does not exist.
        ValueError, OSError: a file that is not what ``save`` wrote.
    """
    return _engine(engine).load(files, analyser)


def join_lexical(
    engine: LexicalEngine, indexes: Sequence[LexicalIndex], rows: Sequence[RowArray]
) -> LexicalIndex:
    """One index of several of an engine; arguments as for `Segment.joined`."""
    joined: LexicalIndex = _engine(engine).joined(cast(Any, indexes), rows)
    return joined


def _engine(engine: LexicalEngine) -> "type[Bm25sIndex] | type[RankBm25Index]":
    if engine == "bm25s":
        return Bm25sIndex
    if engine == "rank-bm25":
        return RankBm25Index
    raise ConfigurationError(f"lexical engine {engine!r} is unknown; use 'bm25s' or 'rank-bm25'")


class Bm25sIndex:
    """BM25 in Lucene's form, as bm25s scores it, searched by this package's compiled loops.

    Lucene's form is idf · count / (count + k1 (1 − b + b · length / mean length)), with
    idf = ln(1 + (n − df + ½) / (df + ½)), where df passages of n have the word (Kamphuis et al.,
    ECIR 2020).

    Args:
        analyser: Splits passages and queries into terms.
        vocabulary: The number of each term.
        counted: How often each passage has each term.
        scores: BM25 score of each posting, shape (n_postings,); None to compute them.

    Attributes:
        analyser: As given.
        vocabulary: As given.
        counted: As given, read-only.
        postings: The scores and rows of all terms, one after the other, and where each begins.
    """

    def __init__(
        self,
        analyser: Analyser,
        vocabulary: dict[str, int],
        counted: Counted,
        scores: Float32Array | None = None,
    ) -> None:
        self.analyser = analyser
        self._kernels = require("ctxguard.retrieval.index.kernels", "embedded")
        self.vocabulary = vocabulary
        # Read-only whether built or mapped, so that numba compiles one variant of each loop.
        self.counted = Counted(*[read_only(each) for each in counted])
        counts, rows, starts, lengths = self.counted
        if scores is None:
            weights = idf(np.diff(starts), len(self))
            scores = self._kernels.posting_scores(
                counts, rows, starts, weights, length_norms(lengths)
            )
        self.postings: Postings = read_only(scores), rows, starts

    @classmethod
    def build(cls, texts: Iterable[str], analyser: Analyser = ENGLISH) -> Self:
        """Analyse and score texts, one per row."""
        words, ends, vocabulary = _term_ids(texts, analyser)
        lengths = np.diff(ends)
        rows = np.repeat(np.arange(lengths.size), lengths)
        # One number for each pair of word and row, so that sorting counts the pairs.
        pairs, counts = np.unique(words * max(lengths.size, 1) + rows, return_counts=True)
        words, rows = np.divmod(pairs, max(lengths.size, 1))
        counted = _counted(words, rows, counts, lengths, len(vocabulary))
        return cls(analyser, vocabulary, counted)

    @classmethod
    def joined(cls, indexes: "Sequence[Bm25sIndex]", rows: Sequence[RowArray]) -> "Bm25sIndex":
        """One index of several, without analysing anything; arguments as for `Segment.joined`."""
        vocabulary: dict[str, int] = {}
        lengths = np.zeros(sum(int((new >= 0).sum()) for new in rows), np.int64)
        words, passages, counts = [], [], []
        for index, new in zip(indexes, rows, strict=True):
            counted = index.counted
            if _has_odd_row(counted.rows, new.size):
                raise IndexFolderError(f"{_array('rows')} {ALTERED}")
            lengths[new[new >= 0]] = counted.lengths[new >= 0]
            new_rows = new[counted.rows]
            is_there = new_rows >= 0
            old = np.repeat(np.arange(len(index.vocabulary)), np.diff(counted.starts))[is_there]
            numbers = np.full(len(index.vocabulary), -1)
            terms = list(index.vocabulary)
            for number in np.unique(old).tolist():
                numbers[number] = vocabulary.setdefault(terms[number], len(vocabulary))
            words.append(numbers[old])
            passages.append(new_rows[is_there])
            counts.append(counted.counts[is_there])
        word, row, count = map(np.concatenate, (words, passages, counts))
        order = np.argsort(word * max(lengths.size, 1) + row)
        counted = _counted(word[order], row[order], count[order], lengths, len(vocabulary))
        return cls(indexes[0].analyser, vocabulary, counted)

    def __len__(self) -> int:
        return self.counted.lengths.size

    def search(self, query: str, k: int) -> LexicalHits:
        """The at most ``k`` best rows, and every row's score."""
        words = self.words(query)
        if words.size == 0 or len(self) == 0:
            return _no_hits(len(self))
        return LexicalHits(
            *self._kernels.search_postings(words, self.postings, len(self), min(k, len(self)))
        )

    def words(self, query: str) -> NDArray[np.int64]:
        """The numbers of a query's terms, without those that no passage has."""
        numbers = self.vocabulary
        terms = self.analyser.analyse(query)
        return np.array([numbers[term] for term in terms if term in numbers], np.int64)

    @property
    def fingerprint(self) -> str:
        """The engine, the analyser and their parameters."""
        return f"bm25s lucene k1={K1} b={B}; {self.analyser.fingerprint}"

    def save(self, folder: Path) -> None:
        """Write the postings as arrays and the vocabulary as JSON."""
        np.save(folder / _array("scores"), self.postings[0])
        for name, counted in self.counted._asdict().items():
            np.save(folder / _array(name), counted)
        _write_vocabulary(folder, list(self.vocabulary))

    @classmethod
    def load(cls, files: PartFiles, analyser: Analyser = ENGLISH) -> Self:
        """Read what ``save`` wrote."""
        scores, counts, rows = map(files.large_array, map(_array, ("scores", "counts", "rows")))
        starts, lengths = map(files.array, map(_array, ("starts", "lengths")))
        vocabulary = {word: number for number, word in enumerate(files.texts(_VOCABULARY))}
        found = Counted(counts, rows, starts, lengths)
        _check_postings(found, scores, len(vocabulary))
        return cls(analyser, vocabulary, found, scores)


class EditedBm25sIndex:
    """The BM25 index of an edited index, with the scores that a new one would give.

    How rare each word is and how long passages are on the mean change with every edit, so the
    score of each posting is computed when it is read.

    Args:
        base: The base's index.
        tail: The tail's index.
        row_map: Which of their passages are there.

    Attributes:
        analyser: The base's.
    """

    def __init__(self, base: Bm25sIndex, tail: Bm25sIndex, row_map: RowMap) -> None:
        self.analyser = base.analyser
        self._base = base
        self._kernels = require("ctxguard.retrieval.index.kernels", "embedded")
        lengths = np.concatenate((base.counted.lengths, tail.counted.lengths))
        self._norms = read_only(length_norms(lengths[row_map.stored]))
        self._parts = [
            (
                index,
                rows,
                self._kernels.passages_with(index.counted.rows, index.counted.starts, rows),
            )
            for index, rows in ((base, row_map.base_rows), (tail, row_map.tail_rows))
        ]

    def __len__(self) -> int:
        return self._norms.size

    def search(self, query: str, k: int) -> LexicalHits:
        """The at most ``k`` best rows, and every row's score."""
        n, terms = len(self), self.analyser.analyse(query)
        words = [
            np.array([index.vocabulary.get(term, -1) for term in terms], np.int64)
            for index, _, _ in self._parts
        ]
        frequencies = np.zeros(len(terms), np.int64)
        for numbers, (_, _, passages_with) in zip(words, self._parts, strict=True):
            is_known = numbers >= 0
            frequencies[is_known] += passages_with[numbers[is_known]]
        all_scores, weights = np.zeros(n, np.float32), idf(frequencies, n)
        for numbers, (index, rows, _) in zip(words, self._parts, strict=True):
            counts, stored, starts, _ = index.counted
            self._kernels.add_scores(
                all_scores, numbers, weights, counts, stored, starts, rows, self._norms
            )
        best = self._kernels.best_first(all_scores, min(k, n), 0.0)
        return LexicalHits(best, all_scores[best].astype(np.float64), all_scores)

    @property
    def fingerprint(self) -> str:
        """The engine, the analyser and their parameters."""
        return self._base.fingerprint

    def save(self, folder: Path) -> None:
        """Write one index of both parts."""
        parts, rows = zip(*[(index, rows) for index, rows, _ in self._parts], strict=True)
        Bm25sIndex.joined(parts, rows).save(folder)


def idf(passages_with: NDArray[np.int64], n_passages: int) -> FloatArray:
    """Lucene's inverse document frequency of words that so many of n passages have, same shape."""
    return np.log1p((n_passages - passages_with + 0.5) / (passages_with + 0.5))


def length_norms(lengths: NDArray[np.int32]) -> FloatArray:
    """k1 (1 − b + b · length / mean length) of each passage, same shape."""
    mean = float(lengths.sum()) / lengths.size if lengths.any() else 1.0
    norms: FloatArray = K1 * (1.0 - B + B / mean * lengths.astype(np.float64))
    return norms


def _counted(
    words: NDArray[np.int64],
    rows: NDArray[np.int64],
    counts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    n_words: int,
) -> Counted:
    """Postings in the order of words and rows, shape (n_postings,) each."""
    starts = np.zeros(n_words + 1, np.int64)
    np.cumsum(np.bincount(words, minlength=n_words), out=starts[1:])
    return Counted(
        np.minimum(counts, _MAX_COUNT).astype(np.uint16),
        rows.astype(np.int32),
        starts,
        lengths.astype(np.int32),
    )


def _check_postings(counted: Counted, scores: Float32Array, n_words: int) -> None:
    """Refuse arrays with which the compiled loops would read or write outside of them.

    Digests are not checked on every load.
    """
    counts, rows, starts, lengths = counted
    dtypes = [str(array.dtype) for array in (counts, rows, starts, lengths, scores)]
    if dtypes != ["uint16", "int32", "int64", "int32", "float32"]:
        raise ValueError(f"the lexical postings are of {', '.join(dtypes)}")
    shapes = {array.shape for array in (counts, rows, scores)}
    if starts.shape != (n_words + 1,) or lengths.ndim != 1 or shapes != {(int(starts[-1]),)}:
        raise ValueError("the lexical postings and the vocabulary do not belong together")
    if starts[0] != 0 or (np.diff(starts) < 0).any():
        raise ValueError("the lexical postings of some word end before they begin")
    if _has_odd_row(rows, lengths.size):
        raise ValueError(f"a lexical posting is of no passage from 0 to {lengths.size - 1}")
    if (lengths < 0).any():
        raise ValueError("a passage has a negative length")


def _has_odd_row(rows: NDArray[np.int32], n_passages: int) -> bool:
    return bool(rows.size) and not 0 <= rows.min() <= rows.max() < n_passages


def _array(name: str) -> str:
    return f"lexical.{name}.npy"


class RankBm25Index:
    """BM25 as rank-bm25's ``BM25Okapi`` scores it, one pass over all passages per query.

    Its inverse document frequency is negative for terms of most passages. A negative score becomes
    zero here, because scores of kind ``ratio`` are never negative.

    Attributes:
        analyser: Splits passages and queries into terms.
    """

    def __init__(self, passages: list[list[str]], analyser: Analyser) -> None:
        self.analyser = analyser
        self._passages = passages
        # BM25Okapi divides by the number of passages and by the number of terms.
        self._okapi: Any = (
            require("rank_bm25", "embedded").BM25Okapi(passages, k1=K1, b=B, epsilon=0.25)
            if any(passages)
            else None
        )

    @classmethod
    def build(cls, texts: Iterable[str], analyser: Analyser = ENGLISH) -> Self:
        """Analyse texts, one per row."""
        return cls([analyser.analyse(text) for text in texts], analyser)

    @classmethod
    def joined(
        cls, indexes: "Sequence[RankBm25Index]", rows: Sequence[RowArray]
    ) -> "RankBm25Index":
        """One index of several, without analysing anything; arguments as for `Segment.joined`."""
        passages = {
            new: index._passages[old]
            for index, new_rows in zip(indexes, rows, strict=True)
            for old, new in enumerate(new_rows.tolist())
        }
        n_passages = len(passages) - (-1 in passages)
        return cls([passages[row] for row in range(n_passages)], indexes[0].analyser)

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, query: str, k: int) -> LexicalHits:
        """The at most ``k`` best rows, and every row's score."""
        words = self.analyser.analyse(query)
        if self._okapi is None or not words:
            return _no_hits(len(self._passages))
        all_scores = np.maximum(self._okapi.get_scores(words), 0.0).astype(np.float32)
        rows = np.flatnonzero(all_scores)
        best = rows[np.argsort(-all_scores[rows], kind="stable")[:k]]
        return LexicalHits(best, all_scores[best].astype(np.float64), all_scores)

    @property
    def fingerprint(self) -> str:
        """The engine, the analyser and their parameters."""
        return f"rank-bm25 okapi k1={K1} b={B} epsilon=0.25; {self.analyser.fingerprint}"

    def save(self, folder: Path) -> None:
        """Write every passage's terms, as numbers, and the vocabulary as JSON."""
        vocabulary: dict[str, int] = {}
        for passage in self._passages:
            for word in passage:
                vocabulary.setdefault(word, len(vocabulary))
        flat = [vocabulary[word] for passage in self._passages for word in passage]
        np.save(folder / "lexical.words.npy", np.array(flat, np.int32))
        ends = np.cumsum([0, *map(len, self._passages)], dtype=np.int64)
        np.save(folder / "lexical.offsets.npy", ends)
        _write_vocabulary(folder, list(vocabulary))

    @classmethod
    def load(cls, files: PartFiles, analyser: Analyser = ENGLISH) -> Self:
        """Read what ``save`` wrote; the statistics are computed again."""
        flat, ends = files.array("lexical.words.npy"), files.array("lexical.offsets.npy")
        names = files.texts(_VOCABULARY)
        if ends.size == 0 or ends[0] != 0 or ends[-1] != flat.size or (np.diff(ends) < 0).any():
            raise ValueError("the lexical words and their offsets do not belong together")
        if flat.size and not (flat.min() >= 0 and flat.max() < len(names)):
            raise ValueError("a lexical word is not in the vocabulary")
        words = [names[word] for word in flat.tolist()]
        bounds = ends.tolist()
        return cls([words[a:b] for a, b in pairwise(bounds)], analyser)


def _no_hits(n_passages: int) -> LexicalHits:
    return LexicalHits(np.zeros(0, np.int64), np.zeros(0), np.zeros(n_passages, np.float32))


def _term_ids(
    texts: Iterable[str], analyser: Analyser
) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[str, int]]:
    """The numbers of all terms, one text after the other, where each text begins, and the terms."""
    vocabulary: dict[str, int] = {}
    number, analyse = vocabulary.setdefault, analyser.analyse
    words, ends = array("q"), array("q", [0])
    for text in texts:
        words.extend([number(term, len(vocabulary)) for term in analyse(text)])
        ends.append(len(words))
    return np.array(words, np.int64), np.array(ends, np.int64), vocabulary


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """A view that cannot be written to, of a mapped array too."""
    view = np.asarray(array).view(np.ndarray)
    view.flags.writeable = False
    return view


def _write_vocabulary(folder: Path, vocabulary: list[str]) -> None:
    text = json.dumps(vocabulary, ensure_ascii=False)
    (folder / _VOCABULARY).write_text(text, encoding="utf-8")
