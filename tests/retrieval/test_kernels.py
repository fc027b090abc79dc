"""The loops of a search, compiled and by numpy, give what the plain definitions give."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ctxguard.core.fusion import Fusion, fuse
from ctxguard.core.types import Leg, ScoreKind
from ctxguard.retrieval.index.kernels import (
    FusedCandidates,
    best_first,
    fuse_candidates,
    nearest,
    search_postings,
    unit_vector,
)
from tests.rankings import assert_best

pytestmark = pytest.mark.usefixtures("computed_by")

FUSIONS = [Fusion(), Fusion(constant=1), Fusion("convex", 0.8), Fusion("convex", 0.0)]

few_values = st.sampled_from([-1.0, -0.25, 0.0, 0.25, 0.5, 1.0, 2.0])
"""Few, so that scores are often equal."""


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


class TestBestFirst:
    @given(
        st.lists(few_values | st.floats(-1e6, 1e6, width=32), max_size=200),
        st.integers(0, 250),
        few_values | st.just(-math.inf),
    )
    def test_it_is_sorting_by_score_and_then_position(
        self, scores: list[float], k: int, above: float
    ) -> None:
        expected = sorted(
            (position for position, score in enumerate(scores) if score > above),
            key=lambda position: (-scores[position], position),
        )
        assert best_first(np.array(scores, np.float32), k, above).tolist() == expected[:k]

    def test_what_is_no_number_is_never_among_the_best(self) -> None:
        scores = np.array([math.nan, 1.0, math.nan, 2.0], np.float32)
        assert best_first(scores, 3, -math.inf).tolist() == [3, 1]


class TestSearchPostings:
    def test_scores_of_a_querys_words_add_up_and_a_repeated_word_counts_again(self) -> None:
        # Word 0 is in rows 0 and 2, word 1 in rows 2 and 3.
        postings = (
            read_only(np.array([1.0, 2.0, 4.0, 8.0], np.float32)),
            read_only(np.array([0, 2, 2, 3], np.int32)),
            read_only(np.array([0, 2, 4], np.int64)),
        )
        # A word below 0 is one that no passage has.
        rows, scores, all_scores = search_postings(np.array([0, -1, 1, 0]), postings, 5, 2)
        assert all_scores.tolist() == [2.0, 0.0, 8.0, 8.0, 0.0]
        assert (rows.tolist(), scores.tolist()) == ([2, 3], [8.0, 8.0])


class TestUnitVector:
    def test_a_vector_keeps_its_direction(self) -> None:
        vector = np.random.default_rng(0).normal(size=383).astype(np.float32)
        unit = unit_vector(vector)
        assert unit is not None
        assert unit == pytest.approx(vector / np.linalg.norm(vector), rel=1e-6)

    @pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
    def test_one_without_a_direction_is_none(self, value: float) -> None:
        assert unit_vector(np.full(7, value, np.float32)) is None


class TestNearest:
    @pytest.mark.parametrize("some", [False, True])
    def test_it_is_the_best_inner_products(self, some: bool) -> None:
        random = np.random.default_rng(0)
        vectors = read_only(random.normal(size=(500, 24)).astype(np.float32))
        vector = random.normal(size=24).astype(np.float32)
        candidate_rows = random.permutation(500)[:200] if some else None
        rows, cosines = nearest(vectors, vector, 20, candidate_rows)
        compared = np.arange(500) if candidate_rows is None else candidate_rows
        exact = np.full(500, -np.inf)
        exact[compared] = vectors[compared] @ vector
        assert len(rows) == 20
        assert_best(rows, exact, atol=1e-5)
        assert cosines == pytest.approx(exact[rows], abs=1e-5)

    @pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    def test_every_row_is_compared_whatever_their_number(self, n: int) -> None:
        vectors = read_only(np.eye(n, 9, dtype=np.float32))
        for row in range(n):
            rows, cosines = nearest(vectors, vectors[row].copy(), n, None)
            assert (rows[0], cosines[0]) == (row, 1.0)
            assert rows.tolist() == [row, *(other for other in range(n) if other != row)]

    def test_equal_vectors_come_in_the_order_of_their_rows(self) -> None:
        vector = np.random.default_rng(0).normal(size=384).astype(np.float32)
        vectors = read_only(np.tile(vector, (1003, 1)))
        rows, _ = nearest(vectors, vector, 1003, None)
        assert rows.tolist() == list(range(1003))


class TestFuseCandidates:
    @given(
        st.integers(1, 60).flatmap(
            lambda n: st.tuples(
                st.lists(few_values.map(abs), min_size=n, max_size=n),
                st.lists(few_values.map(lambda value: value / 2.0), min_size=n, max_size=n),
                st.sets(st.integers(0, n - 1)),
                st.sets(st.integers(0, n - 1)),
                st.integers(1, n),
            )
        ),
        st.sampled_from(FUSIONS),
    )
    def test_it_is_the_union_scored_in_both_legs_and_fused_by_the_pure_function(
        self,
        drawn: tuple[list[float], list[float], set[int], set[int], int],
        fusion: Fusion,
    ) -> None:
        all_scores, products, of_lexical, of_dense, k = drawn
        rows, fused, lexical, cosines = fused_candidates(
            all_scores, products, of_lexical, of_dense, k, fusion
        )
        union = np.array(sorted(of_lexical | of_dense), np.int64)
        legs = {
            "lexical": Leg(np.array(all_scores)[union], ScoreKind.RATIO),
            "dense": Leg(np.array(products)[union], ScoreKind.COSINE),
        }
        expected = fuse(legs, fusion)
        positions = np.searchsorted(union, rows)
        assert union[positions].tolist() == rows.tolist()
        assert fused == pytest.approx(expected[positions])
        assert fused == pytest.approx(np.sort(expected)[::-1][:k])
        assert rows.tolist() == rows[np.lexsort((rows, -fused))].tolist()
        assert lexical.tolist() == legs["lexical"].scores[positions].tolist()
        assert cosines.tolist() == legs["dense"].scores[positions].tolist()

    @pytest.mark.parametrize("fusion", FUSIONS, ids=repr)
    @pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 3.4e38])
    @pytest.mark.parametrize("leg", ["lexical", "dense"])
    def test_a_garbage_score_counts_as_none_as_in_the_pure_function(
        self, fusion: Fusion, garbage: float, leg: str
    ) -> None:
        scores, cosines = [3.0, 2.0, 1.0], [0.1, 0.5, 0.9]
        (scores if leg == "lexical" else cosines)[1] = garbage
        rows, fused, _, _ = fused_candidates(scores, cosines, {0, 1}, {1, 2}, 3, fusion)
        legs = {
            "lexical": Leg(np.array(scores), ScoreKind.RATIO),
            "dense": Leg(np.array(cosines), ScoreKind.COSINE),
        }
        assert sorted(rows.tolist()) == [0, 1, 2]
        assert fused == pytest.approx(fuse(legs, fusion)[rows])


def fused_candidates(  # noqa: PLR0917  as the kernel
    all_scores: list[float],
    cosines: list[float],
    lexical_rows: set[int],
    dense_rows: set[int],
    k: int,
    fusion: Fusion,
) -> FusedCandidates:
    """The kernel's fusion, over vectors that have these cosines with the query's."""
    return fuse_candidates(
        np.array(list(lexical_rows), np.int64),
        np.array(all_scores, np.float32),
        np.array(list(dense_rows), np.int64),
        read_only(np.array([[cosine, 0.0] for cosine in cosines], np.float32)),
        np.array([1.0, 0.0], np.float32),
        k,
        fusion,
    )
