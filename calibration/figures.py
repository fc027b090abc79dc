"""Figures as files have them, and a share of pairs. Pure."""

import numpy as np

from ctxguard.core.types import FloatArray


def significant(value: float, digits: int = 6) -> float:
    """Round to so many significant digits, more than labels support: files stay short.

    >>> significant(0.123456789), significant(1234.5678, 5)
    (0.123457, 1234.6)
    """
    return float(f"{value:.{digits}g}")


def pair_share(above: FloatArray, below: FloatArray) -> float:
    """Return the share of pairs in which a value of the first is higher, ties half.

    >>> pair_share(np.array([2.0, 1.0]), np.array([1.0]))
    0.75
    """
    wins = sum(np.searchsorted(np.sort(below), above, side).sum() for side in ("left", "right"))
    return float(wins / 2.0 / (above.size * below.size))
