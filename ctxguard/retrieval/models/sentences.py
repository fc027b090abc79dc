"""Combines the states of texts' word pieces into their sentences."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ctxguard.retrieval.analysers.reading import SENTENCE_END
from ctxguard.retrieval.nibbles import packed
from ctxguard.retrieval.protocols import Float32Array, PieceArray, Sentences

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


def sentences_of(
    sums: Float32Array,
    lengths: Sequence[NDArray[np.uint8]],
    pieces: NDArray[np.int64],
    n_vocabulary: int,
) -> Sentences:
    """Make the sentences of passages, in their order.

    Args:
        sums: The sum of the states of each sentence's pieces, shape (n_sentences, d).
        lengths: Pieces of each sentence by passage, from `sentence_lengths`; at least one passage.
        pieces: The number of each piece, shape (n_pieces,).
        n_vocabulary: Number of pieces that the model has.
    """
    of_all = np.concatenate(lengths)
    # Sorted in each sentence, of which only the nearest piece ever counts.
    distinct = np.unique(np.repeat(np.arange(of_all.size), of_all) * n_vocabulary + pieces)
    sizes = np.bincount(distinct // n_vocabulary, minlength=of_all.size)
    numbers: PieceArray = (distinct % n_vocabulary).astype(np.int32)
    if n_vocabulary <= 2**16:
        numbers = numbers.astype(np.uint16)
    firsts = np.cumsum([0, *map(len, lengths)], dtype=np.int64)
    return Sentences(
        packed(unit_states(sums)),
        sizes.astype(np.uint8),
        numbers,
        np.stack((firsts, np.concatenate(([0], np.cumsum(sizes)))[firsts]), axis=1),
    )


def unit_states(vectors: Float32Array) -> Float32Array:
    """Normalise vectors to unit length, same shape; zero vectors stay zero."""
    lengths: Float32Array = np.sqrt(np.square(vectors).sum(axis=-1, keepdims=True))
    lengths[lengths == 0.0] = 1.0
    unit: Float32Array = vectors / lengths
    return unit
