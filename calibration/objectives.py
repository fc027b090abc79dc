"""Choose among the policies of a grid: balanced, leaner or richer contexts, or an extension.

Pure: sums over labelled queries in, the place of one policy out. The sums are kept by fold, so that
the same choice can be made without the queries that measure it (`calibration.folded`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from calibration.grid import Grid, GridIndex
from calibration.pool_labels import IntArray
from calibration.settings import Context
from ctxguard.core.types import FloatArray

CAUTIONS = (0.5, 1.0)
"""Standard errors of recall by which a policy must be clear of the tolerance: the first choice that
may be enforced is taken. On 20 to 40 splits of eleven sets and sizes 3% of those were refuted;
1.0 alone costs a quarter of the gain at 50 labels."""

EXTENSION_CAUTION = 1.64
"""Paired standard errors by which strict UDCG of an extension must be above today's."""

MOST_KEPT = 2.0
"""Passages that a balanced context holds at most on the mean, in multiples of the serving k."""

LOST_QUERIES = 0.5
"""Queries, added to those at hand, of which everything relevant is lost. With few labels most
policies lose nothing on any query, and a standard error of 0 would say that they never do."""

_WIDER = (1.0, 1.2, 1.6, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 20.0)
"""Sizes of context that are tried, in multiples of the serving k, as far as the depth and the
budget go: a threshold drops from them."""

_TIE = 1e-12


@dataclass(frozen=True)
class PolicySums:
    """Sums over queries of what some policies of a grid give, by fold.

    Attributes:
        n_k: Sizes of context; policies are in the order of `tried`, all thresholds of one size,
            ascending, after the other's.
        all_queries: Shape (n_folds,), the number of queries.
        answerable: Likewise, of those with a relevant passage.
        recall: Shape (2, n_folds, n_policies), Σ d and Σ d² of recall less that of today's
            first k, over the answerable queries; half by labels and half by P(relevant), where
            that is known (`Grid.beyond_today`).
        gain: Likewise of strict UDCG, over all queries.
        kept: Shape (n_folds, n_policies), passages kept.
        today_kept: Shape (n_folds,), likewise of today's first k.
    """

    n_k: int
    all_queries: FloatArray
    answerable: FloatArray
    recall: FloatArray
    gain: FloatArray
    kept: FloatArray
    today_kept: FloatArray

    @classmethod
    def of(
        cls,
        grid: Grid,
        tried: Sequence[GridIndex],
        fold: IntArray,
        serving_k: int,
    ) -> "PolicySums":
        """Add up what the tried policies give.

        Args:
            grid: With the first ``serving_k`` as the baseline of its labels.
            tried: As `tried` lists them.
            fold: Shape (n_q,), the number of each query's fold, from 0.

        Raises:
            CalibrationError: there are no queries.
        """
        grid.check_queries()
        member = np.equal(fold, np.arange(fold.max() + 1)[:, None]) * 1.0  # (n_folds, n_q)
        sizes = list(dict.fromkeys(index_k for index_k, _ in tried))
        columns = [[index for index in tried if index[0] == size] for size in sizes]
        recall, gain, kept = list[FloatArray](), list[FloatArray](), list[FloatArray]()
        answerable = grid.labels.n_relevant > 0
        for column in columns:
            n_kept = grid.kept(column)
            lost, more = np.take_along_axis(grid.beyond_today, n_kept[None], axis=2)
            recall.append(np.stack([member @ lost, member @ lost**2]))
            gain.append(np.stack([member @ more, member @ more**2]))
            kept.append(member @ n_kept)
        today = np.minimum(grid.labels.retrieved.sum(axis=1), serving_k)
        return cls(
            len(sizes),
            member.sum(axis=1),
            member @ answerable,
            np.concatenate(recall, axis=2),
            np.concatenate(gain, axis=2),
            np.concatenate(kept, axis=1),
            member @ today,
        )

    def without(self, fold: int) -> "PolicySums":
        """Return the sums over the queries of all other folds."""
        others = np.arange(len(self.all_queries)) != fold
        return PolicySums(
            self.n_k,
            self.all_queries[others],
            self.answerable[others],
            self.recall[:, others],
            self.gain[:, others],
            self.kept[others],
            self.today_kept[others],
        )

    @cached_property
    def mean_kept(self) -> FloatArray:
        """Passages kept on the mean, shape (n_policies,)."""
        kept: FloatArray = self.kept.sum(axis=0) / self.all_queries.sum()
        return kept

    @cached_property
    def mean_gain(self) -> FloatArray:
        """Mean strict UDCG less today's, shape (n_policies,)."""
        gain: FloatArray = self.gain[0].sum(axis=0) / self.all_queries.sum()
        return gain

    @cached_property
    def gain_error(self) -> FloatArray:
        """The paired standard error of `mean_gain`, shape (n_policies,)."""
        n = self.all_queries.sum()
        variance = self.gain[1].sum(axis=0) / n - self.mean_gain**2
        error: FloatArray = np.sqrt(np.maximum(variance, 0.0) / max(n - 1.0, 1.0))
        return error

    def least_recall(self, caution: float, lost: float = LOST_QUERIES) -> FloatArray:
        """Bound mean recall less today's, with lost queries added and standard errors taken off.

        Returns:
            Shape (n_policies,); −1 where no query has a relevant passage.
        """
        n = self.answerable.sum() + lost
        if n == lost:
            return np.full(self.kept.shape[1], -1.0)
        first, second = self.recall.sum(axis=1)
        mean = (first - lost) / n
        squares = second + lost - n * mean**2
        least: FloatArray = mean - caution * np.sqrt(np.maximum(squares, 0.0)) / n
        return least


def fewest_to_choose(tolerance: float) -> int | None:
    """Count the queries from which a policy that loses nothing is chosen; None if over 5,000.

    >>> fewest_to_choose(0.01)
    85
    """
    for n in range(1, 5_001):
        total = n + LOST_QUERIES
        mean = -LOST_QUERIES / total
        error = math.sqrt(LOST_QUERIES - total * mean**2) / total
        if mean - min(CAUTIONS) * error >= -tolerance - _TIE:
            return n
    return None


def tried(grid: Grid, serving_k: int) -> tuple[GridIndex, ...]:
    """Return the policies among which a choice is made, by size and then by threshold, ascending.

    Contexts of the serving k and larger ones: sizes between would only add luck.
    """
    ks = np.array(grid.ks)
    wanted = serving_k * np.array(_WIDER)
    wanted = wanted[wanted.round() <= ks[-1]]
    sizes = np.unique(np.abs(ks[:, None] - wanted).argmin(axis=0)).tolist()
    return tuple((size, t) for size in sizes for t in range(grid.thresholds.size))


def choose(
    sums: PolicySums,
    serving_k: int,
    context: Context = "balanced",
    *,
    tolerance: float,
    caution: float = CAUTIONS[-1],
    lost: float = LOST_QUERIES,
) -> int | None:
    """Choose a policy that keeps the recall of the first k served today.

    For each size thresholds are tried from the lowest up, until one loses recall: its mean is
    below today's by more than ``tolerance`` when ``lost`` queries are added as lost and
    ``caution`` standard errors are taken off. No policy of less strict UDCG than today's is taken.

    - ``balanced``: the highest strict UDCG with at most twice the serving k passages on the mean.
    - ``richer``: the same without this bound.
    - ``leaner``: the fewest passages, fewer than today's.

    Equals are told apart by the fewest passages, or by strict UDCG.

    Args:
        sums: Of the policies that are `tried`, with probabilities out of fold.
        serving_k: How many passages are served today.
        tolerance: How much mean recall may be lost, ≥ 0.
        caution: How many standard errors the mean must be clear of that, ≥ 0.
        lost: How many queries are added as lost, ≥ 0.

    Returns:
        The place of the policy among those tried; None where none is accepted: serve the first k
        as today.
    """
    kept_recall = sums.least_recall(caution, lost) >= -tolerance - _TIE
    by_size = np.logical_and.accumulate(kept_recall.reshape(sums.n_k, -1), axis=1)
    gain, kept = sums.mean_gain, sums.mean_kept
    today_kept = float(sums.today_kept.sum() / sums.all_queries.sum())
    accepted = by_size.ravel() & (gain >= -_TIE)
    if context == "leaner":
        accepted &= kept < today_kept - _TIE
        return _best(accepted, -kept, gain)
    if context == "balanced":
        accepted &= kept <= MOST_KEPT * serving_k + _TIE
    accepted &= (gain > _TIE) | (kept < today_kept - _TIE)
    return _best(accepted, gain, -kept)


def extend(
    sums: PolicySums,
    serving_k: int,
    context: Context = "balanced",
) -> int | None:
    """Choose how far to go on in today's order, never serving fewer than today.

    Recall cannot fall; accepted is what gains strict UDCG by more than ``EXTENSION_CAUTION``
    paired standard errors. A leaner context has no extension.

    Args:
        sums: Of policies that keep the first ``serving_k`` in the retriever's own order, whatever
            their threshold.

    Returns:
        The place of the policy; None where none is accepted.
    """
    if context == "leaner":
        return None
    gain, kept = sums.mean_gain, sums.mean_kept
    accepted = gain > EXTENSION_CAUTION * sums.gain_error + _TIE
    if context == "balanced":
        accepted &= kept <= MOST_KEPT * serving_k + _TIE
    return _best(accepted, gain, -kept)


def highest_utility(sums: PolicySums) -> int | None:
    """Choose the policy of highest strict UDCG, whatever its recall; of equals the leanest."""
    return _best(np.ones(sums.mean_gain.size, dtype=bool), sums.mean_gain, -sums.mean_kept)


def _best(accepted: np.ndarray, first: FloatArray, then: FloatArray) -> int | None:
    """Find the accepted place of the highest value; among equals the highest other value."""
    if not accepted.any():
        return None
    highest = accepted & (first >= first[accepted].max() - _TIE)
    return int(np.flatnonzero(highest)[np.argmax(np.round(then[highest], 12))])
