"""The inner loops of the forward index, compiled by numba.

A word that does not exist, as in a mapped file that somebody altered, is taken for the first.

Import this module through `ctxguard._support.extras.require`: numba comes with an extra.
"""

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.compiled import compiled
from ctxguard.core.types import FloatArray
from ctxguard.retrieval.index.forward import Ordered
from ctxguard.retrieval.protocols import RowArray

Numbers32 = NDArray[np.int32]
Numbers = NDArray[np.int64]


@compiled()
def passages_with(ordered: Ordered, number_of: Numbers32, n_numbers: int) -> Numbers:
    """Count the passages that have each number, shape (n_numbers,).

    Args:
        ordered: The words of the passages.
        number_of: The number of each word: its own, or its stem's.
        n_numbers: All below this.
    """
    passages = np.zeros(n_numbers, np.int64)
    last = np.full(n_numbers, -1, np.int64)
    for row in range(ordered.starts.size - 1):
        for at in range(ordered.starts[row], ordered.starts[row + 1]):
            word = ordered.words[at]
            word = word if word >= 0 else ~word
            number = number_of[word if word < number_of.size else 0]
            if last[number] != row:
                last[number] = row
                passages[number] += 1
    return passages


@compiled()
def renumbered(words: Numbers32, numbers: Numbers32) -> Numbers32:
    """Give each word its new number; complements stay complements."""
    new = np.empty(words.size, np.int32)
    for at in range(words.size):
        known = words[at] if words[at] >= 0 else ~words[at]
        number = numbers[known if known < numbers.size else 0]
        new[at] = number if words[at] >= 0 else ~number
    return new


@compiled()
def taken(ordered: Ordered, rows: RowArray) -> tuple[Numbers32, Numbers]:
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
    rows: RowArray, ordered: Ordered, stem_of: Numbers32, norm: tuple[float, float]
) -> tuple[Numbers32, Numbers32, Numbers, FloatArray]:
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
