"""The inner loops of a search, compiled by numba; they run without the interpreter lock.

The BM25 scores of a word lie one after the other, as bm25s stores them: ``data`` and ``indices``
between ``indptr[word]`` and ``indptr[word + 1]``. The search of bm25s returns passages that score
zero, breaks ties arbitrarily and compiles again in each process; this one does not.

Each step of a search is one call here instead of a dozen numpy calls. A search takes a few tenths
of a millisecond, in which a dozen calls would show; and nearly every numpy call releases and takes
the interpreter lock, for which concurrent clients wait longer than for the work itself.

A row, a word or a piece that does not exist, as in a mapped file that somebody altered, is
taken for the first: the result is wrong then, and nothing else is read or written.

Import this module through `ctxguard._support.extras.require`: numba comes with an extra.
"""

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.compiled import SUMS_REORDERED, compiled
from ctxguard.core.fusion import Fusion
from ctxguard.core.scores import INVALID_MAGNITUDE
from ctxguard.core.types import FloatArray
from ctxguard.retrieval.index.forward import Ordered
from ctxguard.retrieval.index.lexical import Postings
from ctxguard.retrieval.protocols import Float32Array, PieceArray, RowArray

WordArray = NDArray[np.int64]
CountArray = NDArray[np.uint16]
PostingRows = NDArray[np.int32]
AnyFloatArray = Float32Array | FloatArray

FusionParams = tuple[bool, float, int]
"""Whether a fusion is convex, its dense weight, and its constant of reciprocal rank."""

FusedCandidates = tuple[RowArray, FloatArray, FloatArray, FloatArray]
"""Rows, fused scores, lexical scores and cosines, best first, ties by row; shape (n,) each."""


@compiled()
def _sink(heap: RowArray, scores: AnyFloatArray, at: int, size: int) -> None:
    """Move a position down a heap until none below it is worse; of equal scores, the later is."""
    position = heap[at]
    score = scores[position]
    while 2 * at + 1 < size:
        below = 2 * at + 1
        if below + 1 < size:
            left, right = heap[below], heap[below + 1]
            if scores[right] < scores[left] or (scores[right] == scores[left] and right > left):
                below += 1
        worst = heap[below]
        if scores[worst] > score or (scores[worst] == score and worst < position):
            break
        heap[at] = worst
        at = below
    heap[at] = position


@compiled()
def _sort(positions: RowArray, scores: AnyFloatArray) -> None:
    """Order positions best first, ties by position. Shell's sort is fastest for hundreds."""
    gap = 1
    while 3 * gap < positions.size:
        gap = 3 * gap + 1
    while gap > 0:
        for at in range(gap, positions.size):
            position = positions[at]
            score = scores[position]
            to = at
            while to >= gap:
                before = positions[to - gap]
                if scores[before] > score or (scores[before] == score and before < position):
                    break
                positions[to] = before
                to -= gap
            positions[to] = position
        gap //= 3


@compiled()
def best_first(scores: AnyFloatArray, k: int, above: float) -> RowArray:
    """Positions of the at most k highest scores above a bound, best first, ties by position.

    NaN is never among them. A heap keeps the worst of the k best so far on top; numpy's partition
    and argsort take numba seconds to compile.
    """
    best = np.empty(min(k, scores.size), np.int64)
    if best.size == 0:
        return best
    size = 0
    is_heap = False
    least = above
    for position in range(scores.size):
        if not scores[position] > least:
            continue
        if size < best.size:
            best[size] = position
            size += 1
            continue
        if not is_heap:
            for at in range(size // 2 - 1, -1, -1):
                _sink(best, scores, at, size)
            is_heap = True
        if scores[position] > scores[best[0]]:
            best[0] = position
            _sink(best, scores, 0, size)
        least = scores[best[0]]
    best = best[:size]
    _sort(best, scores)
    return best


@compiled()
def search_postings(
    words: WordArray, postings: Postings, n_passages: int, k: int
) -> tuple[RowArray, FloatArray, Float32Array]:
    """Search by BM25: find the at most k best rows above zero, best first, ties by row.

    Returns:
        The rows, their scores, and the score of every row of the index, shape (n_passages,).
    """
    data, indices, indptr = postings
    all_scores = np.zeros(n_passages, np.float32)
    for word in words:
        for at in range(indptr[word], indptr[word + 1]):
            row = indices[at]
            all_scores[row if 0 <= row < n_passages else 0] += data[at]
    rows = best_first(all_scores, k, 0.0)
    return rows, all_scores[rows].astype(np.float64), all_scores


@compiled()
def _bm25(count: int, weight: float, norm: float) -> np.float32:
    """Score one word in one passage; one formula, so that equal numbers score equally."""
    return np.float32(weight * (count / (count + norm)))


@compiled()
def posting_scores(
    counts: CountArray,
    rows: PostingRows,
    starts: WordArray,
    weights: FloatArray,
    norms: FloatArray,
) -> Float32Array:
    """BM25 score of every posting, shape as ``counts``.

    Args:
        counts: As for `Counted`.
        rows: As for `Counted`.
        starts: As for `Counted`.
        weights: Inverse document frequency of each word, shape (n_words,).
        norms: The addend of a passage's length to the count, shape (n_passages,).
    """
    scores = np.empty(counts.size, np.float32)
    for word in range(weights.size):
        for at in range(starts[word], starts[word + 1]):
            scores[at] = _bm25(counts[at], weights[word], norms[rows[at]])
    return scores


@compiled()
def passages_with(rows: PostingRows, starts: WordArray, new_rows: RowArray) -> WordArray:
    """Count the passages that were not deleted and have each word, shape (n_words,).

    Args:
        rows: As for `Counted`.
        starts: As for `Counted`.
        new_rows: The row of each passage, −1 where it was deleted.
    """
    there = np.zeros(starts.size - 1, np.int64)
    for word in range(there.size):
        for at in range(starts[word], starts[word + 1]):
            row = rows[at]
            there[word] += new_rows[row if 0 <= row < new_rows.size else 0] >= 0
    return there


@compiled()
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
    last = np.full(n_numbers, -1, np.int64)
    for row in rows:
        for at in range(starts[row], starts[row + 1]):
            number = np.int64(numbers[at])
            number = number if number >= 0 else ~number
            number = number_of[number if number < number_of.size else 0]
            if last[number] != row:
                last[number] = row
                found[number] += 1
    return found


@compiled()
def add_scores(  # noqa: PLR0917  compiled code takes no keywords
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
    for i in range(words.size):
        if words[i] < 0:
            continue
        for at in range(starts[words[i]], starts[words[i] + 1]):
            row = rows[at]
            row = new_rows[row if 0 <= row < new_rows.size else 0]
            if row >= 0:
                all_scores[row] += _bm25(counts[at], weights[i], norms[row])


@compiled(SUMS_REORDERED)
def _product(vectors: Float32Array, row: int, vector: Float32Array) -> np.float32:
    """Multiply one vector of many, read where it lies, with another: their inner product."""
    total = np.float32(0.0)
    for i in range(vector.size):
        total += vectors[row, i] * vector[i]
    return total


@compiled(SUMS_REORDERED)
def _products(vectors: Float32Array, vector: Float32Array) -> Float32Array:
    """`_product` of every vector, four at a time, so that no sum waits for the one before it.

    The last four may overlap those before: each sum runs in the same order, so that equal vectors
    have equal products.
    """
    products = np.empty(len(vectors), np.float32)
    if products.size < 4:
        for row in range(products.size):
            products[row] = _product(vectors, row, vector)
        return products
    for start in range(0, products.size, 4):
        row = min(start, products.size - 4)
        first = second = third = fourth = np.float32(0.0)
        for i in range(vector.size):
            number = vector[i]
            first += vectors[row, i] * number
            second += vectors[row + 1, i] * number
            third += vectors[row + 2, i] * number
            fourth += vectors[row + 3, i] * number
        products[row] = first
        products[row + 1] = second
        products[row + 2] = third
        products[row + 3] = fourth
    return products


@compiled()
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
    if candidate_rows is None:
        cosines = _products(vectors, vector)
        rows = best_first(cosines, k, -np.inf)
        return rows, cosines[rows].astype(np.float64)
    ascending = np.sort(candidate_rows)
    cosines = np.empty(ascending.size, np.float32)
    for at in range(ascending.size):
        cosines[at] = _product(vectors, ascending[at], vector)
    best = best_first(cosines, k, -np.inf)
    return ascending[best], cosines[best].astype(np.float64)


def kernel_params(fusion: Fusion) -> FusionParams:
    """Convert a fusion for the compiled loops."""
    return fusion.method == "convex", fusion.weight, fusion.constant


@compiled()
def fuse_candidates(  # noqa: PLR0917  compiled code takes no keywords
    lexical_rows: RowArray,
    all_scores: Float32Array,
    dense_rows: RowArray,
    vectors: Float32Array,
    vector: Float32Array,
    k: int,
    fusion: FusionParams,
) -> FusedCandidates:
    """Score the rows of either leg in both, and fuse as `ctxguard.core.fusion.fuse` does.

    Args:
        lexical_rows: The lexical leg's best rows.
        all_scores: The BM25 score of every row of the index.
        dense_rows: The dense leg's best rows.
        vectors: The unit vector of every row.
        vector: The query's unit vector.
        k: The most candidates to return.
        fusion: From `kernel_params`.
    """
    is_convex, weight, constant = fusion
    both = np.sort(np.concatenate((lexical_rows, dense_rows)))
    n = 0
    for at in range(both.size):
        if at == 0 or both[at] != both[n - 1]:
            both[n] = both[at]
            n += 1
    rows = both[:n]
    scores = np.empty(n, np.float64)
    cosines = np.empty(n, np.float64)
    for at in range(n):
        scores[at] = all_scores[rows[at]]
        cosines[at] = _product(vectors, rows[at], vector)
    if is_convex:
        fused = weight * _unit_interval(cosines, -1.0)
        fused += (1.0 - weight) * _unit_interval(scores, 0.0)
    else:
        fused = _reciprocal_ranks(scores, 0.0, constant)
        fused += _reciprocal_ranks(cosines, -INVALID_MAGNITUDE, constant)
    # There are at most 2 k of them: sorting all is quicker than keeping a heap of k.
    best = best_first(fused, n, -np.inf)[:k]
    return rows[best], fused[best], scores[best], cosines[best]


@compiled()
def search_both(  # noqa: PLR0917  compiled code takes no keywords
    words: WordArray,
    postings: Postings,
    vectors: Float32Array,
    vector: Float32Array,
    k: int,
    candidate_rows: RowArray | None,
    fusion: FusionParams,
) -> FusedCandidates:
    """`search_postings`, `nearest` and `fuse_candidates` in one call; arguments as theirs."""
    lexical_rows, _, all_scores = search_postings(words, postings, len(vectors), k)
    dense_rows, _ = nearest(vectors, vector, k, candidate_rows)
    return fuse_candidates(lexical_rows, all_scores, dense_rows, vectors, vector, k, fusion)


@compiled()
def _reciprocal_ranks(scores: FloatArray, above: float, constant: int) -> FloatArray:
    """1 / (constant + rank), equal scores sharing the better rank; 0 for garbage and below."""
    ranks = np.zeros(scores.size, np.float64)
    order = best_first(scores, scores.size, above)
    garbage = 0
    while garbage < order.size and scores[order[garbage]] >= INVALID_MAGNITUDE:
        garbage += 1
    better = 0
    for at in range(garbage, order.size):
        if at > garbage and scores[order[at]] != scores[order[at - 1]]:
            better = at - garbage
        ranks[order[at]] = 1.0 / (constant + 1.0 + better)
    return ranks


@compiled()
def _unit_interval(scores: FloatArray, minimum: float) -> FloatArray:
    """Compute (score − minimum) / (highest − minimum); 0 for garbage and lower scores."""
    shifted = np.zeros(scores.size, np.float64)
    span = 0.0
    for at in range(scores.size):
        # NaN fails both comparisons.
        if minimum < scores[at] < INVALID_MAGNITUDE:
            shifted[at] = scores[at] - minimum
            span = max(span, shifted[at])
    return shifted / span if span > 0.0 else shifted


@compiled()
def renumbered(words: PostingRows, numbers: PostingRows) -> PostingRows:
    """Give each word its new number; complements stay complements."""
    new = np.empty(words.size, np.int32)
    for at in range(words.size):
        known = words[at] if words[at] >= 0 else ~words[at]
        number = numbers[known if known < numbers.size else 0]
        new[at] = number if words[at] >= 0 else ~number
    return new


@compiled()
def taken(ordered: Ordered, rows: RowArray) -> tuple[PostingRows, WordArray]:
    """Copy the words of some passages, in the order of ``rows``; also return their starts."""
    starts = np.zeros(rows.size + 1, np.int64)
    for i in range(rows.size):
        size = ordered.starts[rows[i] + 1] - ordered.starts[rows[i]]
        starts[i + 1] = starts[i] + size
    words = np.empty(starts[-1], np.int32)
    for i in range(rows.size):
        begin = ordered.starts[rows[i]]
        words[starts[i] : starts[i + 1]] = ordered.words[begin : ordered.starts[rows[i] + 1]]
    return words, starts


@compiled()
def candidate_words(
    rows: RowArray, ordered: Ordered, stem_of: PostingRows, norm: tuple[float, float]
) -> tuple[PostingRows, PostingRows, WordArray, FloatArray]:
    """Gather the fields of `CandidateWords` of some rows.

    Args:
        rows: Rows of ``ordered``.
        ordered: The words of passages.
        stem_of: The stem of each word.
        norm: BM25's addend to the counts of a passage without words, and for each word.
    """
    starts = np.zeros(rows.size + 1, np.int64)
    norms = np.empty(rows.size, np.float64)
    for i in range(rows.size):
        length = ordered.starts[rows[i] + 1] - ordered.starts[rows[i]]
        starts[i + 1] = starts[i] + length
        norms[i] = norm[0] + norm[1] * length
    words = np.empty(starts[-1], np.int32)
    stems = np.empty(starts[-1], np.int32)
    for i in range(rows.size):
        begin = ordered.starts[rows[i]]
        for at in range(starts[i + 1] - starts[i]):
            word = ordered.words[begin + at]
            known = word if word >= 0 else ~word
            known = known if known < stem_of.size else 0
            words[starts[i] + at] = known if word >= 0 else ~known
            stems[starts[i] + at] = stem_of[known]
    return words, stems, starts, norms
