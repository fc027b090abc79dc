"""Chooses the candidates to ask an assessor about, and updates P(relevant) with its answers.

Pure: numpy alone, no I/O, no clock. An assessor's number is never a probability here. Calibration
says how far the normal scores of its ranks stand apart for relevant and other candidates of equal
P, and an answer moves the log-odds by that likelihood ratio (DESIGN.md §5).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.scores import discounts, log_odds, logistic
from ctxguard.core.types import FloatArray, StageFailure
from ctxguard.errors import ConfigurationError

ASSESS = "assess"
"""The stage's name in answers and metrics."""

DEFAULT_PER_SECOND = 100.0
"""How many candidates a process may ask about per second: five requests of 20."""
DEFAULT_QUESTIONS = ("relevant", "answers")
"""The names of the questions that a model is asked about each candidate."""

ANSWER = "answer_"
"""The prefix of an answer's name among a ranking's signals. No model of P sees them: it decides
before anybody is asked."""

BINS = 16
"""The number of bins of answers over which the value of asking is averaged."""

KNOTS = 64
"""The most answers a profile keeps of the distribution from which ranks are found."""

FEWEST_RELEVANT = 5
"""No effect is fitted with fewer relevant, or fewer other, candidates that were asked about."""

DOUBT = 2.5
"""Standard errors up to which a fitted effect counts as none: δ = δ̂ · (1 − (DOUBT · se / δ̂)²)₊.
With 20 labels an answer of no worth is asked about 1% of candidates in the worst of 390 runs; by a
bound of δ̂ − 1.64 se it was 7%, and good answers weighed too little."""

_LOG_ODDS = 12.0
"""The largest |log-odds| of a candidate: a probability of exactly 0 or 1 could not be moved."""

_LEAST_DEVIATION = 0.1
"""The smallest deviation of an answer's noise: no labels show that answers are never wrong."""

_LEAST_MASS = 1e-12
"""The smallest probability of a bin, so that no answer is impossible."""

_TAIL = 2.5
"""Standard deviations beyond the two means at which the outer bins begin."""


@dataclass(frozen=True)
class AnswerModel:
    """The information that an assessor's answers add to P, stored as plain numbers in a profile.

    The normal score z of an answer's rank is α + β · logit P + γ · place + δ · relevant + σ ·
    noise.

    Attributes:
        answers: Distinct answers of the asked training candidates, ascending, at most ``KNOTS``.
        scores: The normal score of each one's mid-rank, ascending.
        intercept: α.
        slope: β, of the log-odds that the candidate had before it was asked about.
        place: γ, of the candidate's place in the call, from −½ (first) to ½ (last).
        effect: δ, shrunk by the doubt about it; 0 if the answers are not shown to say anything.
        deviation: σ, > 0.

    Raises:
        ConfigurationError: at construction, for numbers that form no model.
    """

    answers: tuple[float, ...]
    scores: tuple[float, ...]
    intercept: float
    slope: float
    effect: float
    deviation: float
    place: float = 0.0

    def __post_init__(self) -> None:
        for name, values in (("answers", self.answers), ("scores", self.scores)):
            if not values or not np.isfinite(values).all() or (np.diff(values) <= 0.0).any():
                raise ConfigurationError(
                    f"{name} {values!r} must be finite numbers in ascending order"
                )
        if len(self.answers) != len(self.scores):
            raise ConfigurationError(
                f"answers has {len(self.answers)} numbers and scores {len(self.scores)}"
            )
        if not np.isfinite((self.intercept, self.slope, self.place)).all():
            raise ConfigurationError("intercept, slope and place must be finite numbers")
        if not 0.0 <= self.effect < math.inf or not 0.0 < self.deviation < math.inf:
            raise ConfigurationError("effect must be ≥ 0, deviation > 0, and both finite")

    @property
    def distance(self) -> float:
        """d′ of the answers given P: the effect in standard deviations."""
        return self.effect / self.deviation

    @cached_property
    def _bins(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Probabilities of the bins of an answer, and their log-likelihood ratios.

        Returns:
            Shape (BINS,) each: of a relevant candidate, of another, ln of their ratio. An answer in
            bins tells a little less than the answer, and makes E[P′] = P exactly.
        """
        edges = np.linspace(-_TAIL, self.distance + _TAIL, BINS - 1).tolist()
        masses = [
            np.maximum(np.diff([0.0, *map(NormalDist(mean).cdf, edges), 1.0]), _LEAST_MASS)
            for mean in (self.distance, 0.0)
        ]
        masses = [mass / mass.sum() for mass in masses]
        return masses[0], masses[1], np.log(masses[0] / masses[1])

    @classmethod
    def fit(
        cls,
        answers: FloatArray,
        probabilities: FloatArray,
        relevant: NDArray[np.bool_],
        groups: NDArray[np.int64],
        places: FloatArray | None = None,
    ) -> Self | None:
        """Fit by one regression of z on (1, logit P, relevant, place).

        Args:
            answers: Shape (n,), of asked candidates; NaN where the assessor refused.
            probabilities: Shape (n,), P(relevant) out of fold.
            relevant: Shape (n,).
            groups: Shape (n,), the question of each candidate. Its candidates count as one
                observation in the standard error of δ (Liang and Zeger, 1986).
            places: Shape (n,), drawn at random, in [−½, ½]; None if the answers know of no place.

        Returns:
            None if there are too few answers about relevant or other candidates.
        """
        answered = np.isfinite(answers) & np.isfinite(probabilities)
        answers, probabilities = answers[answered], probabilities[answered]
        y, groups = relevant[answered].astype(np.float64), groups[answered]
        if min(y.sum(), y.size - y.sum()) < FEWEST_RELEVANT or np.ptp(answers) == 0.0:
            return None
        knots, scores = _knots(answers)
        z = np.interp(answers, knots, scores)
        columns = [np.ones(y.size), bounded_log_odds(probabilities), y]
        if places is not None:
            columns.append(places[answered])
        design = np.column_stack(columns)
        inverse = np.linalg.pinv(design.T @ design)
        coefficients = inverse @ (design.T @ z)
        residuals = z - design @ coefficients
        freedom = max(y.size - len(columns), 1)
        variance = float(residuals @ residuals) / freedom
        distinct, group = np.unique(groups, return_inverse=True)
        sums = np.zeros((distinct.size, len(columns)))
        np.add.at(sums, group, design * residuals[:, None])
        n = distinct.size
        clustered = inverse @ (sums.T @ sums) @ inverse * (n / max(n - 1, 1))
        # Few questions can agree by chance: never below the error of independent candidates.
        error = math.sqrt(max(clustered[2, 2], variance * inverse[2, 2]))
        effect = max(float(coefficients[2]), 0.0)
        shown = 0.0 if effect == 0.0 else max(1.0 - (DOUBT * error / effect) ** 2, 0.0)
        return cls(
            tuple(knots.tolist()),
            tuple(scores.tolist()),
            float(coefficients[0]),
            float(coefficients[1]),
            shown * effect,
            max(math.sqrt(variance), _LEAST_DEVIATION),
            0.0 if places is None else float(coefficients[3]),
        )

    def updated(
        self, probabilities: FloatArray, answers: FloatArray, places: FloatArray | None = None
    ) -> FloatArray:
        """Return P(relevant) after the answers, shape (n,).

        An answer that is not finite leaves P as it is; ``places`` as for `fit`.
        """
        answered = np.isfinite(answers)
        if not answered.any() or self.effect == 0.0:
            return probabilities
        before = bounded_log_odds(probabilities[answered])
        z = np.interp(answers[answered], self.answers, self.scores)
        if places is not None:
            z = z - self.place * np.nan_to_num(places[answered])
        unexplained = z - self.intercept - self.slope * before - 0.5 * self.effect
        after = probabilities.copy()
        after[answered] = logistic(before + self.effect / self.deviation**2 * unexplained)
        return after

    def values(
        self, probabilities: FloatArray, k: int, threshold: float, first: int | None = None
    ) -> FloatArray:
        """Return the expected gain in utility from asking about each candidate alone.

        V_i = (E[L(P with P_i → P_i′)] − L(P)) / (1 − t), with L(P) = Σ_r D_r · max(P_(r) − t, 0)
        over the first k of the list sorted again; the first is kept whatever its P. In units of a
        relevant passage at rank 1.

        Args:
            probabilities: Shape (n,), in any order.
            k: The most passages that are kept.
            threshold: t, the least P that is kept, in [0, 1).
            first: Only the first so many by P are valued, others are 0; None for all.
        """
        n = probabilities.size
        if n == 0 or self.effect == 0.0:
            return np.zeros(n)
        order = np.argsort(-probabilities, kind="stable")
        ranked = probabilities[order]
        if_relevant, if_not, ratios = self._bins
        own = ranked[:first]
        after = logistic(bounded_log_odds(own)[:, None] + ratios)
        chance = own[:, None] * if_relevant + (1.0 - own)[:, None] * if_not
        # The first k of a changed list are the new value or among the first k + 1.
        at = np.arange(own.size)
        lists = np.tile(ranked[: k + 1], (own.size, BINS, 1))
        lists[at, :, np.minimum(at, k)] = after
        gains = _utilities(lists, k, threshold) - _utilities(ranked, k, threshold)
        expected = (chance * gains).sum(axis=1)
        values = np.zeros(n)
        values[order[:first]] = np.maximum(expected, 0.0) / (1.0 - threshold)
        return values


def to_ask(values: FloatArray, price: float, most: int) -> NDArray[np.int64]:
    """Choose positions worth asking about, by value: those above the price, at most ``most``.

    Of equal values the first come first; a value of 0 is never asked, not even for nothing.
    """
    order = np.argsort(-values, kind="stable")
    n = int(np.count_nonzero(values > max(price, 0.0)))
    return order[: min(n, most)]


def bounded_log_odds(probabilities: FloatArray) -> FloatArray:
    """Return ln(P / (1 − P)), at most 12 in magnitude."""
    return log_odds(probabilities).clip(-_LOG_ODDS, _LOG_ODDS)


def _knots(answers: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Thin distinct answers evenly by rank; also return the normal scores of their mid-ranks."""
    distinct, counts = np.unique(answers, return_counts=True)
    ranks = (np.cumsum(counts) - 0.5 * counts) / answers.size
    if distinct.size > KNOTS:
        wanted = np.linspace(ranks[0], ranks[-1], KNOTS)
        kept = np.unique(np.searchsorted(ranks, wanted).clip(0, distinct.size - 1))
        distinct, ranks = distinct[kept], ranks[kept]
    normal = NormalDist()
    return distinct, np.array([normal.inv_cdf(rank) for rank in ranks.tolist()])


def _utilities(lists: FloatArray, k: int, threshold: float) -> FloatArray:
    """Compute L(P) for lists of probabilities, shape (..., n); the first is always kept."""
    gains = -np.sort(-lists)[..., :k] - threshold
    np.maximum(gains[..., 1:], 0.0, out=gains[..., 1:])
    utilities: FloatArray = gains @ discounts(gains.shape[-1])
    return utilities


@dataclass(frozen=True, slots=True)
class Assessment:
    """An assessor's answers about the candidates of one request, and their effect.

    Attributes:
        answers: By name, shape (n,), in the order of the ranking's candidates; NaN where it was not
            asked or refused.
        places: Shape (n,), places in the call in [−½, ½]; NaN where it was not asked.
        asked: Candidates that it was asked about: ``cached`` of them were answered in an earlier
            request, and ``refused`` of them not at all.
        over_budget: Candidates worth asking about that the budget left out.
        cost: Of the call, in the currency of the assessor's prices; 0.0 if it has none.
        applied: Whether the answers count, or are only recorded.
        changed: Whether they change which passages are kept, or would.
    """

    answers: Mapping[str, FloatArray]
    places: FloatArray
    asked: int
    cached: int = 0
    refused: int = 0
    over_budget: int = 0
    cost: float = 0.0
    failure: StageFailure | None = None
    applied: bool = False
    changed: bool = False
