"""The dense leg: cosines, exact or through a graph."""

from pathlib import Path

import numpy as np
import pytest

from ctxguard.errors import DataError
from ctxguard.retrieval.dense import GRAPH, DenseIndex, unit_rows


def random_units(n: int, dimension: int = 16, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((n, dimension), dtype=np.float32)
    return unit_rows(vectors, [str(row) for row in range(n)])


def test_the_exact_search_finds_what_comparing_everything_finds() -> None:
    vectors = random_units(500)
    rows, scores = DenseIndex.build(vectors).search(vectors[7], 10)
    cosines = vectors @ vectors[7]
    assert rows.tolist() == np.argsort(-cosines)[:10].tolist()
    assert scores == pytest.approx(cosines[rows], abs=1e-6)


def test_k_may_exceed_the_index() -> None:
    rows, _ = DenseIndex.build(random_units(5)).search(random_units(5)[0], 100)
    assert sorted(rows.tolist()) == [0, 1, 2, 3, 4]


def test_above_the_exact_limit_a_graph_is_searched_and_finds_nearly_the_same() -> None:
    vectors = random_units(2000)
    exact, graph = DenseIndex.build(vectors), DenseIndex.build(vectors, exact_limit=100)
    assert exact.is_exact
    assert not graph.is_exact
    shared = [
        len(set(exact.search(vectors[row], 50)[0]) & set(graph.search(vectors[row], 50)[0]))
        for row in range(20)
    ]
    assert np.mean(shared) > 45


def test_a_graph_that_finds_fewer_than_k_gives_no_padding() -> None:
    vectors = random_units(30)
    rows, scores = DenseIndex.build(vectors, exact_limit=1).search(vectors[0], 30)
    assert (rows >= 0).all()
    assert (scores > -1.1).all()
    assert rows.size == scores.size


@pytest.mark.parametrize("exact_limit", [1, 1000])
def test_a_saved_index_answers_as_before(tmp_path: Path, exact_limit: int) -> None:
    vectors = random_units(300)
    index = DenseIndex.build(vectors, exact_limit=exact_limit)
    index.save(tmp_path)
    loaded = DenseIndex.load(tmp_path, with_graph=not index.is_exact)
    assert loaded.search(vectors[3], 20)[0].tolist() == index.search(vectors[3], 20)[0].tolist()
    assert (tmp_path / GRAPH).exists() == (exact_limit == 1)


def test_a_vector_that_is_no_number_names_its_passage() -> None:
    vectors = np.ones((3, 4), np.float32)
    vectors[1, 2] = np.nan
    with pytest.raises(DataError, match=r"1 of 3 passages, first for passage 'bad'"):
        unit_rows(vectors, ["good", "bad", "fine"])


def test_vectors_are_brought_to_unit_length_and_a_zero_vector_stays_zero() -> None:
    units = unit_rows(np.array([[3.0, 4.0], [0.0, 0.0]], np.float32), ["a", "b"])
    assert units.tolist() == [[pytest.approx(0.6), pytest.approx(0.8)], [0.0, 0.0]]
