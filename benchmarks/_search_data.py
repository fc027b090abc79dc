"""What hybrid search is measured on: passages, queries, their vectors, and the exact answers.

Made once for each size and kept in a folder, from which every peer's process reads; the same size
gives the same data on every machine. Passages belong to topics. A topic has words of its own
among Zipf-distributed ones and a centre in the space of vectors, whose spectrum and spread follow
those of all-MiniLM-L6-v2 over scifact: a few dozen directions hold most of the variance, so that
an approximate index has neighbours to confuse. A query has words of one passage and a vector near
that passage's.
"""

import json
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.fusion import Fusion, fuse
from ctxguard.core.types import FloatArray, Leg, ScoreKind
from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.protocols import Float32Array, RowArray

DIMENSION = 384
DEPTH = 100
QUERIES = 400

_FORMAT = 2
_TOPIC_SIZE = 500
_SUBTOPIC_SIZE = 40
_MEAN_SHARE, _TOPIC_SHARE, _SUBTOPIC_SHARE, _OWN_SHARE = 0.13, 0.25, 0.20, 0.42
_QUERY_NOISE = 1.2
_ZIPF_EXPONENT = 1.07
_ZIPF_SHIFT = 2.7
_WORDS_PER_PASSAGE = 60
_WORDS_PER_SENTENCE = 12
_WORDS_PER_TOPIC = 40
_TOPIC_WORD_SHARE = 0.3
_COMMON_WORDS = 60
_BLOCK = 50_000
_STOP_WORDS = ("the", "of", "and", "to", "in", "is", "for", "that", "with", "as")
_SYLLABLES = [
    c + v for c in "bcdfghklmnprstvz" for v in ("a", "e", "i", "o", "u", "an", "er", "on")
]


@dataclass(frozen=True)
class Corpus:
    """One size's data, read from its folder.

    Attributes:
        folder: Where it is kept.
    """

    folder: Path

    def texts(self) -> list[str]:
        """Every passage's text, by row."""
        return (self.folder / "texts.txt").read_text(encoding="utf-8").splitlines()

    @cached_property
    def vectors(self) -> Float32Array:
        """Unit vectors of the passages, shape (n, 384), memory-mapped."""
        vectors: Float32Array = np.load(self.folder / "vectors.npy", mmap_mode="r")
        return vectors

    @cached_property
    def queries(self) -> list[str]:
        """Texts of the queries, no two alike."""
        return (self.folder / "queries.txt").read_text(encoding="utf-8").splitlines()

    @cached_property
    def query_vectors(self) -> Float32Array:
        """Unit vectors of the queries, shape (queries, 384)."""
        vectors: Float32Array = np.load(self.folder / "query_vectors.npy")
        return vectors

    @cached_property
    def exact(self) -> "Exact":
        """The answers of an exact search."""
        return Exact(**np.load(self.folder / "exact.npz"))

    def __len__(self) -> int:
        return len(self.vectors)

    def release(self) -> None:
        """Give back the memory of the mapped vectors, so that it is not counted as an index's."""
        mapped: object = self.vectors.base
        if isinstance(mapped, mmap.mmap):
            mapped.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class Exact:
    """Answers of an exact search in both legs, each of shape (queries, depth), best first.

    Attributes:
        dense: Rows by cosine.
        lexical: Rows by BM25 (Lucene's form, k1 = 1.5, b = 0.75); −1 after the last that scores.
        united: Rows of either leg by reciprocal rank fusion (constant 60) after every one of them
            was scored in both legs, as ctxguard fuses.
        fused: Rows of either leg by reciprocal rank fusion (constant 60) of the two lists alone,
            as most peers fuse.
    """

    dense: RowArray
    lexical: RowArray
    united: RowArray
    fused: RowArray


def prepare(n: int, folder: Path, *, n_queries: int = QUERIES, seed: int = 0) -> Corpus:
    """The data of one size, made where the folder does not hold it yet.

    Args:
        n: Passages.
        folder: Of all sizes; this one has a folder of its own in it.
        n_queries: Queries.
        seed: Of everything drawn.
    """
    corpus = Corpus(folder / f"format{_FORMAT}-n{n}-q{n_queries}-s{seed}")
    if not (corpus.folder / "exact.npz").exists():
        corpus.folder.mkdir(parents=True, exist_ok=True)
        _write(corpus.folder, n, n_queries, seed)
        exact = _exact(corpus)
        with (corpus.folder / "exact.partial").open("wb") as stream:
            np.savez(stream, **vars(exact))
        (corpus.folder / "exact.partial").rename(corpus.folder / "exact.npz")
    return corpus


def _write(folder: Path, n: int, n_queries: int, seed: int) -> None:
    rng = np.random.default_rng([seed, n])
    topics = rng.integers(max(1, n // _TOPIC_SIZE), size=n)
    targets = rng.choice(n, n_queries, replace=n_queries > n)
    vectors = np.lib.format.open_memmap(folder / "vectors.npy", "w+", np.float32, (n, DIMENSION))
    space = _Space(rng, n)
    for start in range(0, n, _BLOCK):
        vectors[start : start + _BLOCK] = space.near(topics[start : start + _BLOCK])
    np.save(folder / "query_vectors.npy", space.beside(np.asarray(vectors[np.sort(targets)])))
    vectors.flush()
    language = _Language(rng, n)
    wanted = set(targets.tolist())
    words_of: dict[int, list[str]] = {}
    with (folder / "texts.txt").open("w", encoding="utf-8") as stream:
        for row, words in enumerate(language.passages(topics)):
            stream.write(_text(words) + "\n")
            if row in wanted:
                words_of[row] = words
    queries = [language.query(words_of[row], number) for number, row in enumerate(sorted(targets))]
    (folder / "queries.txt").write_text("\n".join(queries), encoding="utf-8")
    (folder / "about.json").write_text(json.dumps({"passages": n, "seed": seed}))


def _text(words: list[str]) -> str:
    sentences = [
        " ".join(words[start : start + _WORDS_PER_SENTENCE])
        for start in range(0, len(words), _WORDS_PER_SENTENCE)
    ]
    return ". ".join(sentences) + "."


class _Space:
    """Draws unit vectors: mean, topic, subtopic and what is a passage's own."""

    def __init__(self, rng: np.random.Generator, n: int) -> None:
        self._rng = rng
        direction = np.arange(DIMENSION)
        variance = (direction + 4.0) ** -0.8 * np.exp(-direction / 110.0)
        # Turned, so that no index gains from directions that lie along the axes.
        turn, _ = np.linalg.qr(rng.standard_normal((DIMENSION, DIMENSION)))
        self._shape = (np.sqrt(variance / variance.sum())[:, np.newaxis] * turn).astype(np.float32)
        self._mean = self._drawn(1, _MEAN_SHARE)
        self._topics = self._drawn(max(1, n // _TOPIC_SIZE), _TOPIC_SHARE)
        self._per_topic = max(1, _TOPIC_SIZE // _SUBTOPIC_SIZE)
        self._subtopics = self._drawn(len(self._topics) * self._per_topic, _SUBTOPIC_SHARE)

    def _drawn(self, n: int, share: float) -> Float32Array:
        free = self._rng.standard_normal((n, DIMENSION), dtype=np.float32)
        drawn: Float32Array = np.float32(share**0.5) * (free @ self._shape)
        return drawn

    def near(self, topics: RowArray) -> Float32Array:
        """A passage's vector for each topic given."""
        subtopics = topics * self._per_topic + self._rng.integers(self._per_topic, size=len(topics))
        common = self._mean + self._topics[topics] + self._subtopics[subtopics]
        return _unit(common + self._drawn(len(topics), _OWN_SHARE))

    def beside(self, vectors: Float32Array) -> Float32Array:
        """A query's vector beside each vector given."""
        return _unit(vectors + self._drawn(len(vectors), _QUERY_NOISE))


class _Language:
    """Draws words: frequent ones are English stop words, and a topic prefers its own."""

    def __init__(self, rng: np.random.Generator, n: int) -> None:
        self._rng = rng
        size = int(30_000 * (n / 10_000) ** 0.35)
        lengths = rng.integers(2, 5, size * 2)
        made = dict.fromkeys(_STOP_WORDS)
        for length in lengths.tolist():
            made["".join([_SYLLABLES[at] for at in rng.integers(len(_SYLLABLES), size=length)])] = (
                None
            )
        self._words = np.array(list(made)[:size], dtype=object)
        chances = (np.arange(len(self._words)) + _ZIPF_SHIFT) ** -_ZIPF_EXPONENT
        self._cumulative = np.cumsum(chances / chances.sum())
        self._preferred = rng.integers(
            2 * _COMMON_WORDS, len(self._words), (max(1, n // _TOPIC_SIZE), _WORDS_PER_TOPIC)
        )
        self._number = {word: number for number, word in enumerate(self._words)}

    def passages(self, topics: RowArray) -> Iterator[list[str]]:
        """The words of a passage for each topic given."""
        for start in range(0, len(topics), _BLOCK):
            block = topics[start : start + _BLOCK]
            spread = self._rng.lognormal(np.log(_WORDS_PER_PASSAGE), 0.4, len(block))
            lengths = np.clip(spread, 12, 250).astype(int)
            total = int(lengths.sum())
            drawn = np.searchsorted(self._cumulative, self._rng.random(total))
            drawn = np.minimum(drawn, len(self._words) - 1)
            topical = np.flatnonzero(self._rng.random(total) < _TOPIC_WORD_SHARE)
            owner = np.repeat(block, lengths)[topical]
            drawn[topical] = self._preferred[
                owner, self._rng.integers(_WORDS_PER_TOPIC, size=len(topical))
            ]
            words, end = self._words[drawn], np.cumsum(lengths)
            for first, last in zip(end - lengths, end, strict=True):
                yield words[first:last].tolist()

    def query(self, words: list[str], number: int) -> str:
        """Words of a passage, two stop words among them, and one of its own to be unlike others."""
        rare = [word for word in dict.fromkeys(words) if self._number[word] >= _COMMON_WORDS]
        chosen = self._rng.permutation(rare)[:6].tolist()
        first, second = self._rng.choice(_STOP_WORDS, 2).tolist()
        return " ".join([first, *chosen[:3], second, *chosen[3:], f"query{number}"])


def _unit(vectors: Float32Array) -> Float32Array:
    unit: Float32Array = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit


def _exact(corpus: Corpus) -> Exact:
    """Every passage scored for every query, with numpy and bm25s alone."""
    import bm25s

    words = bm25s.BM25(k1=1.5, b=0.75, method="lucene")
    words.index([ENGLISH.analyse(text) for text in corpus.texts()], show_progress=False)
    n, depth = len(corpus), min(DEPTH, len(corpus))
    rows = np.full((4, len(corpus.queries), depth), -1, np.int64)
    for at, query in enumerate(corpus.queries):
        cosines = np.concatenate(
            [
                corpus.vectors[start : start + _BLOCK] @ corpus.query_vectors[at]
                for start in range(0, n, _BLOCK)
            ]
        )
        known = [word for word in ENGLISH.analyse(query) if word in words.vocab_dict]
        matches = words.get_scores(known) if known else np.zeros(n, np.float32)
        dense, lexical = _best(cosines, depth), _best(matches, depth)
        lexical = lexical[matches[lexical] > 0.0]
        for kind, found in enumerate(
            (dense, lexical, _united(dense, lexical, cosines, matches), _fused(dense, lexical))
        ):
            rows[kind, at, : len(found)] = found[:depth]
    return Exact(*rows)


def _best(scores: NDArray[np.float32], depth: int) -> RowArray:
    least = np.partition(scores, len(scores) - depth)[len(scores) - depth]
    rows = np.flatnonzero(scores >= least)
    best: RowArray = rows[np.lexsort((rows, -scores[rows]))][:depth]
    return best


def _united(
    dense: RowArray, lexical: RowArray, cosines: Float32Array, matches: Float32Array
) -> RowArray:
    rows = np.union1d(dense, lexical)
    legs = {
        "lexical": Leg(matches[rows].astype(np.float64), ScoreKind.RATIO),
        "dense": Leg(cosines[rows].astype(np.float64), ScoreKind.COSINE),
    }
    return _sorted(rows, fuse(legs, Fusion()))


def _fused(dense: RowArray, lexical: RowArray) -> RowArray:
    rows = np.union1d(dense, lexical)
    scores = np.zeros(len(rows))
    for leg in (dense, lexical):
        scores[np.searchsorted(rows, leg)] += 1.0 / (60.0 + np.arange(1, len(leg) + 1))
    return _sorted(rows, scores)


def _sorted(rows: RowArray, scores: FloatArray) -> RowArray:
    ordered: RowArray = rows[np.lexsort((rows, -scores))]
    return ordered
