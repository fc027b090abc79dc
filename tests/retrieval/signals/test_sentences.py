"""The sentence family gives what its formulas say, candidate by candidate."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxguard.core.types import FloatArray
from ctxguard.retrieval.nibbles import UNIT, packed, unpacked
from ctxguard.retrieval.protocols import Sentences
from ctxguard.retrieval.signals.sentences import (
    MOST_PIECES,
    NAMES,
    SentenceInputs,
    sentence_signals,
    weighted_pieces,
)

pytestmark = pytest.mark.usefixtures("computed_by")

NEAR = 2e-4
"""Products are rounded to 16 bits."""


def unit_rows(rng: np.random.Generator, n: int, d: int) -> np.ndarray:
    """Unit vectors as an index stores them."""
    rows = rng.standard_normal((n, d)).astype(np.float32)
    return packed(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def as_numbers(rows: np.ndarray, d: int) -> np.ndarray:
    """The vectors that stored rows stand for."""
    numbers, steps = unpacked(rows, d)
    vectors: np.ndarray = numbers * (steps[:, np.newaxis] / UNIT)
    return vectors


def random_sentences(seed: int, n_passages: int, n_pieces: int = 40, d: int = 12) -> Sentences:
    """Passages of 0 to 4 sentences of 1 to 9 pieces."""
    rng = np.random.default_rng(seed)
    of_passages = rng.integers(0, 5, n_passages)
    lengths = rng.integers(1, 10, of_passages.sum()).astype(np.uint8)
    ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    firsts = np.concatenate(([0], np.cumsum(of_passages)))
    return Sentences(
        unit_rows(rng, lengths.size, d),
        lengths,
        rng.integers(0, n_pieces, ends[-1]).astype(np.uint16),
        np.stack([firsts, ends[firsts]], axis=1).astype(np.int64),
    )


def random_query(seed: int, m: int, d: int = 12) -> tuple[np.ndarray, FloatArray]:
    rng = np.random.default_rng(seed)
    states = rng.standard_normal((m, d)).astype(np.float32)
    return states / np.linalg.norm(states, axis=1, keepdims=True), rng.uniform(0.1, 9.0, m)


def table_of(seed: int, n_pieces: int = 40, d: int = 12) -> np.ndarray:
    return unit_rows(np.random.default_rng(seed), n_pieces, d)


def computed(
    states: np.ndarray,
    weights: FloatArray,
    table: np.ndarray,
    sentences: Sentences,
    rows: list[int],
) -> FloatArray:
    vectors, lengths, pieces, starts = sentences
    narrow, wide = (pieces, None) if pieces.dtype == np.uint16 else (None, pieces)
    scaled, shares = weighted_pieces(states, weights)
    inputs = SentenceInputs(scaled, shares, table, vectors, lengths, narrow, wide, starts)  # type: ignore[arg-type]
    return sentence_signals(inputs, np.array(rows, np.int64)).T


def plain(
    states: np.ndarray, weights: FloatArray, table: np.ndarray, sentences: Sentences, row: int
) -> list[float]:
    """The formulas, word for word."""
    rows, lengths, pieces, starts = sentences
    table, vectors = (as_numbers(each, states.shape[1]) for each in (table, rows))
    w = weights / weights.sum()
    (first, at), (end, _) = starts[row], starts[row + 1]
    match, similarity, of_tokens = [], [], []
    for sentence in range(first, end):
        own = table[pieces[at : at + lengths[sentence]]]
        at += lengths[sentence]
        to_sentence = states @ vectors[sentence]
        nearest = (states @ own.T).max(axis=1)
        match.append(w @ (nearest + 2.0 * to_sentence))
        similarity.append(w @ to_sentence)
        of_tokens.append(nearest + to_sentence)
    if not match:
        return [np.nan] * 3
    return [max(match), float(w @ np.max(of_tokens, axis=0)), max(similarity)]


def test_a_case_worked_by_hand() -> None:
    """Two pieces in the query, (1, 0) that weighs 1 and (0, 1) that weighs 3.

    The first passage has the sentences of the pieces 0 and 2 and of the piece 1, with the vectors
    (1, 0) and (0, 1); the second one of the piece 2, with its vector.
    """
    table = packed(np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]], np.float32))
    sentences = Sentences(
        table,
        np.array([2, 1, 1], np.uint8),
        np.array([0, 2, 1, 2], np.uint16),
        np.array([[0, 0], [2, 3], [3, 4]]),
    )
    found = computed(np.eye(2, dtype=np.float32), np.array([1.0, 3.0]), table, sentences, [0, 1])
    own = 0.25 * 0.6 + 0.75 * 0.8
    assert NAMES == ("sentence_match", "token_match", "sentence_similarity")
    # Of the first passage: 0.25 · (1 + 2) + 0.75 · 0.8 = 1.35 and 0.75 · (1 + 2) = 2.25;
    # (0.25 + 0.75) · (1 + 1); 0.25 and 0.75.
    assert found[0].tolist() == pytest.approx([2.25, 2.0, 0.75], abs=0.1)
    assert found[1].tolist() == pytest.approx([3.0 * own, 2.0 * own, own], abs=0.1)


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 11))
@settings(max_examples=100)
def test_they_are_the_formulas(seed: int, n_passages: int, m: int) -> None:
    sentences, table = random_sentences(seed, n_passages), table_of(seed)
    states, weights = random_query(seed, m)
    found = computed(states, weights, table, sentences, list(range(n_passages)))
    for row in range(n_passages):
        expected = plain(states, weights, table, sentences, row)
        assert found[row].tolist() == pytest.approx(expected, abs=NEAR, nan_ok=True)


@given(st.integers(0, 10_000), st.permutations(range(6)))
@settings(max_examples=50)
def test_a_candidates_signals_do_not_depend_on_the_others(seed: int, rows: list[int]) -> None:
    sentences, table, query = random_sentences(seed, 6), table_of(seed), random_query(seed, 5)
    together = computed(*query, table, sentences, rows)
    alone = [computed(*query, table, sentences, [row])[0] for row in rows]
    np.testing.assert_allclose(together, alone, atol=NEAR)


def test_large_vocabularies_are_read_too() -> None:
    sentences, table, query = random_sentences(3, 5), table_of(3), random_query(3, 5)
    wide = sentences._replace(pieces=sentences.pieces.astype(np.int32))
    rows = [4, 0, 2]
    np.testing.assert_allclose(
        computed(*query, table, wide, rows), computed(*query, table, sentences, rows), atol=NEAR
    )


def test_of_a_long_query_the_heaviest_pieces_count() -> None:
    """As many pieces again that weigh next to nothing change nothing, wherever they stand."""
    sentences, table = random_sentences(1, 5), table_of(1)
    states, weights = random_query(1, 2 * MOST_PIECES)
    light = np.arange(2 * MOST_PIECES) % 2 == 0
    weights[light] = 0.01
    rows = list(range(5))
    np.testing.assert_allclose(
        computed(states, weights, table, sentences, rows),
        computed(states[~light], weights[~light], table, sentences, rows),
        atol=NEAR,
    )


def test_a_passage_of_ten_thousand_pieces_is_read_whole() -> None:
    n = 10_000
    table = table_of(5)
    lengths = np.full(n // 50, 50, np.uint8)
    rng = np.random.default_rng(5)
    sentences = Sentences(
        unit_rows(rng, lengths.size, 12),
        lengths,
        rng.integers(0, 40, n).astype(np.uint16),
        np.array([[0, 0], [lengths.size, n]]),
    )
    query = random_query(5, 7)
    found = computed(*query, table, sentences, [0])[0]
    assert found.tolist() == pytest.approx(plain(*query, table, sentences, 0), abs=NEAR)
