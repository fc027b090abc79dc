"""The choice: which policy of a grid, with which certificate, and what the certificate costs.

Policies are compared on one set of queries and tested on another (DESIGN.md §9): given the
first, the second is an independent sample, which is all that the certificate needs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from calibration import risk
from calibration.fit import fit_temperature
from calibration.losses import (
    IntArray,
    Labels,
    Survival,
    discounts,
    grid_means,
    losses_at,
    relative_values,
)
from calibration.replay import Pools
from ctxguard.errors import CalibrationError, ConfigurationError
from ctxguard.policy import ExpectedUtilityPolicy, Policy, RatioPolicy
from ctxguard.scores import is_relative
from ctxguard.signals import RelevanceModel
from ctxguard.types import FloatArray

MAX_K = 20
RATIOS: FloatArray = np.round(np.arange(0, 100) / 100, 2)
PROBABILITIES: FloatArray = np.round(
    np.concatenate([np.arange(0, 20) / 400, np.arange(5, 96) / 100]), 4
)
"""Thresholds on P(relevant): finer below 0.05, where rare relevance puts most candidates."""

_TIE = 1e-12

Cell = tuple[int, int]


@dataclass(frozen=True)
class Grid:
    """Policies of one family, (k, threshold), over one set of queries.

    Attributes:
        labels: Of the candidates in the order that the policies serve them.
        survival: Where each candidate stands on the grid.
        make: The policy of a k and a threshold.
    """

    labels: Labels
    survival: Survival
    make: Callable[[int, float], Policy]

    def policy(self, cell: Cell) -> Policy:
        """The policy of a cell."""
        return self.make(int(self.survival.ks[cell[0]]), float(self.survival.thresholds[cell[1]]))

    @cached_property
    def means(self) -> "GridMeans":
        """The means of every cell over all queries."""
        found = grid_means(self.labels, self.survival)
        return GridMeans(found["udcg_strict"], found["harm"], found["recall_loss"], found["kept"])

    def rows(self, rows: IntArray) -> "Grid":
        """The same policies over some of the queries."""
        survival = self.survival
        return Grid(
            self.labels.rows(rows),
            Survival(survival.ks, survival.thresholds, survival.reach[rows]),
            self.make,
        )


@dataclass(frozen=True)
class GridMeans:
    """Means over queries for every cell, shape (n_k, n_thresholds) each."""

    udcg_strict: FloatArray
    harm: FloatArray
    recall_loss: FloatArray
    kept: FloatArray

    def best(self) -> Cell:
        """The cell of highest strict UDCG; of equal ones the least recall loss, then smallest k."""
        contenders = np.argwhere(self.udcg_strict >= self.udcg_strict.max() - _TIE)
        losses = np.nan_to_num(self.recall_loss[contenders[:, 0], contenders[:, 1]])
        row_k, row_t = contenders[int(np.argmin(np.round(losses, 12)))]
        return int(row_k), int(row_t)


def ratio_grid(
    pools: Pools,
    labels: Labels,
    *,
    temperature: float | None = None,
    ks: Sequence[int] | None = None,
    ratios: FloatArray = RATIOS,
    min_keep: int = 1,
) -> Grid:
    """Every (k, min_ratio); min_ratio is 0 throughout where scores carry rank only.

    Args:
        pools: The replay of one route.
        labels: Their labels.
        temperature: Of the relative score; fitted to these pools unless given.
        ks: Sizes of context; 1 … 20 unless given, never beyond the depth.
        ratios: Relative thresholds, ascending.
        min_keep: The fewest passages that every policy keeps.
    """
    chosen = fit_temperature(pools) if temperature is None else temperature
    values, outside = relative_values(pools, chosen)
    survival = Survival.of(
        values,
        _sizes(pools, ks),
        ratios if is_relative(pools.kind) else np.zeros(1),
        min_keep=min_keep,
        always=outside,
    )
    return Grid(
        labels,
        survival,
        lambda k, ratio: RatioPolicy(
            k=k, min_ratio=ratio, temperature=chosen, min_keep=min(min_keep, k)
        ),
    )


def utility_grid(
    pools: Pools,
    labels: Labels,
    probabilities: FloatArray,
    model: RelevanceModel,
    *,
    gain: float = 1.0,
    ks: Sequence[int] | None = None,
    thresholds: FloatArray = PROBABILITIES,
    min_keep: int = 1,
) -> Grid:
    """Every (k, cost) of expected-utility policies with one model.

    Args:
        pools: The replay of one route.
        labels: Their labels, in the pools' order.
        probabilities: Shape (n_q, depth), from the model or, where a threshold is to be chosen
            on its own training queries, out of fold.
        model: What the policies carry.
        gain: What a relevant passage is worth.
        ks: Sizes of context; 1 … 20 unless given, never beyond the depth.
        thresholds: On P(relevant), ascending, in [0, 1).
        min_keep: The fewest passages that every policy keeps.
    """
    order = np.argsort(-probabilities, axis=1, kind="stable")
    survival = Survival.of(
        np.take_along_axis(probabilities, order, axis=1),
        _sizes(pools, ks),
        thresholds,
        min_keep=min_keep,
    )
    return Grid(
        labels.reordered(order),
        survival,
        lambda k, threshold: ExpectedUtilityPolicy(
            model=model,
            k=k,
            cost=float(f"{gain * threshold / (1.0 - threshold):.8g}"),
            gain=gain,
            min_keep=min(min_keep, k),
        ),
    )


def _sizes(pools: Pools, ks: Sequence[int] | None) -> Sequence[int]:
    return range(1, min(MAX_K, pools.scores.shape[1]) + 1) if ks is None else ks


@dataclass(frozen=True)
class Promise:
    """What a certificate is asked to say.

    Attributes:
        alpha: The most mean recall loss, in (0, 1).
        beta: The most mean harm, > 0; None for no promise on harm.
        delta: The probability that the promise may be false, in (0, 1).
    """

    alpha: float = 0.1
    beta: float | None = None
    delta: float = 0.1

    def __post_init__(self) -> None:
        for name, value in (("alpha", self.alpha), ("delta", self.delta)):
            if not 0.0 < value < 1.0:
                raise ConfigurationError(f"{name} {value!r} must lie strictly between 0 and 1")
        if self.beta is not None and not self.beta > 0.0:
            raise ConfigurationError(f"beta {self.beta!r} must be > 0, or left out")


@dataclass(frozen=True)
class Alternative:
    """What another rule would have chosen among the same candidates.

    Attributes:
        rule: ``betting``, ``hoeffding_bentkus``, ``clt``, ``conformal_risk_control``, or
            ``uncorrected``: the boldest whose plain means keep the promise.
        cell: Its choice; None where it allows none.
        tested: Means on the test queries, for that choice: udcg_strict, recall_loss, harm.
    """

    rule: str
    cell: Cell | None
    tested: dict[str, float] | None


@dataclass(frozen=True)
class Certification:
    """The outcome of testing a family's policies on queries that did not order them.

    Attributes:
        cell: The chosen cell of the grid; None where nothing could be certified.
        p_value: Of the chosen cell.
        recall_loss: Its mean on the test queries.
        harm: Its mean on the test queries.
        n_recall: Test queries on which recall loss is defined.
        n_harm: Test queries in all.
        tested: Candidates in the sequence.
        certified: How many passed.
        labels_needed: Where nothing is certified: test queries that would certify the safest
            candidate, were these typical; None where no number would.
        alternatives: What other rules would have chosen.
    """

    cell: Cell | None
    p_value: float | None
    recall_loss: float | None
    harm: float | None
    n_recall: int
    n_harm: int
    tested: int
    certified: int
    labels_needed: int | None
    alternatives: tuple[Alternative, ...]


def certify(ordering: Grid, testing: Grid, promise: Promise, *, seed: int = 0) -> Certification:
    """Order candidates on one set of queries, test them on another, choose among those that pass.

    Fixed-sequence testing with betting p-values along the Pareto front of risk and strict UDCG,
    safest first. A candidate whose plain mean on the test queries breaks the promise is not
    certified whatever its p-value: betting may stop at its luckiest moment, which is valid at
    level delta, but nobody should be handed a promise that its own evidence contradicts. Of
    those certified the one with the highest strict UDCG over all these queries is chosen, which
    the certificate allows, since it holds for all of them at once.

    Args:
        ordering: The grid over the queries that order it.
        testing: The same policies over the queries that test them; nothing in it may have
            served to fit or order them.
        promise: What is to be certified.
        seed: Shuffles the test queries, since betting needs an order fixed beforehand.

    Raises:
        CalibrationError: no test query has a relevant passage in the baseline.
    """
    cells = _sequence(ordering, promise)
    order = np.random.default_rng(seed).permutation(testing.labels.grades.shape[0])
    recall_loss, harm = losses_at(testing.labels, testing.survival, cells)
    recall_loss, harm = recall_loss[order], harm[order]
    defined = ~np.isnan(recall_loss[:, 0])
    if not defined.any():
        raise CalibrationError(
            f"none of the {defined.size} test queries has a relevant passage in the baseline, "
            "so recall loss cannot be tested; label more queries, or deepen the retrieval"
        )
    recall_loss = recall_loss[defined]
    largest = _largest_harm(testing)

    def p_values(test: Callable[[FloatArray, float], FloatArray]) -> FloatArray:
        values = test(recall_loss, promise.alpha)
        if promise.beta is None:
            return values
        limit = promise.beta / largest
        # A harm that cannot exceed the limit keeps the promise without any evidence.
        harmless = np.zeros(len(cells)) if limit >= 1.0 else test(harm / largest, limit)
        return risk.joint_p_value(values, harmless)

    kept_promise = recall_loss.mean(axis=0) <= promise.alpha
    if promise.beta is not None:
        kept_promise &= harm.mean(axis=0) <= promise.beta
    betting = np.where(kept_promise, p_values(risk.betting_p_value), 1.0)
    certified = risk.fixed_sequence(betting, promise.delta)
    udcg = udcg_at(testing, cells)
    n_ordering, n_testing = ordering.labels.grades.shape[0], udcg.shape[0]
    gain = (
        np.array([ordering.means.udcg_strict[cell] for cell in cells]) * n_ordering
        + udcg.sum(axis=0)
    ) / (n_ordering + n_testing)
    chosen = int(np.argmax(gain[:certified])) if certified else -1

    def alternative(rule: str, index: int) -> Alternative:
        if index < 0:
            return Alternative(rule, None, None)
        means = {
            "udcg_strict": float(udcg[:, index].mean()),
            "recall_loss": float(recall_loss[:, index].mean()),
            "harm": float(harm[:, index].mean()),
        }
        return Alternative(rule, cells[index], means)

    boldest = int(np.flatnonzero(kept_promise)[-1]) if kept_promise.any() else -1
    alternatives = [
        alternative("betting", chosen),
        alternative(
            "hoeffding_bentkus",
            risk.fixed_sequence(p_values(risk.hoeffding_bentkus_p_value), promise.delta) - 1,
        ),
        alternative("uncorrected", boldest),
        alternative(
            "conformal_risk_control", risk.conformal_risk_control(recall_loss, promise.alpha) - 1
        ),
    ]
    if recall_loss.shape[0] > 1:
        clt = risk.fixed_sequence(p_values(risk.clt_p_value), promise.delta) - 1
        alternatives.insert(2, alternative("clt", clt))
    return Certification(
        cell=cells[chosen] if certified else None,
        p_value=float(betting[chosen]) if certified else None,
        recall_loss=float(recall_loss[:, chosen].mean()) if certified else None,
        harm=float(harm[:, chosen].mean()) if certified else None,
        n_recall=recall_loss.shape[0],
        n_harm=harm.shape[0],
        tested=len(cells),
        certified=certified,
        labels_needed=None if certified else _needed(recall_loss, harm / largest, largest, promise),
        alternatives=tuple(alternatives),
    )


def _sequence(ordering: Grid, promise: Promise) -> list[Cell]:
    """The cells worth testing, safest first, by the ordering queries alone."""
    means = ordering.means
    if np.isnan(means.recall_loss).any():
        raise CalibrationError(
            "no query to choose on has a relevant passage in the baseline of recall loss; label "
            "more queries, or deepen the retrieval"
        )
    share_used = means.recall_loss / promise.alpha
    if promise.beta is not None:
        share_used = np.maximum(share_used, means.harm / promise.beta)
    order = risk.pareto_order(share_used.ravel(), means.udcg_strict.ravel())
    width = means.udcg_strict.shape[1]
    return [(int(flat) // width, int(flat) % width) for flat in order]


def _largest_harm(grid: Grid) -> float:
    """The most harm that any context of the grid could do: a bound known without the labels."""
    worst = max(float(-grid.labels.worst_utility), 1e-9)
    return worst * float(discounts(int(grid.survival.ks[-1])).sum())


def udcg_at(grid: Grid, cells: Sequence[Cell]) -> FloatArray:
    """Strict UDCG of every query at some cells, shape (n_q, n_cells)."""
    kept = grid.survival.kept(cells)
    gains = grid.labels.utilities * discounts(grid.labels.grades.shape[1])
    running = np.concatenate([np.zeros((gains.shape[0], 1)), gains.cumsum(axis=1)], axis=1)
    return np.take_along_axis(running, kept, axis=1)


def _needed(
    recall_loss: FloatArray, harm_share: FloatArray, largest: float, promise: Promise
) -> int | None:
    """Test queries for every promise; None where one of them cannot be kept."""
    needed = risk.labels_needed(recall_loss[:, 0], promise.alpha, promise.delta)
    if needed is None or promise.beta is None or promise.beta >= largest:
        return needed
    limit = promise.beta / largest
    for_harm = risk.labels_needed(harm_share[:, 0], limit, promise.delta)
    return None if for_harm is None else max(needed, for_harm)
