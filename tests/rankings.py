"""Comparison of a ranking with the scores that it should be in the order of."""

import numpy as np
from numpy.typing import NDArray


def assert_best(
    rows: NDArray[np.integer], scores: NDArray[np.floating], *, atol: float = 1e-6
) -> None:
    """Assert that ``rows`` are the highest of ``scores``, best first.

    Each processor's kernels add up in an order of their own, so scores closer than ``atol`` may
    change places.
    """
    of_rows = scores[rows]
    assert len(set(rows.tolist())) == len(rows), "a row comes twice"
    assert (np.diff(of_rows) <= atol).all(), "a higher score comes later"
    others = np.delete(scores, rows)
    assert others.size == 0 or others.max() <= of_rows.min() + atol, "a higher score is left out"
