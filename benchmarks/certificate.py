"""Simulate how often a certificate is false, and what it costs in utility.

    python -m benchmarks.certificate --repeats 1000 --json results.json

The mean risks of a simulated population of queries are known for each of about a hundred settings.
Each repeat labels n of the queries, lets every method choose a setting, and compares the choice
with its true risk. Every method gets all n labels; methods that need an order of the settings use
a share of them for it.

Populations:
    retrieval    rankings with relevant passages and falling scores; the grid is k × min_ratio,
                 and the promise is recall loss ≤ alpha
    boundary     the mean of every setting is just above alpha, with rare, fractional losses, so
                 that every certificate is false
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from benchmarks._command import CONSOLE, command, ended, figures
from benchmarks._risk_baselines import (
    bonferroni,
    clt_p_value,
    conformal_risk_control,
    hoeffding_bentkus_p_value,
)
from ctxguard.core.types import FloatArray
from ctxguard.measure.risk import betting_p_value, fixed_sequence, pareto_order
from ctxguard.measure.rows import IntArray

POPULATION_SIZE = 20_000
ALPHA = 0.1
DELTA = 0.1
ORDERING_SHARE = 0.2
MIN_LABELS = 10
POOL_SIZE = 60
KS = (1, 2, 3, 5, 7, 10, 12, 15, 17, 20)
MIN_RATIOS = (0.0, 0.1, 0.2, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7)
DISTRACTOR_COST = 0.1


@dataclass(frozen=True)
class Population:
    """A finite population of queries, whose true risks are its means.

    Attributes:
        losses: Of every query at every setting, shape (n_queries, n_settings); their mean is
            promised to be at most ``ALPHA``.
        utility: Shape (n_queries, n_settings).
        fallback: The setting that is served if nothing is certified.
    """

    name: str
    losses: FloatArray
    utility: FloatArray
    fallback: int

    def broken(self) -> NDArray[np.bool_]:
        """Whether each setting breaks the promise on the population, shape (n_settings,)."""
        return np.asarray(self.losses.mean(axis=0) > ALPHA)


@dataclass(frozen=True)
class Sample:
    """The labelled queries of one repeat.

    Attributes:
        whole: Losses of all labelled queries.
        testing: Losses of those that do not order.
        order: Settings, safest first, by the queries that order.
        utility: Mean utility of every setting on all labelled queries.
    """

    whole: FloatArray
    testing: FloatArray
    order: IntArray
    utility: FloatArray


@dataclass(frozen=True)
class Outcome:
    """One method over all repeats of one population at one n.

    Attributes:
        certified: Share of repeats in which it chose a setting.
        violations: Share of repeats in which its choice breaks the promise.
        price: Mean utility lost against the best setting that keeps the promise, with the
            fallback served if nothing is chosen; None if no setting keeps it.
    """

    population: str
    method: str
    n: int
    repeats: int
    certified: float
    certified_error: float
    violations: float
    violations_error: float
    price: float | None
    price_error: float | None


PValue = Callable[[FloatArray, float], FloatArray]
Method = Callable[[Sample], IntArray]


def retrieval(seed: int) -> tuple[FloatArray, FloatArray]:
    """Recall loss and utility at every (k, min_ratio)."""
    rng = np.random.default_rng(seed)
    ranks = np.arange(1, POOL_SIZE + 1)
    discount = 1.0 / np.log2(ranks + 1)
    # The easier the query, the nearer to the top its relevant passages.
    ease = rng.beta(2.0, 1.2, (POPULATION_SIZE, 1))
    head = rng.uniform(0.3, 0.95, (POPULATION_SIZE, 1)) * ease
    chance = head * np.exp(-(ranks - 1) / (1.0 + 6.0 * (1.0 - ease))) + 0.002
    relevant = rng.random(chance.shape) < chance
    # A query without relevant passages has no recall; it is given one within the largest k.
    bare = np.flatnonzero(~relevant.any(axis=1))
    relevant[bare, rng.integers(0, max(KS), bare.size)] = True
    gaps = rng.exponential(0.05, relevant.shape) * np.where(relevant, 0.7, 1.2)
    gaps[:, 0] = 0.0
    ratio = np.exp(-np.cumsum(gaps, axis=1))
    total = relevant.sum(axis=1)
    gain = np.where(relevant, discount, 0.0)
    harm = np.where(relevant, 0.0, DISTRACTOR_COST * discount)
    recall_losses, utilities = [], []
    for min_ratio in MIN_RATIOS:
        for k in KS:
            kept = (ratio >= min_ratio) & (ranks <= k)
            recall_losses.append(1.0 - (relevant & kept).sum(axis=1) / total)
            utilities.append((gain * kept).sum(axis=1) - (harm * kept).sum(axis=1))
    return np.column_stack(recall_losses), np.column_stack(utilities)


def boundary(seed: int, alpha: float, n_settings: int = 100) -> tuple[FloatArray, FloatArray]:
    """Losses with means just above alpha, from nearly all-or-nothing to mild."""
    rng = np.random.default_rng(seed)
    rate = np.linspace(alpha + 0.01, 0.6, n_settings)
    severity = alpha / rate
    losses = rng.beta(2.0 * severity, 2.0 * (1.0 - severity), (POPULATION_SIZE, n_settings))
    losses[rng.random(losses.shape) >= rate] = 0.0
    # Scaled towards 0 or towards 1, so that the mean is the target.
    target, mean = alpha * (1.0 + 1e-6), losses.mean(axis=0)
    losses = np.where(
        mean > target, losses * target / mean, 1 - (1 - losses) * (1 - target) / (1 - mean)
    )
    return np.clip(losses, 0.0, 1.0), np.tile(
        np.linspace(0.0, 1.0, n_settings), (POPULATION_SIZE, 1)
    )


def populations(seed: int) -> tuple[Population, ...]:
    """The two populations; equal seeds give equal ones."""
    recall_loss, utility = retrieval(seed)
    hair_above, rising = boundary(seed, ALPHA)
    everything = len(KS) - 1
    return (
        Population("retrieval", recall_loss, utility, everything),
        Population("boundary", hair_above, rising, 0),
    )


def draw(population: Population, n: int, rng: np.random.Generator) -> Sample:
    """Label n queries, and order the candidates on the first of them."""
    rows = rng.integers(0, POPULATION_SIZE, n)
    n_ordering = round(n * ORDERING_SHARE)
    ordering, testing = rows[:n_ordering], rows[n_ordering:]
    utility = population.utility[rows].mean(axis=0)
    losses = population.losses
    estimated_risk = clt_p_value(losses[ordering], ALPHA)
    return Sample(
        whole=losses[rows],
        testing=losses[testing],
        order=pareto_order(estimated_risk, population.utility[ordering].mean(axis=0)),
        utility=utility,
    )


def in_sequence(p_value: PValue) -> Method:
    """Fixed-sequence testing of the ordered candidates with one kind of p-value."""

    def certify(sample: Sample) -> IntArray:
        p_values = p_value(sample.testing[:, sample.order], ALPHA)
        return sample.order[: fixed_sequence(p_values, DELTA)]

    return certify


def all_at_once(sample: Sample) -> IntArray:
    """Hoeffding–Bentkus with Bonferroni over the grid; needs no order, so tests on all labels."""
    return bonferroni(hoeffding_bentkus_p_value(sample.whole, ALPHA), DELTA)


def conformal(sample: Sample) -> IntArray:
    """The prefix of the order that conformal risk control allows."""
    return sample.order[: conformal_risk_control(sample.testing[:, sample.order], ALPHA)]


def uncorrected(sample: Sample) -> IntArray:
    """The settings whose means on the labelled queries keep the promise."""
    return np.flatnonzero(sample.whole.mean(axis=0) <= ALPHA)


METHODS: Mapping[str, Method] = {
    "betting, fixed sequence": in_sequence(betting_p_value),
    "Hoeffding-Bentkus, fixed sequence": in_sequence(hoeffding_bentkus_p_value),
    "Hoeffding-Bentkus, Bonferroni": all_at_once,
    "CLT, fixed sequence": in_sequence(clt_p_value),
    "conformal risk control": conformal,
    "uncorrected": uncorrected,
}
GUARANTEED = tuple(METHODS)[:3]
"""The methods that promise at most delta violations at every n."""


def simulate(population: Population, n: int, repeats: int, seed: int) -> list[Outcome]:
    """Every method on the same ``repeats`` samples of n labels."""
    rng = np.random.default_rng([seed, n])
    broken = population.broken()
    utility = population.utility.mean(axis=0)
    best = None if broken.all() else float(utility[~broken].max())
    choices: dict[str, list[int]] = {method: [] for method in METHODS}
    for _ in range(repeats):
        sample = draw(population, n, rng)
        for method, certify in METHODS.items():
            certified = certify(sample)
            # Every certified setting keeps its promise at once, so any labels may choose.
            choice = certified[sample.utility[certified].argmax()] if certified.size else -1
            choices[method].append(int(choice))
    outcomes = []
    for method, chosen in choices.items():
        settings = np.array(chosen)
        named = settings >= 0
        served = np.where(named, settings, population.fallback)
        certified_share, certified_error = _mean_and_error(named)
        violations, violations_error = _mean_and_error(named & broken[served])
        price, price_error = (
            (None, None) if best is None else _mean_and_error(best - utility[served])
        )
        outcomes.append(
            Outcome(
                population=population.name,
                method=method,
                n=n,
                repeats=repeats,
                certified=certified_share,
                certified_error=certified_error,
                violations=violations,
                violations_error=violations_error,
                price=price,
                price_error=price_error,
            )
        )
    return outcomes


def _mean_and_error(values: NDArray[Any]) -> tuple[float, float]:
    return float(values.mean()), float(values.std() / sqrt(values.size))


def guarantee_is_kept(outcome: Outcome) -> bool:
    """Whether the violations are at most delta, within two Monte Carlo errors at delta itself."""
    return outcome.violations <= DELTA + 2.0 * sqrt(DELTA * (1.0 - DELTA) / outcome.repeats)


def table(outcomes: Sequence[Outcome]) -> Table:
    """Lay out the outcomes, each figure with its Monte Carlo error."""
    title = f"alpha {ALPHA}, delta {DELTA}; ± one Monte Carlo error"
    columns = ("certified", "violations", "utility price")
    result = figures(title, ("population", "n", "method"), columns)
    for each in outcomes:
        price = "no setting is safe"
        if each.price is not None:
            price = f"{each.price:.3f} ± {each.price_error:.3f}"
        certified = f"{each.certified:.3f} ± {each.certified_error:.3f}"
        violations = f"{each.violations:.3f} ± {each.violations_error:.3f}"
        row = (each.population, str(each.n), each.method, certified, violations, price)
        result.add_row(*row, end_section=each.method == list(METHODS)[-1])
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulation; the exit status is 1 if a guaranteed method breaks its promise."""
    parser = command("Simulate how often a certificate is false, and its cost.", seed=True)
    parser.add_argument("--repeats", type=int, default=1000, help="samples per n (default 1000)")
    parser.add_argument("--labels", type=int, nargs="+", default=[50, 100, 200, 400], metavar="N")
    options = parser.parse_args(arguments)
    if options.repeats < 1 or min(options.labels) < MIN_LABELS:
        parser.error(f"at least 1 repeat and {MIN_LABELS} labels are needed")
    outcomes = [
        outcome
        for population in populations(options.seed)
        for n in options.labels
        for outcome in simulate(population, n, options.repeats, options.seed)
    ]
    CONSOLE.print(table(outcomes))
    broken = [
        f"{each.method}, n {each.n}: {each.violations:.3f} violations"
        for each in outcomes
        if each.method in GUARANTEED and not guarantee_is_kept(each)
    ]
    report = {
        "alpha": ALPHA,
        "delta": DELTA,
        "ordering_share": ORDERING_SHARE,
        "population_size": POPULATION_SIZE,
        "repeats": options.repeats,
        "seed": options.seed,
        "guarantee_kept": not broken,
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    return ended(options, report, broken)


if __name__ == "__main__":
    sys.exit(main())
