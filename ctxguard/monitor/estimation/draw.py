"""Which passages people grade, and with what probability each.

One budget of grades serves every metric. Some requests are opened: people grade their first
passage; if it is irrelevant they go on down to the first relevant one, with one coin a request;
below that each passage, served or dropped, has a coin of its own. The rest of the budget goes to
single passages of other requests. Coins and single passages are drawn in proportion to m, what a
grade can change: m² = Σ over metrics of λ·(weight/bar)²·f(1 − f), where f is P(relevant) as last
month's grades predict it. Pure: no I/O, no clock, no logging.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import FloatArray
from ctxguard.monitor.estimation.joint import KEPT, POOL, Population, basis, none_above, predicted
from ctxguard.monitor.estimation.relevance import NEAR, IntArray, Model, rank_group

BARS = {"precision": 0.05, "utility": 0.21, "recall": 0.12}
"""Half-widths that a month of grades is to reach."""

RECALL_WEIGHT = 0.8
"""λ of recall; that of precision and UDCG is 1. Recall is what costs."""

OPENED_SHARE = 0.3
"""Requests opened, as a share of the budget."""
GO_ON = 0.6
"""Probability of going on below an irrelevant first passage."""

SINGLE_SHARE = 0.12
"""Share of the budget that goes to single passages of requests that are not opened."""
MOST_COIN = 1.0
MOST_FROM_THE_TOP = 0.45
"""Share of the budget that runs from the top may take."""
LONGEST_RUN = 3.5
"""If a run costs more grades than this, whole lists are graded instead."""
_CERTAIN = 1e9
_LEAST_DROPPED = 0.2
"""Least share of dropped passages in what grades can change: by last month's figures, which may be
wrong, recall may seem to need none of them."""
_LEAST_SPREAD = 0.03
"""Floor of f(1 − f): a judge that was never seen to err may."""
_UTILITY = 1.5
"""Difference in utility between a relevant passage and another."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a budget of grades is spent.

    Attributes:
        n_opened: Requests to open.
        go_on: Probability of going on below an irrelevant first passage.
        coin: Factor of m for the coins below a relevant passage.
        n_singles: Single passages of other requests.
        expected: Expected grades of the opened requests.
    """

    n_opened: int
    go_on: float
    coin: float
    n_singles: int
    expected: float


Worth = tuple[FloatArray, FloatArray]
"""What a grade of each judged passage can change, m: shape (n, k), of the served by rank, 0 past
the last; and (n, 2, 2), of one dropped passage divided by the inverse of its probability of being
judged, by nearness and verdict."""

UNIT = np.dtype(
    [*((name, np.intp) for name in ("request", "rank", "group", "verdict")), ("probability", "f8")]
)
"""A passage that can be drawn by itself: the row of the population, then as of ``joint.PASSAGE``,
with rank 0 for the dropped of a kind, and the probability with which it, or any of these, is
drawn."""


def worth(population: Population, model: Model, recall_weight: float = RECALL_WEIGHT) -> Worth:
    """Compute m for every judged passage of n requests."""
    served, dropped = predicted(population, model)
    terms = basis(population, model)
    kept, pool = (float(population.weight @ terms[:, one]) for one in (KEPT, POOL))
    recall = kept / pool if pool > 0.0 else 1.0
    per_request = max(pool, 1e-9) / population.weight.sum()
    n_served = np.maximum(population.n_served, 1)[:, None]
    discounts = 1.0 / np.log2(np.arange(2, served.shape[1] + 2))
    squares = (
        (1.0 / n_served / BARS["precision"]) ** 2
        + (_UTILITY * discounts / BARS["utility"]) ** 2
        + recall_weight * ((1.0 - recall) / per_request / BARS["recall"]) ** 2
    )
    of_dropped = recall_weight * (recall / per_request / BARS["recall"]) ** 2
    m_served = np.where(population.verdict >= 0, np.sqrt(squares * _spread(served)), 0.0)
    m_dropped = np.sqrt(of_dropped * _spread(dropped))
    below, of_pool = float(m_served[:, 1:].sum()), float((m_dropped * population.dropped).sum())
    least = _LEAST_DROPPED / (1.0 - _LEAST_DROPPED) * below
    return m_served, m_dropped * (max(1.0, least / of_pool) if of_pool > 0.0 else 1.0)


def plan(
    population: Population, model: Model, m: Worth, budget: int, *, whole: bool = False
) -> Plan:
    """Spend a budget of grades on n ≥ 1 requests.

    Args:
        model: What earlier grades predict.
        m: What a grade of each of their passages can change.
        whole: Whether to grade all that is judged of the opened requests, and nothing else.
    """
    served, _ = predicted(population, model)
    is_later = (population.verdict >= 0) & (np.arange(served.shape[1]) > 0)
    goes_on_to = np.where(is_later, none_above(served), 0.0)
    run = float(goes_on_to.sum(axis=1).mean())
    lists = whole or 1.0 + run > LONGEST_RUN
    go_on = 1.0 if lists else GO_ON
    first = served[:, :1]
    reached = np.where(is_later, first + go_on * (1.0 - first - goes_on_to), 0.0)
    ended = (first + go_on * (1.0 - first)).sum(axis=1)[:, None, None] * population.dropped

    def each(coin: float) -> float:
        """Return expected grades of an opened request."""
        below = np.sum(reached * np.minimum(coin * m[0], 1.0), axis=1)
        of_size = np.minimum(coin * m[1], population.chance[:, None, None])
        below += np.sum(ended * of_size, axis=(1, 2))
        return 1.0 + go_on * run + float(below.mean())

    if lists:
        coin = _CERTAIN if whole else 1.0
        most = budget / each(coin)
    else:
        most = min(OPENED_SHARE, MOST_FROM_THE_TOP / (1.0 + go_on * run)) * budget
        below_top = (1.0 - SINGLE_SHARE) * budget / most
        coin = bisected(lambda coin: each(coin) - below_top, 0.0, MOST_COIN)
    n_opened = min(max(round(most), 1), len(population.verdict))
    expected = n_opened * each(coin)
    n_singles = 0 if whole else max(round(budget - expected), 0)
    return Plan(n_opened, go_on, coin, n_singles, expected)


def bisected(rising: Callable[[float], float], low: float, high: float) -> float:
    """Find where a rising function is 0, or the nearer end."""
    for _ in range(30):
        middle = (low + high) / 2.0
        low, high = (middle, high) if rising(middle) < 0.0 else (low, middle)
    return (low + high) / 2.0


def units(
    population: Population, m: Worth, is_opened: NDArray[np.bool_], n_singles: int
) -> NDArray[np.void]:
    """List the passages of requests that are not opened, as ``UNIT``.

    They are sorted by rank group and verdict, so that a systematic sample spreads over these.
    """
    served, dropped = m
    row, place = np.nonzero((population.verdict >= 0) & ~is_opened[:, None])
    row, place = row[place > 0], place[place > 0]
    kinds = np.argwhere((population.dropped > 0.0) & ~is_opened[:, None, None])
    found = np.zeros(len(row) + len(kinds), UNIT)
    for name, of_served, of_dropped in (
        ("request", row, kinds[:, 0]),
        ("rank", place + 1, 0),
        ("group", rank_group(place + 1), NEAR + kinds[:, 1]),
        ("verdict", population.verdict[row, place], kinds[:, 2]),
        ("probability", served[row, place], (dropped * population.dropped)[tuple(kinds.T)]),
    ):
        found[name][: len(row)], found[name][len(row) :] = of_served, of_dropped
    found = found[np.lexsort((found["request"], found["verdict"], found["group"]))]
    found["probability"] = _scaled(found["probability"], n_singles)
    return found


def systematic(probability: FloatArray, start: float) -> IntArray:
    """Draw a systematic sample: one of each unit length of cumulated probability.

    Args:
        probability: Shape (u,), each at most 1.
        start: Uniform in [0, 1).

    >>> systematic(np.array([0.5, 0.5, 1.0, 0.25]), 0.6).tolist()
    [1, 2]
    """
    ends = np.cumsum(probability)
    points = np.arange(start, ends[-1] if len(ends) else 0.0)
    return np.asarray(np.searchsorted(ends, points, side="right"), np.intp)


def _scaled(size: FloatArray, n: int) -> FloatArray:
    """Scale sizes to probabilities that add up to n, none above 1."""
    if n >= len(size):
        return np.ones(len(size))
    chance = size * n / size.sum()
    for _ in range(10):
        certain = chance >= 1.0
        rest = size[~certain].sum()
        if not certain.any() or rest <= 0.0:
            break
        chance = np.where(certain, 1.0, size * (n - certain.sum()) / rest)
    return np.asarray(np.minimum(chance, 1.0))


def _spread(p: FloatArray) -> FloatArray:
    return np.maximum(p * (1.0 - p), _LEAST_SPREAD)
