"""The inner loops of a search: compiled, or by numpy where the compiled module is absent.

The BM25 scores of a word lie one after the other, as bm25s stores them: ``data`` and ``indices``
between ``indptr[word]`` and ``indptr[word + 1]``. The search of bm25s returns passages that score
zero and breaks ties arbitrarily; this one does not.

A row, a word or a piece that does not exist, as in a mapped file that somebody altered, is
taken for the first: the result is wrong then, and nothing else is read or written.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ctxguard._support import _compiled
from ctxguard.core.fusion import Fusion, fuse
from ctxguard.core.types import FloatArray, Leg, ScoreKind
from ctxguard.retrieval.protocols import Float32Array, PieceArray, RowArray

_Number = TypeVar("_Number", bound=np.integer[Any])

WordArray = NDArray[np.int64]
CountArray = NDArray[np.uint16]
PostingRows = NDArray[np.int32]
Postings = tuple[Float32Array, PostingRows, WordArray]

_POSTINGS = 2**18
"""Postings that are scored or counted together: each takes some tens of bytes meanwhile."""

FusedCandidates = tuple[RowArray, FloatArray, FloatArray, FloatArray]
"""Rows, fused scores, lexical scores and cosines, best first, ties by row; shape (n,) each."""


def best_first(scores: Float32Array, k: int, above: float) -> RowArray:
    """Positions of the at most k highest scores above a bound, best first, ties by position.

    NaN is never among them.
    """
    if _compiled.kernels is not None:
        best = np.empty(min(k, scores.size), np.int64)
        return best[: _compiled.kernels.best_scores(scores, above, best)]
    at = np.flatnonzero(scores > above)
    if at.size > k > 0:
        at = at[scores[at] >= np.partition(scores[at], at.size - k)[at.size - k]]
    return at[np.argsort(-scores[at], kind="stable")][:k]


def search_postings(
    words: WordArray, postings: Postings, n_passages: int, k: int
) -> tuple[RowArray, FloatArray, Float32Array]:
    """Search by BM25: find the at most k best rows above zero, best first, ties by row.

    Args:
        words: The query's words; −1 for one that no passage has.
        postings: See `Postings`.
        n_passages: Rows of the index.
        k: ≥ 0.

    Returns:
        The rows, their scores, and the score of every row of the index, shape (n_passages,).
    """
    all_scores = np.zeros(n_passages, np.float32)
    if _compiled.kernels is not None:
        rows, scores = np.empty(k, np.int64), np.empty(k)
        n = _compiled.kernels.search_postings(words, *postings, all_scores, rows, scores)
        return rows[:n], scores[:n], all_scores
    data, indices, indptr = postings
    for word in words[words >= 0].tolist():
        part = slice(indptr[word], indptr[word + 1])
        all_scores[_existing(indices[part], n_passages)] += data[part]
    rows = best_first(all_scores, k, 0.0)
    return rows, all_scores[rows].astype(np.float64), all_scores


def _existing(numbers: NDArray[np.integer], n: int) -> NDArray[np.integer]:
    return np.where((numbers >= 0) & (numbers < n), numbers, 0)


def _bm25(counts: CountArray, weights: FloatArray | float, norms: FloatArray) -> Float32Array:
    """Score words in passages; one formula, so that equal numbers score equally."""
    return (weights * (counts / (counts + norms))).astype(np.float32)


def posting_scores(
    counts: CountArray,
    rows: PostingRows,
    starts: WordArray,
    weights: FloatArray,
    norms: FloatArray,
) -> Iterator[Float32Array]:
    """BM25 score of every posting in their order, some at a time.

    Args:
        counts: As for `Counted`.
        rows: As for `Counted`.
        starts: As for `Counted`.
        weights: Inverse document frequency of each word, shape (n_words,).
        norms: The addend of a passage's length to the count, shape (n_passages,).
    """
    for part, words, bounds in _some_postings(starts):
        by_posting = np.repeat(weights[words], np.diff(bounds))
        yield _bm25(counts[part], by_posting, norms[rows[part]])


def posting_counts(
    scores: Float32Array,
    rows: PostingRows,
    starts: WordArray,
    weights: FloatArray,
    norms: FloatArray,
) -> Iterator[CountArray]:
    """Yield the counts of postings from their scores; arguments as for `posting_scores`."""
    for part, words, bounds in _some_postings(starts):
        norm = norms[_existing(rows[part], norms.size)]
        share = scores[part] / np.repeat(weights[words], np.diff(bounds))
        # Only scores that were altered in a mapped file are no share from 0 to 1.
        share = np.nan_to_num(share).clip(0.0, 1.0 - 1e-7)
        found = np.rint(norm * share / (1.0 - share))
        yield found.clip(1, np.iinfo(np.uint16).max).astype(np.uint16)


def _some_postings(starts: WordArray) -> Iterator[tuple[slice, slice, WordArray]]:
    """Yield some postings at a time: where they are, their words, and the bounds of each word."""
    for first in range(0, int(starts[-1]), _POSTINGS):
        end = min(first + _POSTINGS, int(starts[-1]))
        begin = int(np.searchsorted(starts, first, "right")) - 1
        last = int(np.searchsorted(starts, end, "left"))
        bounds = np.clip(starts[begin : last + 1], first, end) - first
        yield slice(first, end), slice(begin, last), bounds


def passages_with(rows: PostingRows, starts: WordArray, new_rows: RowArray) -> WordArray:
    """Count the passages that were not deleted and have each word, shape (n_words,).

    Args:
        rows: As for `Counted`.
        starts: As for `Counted`.
        new_rows: The row of each passage, −1 where it was deleted.
    """
    found = np.zeros(starts.size - 1, np.int64)
    for part, words, bounds in _some_postings(starts):
        there = np.zeros(bounds[-1] + 1, np.int64)
        np.cumsum(new_rows[_existing(rows[part], new_rows.size)] >= 0, out=there[1:])
        found[words] += np.diff(there[bounds])
    return found


def rows_with(
    numbers: PieceArray, starts: RowArray, rows: RowArray, number_of: PostingRows, n_numbers: int
) -> WordArray:
    """Count how many of some rows have each number, shape (n_numbers,).

    Args:
        numbers: The words or pieces of all rows; perhaps complements, as in `Ordered`.
        starts: Those of row i are from ``starts[i]`` to ``starts[i + 1]``.
        rows: Each once.
        number_of: The number counted for each word or piece: its own, or its stem's.
        n_numbers: All are below this.
    """
    found = np.zeros(n_numbers, np.int64)
    if _compiled.kernels is not None:
        typed = (None, numbers) if numbers.dtype == np.uint16 else (numbers, None)
        _compiled.kernels.rows_with(*typed, starts, rows, number_of, found)
        return found
    for row in rows.tolist():
        own = numbers[starts[row] : starts[row + 1]].astype(np.int64)
        found[np.unique(number_of[_existing(np.where(own < 0, ~own, own), number_of.size)])] += 1
    return found


def add_scores(  # noqa: PLR0917  as the compiled one
    all_scores: Float32Array,
    words: WordArray,
    weights: FloatArray,
    counts: CountArray,
    rows: PostingRows,
    starts: WordArray,
    new_rows: RowArray,
    norms: FloatArray,
) -> None:
    """Add the BM25 scores of one part of an edited index to those of its passages.

    Args:
        all_scores: Of every row of the edited index, shape (n,).
        words: The part's number of each word of the query, −1 where it has none.
        weights: Inverse document frequency of each, same shape.
        counts: As for `Counted`.
        rows: As for `Counted`.
        starts: As for `Counted`.
        new_rows: The row of each passage of the part, −1 where it was deleted.
        norms: As for `posting_scores`, by row of the edited index.
    """
    if _compiled.kernels is not None:
        _compiled.kernels.add_scores(
            all_scores, words, weights, counts, rows, starts, new_rows, norms
        )
        return
    for word, weight in zip(words.tolist(), weights.tolist(), strict=True):
        if word >= 0:
            part = slice(starts[word], starts[word + 1])
            there = new_rows[_existing(rows[part], new_rows.size)]
            scores = _bm25(counts[part], weight, norms[there])
            all_scores[there[there >= 0]] += scores[there >= 0]


def _products(vectors: Float32Array, vector: Float32Array) -> Float32Array:
    # Not a matrix product, in which equal vectors may have unequal products.
    products: Float32Array = np.einsum("nd,d->n", vectors, vector)
    return products


def unit_vector(vector: Float32Array) -> Float32Array | None:
    """Scale a vector to unit length, same shape; None if it has no direction."""
    if _compiled.kernels is not None:
        unit = np.empty_like(vector)
        return None if _compiled.kernels.unit_vector(vector, unit) is None else unit
    length = np.sqrt(np.square(vector).sum())
    return vector / length if 0.0 < length < np.inf else None


def nearest(
    vectors: Float32Array, vector: Float32Array, k: int, candidate_rows: RowArray | None
) -> tuple[RowArray, FloatArray]:
    """Find the at most k rows nearest to a vector, best first, ties by row, with their cosines.

    Args:
        vectors: Unit vectors, shape (n, dimension).
        vector: A unit vector, shape (dimension,).
        k: ≥ 0.
        candidate_rows: The rows to compare, each once, in any order; None for all.
    """
    if _compiled.kernels is not None:
        rows, scores = np.empty(k, np.int64), np.empty(k)
        n = _compiled.kernels.nearest(vectors, vector, candidate_rows, rows, scores)
        return rows[:n], scores[:n]
    compared = np.arange(len(vectors)) if candidate_rows is None else np.sort(candidate_rows)
    cosines = _products(vectors[compared], vector)
    best = best_first(cosines, k, -np.inf)
    return compared[best], cosines[best].astype(np.float64)


def fuse_candidates(  # noqa: PLR0917  as the compiled one
    lexical_rows: RowArray,
    all_scores: Float32Array,
    dense_rows: RowArray,
    vectors: Float32Array,
    vector: Float32Array,
    k: int,
    fusion: Fusion,
) -> FusedCandidates:
    """Score the rows of either leg in both, and fuse as `ctxguard.core.fusion.fuse` does.

    Args:
        lexical_rows: The lexical leg's best rows.
        all_scores: The BM25 score of every row of the index.
        dense_rows: The dense leg's best rows.
        vectors: The unit vector of every row.
        vector: The query's unit vector.
        k: The most candidates to return.
        fusion: By reciprocal ranks, or convex.
    """
    if _compiled.kernels is not None:
        rows, values = np.empty(k, np.int64), np.empty((3, k))
        n = _compiled.kernels.fuse_candidates(
            lexical_rows,
            all_scores,
            dense_rows,
            vectors,
            vector,
            fusion.method == "convex",
            fusion.weight,
            fusion.constant,
            rows,
            values,
        )
        return rows[:n], *values[:, :n]
    rows = np.union1d(lexical_rows, dense_rows)
    scores = all_scores[rows].astype(np.float64)
    cosines = _products(vectors[rows], vector).astype(np.float64)
    legs = {"lexical": Leg(scores, ScoreKind.RATIO), "dense": Leg(cosines, ScoreKind.COSINE)}
    fused = fuse(legs, fusion)
    best = np.lexsort((rows, -fused))[:k]
    return rows[best], fused[best], scores[best], cosines[best]


def search_both(  # noqa: PLR0917  as the compiled one
    words: WordArray,
    postings: Postings,
    vectors: Float32Array,
    vector: Float32Array,
    k: int,
    candidate_rows: RowArray | None,
    fusion: Fusion,
) -> FusedCandidates:
    """`search_postings`, `nearest` and `fuse_candidates` in one call; arguments as theirs.

    A search takes tenths of a millisecond, in which a dozen calls would show; and nearly every
    numpy call releases and takes the interpreter lock, for which concurrent clients wait longer
    than for the work itself.
    """
    if _compiled.kernels is not None:
        rows, values = np.empty(k, np.int64), np.empty((3, k))
        n = _compiled.kernels.search_both(
            words,
            *postings,
            vectors,
            vector,
            candidate_rows,
            fusion.method == "convex",
            fusion.weight,
            fusion.constant,
            rows,
            values,
        )
        return rows[:n], *values[:, :n]
    lexical_rows, _, all_scores = search_postings(words, postings, len(vectors), k)
    dense_rows, _ = nearest(vectors, vector, k, candidate_rows)
    return fuse_candidates(lexical_rows, all_scores, dense_rows, vectors, vector, k, fusion)


def renumbered(words: PostingRows, numbers: PostingRows) -> PostingRows:
    """Give each word its new number; complements stay complements."""
    new = numbers[_existing(np.where(words < 0, ~words, words), numbers.size)]
    renumbered: PostingRows = np.where(words < 0, ~new, new)
    return renumbered


def taken(
    words: NDArray[_Number], starts: NDArray[np.integer], rows: RowArray
) -> tuple[NDArray[_Number], WordArray]:
    """Copy the words of some passages, in the order of ``rows``; also return their starts."""
    begin, sizes = starts[rows], starts[rows + 1] - starts[rows]
    new_starts = np.zeros(rows.size + 1, np.int64)
    np.cumsum(sizes, out=new_starts[1:])
    at = np.repeat(begin - new_starts[:-1], sizes) + np.arange(new_starts[-1])
    return words[at], new_starts
