"""The grid benchmark compares like with like."""

from pathlib import Path

import pytest

from benchmarks.grid import largest_difference, main, naive, rankings, vectorised


@pytest.mark.parametrize("depth", [7, 60])
def test_the_naive_loop_and_the_vectorised_means_agree(depth: int) -> None:
    relative, labels = rankings(3, depth, seed=4)
    assert largest_difference(vectorised(relative, labels), naive(relative, labels)) < 1e-9


def test_a_grid_of_no_queries_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--queries", "0", "--json", str(tmp_path / "grid.json")])
