"""Other ways to bound a mean loss, shown beside the betting test that calibration certifies by.

Losses have shape (n,) or (n, n_candidates) and lie in [0, 1]; the results have shape () or
(n_candidates,).
"""

from math import e, sqrt

import numpy as np
from numpy.typing import ArrayLike
from scipy import special, stats

from ctxguard.core.types import FloatArray
from ctxguard.measure.risk import ROUNDING
from ctxguard.measure.rows import IntArray


def hoeffding_bentkus_p_value(losses: ArrayLike, alpha: float) -> FloatArray:
    """P-value of "the mean loss is at least alpha" from the mean alone; valid at every n.

    min{ exp(−n h(min(R̂, alpha), alpha)), e · P(Binomial(n, alpha) ≤ ⌈n R̂⌉) }, where h is the
    relative entropy of two Bernoulli variables: the bounds of Hoeffding and Bentkus. Unlike
    betting it does not profit from a small variance.

    Source: Bates, Angelopoulos, Lei, Malik and Jordan, J. ACM 68(6), 2021, §3.1; Angelopoulos
    et al., Learn then Test, 2021, Proposition 3.

    >>> hoeffding_bentkus_p_value([0.0] * 50, alpha=0.1).round(4).tolist()
    0.0052
    """
    values = np.asarray(losses, dtype=np.float64)
    n, total = values.shape[0], values.sum(axis=0)
    low = np.minimum(total / n, alpha)
    entropy = special.xlogy(low, low / alpha) + special.xlogy(1 - low, (1 - low) / (1 - alpha))
    # A sum such as 30 × 0.1 is a rounding error above 3, and must not be counted as 4.
    successes = np.minimum(np.ceil(total - ROUNDING), n)
    bentkus = e * stats.binom.cdf(successes, n, alpha)
    return np.asarray(np.minimum(np.exp(-n * entropy), np.minimum(bentkus, 1.0)))


def clt_p_value(losses: ArrayLike, alpha: float) -> FloatArray:
    """P-value of "the mean loss is at least alpha" by the central limit theorem, n ≥ 2.

    Φ((R̂ − alpha) √n / σ̂). An approximation: too small where a few queries carry the loss, and 0
    where the sample has no variance and a mean below alpha.

    >>> clt_p_value([0.0, 0.2, 0.0, 0.2], alpha=0.1).tolist()
    0.5
    """
    values = np.asarray(losses, dtype=np.float64)
    margin = values.mean(axis=0) - alpha
    error = values.std(axis=0, ddof=1) / sqrt(values.shape[0])
    # Without variance the sign of the margin decides: Φ(±inf) is 0 or 1.
    certain = np.where(margin < 0.0, -np.inf, np.inf)
    z = np.divide(margin, error, out=certain, where=error > 0.0)
    return np.asarray(special.ndtr(z))


def bonferroni(p_values: ArrayLike, delta: float) -> IntArray:
    """Indices of the candidates certified when each is tested at delta / n_candidates.

    >>> bonferroni([0.01, 0.08, 0.30, 0.02], delta=0.1).tolist()
    [0, 3]
    """
    values = np.asarray(p_values, dtype=np.float64)
    return np.flatnonzero(values <= delta / max(values.size, 1))


def conformal_risk_control(losses_in_order: ArrayLike, alpha: float) -> int:
    """How many candidates of an order conformal risk control allows; it chooses the last.

    Candidate j is allowed where (n R̂_j + 1) / (n + 1) ≤ alpha. This bounds the expected loss of
    the next query, averaged over calibration samples too: in many samples the risk of the choice
    is above alpha. The method needs losses that rise along the order for every query, so each is
    replaced by its running maximum.

    Source: Angelopoulos, Bates, Fisch, Lei and Schuster, ICLR 2024, Theorem 1, with B = 1.

    Args:
        losses_in_order: Shape (n, n_candidates), safest candidate first, in an order chosen
            without these queries.
        alpha: The limit on the expected loss, in (0, 1).

    >>> conformal_risk_control([[0.0, 0.0, 0.2], [0.0, 0.1, 0.9]] * 50, alpha=0.1)
    2
    """
    values = np.asarray(losses_in_order, dtype=np.float64)
    rising = np.maximum.accumulate(values, axis=1)
    too_high = (rising.sum(axis=0) + 1.0) / (values.shape[0] + 1) > alpha
    return int(too_high.argmax()) if too_high.any() else too_high.size
