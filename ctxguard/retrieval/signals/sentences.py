"""The sentence family: the nearness of a query's word pieces to a candidate's pieces and sentences.

With q_i the unit state of the query's piece i, w_i its weight, e(t) the unit vector of piece t by
itself, s_S the unit vector of sentence S, and all maxima over one candidate:

    sentence_match       max_S Σ_i w_i [max_{j in S} q_i·e(t_j) + 2 q_i·s_S]
    token_match          Σ_i w_i max_j [q_i·e(t_j) + q_i·s_{S(j)}]
    sentence_similarity  max_S Σ_i w_i q_i·s_S

A soft match in the manner of MaxSim (Khattab and Zaharia, SIGIR 2020), without a stored vector for
every piece: one table for all texts gives a piece by itself, and its sentence gives its context.
Each q_i·e(t) is computed once for all candidates. For 100 candidates of 200
words and a query of 20 pieces this takes 2 to 3 ms on one thread.

Import this module through `ctxguard._support.extras.require`: numba comes with an extra.
"""

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.compiled import SUMS_REORDERED, compiled
from ctxguard.core.types import FloatArray

NAMES = ("sentence_match", "token_match", "sentence_similarity")
"""The columns of `sentence_signals`."""

MOST_PIECES = 64
"""Maximum number of a query's pieces that count: those of the highest weights."""

_SIDE_BY_SIDE = 4

Float32Array = NDArray[np.float32]
Int8Array = NDArray[np.int8]
PieceArray = NDArray[np.uint16] | NDArray[np.int32]
RowArray = NDArray[np.int64]


def weighted_pieces(states: Float32Array, weights: FloatArray) -> tuple[Float32Array, Float32Array]:
    """Prepare a query's pieces for `sentence_signals`.

    Args:
        states: Unit vectors, shape (m, d).
        weights: ≥ 0, shape (m,).

    Returns:
        The states of up to `MOST_PIECES` pieces with the highest weights, in their order, 1/127
        as long; and their weights, which sum to 1. Both are padded with zeros to a multiple of 4.
    """
    heaviest = np.sort(np.argsort(-weights, kind="stable")[:MOST_PIECES])
    size = -(-heaviest.size // _SIDE_BY_SIDE) * _SIDE_BY_SIDE
    scaled = np.zeros((size, states.shape[1]), np.float32)
    scaled[: heaviest.size] = states[heaviest] / np.float32(127.0)
    shares = np.zeros(size, np.float32)
    shares[: heaviest.size] = weights[heaviest] / weights[heaviest].sum()
    return scaled, shares


@compiled(SUMS_REORDERED)
def _products(states: Float32Array, vectors: Int8Array, rows: RowArray) -> Float32Array:
    """Compute the inner products of vectors with all states, shape (n, m); see `weighted_pieces`.

    Two vectors and four states at a time, so that each number is loaded for several products.
    """
    products = np.empty((rows.size, states.shape[0]), np.float32)
    one = np.empty(states.shape[1], np.float32)
    other = np.empty(states.shape[1], np.float32)
    for n in range(0, rows.size, 2):
        # The last of an odd number is paired with itself.
        beside = min(n + 1, rows.size - 1)
        for k in range(one.size):
            one[k] = np.float32(vectors[rows[n], k])
            other[k] = np.float32(vectors[rows[beside], k])
        for i in range(0, states.shape[0], 4):
            a = b = c = d = e = f = g = h = np.float32(0.0)
            for k in range(one.size):
                x, y = one[k], other[k]
                a += states[i, k] * x
                b += states[i + 1, k] * x
                c += states[i + 2, k] * x
                d += states[i + 3, k] * x
                e += states[i, k] * y
                f += states[i + 1, k] * y
                g += states[i + 2, k] * y
                h += states[i + 3, k] * y
            products[n, i], products[n, i + 1] = a, b
            products[n, i + 2], products[n, i + 3] = c, d
            products[beside, i], products[beside, i + 1] = e, f
            products[beside, i + 2], products[beside, i + 3] = g, h
    return products


@compiled()
def _distinct(
    pieces: PieceArray, starts: RowArray, rows: RowArray, n_vocabulary: int
) -> tuple[NDArray[np.int32], RowArray]:
    """Return the distinct pieces of some rows.

    Returns:
        The position of each piece of the vocabulary in the second array, −1 if it does not
        occur, shape (n_vocabulary,); and the pieces that occur, ascending.
    """
    positions = np.full(n_vocabulary, -1, np.int32)
    for row in rows:
        for at in range(starts[row, 1], starts[row + 1, 1]):
            positions[pieces[at] if 0 <= pieces[at] < n_vocabulary else 0] = 0
    n = 0
    for piece in range(n_vocabulary):
        if positions[piece] == 0:
            positions[piece] = n
            n += 1
    found = np.empty(n, np.int64)
    for piece in range(n_vocabulary):
        if positions[piece] >= 0:
            found[positions[piece]] = piece
    return positions, found


@compiled()
def _sentences_of(starts: RowArray, rows: RowArray) -> RowArray:
    """Return the sentences of some rows, one row after another."""
    n = 0
    for row in rows:
        n += starts[row + 1, 0] - starts[row, 0]
    sentences = np.empty(n, np.int64)
    n = 0
    for row in rows:
        for sentence in range(starts[row, 0], starts[row + 1, 0]):
            sentences[n] = sentence
            n += 1
    return sentences


@compiled()
def sentence_signals(  # noqa: PLR0917  compiled code takes no keywords
    states: Float32Array,
    weights: Float32Array,
    table: Int8Array,
    vectors: Int8Array,
    lengths: NDArray[np.uint8],
    pieces: PieceArray,
    starts: RowArray,
    rows: RowArray,
) -> FloatArray:
    """Compute the signals of some rows, shape (n, 3), see `NAMES`; NaN without a sentence.

    Args:
        states: From `weighted_pieces`, shape (m, d).
        weights: From `weighted_pieces`, shape (m,).
        table: 127 times the unit vector of each piece by itself, rounded, shape (n_vocabulary, d).
        vectors: 127 times the unit vector of each sentence, rounded, shape (n_sentences, d).
        lengths: Pieces of each sentence, shape (n_sentences,).
        pieces: The number of each piece in the vocabulary, shape (n_pieces,).
        starts: Start of each row's sentences and of its pieces, shape (n_rows + 1, 2).
        rows: Shape (n,).
    """
    positions, distinct = _distinct(pieces, starts, rows, table.shape[0])
    to_pieces = _products(states, table, distinct)
    to_sentences = _products(states, vectors, _sentences_of(starts, rows))
    m, n_sentences = weights.size, 0
    nearest, best = np.empty(m, np.float32), np.empty(m, np.float32)
    signals = np.full((rows.size, 3), np.nan)
    for n in range(rows.size):
        row = rows[n]
        at = starts[row, 1]
        best[:] = -np.inf
        match = similarity = -np.inf
        for sentence in range(starts[row, 0], starts[row + 1, 0]):
            nearest[:] = -np.inf
            # If a mapped file is altered meanwhile, nothing is as it was a moment ago.
            for piece in pieces[at : min(at + lengths[sentence], starts[row + 1, 1])]:
                found = to_pieces[max(positions[piece if 0 <= piece < positions.size else 0], 0)]
                for i in range(m):
                    nearest[i] = max(nearest[i], found[i])
            at += lengths[sentence]
            to_sentence = to_sentences[n_sentences]
            n_sentences += 1
            of_sentence = of_pieces = 0.0
            for i in range(m):
                best[i] = max(best[i], nearest[i] + to_sentence[i])
                of_sentence += weights[i] * to_sentence[i]
                of_pieces += weights[i] * nearest[i]
            match = max(match, of_pieces + 2.0 * of_sentence)
            similarity = max(similarity, of_sentence)
        if starts[row, 0] < starts[row + 1, 0]:
            signals[n, 0] = match
            signals[n, 1] = 0.0
            for i in range(m):
                signals[n, 1] += weights[i] * best[i]
            signals[n, 2] = similarity
    return signals
