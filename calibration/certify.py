"""Test the policies of a grid, and choose among those that are certified.

Policies are ordered by one set of queries and tested on another (DESIGN.md §9): given the first,
the second is an independent sample, as the test requires.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from calibration import risk
from calibration.grid import Grid, GridIndex
from calibration.pool_labels import discounts
from ctxguard.core.types import FloatArray
from ctxguard.errors import CalibrationError, ConfigurationError


@dataclass(frozen=True)
class Promise:
    """What a certificate must say.

    Attributes:
        alpha: Limit on the mean recall loss, in (0, 1).
        beta: Limit on the mean harm, > 0; None for no promise on harm.
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
class RuleChoice:
    """The policy that one rule chooses.

    Attributes:
        rule: ``betting``, which certifies, or ``uncorrected``: the riskiest policy whose plain
            means on the test queries keep the promise.
        grid_index: Its choice; None if it allows no policy.
        tested: Means of udcg_strict, recall_loss and harm on the test queries; None if it
            allows no policy.
    """

    rule: Literal["betting", "uncorrected"]
    grid_index: GridIndex | None
    tested: dict[str, float] | None


@dataclass(frozen=True)
class Certification:
    """The outcome of testing a grid's policies on queries that did not order them.

    Attributes:
        grid_index: The chosen policy; None if nothing could be certified, as are the next three.
        p_value: Its p-value.
        recall_loss: Its mean recall loss on the test queries.
        harm: Its mean harm on the test queries.
        n_recall: Test queries on which recall loss is defined.
        n_harm: All test queries.
        tested: Policies in the sequence.
        certified: How many of them passed.
        labels_needed: If nothing is certified, how many test queries like these would certify
            the safest policy; None if no number would, or if something is certified.
        rule_choices: What was chosen, and what would be chosen without a test.
    """

    grid_index: GridIndex | None
    p_value: float | None
    recall_loss: float | None
    harm: float | None
    n_recall: int
    n_harm: int
    tested: int
    certified: int
    labels_needed: int | None
    rule_choices: tuple[RuleChoice, ...]


def certify(ordering: Grid, testing: Grid, promise: Promise, *, seed: int = 0) -> Certification:
    """Order policies on one set of queries, test them on another, choose among those that pass.

    Fixed-sequence testing with betting p-values along the Pareto front of risk and strict UDCG,
    safest first. A policy whose plain mean on the test queries breaks the promise is not
    certified whatever its p-value: betting may stop at its luckiest moment, which is valid at
    level delta, but a promise must not contradict its own evidence. Of the certified policies
    the one with the highest strict UDCG over all these queries is chosen. The certificate allows
    this, since it holds for all of them at once.

    Args:
        ordering: The grid over the queries that order it.
        testing: The same policies over the queries that test them, which must not have been used
            to fit or order them.
        promise: What is to be certified.
        seed: Shuffles the test queries, since betting needs an order fixed beforehand.

    Raises:
        CalibrationError: no test query has a relevant passage in the baseline.
    """
    indices = _sequence(ordering, promise)
    tested = testing.at(indices)
    order = np.random.default_rng(seed).permutation(tested.harm.shape[0])
    recall_loss, harm = tested.recall_loss[order], tested.harm[order]
    defined = ~np.isnan(recall_loss[:, 0])
    if not defined.any():
        raise CalibrationError(
            f"none of the {defined.size} test queries has a relevant passage in the baseline, "
            "so recall loss cannot be tested; label more queries, or deepen the retrieval"
        )
    recall_loss = recall_loss[defined]
    largest = _largest_harm(testing)

    p_values = risk.betting_p_value(recall_loss, promise.alpha)
    kept_promise = recall_loss.mean(axis=0) <= promise.alpha
    if promise.beta is not None:
        kept_promise &= harm.mean(axis=0) <= promise.beta
        limit = promise.beta / largest
        # A harm that cannot exceed the limit keeps the promise without any evidence.
        if limit < 1.0:
            harm_p_values = risk.betting_p_value(harm / largest, limit)
            p_values = risk.joint_p_value(p_values, harm_p_values)
    p_values = np.where(kept_promise, p_values, 1.0)
    n_certified = risk.fixed_sequence(p_values, promise.delta)

    def choice(rule: Literal["betting", "uncorrected"], position: int) -> RuleChoice:
        if position < 0:
            return RuleChoice(rule, None, None)
        means = {
            "udcg_strict": float(tested.udcg_strict[:, position].mean()),
            "recall_loss": float(recall_loss[:, position].mean()),
            "harm": float(harm[:, position].mean()),
        }
        return RuleChoice(rule, indices[position], means)

    n_ordering, n_testing = len(ordering.labels), len(testing.labels)
    mean_udcg = (
        np.array([ordering.means.udcg_strict[index] for index in indices]) * n_ordering
        + tested.udcg_strict.sum(axis=0)
    ) / (n_ordering + n_testing)
    chosen = int(np.argmax(mean_udcg[:n_certified])) if n_certified else -1
    riskiest = int(np.flatnonzero(kept_promise)[-1]) if kept_promise.any() else -1
    return Certification(
        grid_index=indices[chosen] if n_certified else None,
        p_value=float(p_values[chosen]) if n_certified else None,
        recall_loss=float(recall_loss[:, chosen].mean()) if n_certified else None,
        harm=float(harm[:, chosen].mean()) if n_certified else None,
        n_recall=recall_loss.shape[0],
        n_harm=harm.shape[0],
        tested=len(indices),
        certified=n_certified,
        labels_needed=(
            None if n_certified else _needed(recall_loss, harm / largest, largest, promise)
        ),
        rule_choices=(choice("betting", chosen), choice("uncorrected", riskiest)),
    )


def _sequence(ordering: Grid, promise: Promise) -> list[GridIndex]:
    """The policies worth testing, safest first, by the ordering queries alone."""
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
    return [divmod(flat, width) for flat in order.tolist()]


def _largest_harm(grid: Grid) -> float:
    """The most harm that any context of the grid could do: a bound known without the labels."""
    worst = max(-grid.labels.worst_utility, 1e-9)
    return worst * float(discounts(int(grid.keep_table.ks[-1])).sum())


def _needed(
    recall_loss: FloatArray, harm_share: FloatArray, largest: float, promise: Promise
) -> int | None:
    """Test queries for every promise; None if one of them cannot be kept."""
    needed = risk.labels_needed(recall_loss[:, 0], promise.alpha, promise.delta)
    if needed is None or promise.beta is None or promise.beta >= largest:
        return needed
    limit = promise.beta / largest
    for_harm = risk.labels_needed(harm_share[:, 0], limit, promise.delta)
    return None if for_harm is None else max(needed, for_harm)
