"""Calibrating an assessor on labelled queries: when it is asked, and what its answers serve."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from simulated_pools import DEPTH, Recorded, indistinct, outcome_of, simulate, with_texts

from calibration.asking import FIRST, Asking, forecast_of
from calibration.calibrate import Calibration, calibrate
from calibration.data.dataset import Dataset
from calibration.report.summary import summarise
from calibration.settings import Settings
from calibration.verdict import mean_interval
from ctxguard.core.policies import ExpectedUtilityPolicy, RatioPolicy
from ctxguard.core.types import FloatArray, Passage
from ctxguard.errors import CalibrationError, OverloadedError
from ctxguard.guard.assess import AssessorStage
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.measure.worth import READERS, STRICT
from ctxguard.profile.schema import AssessorProfile, Profile, RouteProfile

PRICE = 0.002


class Simulated:
    """Answers relevant · d′ + noise to one question, and nothing but noise to another."""

    fingerprint = "simulated"
    names = ("noise", "relevant")

    def __init__(self, dataset: Dataset, d: float, faults: int = 0) -> None:
        self.relevant = {
            query.text: {key for key, grade in dataset.qrels[query.query_id].items() if grade}
            for query in dataset.queries
        }
        self.dataset, self.d, self.faults, self.calls = dataset, d, faults, 0
        self.rng = np.random.default_rng(5)

    def assess(self, query: str, texts: Sequence[str]) -> Mapping[str, FloatArray]:
        self.calls += 1
        if self.faults:
            self.faults -= 1
            raise OverloadedError("assess", "later")
        known = np.array([text in self.relevant[query] for text in texts], dtype=float)
        noise, other = self.rng.standard_normal((2, len(texts)))
        return {"noise": noise, "relevant": self.d * known + other}


def made_with(assessor: Simulated, retriever: Recorded, **asked: Any) -> Calibration:
    """A calibration with an assessor that knows its own labels."""
    pauses = asked.pop("pauses", [])
    stage = AssessorStage(assessor, max_per_second=1e9)
    asking = Asking(stage, lambda name: Passage(name, name), PRICE, pauses.append)
    return calibrate(retriever, assessor.dataset, Settings(depth=DEPTH, **asked), asking=asking)


@cache
def asked(n: int, d: float, noise: float = 0.25, **settings: Any) -> Calibration:
    """A calibration of simulated queries with an assessor; made once for the same question."""
    retriever, dataset = simulate(n, noise=noise)
    return made_with(Simulated(dataset, d), retriever, **settings)


def route_of(made: Calibration | Profile) -> RouteProfile:
    profile = made.profile if isinstance(made, Calibration) else made
    return next(iter(profile.routes.values()))


def assessor_of(made: Calibration | Profile) -> AssessorProfile:
    return route_of(made).assessor


def test_good_answer_is_enforced() -> None:
    made = asked(150, 1.5)
    found = assessor_of(made)
    assert assessor_of(Profile.model_validate_json(made.profile.to_json(), strict=True)) == found
    assert (found.name, found.decision, found.fingerprint) == ("relevant", "enforce", "simulated")
    assert 1.0 < found.model.distance < 1.8
    assert (found.verdict.decision, found.verdict.shown_by) == ("enforce", "folds")
    assert found.gain.lower > 0.0
    assert 0.0 < found.share < 1.0
    assert 0.0 < found.calls <= 1_000.0
    assert found.statement.startswith("enforce: relevant has d′")


def test_choice_is_made_with_answers() -> None:
    made = asked(150, 1.5, 0.15, context="leaner")
    own, alone = assessor_of(made).policy, route_of(made).policy
    assert own.model == alone.model
    assert (own.k, own.cost) != (alone.k, alone.cost)


def test_route_without_assessor_is_unchanged() -> None:
    retriever, dataset = simulate(150, noise=0.25)
    alone = route_of(calibrate(retriever, dataset, Settings(depth=DEPTH)))
    assert route_of(asked(150, 1.5)).model_copy(update={"assessor": None}) == alone


@pytest.mark.parametrize("d", [0.0, -1.0])
def test_worthless_answer_is_not_asked(d: float) -> None:
    """And a line says so."""
    made = asked(150, d)
    assert route_of(made).assessor is None
    summary = summarise(outcome_of(made))
    assert summary.asked == route_of(made).asking
    assert summary.asked == (
        "the assessor is not asked: noise nor relevant is not shown to add anything to P on 150 "
        "queries"
    )
    assert not [each for each in summary.results.policies if each.startswith("with answers")]


def test_below_twenty_labels_nobody_asked() -> None:
    retriever, dataset = simulate(15, noise=0.25)
    assessor = Simulated(dataset, 1.5)
    own = route_of(made_with(assessor, retriever))
    assert (own.assessor, assessor.calls) == (None, 0)
    assert "a probability needs 20" in own.asking


def test_assessor_enforced_where_first_k() -> None:
    retriever, dataset = indistinct(60)
    made = made_with(Simulated(dataset, 6.0), retriever)
    assert isinstance(route_of(made).policy, RatioPolicy)
    found = assessor_of(made)
    assert found.decision == "enforce"
    assert isinstance(found.policy, ExpectedUtilityPolicy)


def test_manual_ratio_has_a_probability() -> None:
    made = asked(60, 2.5, policy="ratio")
    assert isinstance(route_of(made).policy, RatioPolicy)
    assert assessor_of(made).model.effect > 0.0


def test_a_single_score_is_enough() -> None:
    retriever, dataset = simulate(100, noise=0.25)
    bare = {query: replace(each, legs={}) for query, each in retriever.rankings.items()}
    made = made_with(Simulated(dataset, 2.0), Recorded(bare, retriever.identity))
    assert assessor_of(made).decision == "enforce"


def test_held_out_queries_ask_nobody() -> None:
    own = route_of(asked(60, 1.5, held_out=0.4))
    assert own.assessor is None
    assert own.asking.endswith("what it adds is measured by folds, but queries are held out")


def test_costly_gain_stays_in_shadow() -> None:
    found = assessor_of(asked(150, 1.5, context="utility", utilities=STRICT))
    assert found.decision == "shadow"
    assert found.statement.endswith("recorded, not applied: recall is not shown to hold")


def test_a_busy_assessor_is_waited_for() -> None:
    """Each labelled query is asked about once; one that stays silent is an error."""
    retriever, dataset = simulate(30, noise=0.25)
    assessor, pauses = Simulated(dataset, 2.5, faults=3), list[float]()
    made_with(assessor, retriever, pauses=pauses)
    assert (pauses, assessor.calls) == ([1.0, 2.0, 4.0], 3 + 30)
    with pytest.raises(CalibrationError, match="did not answer for"):
        made_with(Simulated(dataset, 1.5, faults=10_000), retriever)


def test_forecast_is_others_gain() -> None:
    gains = []
    retriever, dataset = simulate(250, seed=9, noise=0.25)
    recorded = with_texts(retriever, str)
    for d in (1.5, 2.0):
        profile = asked(150, d).profile
        stage = AssessorStage(Simulated(dataset, d), max_per_second=1e9)
        having = ContextGuard(recorded, profile=profile, assessor=stage)
        [(route, own)] = profile.routes.items()
        bare = {route: own.model_copy(update={"assessor": None})}
        alone = ContextGuard(recorded, profile=profile.model_copy(update={"routes": bare}))
        found = []
        for query in dataset.queries:
            answered = having.retrieve(query.text, request_id=query.query_id)
            price = 0 if answered.assessment is None else PRICE * answered.assessment.asked
            relevant = {key for key, grade in dataset.qrels[query.query_id].items() if grade}
            utilities = [
                sum(
                    (1.0 if each.passage_id in relevant else READERS.irrelevant) / np.log2(rank + 2)
                    for rank, each in enumerate(passages)
                )
                for passages in (answered.passages, alone.retrieve(query.text).passages)
            ]
            found.append(utilities[0] - utilities[1] - price)
        forecast = assessor_of(profile).forecast
        gains.append((forecast, float(np.mean(found))))
    forecast_of, truth_of = np.array(gains, dtype=float).T
    assert truth_of.min() > 0.0
    assert forecast_of.mean() == pytest.approx(truth_of.mean(), rel=0.3)


@pytest.mark.parametrize("n", [27, 50, 100])
@pytest.mark.parametrize("errors", [0.0, 0.5, 1.0, 2.0, 2.5, 3.0, 5.0])
def test_a_forecast_holds_or_is_not_known(errors: float, n: int) -> None:
    """Of gains so many standard errors large, those with a forecast are a fifth off at most."""
    rng = np.random.default_rng([n, int(10 * errors)])
    truth = errors / np.sqrt(n)
    found = [forecast_of(mean_interval(rng.normal(truth, 1.0, n))) for _ in range(800)]
    told = [each for each in found if each is not None]
    if errors < 2.0:
        assert len(told) < 0.2 * len(found)
    else:
        assert np.mean(told) == pytest.approx(truth, rel=0.2)


def test_the_forecast_of_a_weak_judge() -> None:
    """The line says less where the gain of a weak judge may be luck."""
    weak, strong = assessor_of(asked(50, 1.0)), assessor_of(asked(150, 1.5))
    assert weak.forecast is None
    assert "by how much is not known" in weak.statement
    assert 0.6 * strong.gain.value <= strong.forecast < strong.gain.value
    assert f"by about +{strong.forecast:.3f}"[:14] in strong.statement


@pytest.mark.parametrize(("n", "d", "words"), [(150, 1.5, "applied"), (50, 1.0, "not applied")])
def test_a_model_asked_has_a_row(n: int, d: float, words: str) -> None:
    made = asked(n, d)
    found = summarise(outcome_of(made))
    assert f"with answers, {words}" in found.results.policies
    assert found.asked == route_of(made).asking


def test_no_model_sees_kept_answers() -> None:
    retriever, dataset = simulate(150, noise=0.25)
    kept = {
        query: replace(
            ranking, signals={"answer_relevant": np.linspace(1.0, 0.0, len(ranking.passage_ids))}
        )
        for query, ranking in retriever.rankings.items()
    }
    settings = Settings(depth=DEPTH, policy="expected_utility", context="utility")
    made = calibrate(Recorded(kept, retriever.identity), dataset, settings)
    assert outcome_of(made).profile.policy.model.signals == ()


def test_cost_is_of_the_asked() -> None:
    retriever, dataset = simulate(60, noise=0.25)

    class Priced(Simulated):
        """Has a ledger, as models at endpoints have."""

        class ledger:  # noqa: N801
            cost = 0.0

            @classmethod
            def accounts(cls) -> Any:
                return cls

        def assess(self, query: str, texts: Sequence[str]) -> Mapping[str, FloatArray]:
            self.ledger.cost += 0.01 * len(texts)
            return super().assess(query, texts)

    found = assessor_of(made_with(Priced(dataset, 2.0), retriever))
    assert found.cost == pytest.approx(1_000 * 0.01 * found.share * FIRST, rel=1e-3)
