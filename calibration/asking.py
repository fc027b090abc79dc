"""Fit what an assessor's answers are worth, and measure what asking gains at several prices.

All choosing queries and held-out ones are asked about their first candidates by P, once. P of the
choosing queries is out of fold. k and the threshold stay those of the route's policy.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.data.dataset import Dataset
from calibration.evaluate import bootstrap_interval
from calibration.fit import folds, out_of_fold, probabilities
from calibration.pool_labels import PoolLabels, discounts, labelled_part
from calibration.replay import Pools, Progress
from calibration.weights import significant
from ctxguard.core.asking import ANSWER, AnswerModel, Assessment, to_ask
from ctxguard.core.metrics import Utilities
from ctxguard.core.policies import ExpectedUtilityPolicy, Policy
from ctxguard.core.types import FailureKind, FloatArray, Passage, PassagesBy, Ranking
from ctxguard.errors import CalibrationError
from ctxguard.profile.schema import AssessorProfile, PriceEvidence
from ctxguard.request.assess import AssessorStage, Question

FIRST = 20
"""Candidates by P that an assessor is asked about at most."""

PRICES = (0.001, 0.002, 0.005)
"""Of one candidate, in strict UDCG: what is reported beside the chosen price."""

DEFAULT_PRICE = 0.002

FEWEST_TO_ENFORCE = 20
"""Held-out queries whose answers may show that they may be applied."""

_PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""After which an assessor that refuses for its rate limit is asked again."""

_FIGURES = ("intercept", "slope", "effect", "deviation", "place")
"""The figures of a model, which a profile has rounded."""

_MOST_FAILED = 0.2
"""Share of the queries without any answer above which nothing is fitted."""


@dataclass(frozen=True)
class Asking:
    """An assessor to calibrate.

    Attributes:
        stage: Asks it; its deadline should be patient, and its rate high.
        passage: A passage by its id; raises KeyError for one that is not there.
        price: Of asking about one candidate, in strict UDCG, ≥ 0.
        sleep: Waits for a number of seconds.
    """

    stage: AssessorStage
    passage: Callable[[str], Passage]
    price: float = DEFAULT_PRICE
    sleep: Callable[[float], None] = time.sleep


class RecordedAnswers:
    """The answers that samples keep, as an assessor that is asked again about passage ids.

    Args:
        rankings: By query text.
        former: The assessor of the profile in force, whose answers they are.
    """

    def __init__(self, rankings: Mapping[str, Ranking], former: AssessorProfile) -> None:
        self.fingerprint = former.fingerprint
        self.names = (former.name,)
        self._answers = {
            query: dict(zip(ranking.passage_ids, answers.tolist(), strict=True))
            for query, ranking in rankings.items()
            if (answers := ranking.signals.get(ANSWER + former.name)) is not None
        }

    def assess(self, query: str, texts: Sequence[str]) -> dict[str, FloatArray]:
        """The answers about passages by their ids; NaN where none was asked about."""
        known = self._answers.get(query, {})
        return {self.names[0]: np.array([known.get(each, np.nan) for each in texts])}

    def asking(self, price: float) -> Asking:
        """Fits these answers anew at a price."""
        stage = AssessorStage(self, max_per_second=1e9)
        return Asking(stage, lambda name: Passage(name, name), price)


@dataclass(frozen=True)
class _AnsweredPools:
    """Queries with P and answers, as columns; candidates as in the pools."""

    pools: Pools
    labels: PoolLabels
    chances: FloatArray
    answers: Mapping[str, FloatArray]
    places: FloatArray
    n_asked: int
    cost: float | None

    def rows(self, rows: NDArray[np.int64]) -> "_AnsweredPools":
        return replace(
            self,
            pools=self.pools.rows(rows),
            labels=self.labels.rows(rows),
            chances=self.chances[rows],
            answers={name: values[rows] for name, values in self.answers.items()},
            places=self.places[rows],
        )

    def fitted(self, name: str) -> AnswerModel | None:
        asked = ~np.isnan(self.places)
        groups = np.broadcast_to(np.arange(len(self.pools))[:, None], asked.shape)
        return AnswerModel.fit(
            self.answers[name][asked],
            self.chances[asked],
            self.labels.relevant[asked],
            groups[asked],
            self.places[asked],
        )


def calibrate_asking(
    pools: Pools,
    dataset: Dataset,
    chosen_on: Dataset,
    held_out: Dataset | None,
    *,
    policy: Policy,
    utilities: Utilities,
    asking: Asking,
    progress: Progress,
) -> AssessorProfile | None:
    """Ask about every labelled query, fit the answers, and measure them at several prices.

    Returns:
        None for a policy without probabilities, which no answer can update.

    Raises:
        CalibrationError: more than a fifth of the queries got no answer.
    """
    if not isinstance(policy, ExpectedUtilityPolicy):
        return None
    chosen = labelled_part(pools, dataset, chosen_on, utilities)
    tables = [(*chosen, out_of_fold(*chosen))]
    if held_out is not None:
        own = labelled_part(pools, dataset, held_out, utilities)
        tables.append((*own, probabilities(policy.model, own[0])))
    texts = {query.query_id: query.text for query in dataset.queries}
    parts = [_asked(*part, texts=texts, asking=asking, progress=progress) for part in tables]
    models = {name: parts[0].fitted(name) for name in asking.stage.assessor.names}
    name, model = max(
        models.items(), key=lambda each: -1.0 if each[1] is None else each[1].distance
    )
    if model is None:
        return None
    asked = sum(part.n_asked for part in parts)
    spent = [part.cost for part in parts if part.cost is not None]
    cost = sum(spent) / asked if spent and asked else None
    prices = dict.fromkeys((asking.price, *PRICES))
    evidence = tuple(
        _at_price(parts, name, model, policy, price=price, cost=cost) for price in prices
    )
    gain = evidence[0].gain
    shown = gain.lower is not None and gain.lower > 0.0 and gain.n >= FEWEST_TO_ENFORCE
    figures: dict[str, Any] = {each: significant(getattr(model, each), 8) for each in _FIGURES}
    return AssessorProfile(
        fingerprint=asking.stage.fingerprint,
        name=name,
        model=replace(model, **figures),
        price=asking.price,
        first=FIRST,
        decision="enforce" if shown and held_out is not None else "shadow",
        evidence=evidence,
        cost=cost,
    )


def _asked(
    pools: Pools,
    labels: PoolLabels,
    chances: FloatArray,
    *,
    texts: Mapping[str, str],
    asking: Asking,
    progress: Progress,
) -> _AnsweredPools:
    """Ask about the first candidates by P of every query."""
    names = asking.stage.assessor.names
    answers = {name: np.full(chances.shape, np.nan) for name in names}
    places = np.full(chances.shape, np.nan)
    failed, n_asked, cost = 0, 0, 0.0
    order = np.argsort(-chances, axis=1, kind="stable")
    for row, query_id in enumerate(pools.query_ids):
        ids = pools.passage_ids[row]
        first = order[row, : min(FIRST, len(ids))].tolist()
        passages = PassagesBy(lambda position, ids=ids: asking.passage(ids[position]))  # type: ignore[misc]
        question = asking.stage.about(query_id, texts[query_id], passages, first, len(ids))
        found = None if question is None else _patiently(asking, question)
        if found is not None:
            n_asked, cost = n_asked + found.asked, cost + found.cost
            failed += found.failure is not None
            places[row, : len(ids)] = found.places
            for name in names:
                answers[name][row, : len(ids)] = found.answers[name]
        progress(1)
    if failed > _MOST_FAILED * len(pools):
        raise CalibrationError(
            f"the assessor gave no answer about {failed} of {len(pools)} queries; see whether it "
            "can be reached, and that it answers in time"
        )
    return _AnsweredPools(pools, labels, chances, answers, places, n_asked, cost or None)


def _patiently(asking: Asking, question: Question) -> Assessment:
    found = asking.stage.ask(question)
    for pause_seconds in _PAUSES_SECONDS:
        if found.failure is None or found.failure.kind is not FailureKind.SATURATED:
            break
        asking.sleep(pause_seconds)
        found = asking.stage.ask(question)
    return found


def _at_price(
    parts: list[_AnsweredPools],
    name: str,
    model: AnswerModel,
    policy: ExpectedUtilityPolicy,
    *,
    price: float,
    cost: float | None,
) -> PriceEvidence:
    """What asking gains on held-out queries; without any, cross-fitted on the choosing ones."""
    if len(parts) > 1:
        found = [_replayed(parts[1], name, model, policy, price)]
    else:
        own = parts[0]
        found = [
            _replayed(own.rows(inside), name, own.rows(outside).fitted(name), policy, price)
            for inside, outside in folds(own.pools.query_ids)
        ]
    gains, asked, forecasts, possible, weights = np.concatenate(found, axis=1)
    counts = weights / weights.sum()
    return PriceEvidence(
        price=price,
        share=float(min(asked.sum() / max(possible.sum(), 1.0), 1.0)),
        gain=bootstrap_interval(gains, weights),
        forecast=float(counts @ forecasts),
        cost=None if cost is None else float(1e3 * cost * (counts @ asked)),
    )


def _replayed(
    asked: _AnsweredPools,
    name: str,
    model: AnswerModel | None,
    policy: ExpectedUtilityPolicy,
    price: float,
) -> FloatArray:
    """Gain, number asked, forecast, number that could be asked and weight, shape (5, n_q)."""
    n_queries = len(asked.pools)
    gains, n_asked, forecasts, possible = np.zeros((4, n_queries))
    for row, n in enumerate(asked.pools.lengths.tolist()):
        chances = asked.chances[row, :n]
        order = np.argsort(-chances, kind="stable")
        possible[row] = min(n, FIRST)
        if model is None or n == 0:
            continue
        values = model.values(chances[order], policy.k, policy.min_probability, FIRST)
        chosen = to_ask(values, price, FIRST)
        answers = np.full(n, np.nan)
        answers[order[chosen]] = asked.answers[name][row, order[chosen]]
        after = model.updated(chances, answers, asked.places[row, :n])
        worth = asked.labels.utilities[row, :n]
        before = _strict_udcg(chances[order], worth[order], policy)
        gains[row] = _strict_udcg(after[order], worth[order], policy) - before
        n_asked[row], forecasts[row] = chosen.size, values[chosen].sum()
    return np.stack([gains, n_asked, forecasts, possible, asked.labels.weights])


def _strict_udcg(chances: FloatArray, worth: FloatArray, policy: ExpectedUtilityPolicy) -> float:
    """Strict UDCG of what the policy keeps; ties stay in their order."""
    order = np.argsort(-chances, kind="stable")[: policy.k]
    kept = chances[order] >= policy.min_probability
    kept[: min(policy.min_keep, kept.size)] = True
    return float((worth[order] * kept) @ discounts(order.size))
