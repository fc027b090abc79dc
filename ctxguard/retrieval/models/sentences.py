"""Combines the states of a text's word pieces into its sentences."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ctxguard.retrieval.analysers.reading import SENTENCE_END
from ctxguard.retrieval.protocols import Float32Array, Int8Array

SCALE = 127
"""Scale of the whole numbers that store a unit vector's components."""

_SHORTEST, _LONGEST = 5, 64


def sentence_lengths(text: str, starts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.uint8]:
    """Count the word pieces of each sentence, shape (n_sentences,); they sum to the total.

    A sentence ends at its punctuation or at the end of a line. One of fewer than 5 pieces is
    joined with the next, or with the previous one if it is the last; one of more than 64 is cut
    into equal parts.

    Args:
        text: The text.
        starts: The position of each piece's first character, ascending.

    >>> sentence_lengths("One two three four five. Six.", [0, 4, 8, 14, 19, 23, 25, 28]).tolist()
    [8]
    >>> sentence_lengths("a b c d e. f g h i j", [0, 2, 4, 6, 8, 9, 11, 13, 15, 17, 19]).tolist()
    [6, 5]
    """
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    firsts = np.searchsorted(np.asarray(starts), ends)
    bounds = np.concatenate(([0], np.sort(firsts), [len(starts)]))
    return np.fromiter(_fitted(np.diff(bounds).tolist()), np.uint8)


def _fitted(lengths: Sequence[int]) -> Iterator[int]:
    joined = [0]
    for length in lengths:
        if joined[-1] >= _SHORTEST:
            joined.append(0)
        joined[-1] += length
    if len(joined) > 1 and joined[-1] < _SHORTEST:
        joined[-2:] = [joined[-2] + joined[-1]]
    for length in joined:
        n_parts = -(-length // _LONGEST)
        for part in range(n_parts):
            yield length // n_parts + (part < length % n_parts)


def sentence_vectors(states: Float32Array, lengths: NDArray[np.uint8]) -> Int8Array:
    """Average the states of each sentence's pieces, as `as_int8` gives the result.

    Args:
        states: States of the pieces, shape (n_pieces, d).
        lengths: Pieces of each sentence, from `sentence_lengths`.
    """
    if lengths.size == 0:
        return np.zeros((0, states.shape[1]), np.int8)
    ends = np.cumsum(lengths, dtype=np.int64)
    return as_int8(np.add.reduceat(states, ends - lengths, axis=0))


def as_int8(vectors: Float32Array) -> Int8Array:
    """Scale the unit vectors by `SCALE` and round, same shape; zero vectors stay zero."""
    scaled = np.rint(unit_states(vectors) * np.float32(SCALE))
    whole: Int8Array = scaled.astype(np.int8)
    return whole


def unit_states(vectors: Float32Array) -> Float32Array:
    """Normalise vectors to unit length, same shape; zero vectors stay zero."""
    lengths: Float32Array = np.sqrt(np.square(vectors).sum(axis=-1, keepdims=True))
    lengths[lengths == 0.0] = 1.0
    unit: Float32Array = vectors / lengths
    return unit
