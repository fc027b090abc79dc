"""The lexical indexes: BM25 by bm25s (the default) or by rank-bm25, behind one protocol."""

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.extras import require
from ctxguard.errors import ConfigurationError
from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.protocols import Analyser, Float32Array, LexicalHits, LexicalIndex

LexicalEngine = Literal["bm25s", "rank-bm25"]
Postings = tuple[Float32Array, NDArray[np.int32], NDArray[np.int64]]

K1 = 1.5
B = 0.75

_VOCABULARY = "lexical.vocabulary.json"


def build_lexical(engine: LexicalEngine, texts: Iterable[str], analyser: Analyser) -> LexicalIndex:
    """Index texts, one per row.

    Raises:
        ConfigurationError: an engine that does not exist.
    """
    return _engine(engine).build(texts, analyser)


def load_lexical(engine: LexicalEngine, folder: Path, analyser: Analyser) -> LexicalIndex:
    """Read what ``save`` wrote, memory-mapped.

    Args:
        engine: The one that built it.
        folder: Where it was saved.
        analyser: The one that it was built with.

    Raises:
        ConfigurationError: an engine that does not exist.
        ValueError, OSError: a file that is not what ``save`` wrote.
    """
    return _engine(engine).load(folder, analyser)


def _engine(engine: LexicalEngine) -> "type[Bm25sIndex] | type[RankBm25Index]":
    if engine == "bm25s":
        return Bm25sIndex
    if engine == "rank-bm25":
        return RankBm25Index
    raise ConfigurationError(f"lexical engine {engine!r} is unknown; use 'bm25s' or 'rank-bm25'")


class Bm25sIndex:
    """BM25 as bm25s scores it (Lucene's form), searched by this package's compiled loops.

    Attributes:
        analyser: Splits passages and queries into terms.
        postings: The scores and rows of all terms, one after the other, and where each begins.
    """

    def __init__(
        self,
        analyser: Analyser,
        vocabulary: dict[str, int],
        postings: Postings,
        n_passages: int,
    ) -> None:
        self.analyser = analyser
        self._kernels = require("ctxguard.retrieval.index.kernels", "embedded")
        data, indices, indptr = postings
        # Read-only whether built or mapped, so that numba compiles one variant of each loop.
        self.postings: Postings = _read_only(data), _read_only(indices), _read_only(indptr)
        self._vocabulary = vocabulary
        self._n_passages = n_passages

    @classmethod
    def build(cls, texts: Iterable[str], analyser: Analyser = ENGLISH) -> Self:
        """Analyse and score texts, one per row."""
        term_ids, vocabulary = _term_ids(texts, analyser)
        if not vocabulary:
            nothing = np.zeros(0, np.float32), np.zeros(0, np.int32), np.zeros(1, np.int64)
            return cls(analyser, vocabulary, nothing, len(term_ids))
        engine = require("bm25s", "embedded").BM25(k1=K1, b=B, method="lucene")
        engine.index((term_ids, vocabulary), create_empty_token=False, show_progress=False)
        columns = engine.scores
        postings = (
            columns["data"].astype(np.float32, copy=False),
            columns["indices"].astype(np.int32, copy=False),
            columns["indptr"].astype(np.int64, copy=False),
        )
        return cls(analyser, vocabulary, postings, len(term_ids))

    def __len__(self) -> int:
        return self._n_passages

    def search(self, query: str, k: int) -> LexicalHits:
        """The at most ``k`` best rows, and every row's score."""
        words = self.words(query)
        if words.size == 0 or self._n_passages == 0:
            return _no_hits(self._n_passages)
        k = min(k, self._n_passages)
        return LexicalHits(
            *self._kernels.search_postings(words, self.postings, self._n_passages, k)
        )

    def words(self, query: str) -> NDArray[np.int64]:
        """The numbers of a query's terms, without those that no passage has."""
        numbers = self._vocabulary
        terms = self.analyser.analyse(query)
        return np.array([numbers[term] for term in terms if term in numbers], np.int64)

    @property
    def fingerprint(self) -> str:
        """The engine, the analyser and their parameters."""
        return f"bm25s lucene k1={K1} b={B}; {self.analyser.fingerprint}"

    def save(self, folder: Path) -> None:
        """Write the postings as arrays and the vocabulary as JSON."""
        data, indices, indptr = self.postings
        np.save(folder / "lexical.data.npy", data)
        np.save(folder / "lexical.indices.npy", indices)
        np.save(folder / "lexical.indptr.npy", indptr)
        _write_vocabulary(folder, self._vocabulary)
        (folder / "lexical.json").write_text(json.dumps({"n_passages": self._n_passages}))

    @classmethod
    def load(cls, folder: Path, analyser: Analyser = ENGLISH) -> Self:
        """Read what ``save`` wrote, memory-mapped."""
        data, indices, indptr = (
            np.load(folder / f"lexical.{name}.npy", mmap_mode="r", allow_pickle=False)
            for name in ("data", "indices", "indptr")
        )
        vocabulary = _read_vocabulary(folder)
        if indptr.size != len(vocabulary) + 1 or not indptr[-1] == indices.size == data.size:
            raise ValueError("the lexical postings and the vocabulary do not belong together")
        n_passages = int(json.loads((folder / "lexical.json").read_text())["n_passages"])
        return cls(analyser, vocabulary, (data, indices, indptr), n_passages)


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
        _write_vocabulary(folder, vocabulary)

    @classmethod
    def load(cls, folder: Path, analyser: Analyser = ENGLISH) -> Self:
        """Read what ``save`` wrote; the statistics are computed again."""
        flat = np.load(folder / "lexical.words.npy", allow_pickle=False)
        ends = np.load(folder / "lexical.offsets.npy", allow_pickle=False)
        if ends.size == 0 or ends[-1] != flat.size:
            raise ValueError("the lexical words and their offsets do not belong together")
        names = list(_read_vocabulary(folder))
        words = [names[word] for word in flat.tolist()]
        bounds = ends.tolist()
        return cls([words[a:b] for a, b in pairwise(bounds)], analyser)


def _no_hits(n_passages: int) -> LexicalHits:
    return LexicalHits(np.zeros(0, np.int64), np.zeros(0), np.zeros(n_passages, np.float32))


def _term_ids(texts: Iterable[str], analyser: Analyser) -> tuple[list[list[int]], dict[str, int]]:
    vocabulary: dict[str, int] = {}
    number, analyse = vocabulary.setdefault, analyser.analyse
    return [[number(term, len(vocabulary)) for term in analyse(text)] for text in texts], vocabulary


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    view = np.asarray(array).view(np.ndarray)
    view.flags.writeable = False
    return view


def _write_vocabulary(folder: Path, vocabulary: dict[str, int]) -> None:
    text = json.dumps(list(vocabulary), ensure_ascii=False)
    (folder / _VOCABULARY).write_text(text, encoding="utf-8")


def _read_vocabulary(folder: Path) -> dict[str, int]:
    words = json.loads((folder / _VOCABULARY).read_text(encoding="utf-8"))
    return {word: number for number, word in enumerate(words)}
