"""The dense leg: cosines, all of them or of those with the best codes."""

import faiss
import numpy as np
import pytest

from ctxguard.errors import DataError
from ctxguard.retrieval.index.dense import DenseIndex, build_codes, unit_rows


def random_units(n: int, dimension: int = 16, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((n, dimension), dtype=np.float32)
    return unit_rows(vectors, [str(row) for row in range(n)])


def test_codes_first_finds_nearly_the_same() -> None:
    """A code is a sixteenth of its vector."""
    vectors, queries = random_units(2500, 64), random_units(20, 64, seed=1)
    exact, coded = DenseIndex(vectors), DenseIndex(vectors, exact_limit=1)
    assert exact.codes is None
    assert build_codes(vectors).code_size == 16
    shared = [len(set(exact.search(q, 10).rows) & set(coded.search(q, 10).rows)) for q in queries]
    assert np.mean(shared) > 9.8


def test_all_rows_are_found_after_codes() -> None:
    """Cosines are those of the vectors also where codes were compared first."""
    vectors = random_units(1500)
    query = random_units(1, seed=1)[0]
    rows, scores, _ = DenseIndex(vectors, exact_limit=1).search(query, 9999)
    assert sorted(rows.tolist()) == list(range(1500))
    assert scores == pytest.approx(vectors[rows] @ query, abs=1e-6)
    assert (np.diff(scores) <= 0.0).all()


class TestAllowedRows:
    @pytest.mark.parametrize("exact_limit", [1, 5000])
    @pytest.mark.parametrize("n_allowed", [0, 1, 7, 900])
    def test_best_allowed_rows_are_found(self, n_allowed: int, exact_limit: int) -> None:
        vectors = random_units(2000, dimension=64)
        query = random_units(1, dimension=64, seed=1)[0]
        picked = np.random.default_rng(2).permutation(2000)[:n_allowed]
        allowed = np.sort(picked)
        index = DenseIndex(vectors, exact_limit=exact_limit)
        rows, scores, _ = index.search(query, 20, allowed)
        best = np.sort(vectors[allowed] @ query)[::-1][:20]
        assert rows.size == min(20, n_allowed)
        assert set(rows.tolist()) <= set(allowed.tolist())
        assert scores == pytest.approx(vectors[rows] @ query, abs=1e-6)
        assert scores.sum() >= best.sum() - 0.02 * rows.size

    def test_forbidden_best_codes_compare_all_allowed(self) -> None:
        # The 1,000 forbidden vectors are all nearer than the 1,000 allowed ones.
        vectors = random_units(2000)
        query = random_units(1, seed=1)[0]
        nearest_first = np.argsort(-(vectors @ query))
        allowed = np.sort(nearest_first[1000:])
        rows, scores, _ = DenseIndex(vectors, exact_limit=20).search(query, 50, allowed)
        assert set(rows.tolist()) <= set(allowed.tolist())
        assert scores == pytest.approx((vectors @ query)[nearest_first[1000:1050]], abs=1e-6)


def test_building_leaves_thread_count() -> None:
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(3)
    try:
        DenseIndex(random_units(1600), exact_limit=1)
        assert faiss.omp_get_max_threads() == 3
    finally:
        faiss.omp_set_num_threads(before)


@pytest.mark.parametrize(("n", "dimension"), [(1000, 16), (2000, 15)])
def test_few_vectors_are_searched_exactly(n: int, dimension: int) -> None:
    assert DenseIndex(random_units(n, dimension), exact_limit=1).codes is None


def test_bad_vector_names_its_passage() -> None:
    vectors = np.ones((3, 4), np.float32)
    vectors[1, 2] = np.nan
    with pytest.raises(DataError, match=r"1 of 3 passages, first for passage 'bad'"):
        unit_rows(vectors, ["good", "bad", "fine"])


def test_vectors_get_unit_length_except_zero() -> None:
    """Vectors are brought to unit length and a zero vector stays zero."""
    units = unit_rows(np.array([[3.0, 4.0], [0.0, 0.0]], np.float32), ["a", "b"])
    assert units.tolist() == [[pytest.approx(0.6), pytest.approx(0.8)], [0.0, 0.0]]
