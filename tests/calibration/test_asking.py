"""Calibrating an assessor on labelled queries: what it is worth, and when it is asked."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from simulated_pools import DEPTH, Recorded, simulate

from calibration.asking import Asking, RecordedAnswers
from calibration.calibrate import calibrate
from calibration.calibrate_route import Settings
from calibration.data.dataset import Dataset
from ctxguard.core.policies import ExpectedUtilityPolicy
from ctxguard.core.types import FloatArray, Passage
from ctxguard.errors import CalibrationError, OverloadedError
from ctxguard.guard import ContextGuard
from ctxguard.profile.schema import AssessorProfile, Profile
from ctxguard.request.assess import AssessorStage


class Simulated:
    """Answers relevant · d′ + noise to one question, and nothing but noise to another."""

    fingerprint = "simulated"
    names = ("noise", "relevant")

    def __init__(self, dataset: Dataset, d: float, faults: int = 0) -> None:
        self.relevant = {each for grades in dataset.qrels.values() for each in grades}
        self.d, self.faults, self.calls = d, faults, 0
        self.rng = np.random.default_rng(5)

    def assess(self, query: str, texts: Sequence[str]) -> Mapping[str, FloatArray]:
        self.calls += 1
        if self.faults:
            self.faults -= 1
            raise OverloadedError("assess", "later")
        known = np.array([text in self.relevant for text in texts], dtype=float)
        noise, other = self.rng.standard_normal((2, len(texts)))
        return {"noise": noise, "relevant": self.d * known + other}


def asked(
    n: int, d: float, *, faults: int = 0, held_out: float | None = None
) -> tuple[Profile, Simulated, list[float], Recorded]:
    retriever, dataset = simulate(n, noise=0.25)
    assessor = Simulated(dataset, d, faults)
    pauses: list[float] = []
    asking = Asking(
        AssessorStage(assessor, max_per_second=1e9),
        lambda passage_id: Passage(passage_id, passage_id),
        0.002,
        pauses.append,
    )
    settings = Settings(depth=DEPTH, objective="utility", held_out=held_out)
    profile = calibrate(retriever, dataset, settings, asking=asking).profile
    return profile, assessor, pauses, retriever


def only(profile: Profile) -> AssessorProfile:
    found = next(iter(profile.routes.values())).assessor
    assert found is not None
    return found


def test_a_good_answer_is_found_by_name_and_enforced() -> None:
    profile, assessor, _, _ = asked(300, 1.5)
    found = only(profile)
    assert (found.name, found.decision, found.fingerprint) == ("relevant", "enforce", "simulated")
    assert 1.0 < found.model.distance < 1.8
    assert assessor.calls == 300
    chosen, *others = found.evidence
    assert [chosen.price, *(each.price for each in others)] == [0.002, 0.001, 0.005]
    assert chosen.gain.lower > 0.0
    assert 0.0 < others[1].share < chosen.share < others[0].share < 1.0
    assert chosen.gain.value == pytest.approx(chosen.forecast, rel=0.5)
    assert "relevant has d′" in found.statement


def test_an_answer_of_no_worth_is_never_asked_for() -> None:
    profile, *_ = asked(300, 0.0)
    found = only(profile)
    assert found.decision == "shadow"
    assert all(each.share < 0.01 for each in found.evidence)


def test_with_few_labels_the_evidence_is_cross_fitted_and_nothing_is_applied() -> None:
    found = only(asked(40, 1.5, held_out=0.0)[0])
    assert found.decision == "shadow"
    assert found.evidence[0].gain.n == 40


def test_a_busy_assessor_is_waited_for() -> None:
    profile, _, pauses, _ = asked(60, 1.5, faults=3)
    assert pauses == [1.0, 2.0, 4.0]
    assert only(profile).model.effect > 0.0


def test_an_assessor_that_answers_nothing_is_an_error() -> None:
    with pytest.raises(CalibrationError, match="no answer about"):
        asked(60, 1.5, faults=10_000)


def test_the_profile_carries_it_to_a_guard() -> None:
    profile, assessor, _, retriever = asked(300, 1.5)
    loaded = Profile.model_validate_json(profile.to_json(), strict=True)
    assert only(loaded) == only(profile)
    rankings = {
        query: replace(ranking, passages=[Passage(each, each) for each in ranking.passage_ids])
        for query, ranking in retriever.rankings.items()
    }
    guard = ContextGuard(
        Recorded(rankings, retriever.identity),
        profile=loaded,
        mode="enforce",
        assessor=AssessorStage(assessor, max_per_second=1e9),
    )
    found = [guard.retrieve(query) for query in list(rankings)[:20]]
    assert any(each.assessment is not None and each.assessment.applied for each in found)


def test_answers_that_samples_keep_are_fitted_again_and_no_model_sees_them() -> None:
    profile, _, _, retriever = asked(300, 1.5)
    _, dataset = simulate(300, noise=0.25)
    relevant = {each for grades in dataset.qrels.values() for each in grades}
    rng = np.random.default_rng(6)
    kept = {}
    for query, ranking in retriever.rankings.items():
        known = np.array([each in relevant for each in ranking.passage_ids], dtype=float)
        answers = 1.5 * known + rng.standard_normal(known.size)
        kept[query] = replace(
            ranking, signals={"answer_relevant": np.where(answers > -1.0, answers, np.nan)}
        )
    again = calibrate(
        Recorded(kept, retriever.identity),
        dataset,
        Settings(depth=DEPTH, objective="utility"),
        asking=RecordedAnswers(kept, only(profile)).asking(0.002),
    ).profile
    found = only(again)
    assert (found.name, found.fingerprint) == ("relevant", "simulated")
    assert found.model.distance == pytest.approx(only(profile).model.distance, abs=0.5)
    policy = next(iter(again.routes.values())).policy
    assert isinstance(policy, ExpectedUtilityPolicy)
    assert policy.model.signals == ()
