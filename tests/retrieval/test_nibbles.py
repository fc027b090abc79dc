"""Four bits a number keep the direction of a vector, whatever its numbers look like."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxguard.retrieval.nibbles import UNIT, packed, row_bytes, unpacked


def restored(rows: np.ndarray, d: int) -> np.ndarray:
    numbers, steps = unpacked(rows, d)
    vectors: np.ndarray = numbers * (steps[:, np.newaxis] / UNIT)
    return vectors


def unit(vectors: np.ndarray) -> np.ndarray:
    found: np.ndarray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return found.astype(np.float32)


@given(st.integers(0, 10_000), st.integers(2, 80))
@settings(max_examples=50)
def test_a_vector_of_any_length_keeps_its_direction(seed: int, d: int) -> None:
    vectors = unit(np.random.default_rng(seed).standard_normal((9, d)))
    rows = packed(vectors)
    assert rows.shape == (9, row_bytes(d))
    assert (restored(rows, d) * vectors).sum(axis=1).min() > 0.97


def test_products_lose_less_than_a_hundredth() -> None:
    rng = np.random.default_rng(0)
    vectors, queries = unit(rng.standard_normal((500, 384))), unit(rng.standard_normal((50, 384)))
    lost = restored(packed(vectors), 384) @ queries.T - vectors @ queries.T
    assert float(lost.std()) < 0.006
    assert abs(float(lost.mean())) < 0.0005


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_one_number_that_is_larger_than_all_others_is_not_cut_off(share: float) -> None:
    """Some models give every text the same few large numbers."""
    vectors = np.sqrt(1.0 - share) * unit(np.random.default_rng(0).standard_normal((20, 384)))
    vectors[:, 7] = np.sqrt(share)
    vectors = unit(vectors)
    assert (restored(packed(vectors), 384) * vectors).sum(axis=1).min() > 0.75


def test_a_zero_vector_stays_zero() -> None:
    assert not restored(packed(np.zeros((2, 5), np.float32)), 5).any()
    assert packed(np.zeros((0, 5), np.float32)).shape == (0, 5)
