"""The compiled loops give what the plain definitions give."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ctxguard.fusion import Fusion, fuse
from ctxguard.retrieval.index import numbers_of
from ctxguard.retrieval.kernels import best_first, nearest, search_postings, unite
from ctxguard.types import Leg, ScoreKind

FUSIONS = [Fusion(), Fusion(constant=1), Fusion("convex", 0.8), Fusion("convex", 0.0)]

few_values = st.sampled_from([-1.0, -0.25, 0.0, 0.25, 0.5, 1.0, 2.0])
"""Few, so that scores are often equal."""


def read_only(array: NDArray[np.generic]) -> NDArray[np.generic]:
    array.flags.writeable = False
    return array


class TestBestFirst:
    @given(
        st.lists(few_values | st.floats(-1e6, 1e6, width=32), max_size=200),
        st.integers(0, 250),
        few_values | st.just(-math.inf),
    )
    @settings(deadline=None)
    def test_it_is_sorting_by_score_and_then_position(
        self, scores: list[float], k: int, above: float
    ) -> None:
        expected = sorted(
            (position for position, score in enumerate(scores) if score > above),
            key=lambda position: (-scores[position], position),
        )
        assert best_first(np.array(scores, np.float64), k, above).tolist() == expected[:k]

    def test_what_is_no_number_is_never_among_the_best(self) -> None:
        scores = np.array([math.nan, 1.0, math.nan, 2.0])
        assert best_first(scores, 3, -math.inf).tolist() == [3, 1]


class TestSearchPostings:
    def test_scores_of_a_querys_words_add_up_and_a_repeated_word_counts_again(self) -> None:
        # Word 0 is in rows 0 and 2, word 1 in rows 2 and 3.
        postings = (
            read_only(np.array([1.0, 2.0, 4.0, 8.0], np.float32)),
            read_only(np.array([0, 2, 2, 3], np.int32)),
            read_only(np.array([0, 2, 4], np.int64)),
        )
        rows, scores, every = search_postings(np.array([0, 1, 0]), postings, 5, 2)
        assert every.tolist() == [2.0, 0.0, 8.0, 8.0, 0.0]
        assert (rows.tolist(), scores.tolist()) == ([2, 3], [8.0, 8.0])


class TestNearest:
    @pytest.mark.parametrize("some", [False, True])
    def test_it_is_the_best_inner_products(self, some: bool) -> None:
        random = np.random.default_rng(0)
        vectors = read_only(random.normal(size=(500, 24)).astype(np.float32))
        vector = random.normal(size=24).astype(np.float32)
        among = random.permutation(500)[:200] if some else None
        rows, cosines = nearest(vectors, vector, 20, among)
        looked_at = np.arange(500) if among is None else among
        exact = vectors[looked_at] @ vector
        assert rows.tolist() == looked_at[np.argsort(-exact)[:20]].tolist()
        assert np.allclose(cosines, np.sort(exact)[::-1][:20], atol=1e-5)

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


class TestUnite:
    @given(
        st.integers(1, 60).flatmap(
            lambda n: st.tuples(
                st.lists(few_values.map(abs), min_size=n, max_size=n),
                st.lists(few_values.map(lambda value: value / 2.0), min_size=n, max_size=n),
                st.sets(st.integers(0, n - 1)),
                st.sets(st.integers(0, n - 1)),
            )
        ),
        st.sampled_from(FUSIONS),
    )
    @settings(deadline=None)
    def test_it_is_the_union_scored_in_both_legs_and_fused_by_the_pure_function(
        self,
        drawn: tuple[list[float], list[float], set[int], set[int]],
        fusion: Fusion,
    ) -> None:
        every, products, of_lexical, of_dense = drawn
        vectors = read_only(np.array([[product, 0.0] for product in products], np.float32))
        rows, fused, lexical, cosines = unite(
            np.array(list(of_lexical), np.int64),
            np.array(every, np.float32),
            np.array(list(of_dense), np.int64),
            vectors,
            np.array([1.0, 0.0], np.float32),
            numbers_of(fusion),
        )
        union = np.array(sorted(of_lexical | of_dense), np.int64)
        legs = {
            "lexical": Leg(np.array(every)[union], ScoreKind.RATIO),
            "dense": Leg(np.array(products)[union], ScoreKind.COSINE),
        }
        expected = fuse(legs, fusion)
        order = np.lexsort((union, -expected))
        assert rows.tolist() == union[order].tolist()
        assert fused.tolist() == expected[order].tolist()
        assert lexical.tolist() == legs["lexical"].scores[order].tolist()
        assert cosines.tolist() == legs["dense"].scores[order].tolist()
