"""Chooses among a grid's policies: balanced, leaner or richer contexts, or an extension.

Pure: sums over labelled queries in, the place of one policy out. The same choice can be made
without the queries that measure it (`Folded`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from calibration.fit import fold_numbers
from calibration.grid import Grid, GridIndex
from calibration.settings import Context
from ctxguard.core.types import FloatArray
from ctxguard.measure.rows import BoolArray, IntArray

RICHEST = 2.0
"""The most tokens in a richer context on average, as a share of today's."""


class Step(NamedTuple):
    """A rung of the ladder from bold to careful choices.

    Attributes:
        caution: Standard errors of recall by which a policy must be clear of the tolerance.
        tokens: The most tokens of a context on the mean, as a share of today's.
    """

    caution: float
    tokens: float


LADDERS: Mapping[Context, Sequence[Step]] = {
    "leaner": (Step(0.5, 1.0), Step(1.0, 1.0), Step(1.5, 1.0)),
    "balanced": (
        *(Step(0.0, 1.0), Step(0.0, 0.93), Step(0.0, 0.85)),
        *(Step(1.0, 0.93), Step(1.0, 0.85), Step(1.5, 0.9)),
    ),
    "richer": (Step(0.5, RICHEST),),
}
"""The steps tried for each cost of a context, the boldest first. The first choice that
may be enforced is taken: a bold one that few labels refute gives way to a careful one."""

TOKEN_CAUTION = 0.5
"""How many standard errors mean tokens must be below their bound: of many policies near a bound,
the one that looks cheapest on these queries is mostly lucky."""

EXTENSION_CAUTION = 1.64
"""How many paired standard errors an extension's UDCG must be above today's."""

LOST_QUERIES = 0.5
"""How many queries that lose everything relevant are added to the actual ones. With few labels most
policies lose nothing on any query, and a standard error of 0 would say that they never do."""

_WIDER = (1.0, 1.2, 1.6, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 20.0)
"""Sizes of context that are tried, in multiples of the serving k, as far as the depth and the
budget go: a threshold drops from them."""

_TIE = 1e-12


class PolicySums(NamedTuple):
    """The figures of some of a grid's policies, summed over queries.

    Tokens are passages where they are unknown.

    Attributes:
        all_queries: Number of the queries; likewise ``answerable``, of those with a relevant
            passage, and ``today_tokens``, of today's first k.
        kept: Shape (n_policies,), passages kept.
        recall: Shape (2, n_policies), Σ d and Σ d² of `Grid.beyond_today`, over the answerable
            queries; likewise ``gain`` of UDCG and ``tokens``, over all.
    """

    all_queries: float
    answerable: float
    today_tokens: float
    kept: FloatArray
    recall: FloatArray
    gain: FloatArray
    tokens: FloatArray

    @classmethod
    def of(cls, grid: Grid, tried: Sequence[GridIndex], rows: BoolArray) -> "PolicySums":
        """Sum the figures of policies over some queries; ``rows`` has shape (n_q,)."""
        n_kept, pools = grid.kept(tried)[rows], grid.pools
        differences = [np.take_along_axis(each[rows], n_kept, axis=1) for each in grid.beyond_today]
        return cls(
            float(rows.sum()),
            float((pools.n_relevant[rows] > 0).sum()),
            float((pools.sizes * pools.in_baseline)[rows].sum()),
            n_kept.sum(axis=0, dtype=np.float64),
            *[np.stack([d.sum(axis=0), (d**2).sum(axis=0)]) for d in differences],
        )

    @property
    def mean_kept(self) -> FloatArray:
        """Mean number of passages kept, shape (n_policies,)."""
        return self.kept / self.all_queries

    @property
    def mean_gain(self) -> FloatArray:
        """Mean UDCG minus today's, shape (n_policies,)."""
        return np.asarray(self.gain[0] / self.all_queries)

    @property
    def mean_recall(self) -> FloatArray:
        """Mean recall minus today's, shape (n_policies,); 0 if no query has an answer."""
        return np.asarray(self.recall[0] / max(self.answerable, 1.0))

    @property
    def gain_error(self) -> FloatArray:
        """The paired standard error of `mean_gain`, shape (n_policies,)."""
        return self._error(self.gain)

    def token_share(self, caution: float) -> FloatArray:
        """Mean tokens as a share of today's, plus standard errors, shape (n_policies,)."""
        more = self.tokens[0] + caution * self.all_queries * self._error(self.tokens)
        return np.asarray(1.0 + more / max(self.today_tokens, _TIE))

    def _error(self, sums: FloatArray) -> FloatArray:
        first, second = sums / self.all_queries
        variance = np.maximum(second - first**2, 0.0)
        return np.asarray(np.sqrt(variance / max(self.all_queries - 1.0, 1.0)))

    def least_recall(self, caution: float) -> FloatArray:
        """Return mean recall minus today's, less standard errors, shape (n_policies,).

        The error includes the added lost queries: if nothing was lost it would be 0. Without a
        query that has a relevant passage it is −1.
        """
        if self.answerable == 0.0:
            return np.full(self.kept.size, -1.0)
        (first, second), n = self.recall, self.answerable + LOST_QUERIES
        mean = (first - LOST_QUERIES) / n
        squares = second + LOST_QUERIES - n * mean**2
        error = np.sqrt(np.maximum(squares, 0.0)) / n
        return np.asarray(first / self.answerable - caution * error)


Choose = Callable[[PolicySums], int | None]
"""Finds the place of a policy among those that were tried; None if none is accepted, so that
today's context stays."""


@dataclass(frozen=True)
class Folded:
    """A grid's policies over all choosing queries: four folds choose, the fifth measures.

    The probabilities are out of fold already; nothing is fitted again. On 60 splits of five
    collections recall was overstated by .001, and its lower bound above the truth in 9% at a
    nominal 10%.
    """

    grid: Grid
    tried: Sequence[GridIndex]

    @cached_property
    def fold(self) -> IntArray:
        """The fold of each query, shape (n_q,)."""
        return fold_numbers(self.grid.pools.groups)

    @cached_property
    def sums(self) -> PolicySums:
        """The sums of the tried policies over all queries."""
        return PolicySums.of(self.grid, self.tried, self.fold >= 0)

    def chosen(self, choose: Choose) -> GridIndex | None:
        """Return the choice made on all queries; None to keep today's context."""
        place = choose(self.sums)
        return None if place is None else self.tried[place]

    def by_others(self, choose: Choose) -> Mapping[int, GridIndex | None]:
        """Return, for each fold, the other folds' choice; None to keep today's context.

        Without other folds nothing is chosen.
        """
        places = {number: choose(sums) for number, sums in self._without.items()}
        return {
            number: None if place is None else self.tried[place] for number, place in places.items()
        }

    def contexts(
        self, chosen: Mapping[int, GridIndex | None], serving_k: int
    ) -> tuple[IntArray, BoolArray]:
        """Return every query's context under the other folds' choice, or else today's.

        The form is that of `Grid.contexts`.
        """
        grid = self.grid
        order = np.tile(np.arange(grid.order.shape[1]), (len(self.fold), 1))
        kept = order < np.minimum(grid.pools.lengths, serving_k)[:, None]
        for number, index in chosen.items():
            if index is not None:
                rows = self.fold == number
                order[rows], kept[rows] = grid.contexts(index, rows)
        return order, kept

    def share_chosen(self, chosen: Mapping[int, GridIndex | None]) -> float:
        """Return the share, in [0, 1], of the queries for which the other folds choose a policy.

        If it is small, most contexts are today's, and say nothing about the choice of all queries.
        """
        some = [number for number, index in chosen.items() if index is not None]
        return float(np.isin(self.fold, some).mean())

    @cached_property
    def _without(self) -> Mapping[int, PolicySums]:
        """The other folds' sums, for each fold, if there are other folds."""
        numbers = np.unique(self.fold).tolist()
        return {
            number: PolicySums.of(self.grid, self.tried, self.fold != number)
            for number in numbers
            if len(numbers) > 1
        }


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
    sums: PolicySums, context: Context = "balanced", *, tolerance: float, step: Step | None = None
) -> int | None:
    """Choose a policy that keeps the recall and the UDCG of the first k served today.

    A policy is accepted if its mean UDCG is at least today's, and its mean recall, less the step's
    standard errors, is at most ``tolerance`` below today's.

    - ``leaner``: of these the fewest tokens, fewer than today's.
    - ``balanced``: the highest UDCG at no more tokens than today's; of those within a standard
      error of it the highest recall, because UDCG counts what is found at a low rank for less than
      readers do (``benchmarks.readers``).
    - ``richer``: the same at no more than twice today's tokens.

    The step is the most careful one of the ladder unless given.
    """
    step = LADDERS[context][-1] if step is None else step
    gain, share = sums.mean_gain, sums.token_share(TOKEN_CAUTION)
    accepted = sums.least_recall(step.caution) >= -tolerance - _TIE
    accepted &= gain >= -_TIE
    if context == "leaner":
        share = sums.token_share(0.0)
        return _best(accepted & (share < 1.0 - _TIE), -share, gain)
    accepted &= share <= step.tokens + _TIE
    best = _best(accepted, gain, -share)
    if best is None:
        return None
    accepted &= gain >= gain[best] - sums.gain_error[best]
    return _best(accepted, sums.mean_recall, gain)


def extend(sums: PolicySums) -> int | None:
    """Choose how far to extend today's order, using at most twice today's tokens.

    The policies keep the first ``serving_k`` in the retriever's own order, so recall cannot fall.
    Those that gain UDCG by more than ``EXTENSION_CAUTION`` paired standard errors are accepted; of
    these, the one of highest recall is chosen.
    """
    gain, share = sums.mean_gain, sums.token_share(TOKEN_CAUTION)
    accepted = gain > EXTENSION_CAUTION * sums.gain_error + _TIE
    accepted &= share <= LADDERS["richer"][0].tokens + _TIE
    return _best(accepted, sums.mean_recall, gain)


def highest_utility(sums: PolicySums) -> int | None:
    """Choose the policy with the highest UDCG, whatever its recall; the leanest if tied."""
    return _best(np.ones(sums.mean_gain.size, dtype=bool), sums.mean_gain, -sums.mean_kept)


def _best(accepted: np.ndarray, first: FloatArray, then: FloatArray) -> int | None:
    """Find the accepted place with the highest first value, breaking ties by the other."""
    if not accepted.any():
        return None
    highest = accepted & (first >= first[accepted].max() - _TIE)
    return int(np.flatnonzero(highest)[np.argmax(np.round(then[highest], 12))])
