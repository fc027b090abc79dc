"""Decides when to ask an assessor, and chooses and judges the policy that uses its answers.

All labelled queries are asked about their first candidates by P, once. Then, twice: the candidates
whose value exceeds the price at the current (k, t) count as asked, P of the choosing queries is
updated by models of the other folds, and (k, t) is chosen again as the route's policy is. The gain
from the answers is measured on queries outside the choice, net of their price. Looks passages up,
calls the assessor, and waits between attempts. Needs the extra `calibrate`.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from calibration.calibrate_route import Fitted, Option, RouteOutcome, among
from calibration.choice import LADDERS, Choose, Folded, PolicySums, Step, choose, highest_utility
from calibration.fit import folds, significant
from calibration.grid import GridIndex
from calibration.pools import LabelledPools
from calibration.replay import PassageOf, Progress
from calibration.reranked_candidates import PAUSES_SECONDS
from calibration.verdict import CONFIDENCE, mean_interval
from ctxguard._support.words import count
from ctxguard.core.policies import ExpectedUtilityPolicy
from ctxguard.core.types import FailureKind, FloatArray, PassagesBy
from ctxguard.core.value_of_information import FEWEST_RELEVANT, AnswerModel, Assessment, to_ask
from ctxguard.errors import CalibrationError
from ctxguard.guard.assess import AssessorStage, Question
from ctxguard.measure.interval import Interval, t_quantile
from ctxguard.measure.rows import BoolArray, IntArray
from ctxguard.profile.schema import AssessorProfile

FIRST = 20
"""The most candidates an assessor is asked about, those with the highest P first."""

DEFAULT_PRICE = 0.002

ROUNDS = 2
"""How often (k, t) is chosen again, with the answers that are worth asking for at the last
choice."""

_LUCK = 2.0
"""A forecast is the gain less this many squared standard errors divided by the gain. A gain that is
reported only once it is significant is overstated; so shrunk, a gain of two standard errors or more
is right to within a fifth on average (`test_asking.py`)."""

_LEAST_ERRORS = 5.0**0.5
"""Standard errors below which a gain is too uncertain for a forecast."""

_FIGURES = ("intercept", "slope", "effect", "deviation", "place")
"""The values of a model that are rounded in a profile."""

_MOST_FAILED = 0.2
"""Nothing is fitted if a larger share of the queries got no answer."""


@dataclass(frozen=True)
class Asking:
    """An assessor to calibrate.

    Attributes:
        stage: Asks it; its deadline should be patient, and its rate high.
        passage: A passage by its id; raises KeyError for one that is not there.
        price: Price of asking about one candidate, in UDCG, ≥ 0.
        sleep: Waits a number of seconds.
    """

    stage: AssessorStage
    passage: PassageOf
    price: float = DEFAULT_PRICE
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class _AnsweredPools:
    """The queries used for choosing, with P and one kind of answer; candidates as in the pools.

    Attributes:
        name: Name of the answer.
        probabilities: Shape (n_q, depth), out-of-fold P before any answer.
        answers: Shape (n_q, depth), NaN where there is none.
        places: Same shape, the place of each candidate in its call.
        cost: Cost of asking about one candidate; None if unknown.
    """

    name: str
    pools: LabelledPools
    probabilities: FloatArray
    answers: FloatArray
    places: FloatArray
    cost: float | None

    def fitted(self, rows: IntArray | slice = slice(None)) -> AnswerModel | None:
        """Fit the model of the answers to these queries, or to some of them."""
        asked = ~np.isnan(self.places[rows])
        groups = np.arange(len(self.pools))[rows, None]
        return AnswerModel.fit(
            self.answers[rows][asked],
            self.probabilities[rows][asked],
            self.pools.relevant[rows][asked],
            np.broadcast_to(groups, asked.shape)[asked],
            self.places[rows][asked],
        )


def calibrate_asking(
    outcome: RouteOutcome, *, texts: Mapping[str, str], asking: Asking, progress: Progress
) -> RouteOutcome:
    """Ask about every labelled query of a route, and choose the policy that uses the answers.

    The route's model of P is taken, and what it serves without an assessor stands where nothing is
    answered. The profile returned says when to ask the assessor, or why not to.

    Args:
        texts: The queries by their ids.

    Raises:
        CalibrationError: more than a fifth of the queries got no answer.
    """

    def with_profile(**update: object) -> RouteOutcome:
        return replace(outcome, profile=outcome.profile.model_copy(update=update))

    def unasked(why: str) -> RouteOutcome:
        return with_profile(unasked=f"the assessor is not asked: {why}")

    route = outcome.route
    if route.held_out:
        return unasked("what it adds is measured by folds, but queries are held out")
    try:
        fitted = route.by_probability()
    except CalibrationError as error:
        return unasked(str(error))
    probabilities = cast(FloatArray, fitted.pools.probabilities)
    answered = _asked(fitted.pools, probabilities, texts=texts, asking=asking, progress=progress)
    models = {name: each.fitted() for name, each in answered.items()}
    name, model = max(
        models.items(), key=lambda each: -1.0 if each[1] is None else each[1].distance
    )
    if model is None:
        return unasked(
            f"nothing can be fitted to its answers: among the first {FIRST} candidates of the "
            f"labelled queries there must be {FEWEST_RELEVANT} answers about relevant candidates "
            "and as many about others, not all equal"
        )
    own = answered[name]
    if model.effect == 0.0:
        on = count(len(own.pools), "query")
        return unasked(f"{' nor '.join(answered)} is not shown to add anything to P on {on}")
    figures: dict[str, Any] = {each: significant(getattr(model, each), 8) for each in _FIGURES}
    model = replace(model, **figures)
    for choose_by in route.rules(route.settings.context):
        with_answers, option = _with_answers(
            outcome, fitted, asking, own, model, choose_by=choose_by
        )
        if with_answers.decision == "enforce":
            break
    return replace(with_profile(assessor=with_answers), answered=option)


def _with_answers(
    outcome: RouteOutcome,
    fitted: Fitted,
    asking: Asking,
    own: _AnsweredPools,
    model: AnswerModel,
    *,
    choose_by: Choose,
) -> tuple[AssessorProfile, Option]:
    """Choose (k, t) twice, each time with the answers worth asking for at the previous choice."""
    route = outcome.route
    settings = route.settings
    by_fold = [(inside, own.fitted(others)) for inside, others in folds(own.pools.groups)]

    def rule(sums: PolicySums) -> int | None:
        place, wanted = choose_by(sums), settings.context
        if place is None and wanted != "utility":
            # Few labels support no careful choice. Whether this one holds is for the verdict.
            step = Step(0.0, LADDERS[wanted][0].tokens)
            return choose(sums, wanted, tolerance=settings.tolerance, step=step)
        return place

    def chosen(probabilities: FloatArray) -> tuple[Folded, GridIndex, bool]:
        # The value of asking is computed from P alone.
        grid = fitted.grid(replace(own.pools, probabilities=probabilities), per_token=False)
        policies = among(grid, settings)
        index = policies.chosen(rule)
        best = policies.chosen(highest_utility) if index is None else index
        return policies, (0, 0) if best is None else best, index is not None

    policies, index, accepted = chosen(own.probabilities)
    for _ in range(ROUNDS):
        k_and_threshold = policies.grid.settings(index)
        probabilities, n_asked, answered = _updated(own, by_fold, k_and_threshold, asking.price)
        policies, index, accepted = chosen(probabilities)
    policy = cast(ExpectedUtilityPolicy, policies.grid.policy(index))
    order, kept = policies.contexts(policies.by_others(rule), settings.serving_k)
    # Without an answer, the context chosen without the assessor stands.
    without, is_answered = outcome.served, answered[:, None]
    option = route.option(
        "with answers",
        policy,
        np.where(is_answered, order, without.order),
        np.where(is_answered, kept, without.kept),
    )
    gains = option.metrics["udcg"] - without.metrics["udcg"]
    gain = mean_interval(gains - asking.price * n_asked)
    enforced = accepted and option.verdict.decision == "enforce" and (gain.lower or 0.0) > 0.0
    mean_asked = float(n_asked.mean())
    possible = float(np.minimum(own.pools.lengths, FIRST).mean())
    profile = AssessorProfile(
        fingerprint=asking.stage.fingerprint,
        name=own.name,
        model=model,
        policy=policy,
        price=asking.price,
        first=FIRST,
        decision="enforce" if enforced else "shadow",
        verdict=option.verdict,
        gain=gain,
        forecast=forecast_of(gain),
        share=min(significant(mean_asked / max(possible, 1.0)), 1.0),
        calls=significant(1e3 * float(np.minimum(n_asked, 1.0).mean())),
        cost=None if own.cost is None else significant(1e3 * own.cost * mean_asked),
    )
    applied = "applied" if enforced else "not applied"
    return profile, replace(option, name=f"with answers, {applied}")


def _updated(
    own: _AnsweredPools,
    models: Iterable[tuple[IntArray, AnswerModel | None]],
    k_and_threshold: tuple[int, float],
    price: float,
) -> tuple[FloatArray, FloatArray, BoolArray]:
    """Ask about the candidates worth asking about at one (k, t), using each group's own model.

    Returns P after the answers, and of each query how many candidates are asked about and whether
    any of these has an answer.
    """
    k, threshold = k_and_threshold
    after, answered = own.probabilities.copy(), np.zeros(len(own.pools), dtype=bool)
    n_asked = np.zeros(len(own.pools))
    for rows, model in models:
        if model is None:
            continue
        for row in rows.tolist():
            n = int(own.pools.lengths[row])
            probabilities = own.probabilities[row, :n]
            # Ties in P are asked in order, as in a request.
            order = np.argsort(-probabilities, kind="stable")
            values = model.values(probabilities[order], k, threshold, FIRST)
            chosen = order[to_ask(values, price, FIRST)]
            answers = np.full(n, np.nan)
            answers[chosen] = own.answers[row, chosen]
            after[row, :n] = model.updated(probabilities, answers, own.places[row, :n])
            n_asked[row], answered[row] = chosen.size, np.isfinite(answers).any()
    return after, n_asked, answered


def forecast_of(gain: Interval) -> float | None:
    """Shrink a gain to what other queries should show; None if it is too uncertain.

    >>> round(forecast_of(mean_interval(np.tile([0.0, 0.2], 50))), 3)
    0.098
    >>> forecast_of(mean_interval(np.tile([-1.0, 1.1], 50)))
    """
    if gain.value is None or gain.lower is None:
        return None
    error = (gain.value - gain.lower) / t_quantile(CONFIDENCE, gain.n - 1.0)
    if error == 0.0:
        return significant(gain.value)
    if abs(gain.value) < _LEAST_ERRORS * error:
        return None
    return significant(gain.value * (1.0 - _LUCK * (error / gain.value) ** 2))


def _asked(
    pools: LabelledPools,
    probabilities: FloatArray,
    *,
    texts: Mapping[str, str],
    asking: Asking,
    progress: Progress,
) -> dict[str, _AnsweredPools]:
    """Ask about each query's candidates with the highest P; return each kind of answer by name."""
    names = asking.stage.assessor.names
    answers = {name: np.full(probabilities.shape, np.nan) for name in names}
    places = np.full(probabilities.shape, np.nan)
    failed, n_asked, cost = 0, 0, 0.0
    order = np.argsort(-probabilities, axis=1, kind="stable")
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
            f"the assessor did not answer for {failed} of {len(pools)} queries; check that it can "
            "be reached and answers in time"
        )
    each = cost / max(n_asked, 1) or None
    return {
        name: _AnsweredPools(name, pools, probabilities, own, places, each)
        for name, own in answers.items()
    }


def _patiently(asking: Asking, question: Question) -> Assessment:
    found = asking.stage.ask(question)
    for pause_seconds in PAUSES_SECONDS:
        if found.failure is None or found.failure.kind is not FailureKind.SATURATED:
            break
        asking.sleep(pause_seconds)
        found = asking.stage.ask(question)
    return found
