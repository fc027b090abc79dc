"""The sentence family: how near a query's word pieces are to a candidate's pieces and sentences.

With q_i the unit state of the query's piece i, w_i its weight, e(t) the unit vector of piece t by
itself, s_S the unit vector of sentence S, and all maxima over one candidate:

    sentence_match       max_S Σ_i w_i [max_{j in S} q_i·e(t_j) + 2 q_i·s_S]
    token_match          Σ_i w_i max_j [q_i·e(t_j) + q_i·s_{S(j)}]
    sentence_similarity  max_S Σ_i w_i q_i·s_S

A soft match in the manner of MaxSim (Khattab and Zaharia, SIGIR 2020), without a vector kept for
every piece: what a piece is by itself comes from one table for all, what its surroundings make of
it from its sentence. Each q_i·e(t) is computed once for all candidates. For 100 candidates of 200
words and a query of 20 pieces this takes 1 to 3 ms on one thread.

Import this module through `ctxguard._support.extras.require`: numba comes with an extra.
"""

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.compiled import SUMS_REORDERED, compiled
from ctxguard.core.types import FloatArray

NAMES = ("sentence_match", "token_match", "sentence_similarity")
"""The columns of `sentence_signals`."""

MOST_PIECES = 64
"""Of a longer query only so many pieces count, those of the highest weights."""

_SIDE_BY_SIDE = 4

Float32Array = NDArray[np.float32]
Int8Array = NDArray[np.int8]
PieceArray = NDArray[np.uint16] | NDArray[np.int32]
RowArray = NDArray[np.int64]


def weighted_pieces(states: Float32Array, weights: FloatArray) -> tuple[Float32Array, Float32Array]:
    """A query's pieces as `sentence_signals` takes them.

    Args:
        states: Unit vectors, shape (m, d).
        weights: ≥ 0, shape (m,).

    Returns:
        The states of the at most `MOST_PIECES` pieces of the highest weights, in their order, 1/127
        as long; and their weights, of sum 1. Both are filled up with zeros to a multiple of 4.
    """
    heaviest = np.sort(np.argsort(-weights, kind="stable")[:MOST_PIECES])
    size = -(-heaviest.size // _SIDE_BY_SIDE) * _SIDE_BY_SIDE
    scaled = np.zeros((size, states.shape[1]), np.float32)
    scaled[: heaviest.size] = states[heaviest] / np.float32(127.0)
    shares = np.zeros(size, np.float32)
    shares[: heaviest.size] = weights[heaviest] / weights[heaviest].sum()
    return scaled, shares


@compiled(SUMS_REORDERED)
def _products(states: Float32Array, vectors: Int8Array, row: int, products: Float32Array) -> None:
    """The inner products of one vector with all states, four at a time; see `weighted_pieces`."""
    for i in range(0, states.shape[0], 4):
        first = second = third = fourth = np.float32(0.0)
        for k in range(states.shape[1]):
            number = np.float32(vectors[row, k])
            first += states[i, k] * number
            second += states[i + 1, k] * number
            third += states[i + 2, k] * number
            fourth += states[i + 3, k] * number
        products[i] = first
        products[i + 1] = second
        products[i + 2] = third
        products[i + 3] = fourth


@compiled()
def _by_piece(
    states: Float32Array, table: Int8Array, pieces: PieceArray, starts: RowArray, rows: RowArray
) -> tuple[NDArray[np.int32], Float32Array]:
    """The inner products of the states with every piece of some rows.

    Returns:
        The position of each piece of the vocabulary in the second array, shape (n_vocabulary,),
        where it occurs; and the products of those that do, shape (n_distinct, m).
    """
    positions = np.full(table.shape[0], -1, np.int32)
    n = 0
    for row in rows:
        for at in range(starts[row, 1], starts[row + 1, 1]):
            if positions[pieces[at]] < 0:
                positions[pieces[at]] = n
                n += 1
    products = np.empty((n, states.shape[0]), np.float32)
    for piece in range(positions.size):
        if positions[piece] >= 0:
            _products(states, table, piece, products[positions[piece]])
    return positions, products


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
    """The signals of some rows, shape (n, 3), see `NAMES`; NaN for a row without a sentence.

    Args:
        states: From `weighted_pieces`, shape (m, d).
        weights: From `weighted_pieces`, shape (m,).
        table: 127 times the unit vector of each piece by itself, rounded, shape (n_vocabulary, d).
        vectors: 127 times the unit vector of each sentence, rounded, shape (n_sentences, d).
        lengths: Pieces of each sentence, shape (n_sentences,).
        pieces: The number of each piece in the vocabulary, shape (n_pieces,).
        starts: Where each row's sentences begin, and its pieces, shape (n_rows + 1, 2).
        rows: Shape (n,).
    """
    positions, products = _by_piece(states, table, pieces, starts, rows)
    m = weights.size
    nearest, to_sentence, best = (
        np.empty(m, np.float32),
        np.empty(m, np.float32),
        np.empty(m, np.float32),
    )
    signals = np.full((rows.size, 3), np.nan)
    for n in range(rows.size):
        row = rows[n]
        at = starts[row, 1]
        best[:] = -np.inf
        match = similarity = -np.inf
        for sentence in range(starts[row, 0], starts[row + 1, 0]):
            nearest[:] = -np.inf
            for piece in pieces[at : at + lengths[sentence]]:
                found = products[positions[piece]]
                for i in range(m):
                    nearest[i] = max(nearest[i], found[i])
            at += lengths[sentence]
            _products(states, vectors, sentence, to_sentence)
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
