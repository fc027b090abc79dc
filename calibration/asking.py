"""Choose with an assessor's answers: when it is asked, the policy that they serve, its verdict.

All labelled queries are asked about their first candidates by P, once. Then, twice: the candidates
whose value exceeds the price at the current (k, t) count as asked, P of the choosing queries is
updated by models of the other folds, and (k, t) is chosen again as the route's policy is. What the
answers gain is measured where they had no part in the choice, net of their price.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from calibration.calibrate_route import Fitted, LabelledRoute, RouteOutcome, among
from calibration.figures import significant
from calibration.fit import folds, probabilities
from calibration.folded import Choose, Folded
from calibration.grid import GridIndex
from calibration.objectives import PolicySums, choose, highest_utility
from calibration.pool_labels import IntArray, PoolLabels
from calibration.replay import Pools, Progress
from calibration.verdict import mean_interval
from ctxguard.core.policies import ExpectedUtilityPolicy
from ctxguard.core.types import FailureKind, FloatArray, Passage, PassagesBy
from ctxguard.core.value_of_information import (
    FEWEST_RELEVANT,
    AnswerModel,
    Assessment,
    to_ask,
)
from ctxguard.errors import CalibrationError
from ctxguard.profile.schema import AssessorProfile
from ctxguard.request.assess import AssessorStage, Question

FIRST = 20
"""Candidates by P that an assessor is asked about at most."""

DEFAULT_PRICE = 0.002

ROUNDS = 2
"""How often (k, t) is chosen again with the answers that are worth asking for at the former."""

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


@dataclass(frozen=True)
class _AnsweredPools:
    """Queries with P and answers, as columns; candidates as in the pools.

    Attributes:
        answers: By name, shape (n_q, depth).
        name: The answer that counts.
    """

    pools: Pools
    labels: PoolLabels
    chances: FloatArray
    answers: Mapping[str, FloatArray]
    places: FloatArray
    n_asked: int
    cost: float | None
    name: str

    def fitted(self, rows: IntArray | None = None) -> AnswerModel | None:
        """Fit what the answer says by these queries, or by some of them."""
        own = np.arange(len(self.pools)) if rows is None else rows
        asked = ~np.isnan(self.places[own])
        groups = np.broadcast_to(own[:, None], asked.shape)
        return AnswerModel.fit(
            self.answers[self.name][own][asked],
            self.chances[own][asked],
            self.labels.relevant[own][asked],
            groups[asked],
            self.places[own][asked],
        )


@dataclass(frozen=True)
class _Updated:
    """What asking by value at one (k, t) gives some queries.

    Attributes:
        chances: Shape (n_q, depth), P after the answers.
        n_asked: Shape (n_q,), how many candidates are asked about.
        answered: Shape (n_q,), whether any of these has an answer.
    """

    chances: FloatArray
    n_asked: FloatArray
    answered: NDArray[np.bool_]


def calibrate_asking(
    outcome: RouteOutcome,
    *,
    texts: Mapping[str, str],
    asking: Asking,
    progress: Progress,
) -> RouteOutcome:
    """Ask about every labelled query of a route, and choose the policy that the answers serve.

    Args:
        outcome: The route without an assessor: its model of P is taken, and what it serves stands
            where nothing is answered.
        texts: The queries by their ids.

    Returns:
        The route, whose profile says when the assessor is asked, or why nobody is.

    Raises:
        CalibrationError: more than a fifth of the queries got no answer.
    """

    def unasked(why: str) -> RouteOutcome:
        own = {"unasked": f"the assessor is not asked: {why}"}
        return replace(outcome, profile=outcome.profile.model_copy(update=own))

    route = outcome.route
    try:
        fitted = route.by_probability()
    except CalibrationError as error:
        return unasked(str(error))
    if fitted.model is None or fitted.out_of_fold is None:
        return unasked("there is no probability that answers could change")
    tables = [(*route.own, fitted.out_of_fold)]
    if route.held_out:
        tables.append((*route.measured, probabilities(fitted.model, route.measured[0])))
    parts = [_asked(*part, texts=texts, asking=asking, progress=progress) for part in tables]
    names = asking.stage.assessor.names
    models = {name: replace(parts[0], name=name).fitted() for name in names}
    name, model = max(
        models.items(), key=lambda each: -1.0 if each[1] is None else each[1].distance
    )
    if model is None:
        return unasked(
            f"nothing can be fitted to its answers: there must be {FEWEST_RELEVANT} about relevant "
            f"candidates and as many about others, not all alike, among the first {FIRST} of the "
            "labelled queries"
        )
    if model.effect == 0.0:
        n = len(parts[0].pools)
        return unasked(f"{' nor '.join(names)} is not shown to add anything to P on {n} queries")
    figures: dict[str, Any] = {each: significant(getattr(model, each), 8) for each in _FIGURES}
    model = replace(model, **figures)
    parts = [replace(part, name=name) for part in parts]
    for careful in route.rules(route.settings.context):
        found = _choose(route, fitted, parts[0], asking.price, careful)
        if route.held_out:
            found = _on_held_out(found, fitted, parts[1], model, asking.price)
        with_answers = _with_verdict(outcome, asking, parts, model, found)
        if with_answers.decision == "enforce":
            break
    update = {"assessor": with_answers}
    return replace(outcome, profile=outcome.profile.model_copy(update=update))


@dataclass(frozen=True)
class _Choice:
    """The policy that is chosen with the answers, and the contexts by which it is measured.

    Attributes:
        index: Its place in the grid.
        policy: The policy; that of highest utility where none is accepted.
        accepted: Whether it keeps today's recall.
        asked: What asking gives the queries that measure.
        order: Shape (n_q, depth), columns of their pools, best first.
        n_kept: Shape (n_q,).
    """

    index: GridIndex
    policy: ExpectedUtilityPolicy
    accepted: bool
    asked: _Updated
    order: IntArray
    n_kept: IntArray


def _choose(
    route: LabelledRoute, fitted: Fitted, own: _AnsweredPools, price: float, careful: Choose
) -> _Choice:
    """Choose (k, t) with the answers that are worth asking for at the former, twice."""
    by_fold = [(inside, own.fitted(others)) for inside, others in folds(own.labels.groups)]

    def rule(sums: PolicySums) -> int | None:
        place, wanted = careful(sums), route.settings.context
        if place is None and wanted != "utility":
            # Few labels support no careful choice. Whether this one holds is for the verdict.
            k, tolerance = route.settings.serving_k, route.settings.tolerance
            return choose(sums, k, wanted, tolerance=tolerance, caution=0.0, lost=0.0)
        return place

    def chosen(chances: FloatArray) -> tuple[Folded, GridIndex, bool]:
        policies = among(fitted.grid(own.pools, own.labels, chances), route.settings)
        index = policies.chosen(rule)
        best = policies.chosen(highest_utility) if index is None else index
        return policies, (0, 0) if best is None else best, index is not None

    asked = _Updated(own.chances, *np.zeros((2, len(own.pools))))
    policies, index, accepted = chosen(asked.chances)
    for _ in range(ROUNDS):
        asked = _updated(own, by_fold, policies.grid.settings(index), price)
        policies, index, accepted = chosen(asked.chances)
    policy = cast(ExpectedUtilityPolicy, policies.grid.policy(index))
    contexts = policies.contexts(rule, route.settings.serving_k)
    return _Choice(index, policy, accepted, asked, *contexts)


def _on_held_out(
    found: _Choice, fitted: Fitted, own: _AnsweredPools, model: AnswerModel, price: float
) -> _Choice:
    """Measure the same choice on the held-out queries."""
    policy = found.policy
    every = [(np.arange(len(own.pools)), model)]
    asked = _updated(own, every, (policy.k, policy.min_probability), price)
    grid = fitted.grid(own.pools, own.labels, asked.chances)
    order = np.argsort(-asked.chances, axis=1, kind="stable")
    n_kept = grid.kept([found.index])[:, 0]
    return replace(found, asked=asked, order=order, n_kept=n_kept)


def _updated(
    own: _AnsweredPools,
    models: Iterable[tuple[IntArray, AnswerModel | None]],
    settings: tuple[int, float],
    price: float,
) -> _Updated:
    """Ask by value at one (k, t), each group of queries by its model."""
    k, threshold = settings
    after, answered = own.chances.copy(), np.zeros(len(own.pools), dtype=bool)
    n_asked = np.zeros(len(own.pools))
    for rows, model in models:
        if model is None:
            continue
        for row in rows.tolist():
            n = int(own.pools.lengths[row])
            chances = own.chances[row, :n]
            # Of equal P the first is asked first, as a request does.
            order = np.argsort(-chances, kind="stable")
            values = model.values(chances[order], k, threshold, FIRST)
            chosen = order[to_ask(values, price, FIRST)]
            answers = np.full(n, np.nan)
            answers[chosen] = own.answers[own.name][row, chosen]
            after[row, :n] = model.updated(chances, answers, own.places[row, :n])
            n_asked[row], answered[row] = chosen.size, np.isfinite(answers).any()
    return _Updated(after, n_asked, answered)


def _with_verdict(
    outcome: RouteOutcome,
    asking: Asking,
    parts: Sequence[_AnsweredPools],
    model: AnswerModel,
    found: _Choice,
) -> AssessorProfile:
    """Return the assessor's part of the profile: what it gains over what is served without."""
    route, without, asked = outcome.route, outcome.served, found.asked
    # Where nothing is answered, what is served without stands.
    answered = asked.answered[:, None]
    ranks = np.arange(found.order.shape[1])
    with_answers = route.option(
        "with answers",
        found.policy,
        np.where(answered, found.order, without.order),
        np.where(answered, ranks < found.n_kept[:, None], without.kept),
    )
    verdict = with_answers.verdict
    gains = with_answers.metrics.values["udcg_strict"] - without.metrics.values["udcg_strict"]
    gain = mean_interval(gains - asking.price * asked.n_asked)
    enforced = found.accepted and verdict.decision == "enforce"
    enforced = enforced and gain.lower is not None and gain.lower > 0.0
    n_asked = float(asked.n_asked.mean())
    possible = float(np.minimum(parts[-1].pools.lengths, FIRST).mean())
    spent = [part.cost for part in parts if part.cost is not None]
    cost = sum(spent) / max(sum(part.n_asked for part in parts), 1) if spent else None
    return AssessorProfile(
        fingerprint=asking.stage.fingerprint,
        name=parts[0].name,
        model=model,
        policy=found.policy,
        price=asking.price,
        first=FIRST,
        decision="enforce" if enforced else "shadow",
        verdict=verdict,
        gain=gain,
        share=min(significant(n_asked / max(possible, 1.0)), 1.0),
        calls=significant(1e3 * float(np.minimum(asked.n_asked, 1.0).mean())),
        cost=None if cost is None else significant(1e3 * cost * n_asked),
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
    return _AnsweredPools(pools, labels, chances, answers, places, n_asked, cost or None, names[0])


def _patiently(asking: Asking, question: Question) -> Assessment:
    found = asking.stage.ask(question)
    for pause_seconds in _PAUSES_SECONDS:
        if found.failure is None or found.failure.kind is not FailureKind.SATURATED:
            break
        asking.sleep(pause_seconds)
        found = asking.stage.ask(question)
    return found
