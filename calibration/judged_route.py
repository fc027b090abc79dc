"""One route's policy from a judge's verdicts and the questions that people graded.

The regression of P(relevant) is fitted by `calibration.judge_mixture`; passages are kept while they
are worth it by the utilities, P ≥ c / (c + g), and no deeper than was judged. No threshold is tuned
on verdicts: that would tune it to the judge's errors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from calibration.calibrate_route import Settings
from calibration.fit import fit_model, folds, pool_features
from calibration.judge_mixture import DEFAULT_RATES, JudgeRates, fit_mixture
from calibration.pool_labels import discounts
from calibration.replay import Pools
from ctxguard._support.words import count
from ctxguard.core.interval import Interval
from ctxguard.core.policies import ExpectedUtilityPolicy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.types import FloatArray
from ctxguard.errors import CalibrationError
from ctxguard.monitor.estimation.ratio import t_quantile

JUDGED_DEPTH = 20
"""Passages of each question that are judged. Five are too few, and 30 bring nothing."""

Judged = Mapping[str, Mapping[str, int]]
"""The grade of a passage, relevant above 0, by question and passage id."""


@dataclass(frozen=True)
class JudgedRoute:
    """A route's fitted policy, with its evidence.

    Attributes:
        policy: The policy that the guard applies.
        rates: How the judge errs, learned from graded questions where there are any.
        gain: Strict UDCG of the policy less that of the first ``serving_k``, a mean over all
            questions: the mixture's expectation, corrected by the graded ones
            (prediction-powered inference; Angelopoulos et al. 2023). None with fewer than two.
        n_questions: Questions with a verdict.
        n_graded: Of these, questions that people graded whole.
    """

    policy: ExpectedUtilityPolicy
    rates: JudgeRates
    gain: Interval | None
    n_questions: int
    n_graded: int

    @property
    def in_words(self) -> str:
        """Where the policy comes from, in one line."""
        rates = (
            f"it finds {self.rates.sensitivity:.2f} of the relevant passages and says yes to "
            f"{self.rates.false_yes:.2f} of the others"
        )
        gain = (
            ""
            if self.gain is None or self.gain.value is None
            else (
                f"; strict UDCG {self.gain.value:+.2f} [{self.gain.lower:+.2f}, "
                f"{self.gain.upper:+.2f}] against what is served today"
            )
        )
        return (
            f"from a judge's verdicts on {count(self.n_questions, 'question')}, {self.n_graded} "
            f"graded by people: {rates}{gain}"
        )


@dataclass(frozen=True)
class _JudgedPairs:
    """The judged candidates of a route, flat.

    Attributes:
        rows: Shape (n,), the query of each, an index into the pools.
        columns: Shape (n,), its rank less one.
        inputs: Shape (n, n_features).
        verdicts: Shape (n,).
        grades: Shape (n,): 1, 0, or −1 where nobody graded it.
    """

    pools: Pools
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    inputs: FloatArray
    verdicts: NDArray[np.bool_]
    grades: NDArray[np.int8]

    @property
    def query_ids(self) -> list[str]:
        return [self.pools.query_ids[row] for row in self.rows]

    def taken(self, chosen: NDArray[np.int64]) -> "_JudgedPairs":
        return replace(
            self,
            rows=self.rows[chosen],
            columns=self.columns[chosen],
            inputs=self.inputs[chosen],
            verdicts=self.verdicts[chosen],
            grades=self.grades[chosen],
        )


def judged_route(
    pools: Pools,
    verdicts: Judged,
    grades: Judged,
    settings: Settings | None = None,
) -> JudgedRoute:
    """Fit a route's policy, and estimate its gain.

    Args:
        verdicts: The judge's, of the first candidates of each question; a missing one is left out.
        grades: People's.
        settings: ``serving_k``, ``min_keep`` and ``utilities`` are used.

    Raises:
        CalibrationError: no candidate was judged, or all of them alike.
    """
    settings = Settings() if settings is None else settings
    judged = _judged(pools, verdicts, grades)
    policy, believed = _fitted(judged, settings)
    expected, corrections = _gains(judged, policy, settings.serving_k, believed)
    graded = ~np.isnan(corrections)
    return JudgedRoute(
        policy,
        believed,
        _powered(expected, corrections[graded]) if graded.sum() > 1 else None,
        int(expected.size),
        int(graded.sum()),
    )


def _fitted(judged: _JudgedPairs, settings: Settings) -> tuple[ExpectedUtilityPolicy, JudgeRates]:
    relevance, rates = _mixture(judged, DEFAULT_RATES)
    policy = ExpectedUtilityPolicy(
        _model(judged, relevance),
        k=min(JUDGED_DEPTH, int(judged.columns.max()) + 1),
        cost=max(-settings.utilities.irrelevant, 0.0),
        min_keep=settings.min_keep,
    )
    return policy, rates


def _judged(pools: Pools, verdicts: Judged, grades: Judged) -> _JudgedPairs:
    table = pool_features(pools)
    usable: NDArray[np.bool_] = np.logical_not(np.isnan(table).any(axis=1))
    starts = np.cumsum(pools.lengths) - pools.lengths
    rows, columns, said, graded = [], [], [], []
    for row, query_id in enumerate(pools.query_ids):
        own, by_people = verdicts.get(query_id, {}), grades.get(query_id, {})
        ids = pools.labelled_ids(row, own.keys())
        for column, passage_id in enumerate(ids[:JUDGED_DEPTH]):
            if passage_id in own and usable[starts[row] + column]:
                rows.append(row)
                columns.append(column)
                said.append(own[passage_id] > 0)
                graded.append(int(by_people[passage_id] > 0) if passage_id in by_people else -1)
    if len(set(said)) < 2:
        raise CalibrationError(
            f"the judge gave {count(len(said), 'verdict')} on the candidates of "
            f"{count(len(pools), 'question')}, and "
            "not both yes and no: ask it about more questions, or check that it can be reached"
        )
    at = (np.array(rows, dtype=np.int64), np.array(columns, dtype=np.int64))
    inputs = table[starts[at[0]] + at[1]]
    return _JudgedPairs(pools, *at, inputs, np.array(said), np.array(graded, dtype=np.int8))


def _mixture(judged: _JudgedPairs, rates: JudgeRates) -> tuple[FloatArray, JudgeRates]:
    return fit_mixture(judged.inputs, judged.verdicts, judged.grades, judged.query_ids, rates)


def _model(judged: _JudgedPairs, relevance: FloatArray) -> RelevanceModel:
    """Fit P(relevant): each candidate counts as relevant and as not, by its posterior."""
    n = relevance.size
    return fit_model(
        judged.pools,
        np.concatenate([judged.inputs, judged.inputs]),
        np.arange(2 * n) < n,
        np.concatenate([relevance, 1.0 - relevance]),
    )


def _gains(
    judged: _JudgedPairs,
    policy: ExpectedUtilityPolicy,
    serving_k: int,
    rates: JudgeRates,
) -> tuple[FloatArray, FloatArray]:
    """Compute each question's gain in strict UDCG over the first k, by models of other questions.

    Args:
        judged: The judged candidates.
        policy: Its threshold and its k.
        rates: How the judge errs.

    Returns:
        Shape (n_questions,) each: the gain expected by the mixture; the graded gain less that, NaN
        where people did not grade every judged candidate of the question.
    """
    expected, corrections = [], []
    for own_fold, others in folds(judged.query_ids):
        inside, outside = judged.taken(own_fold), judged.taken(others)
        if len(set(outside.verdicts.tolist())) < 2:
            inside = outside = judged
        decided = _predicted(inside, outside, rates)
        believed = _given_verdicts(decided, inside.verdicts, rates)
        for row in np.unique(inside.rows).tolist():
            own = inside.rows == row
            graded = inside.grades[own]
            difference = _utility_difference(decided[own], inside.columns[own], policy, serving_k)
            gain = float(difference @ _worth(believed[own], policy))
            true_gain = float(difference @ _worth((graded == 1).astype(np.float64), policy))
            expected.append(gain)
            corrections.append(true_gain - gain if (graded >= 0).all() else np.nan)
    return np.array(expected), np.array(corrections)


def _predicted(inside: _JudgedPairs, outside: _JudgedPairs, rates: JudgeRates) -> FloatArray:
    """Predict P(relevant) of some candidates, by a model of others."""
    model = _model(outside, _mixture(outside, rates)[0])
    found = model.from_features(inside.inputs.T)
    return np.full(len(inside.inputs), np.nan) if found is None else found


def _given_verdicts(
    prior: FloatArray, verdicts: NDArray[np.bool_], rates: JudgeRates
) -> FloatArray:
    """Update P(relevant) of candidates by their verdicts, by Bayes' rule."""
    log_odds = np.log(prior / (1.0 - prior))
    spread = log_odds.std()
    nearness = (log_odds - log_odds.mean()) / (spread if spread > 1e-12 else 1.0)
    false_yes = rates.of_irrelevant(nearness)
    of_relevant = np.where(verdicts, rates.sensitivity, 1.0 - rates.sensitivity)
    of_others = np.where(verdicts, false_yes, 1.0 - false_yes)
    posterior: FloatArray = prior * of_relevant / (prior * of_relevant + (1 - prior) * of_others)
    return posterior


def _worth(relevance: FloatArray, policy: ExpectedUtilityPolicy) -> FloatArray:
    return relevance * policy.gain - (1.0 - relevance) * policy.cost


def _utility_difference(
    decided: FloatArray, columns: NDArray[np.int64], policy: ExpectedUtilityPolicy, serving_k: int
) -> FloatArray:
    """Discount of each candidate of a question under the policy less that under the first k."""
    discount = discounts(JUDGED_DEPTH)
    order = np.argsort(-decided, kind="stable")
    n_kept = int((decided[order] >= policy.min_probability).sum())
    n_kept = min(max(n_kept, policy.min_keep), policy.k, decided.size)
    weights = np.zeros(decided.size)
    weights[order[:n_kept]] += discount[:n_kept]
    today = columns < serving_k
    weights[today] -= discount[columns[today]]
    return weights


def _powered(expected: FloatArray, corrections: FloatArray, confidence: float = 0.95) -> Interval:
    mean = float(expected.mean() + corrections.mean())
    variance = expected.var(ddof=1) / expected.size + corrections.var(ddof=1) / corrections.size
    half = t_quantile(0.5 + confidence / 2, corrections.size - 1.0) * float(np.sqrt(variance))
    return Interval(value=mean, lower=mean - half, upper=mean + half, n=int(expected.size))
