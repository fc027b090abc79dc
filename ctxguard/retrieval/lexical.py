"""The lexical leg: BM25 through bm25s (the default) or rank-bm25, behind one protocol."""

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from ctxguard._extras import require
from ctxguard.errors import ConfigurationError
from ctxguard.retrieval.analysis import ANALYSER, analyse
from ctxguard.retrieval.protocols import Float32Array, LexicalHits, LexicalIndex

LexicalEngine = Literal["bm25s", "rank-bm25"]
Postings = tuple[Float32Array, NDArray[np.int32], NDArray[np.int64]]

K1 = 1.5
B = 0.75

_VOCABULARY = "lexical.vocabulary.json"


def build_lexical(engine: LexicalEngine, texts: Iterable[str]) -> LexicalIndex:
    """Index texts, one per row.

    Raises:
        ConfigurationError: an engine that does not exist.
    """
    return _engine(engine).build(texts)


def load_lexical(engine: LexicalEngine, folder: Path) -> LexicalIndex:
    """Read what ``save`` wrote, memory-mapped.

    Raises:
        ConfigurationError: an engine that does not exist.
        ValueError, OSError: a file that is not what ``save`` wrote.
    """
    return _engine(engine).load(folder)


def _engine(engine: LexicalEngine) -> "type[Bm25sIndex] | type[RankBm25Index]":
    if engine == "bm25s":
        return Bm25sIndex
    if engine == "rank-bm25":
        return RankBm25Index
    raise ConfigurationError(f"lexical engine {engine!r} is unknown; use 'bm25s' or 'rank-bm25'")


class Bm25sIndex:
    """BM25 as bm25s scores it (Lucene's form), searched by this package's compiled loops.

    Attributes:
        engine: Its name in settings and manifests.
        fingerprint: The engine, the analyser and their parameters.
        postings: The scores and rows of all words, one after the other, and where each begins.
    """

    engine: LexicalEngine = "bm25s"
    fingerprint = f"bm25s lucene k1={K1} b={B}; {ANALYSER}"

    def __init__(
        self,
        vocabulary: dict[str, int],
        data: Float32Array,
        indices: NDArray[np.int32],
        indptr: NDArray[np.int64],
        n_passages: int,
    ) -> None:
        self._kernels = require("ctxguard.retrieval.kernels", "embedded")
        # Read-only whether built or mapped, so that numba compiles one variant of each loop.
        self.postings: Postings = _read_only(data), _read_only(indices), _read_only(indptr)
        self._vocabulary = vocabulary
        self._n_passages = n_passages

    @classmethod
    def build(cls, texts: Iterable[str]) -> Self:
        """Analyse and score texts, one per row."""
        word_ids, vocabulary = _word_ids(texts)
        if not vocabulary:
            nothing = np.zeros(0, np.float32), np.zeros(0, np.int32), np.zeros(1, np.int64)
            return cls(vocabulary, *nothing, len(word_ids))
        engine = require("bm25s", "embedded").BM25(k1=K1, b=B, method="lucene")
        engine.index((word_ids, vocabulary), create_empty_token=False, show_progress=False)
        columns = engine.scores
        return cls(
            vocabulary,
            columns["data"].astype(np.float32, copy=False),
            columns["indices"].astype(np.int32, copy=False),
            columns["indptr"].astype(np.int64, copy=False),
            len(word_ids),
        )

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
        """The numbers of a query's words, without those that no passage has."""
        known = self._vocabulary
        return np.array([known[word] for word in analyse(query) if word in known], np.int64)

    def save(self, folder: Path) -> None:
        """Write the postings as arrays and the vocabulary as JSON."""
        data, indices, indptr = self.postings
        np.save(folder / "lexical.data.npy", data)
        np.save(folder / "lexical.indices.npy", indices)
        np.save(folder / "lexical.indptr.npy", indptr)
        _write_vocabulary(folder, self._vocabulary)
        (folder / "lexical.json").write_text(json.dumps({"n_passages": self._n_passages}))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read what ``save`` wrote, memory-mapped."""
        data, indices, indptr = (
            np.load(folder / f"lexical.{name}.npy", mmap_mode="r", allow_pickle=False)
            for name in ("data", "indices", "indptr")
        )
        vocabulary = _read_vocabulary(folder)
        if indptr.size != len(vocabulary) + 1 or not indptr[-1] == indices.size == data.size:
            raise ValueError("the lexical postings and the vocabulary do not belong together")
        n_passages = int(json.loads((folder / "lexical.json").read_text())["n_passages"])
        return cls(vocabulary, data, indices, indptr, n_passages)


class RankBm25Index:
    """BM25 as rank-bm25's ``BM25Okapi`` scores it, one pass over all passages per query.

    Its inverse document frequency turns negative for words of most passages; a negative score is
    taken for zero here, because scores of kind ``ratio`` have none.

    Attributes:
        engine: Its name in settings and manifests.
        fingerprint: The engine, the analyser and their parameters.
    """

    engine: LexicalEngine = "rank-bm25"
    fingerprint = f"rank-bm25 okapi k1={K1} b={B} epsilon=0.25; {ANALYSER}"

    def __init__(self, passages: list[list[str]]) -> None:
        self._passages = passages
        # BM25Okapi divides by the number of passages and by the number of words.
        self._okapi: Any = (
            require("rank_bm25", "embedded").BM25Okapi(passages, k1=K1, b=B, epsilon=0.25)
            if any(passages)
            else None
        )

    @classmethod
    def build(cls, texts: Iterable[str]) -> Self:
        """Analyse texts, one per row."""
        return cls([analyse(text) for text in texts])

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, query: str, k: int) -> LexicalHits:
        """The at most ``k`` best rows, and every row's score."""
        words = analyse(query)
        if self._okapi is None or not words:
            return _no_hits(len(self._passages))
        every = np.maximum(self._okapi.get_scores(words), 0.0).astype(np.float32)
        rows = np.flatnonzero(every)
        best = rows[np.argsort(-every[rows], kind="stable")[:k]]
        return LexicalHits(best, every[best].astype(np.float64), every)

    def save(self, folder: Path) -> None:
        """Write every passage's words, as numbers, and the vocabulary as JSON."""
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
    def load(cls, folder: Path) -> Self:
        """Read what ``save`` wrote; the statistics are computed again."""
        flat = np.load(folder / "lexical.words.npy", allow_pickle=False)
        ends = np.load(folder / "lexical.offsets.npy", allow_pickle=False)
        if ends.size == 0 or ends[-1] != flat.size:
            raise ValueError("the lexical words and their offsets do not belong together")
        names = list(_read_vocabulary(folder))
        words = [names[word] for word in flat.tolist()]
        bounds = ends.tolist()
        return cls([words[a:b] for a, b in pairwise(bounds)])


def _no_hits(n_passages: int) -> LexicalHits:
    return LexicalHits(np.zeros(0, np.int64), np.zeros(0), np.zeros(n_passages, np.float32))


def _word_ids(texts: Iterable[str]) -> tuple[list[list[int]], dict[str, int]]:
    vocabulary: dict[str, int] = {}
    number = vocabulary.setdefault
    return [[number(word, len(vocabulary)) for word in analyse(text)] for text in texts], vocabulary


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
