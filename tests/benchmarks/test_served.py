"""What the benchmarks of served contexts measure is what calibration and the guard would say."""

import numpy as np
import pytest

from benchmarks._served import Answers, Recorded, asking_figures, few_labels, mean_figures
from calibration.evaluate import per_query
from calibration.settings import Settings
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Route, ScoreKind
from tests.made_up import recorded_of

DEPTH, QUERIES = 20, 60


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    rng = np.random.default_rng(3)
    relevant = rng.random((QUERIES, DEPTH)) < 0.3
    relevant[:, 0] = True
    signal = relevant + 0.4 * rng.standard_normal(relevant.shape)
    scores = np.tile(np.linspace(1.0, 0.1, DEPTH), (QUERIES, 1))
    return recorded_of(
        relevant,
        scores,
        rng.integers(20, 400, scores.shape).astype(np.float64),
        route=Route.HYBRID,
        kind=ScoreKind.RATIO,
        legs={"dense": ScoreKind.COSINE, "lexical": ScoreKind.RATIO},
        signals={"telling": signal},
    )


def answers(recorded: Recorded, d: float) -> Answers:
    pools = recorded.pools
    noise = np.random.default_rng(1).standard_normal(pools.relevant.shape)
    values = d * pools.relevant + noise
    return Answers(
        "known",
        {
            text: dict(zip(ids, row.tolist(), strict=True))
            for text, ids, row in zip(recorded.texts, pools.passage_ids, values, strict=True)
        },
    )


def test_first_k_equal_the_evaluation(recorded: Recorded) -> None:
    rows = np.arange(7)
    found = recorded.first(rows)
    values = per_query(recorded.pools.rows(rows), RatioPolicy(k=5))
    np.testing.assert_allclose(found.udcg, values["udcg"])
    np.testing.assert_allclose(found.recall, values["recall"])
    assert found.kept.tolist() == [5.0] * 7


def test_guard_serves_what_policy_keeps(recorded: Recorded) -> None:
    labelled = few_labels(recorded.dataset, 40, 0)
    made = recorded.calibrated(labelled, Settings(context="utility"))
    rows = recorded.others(labelled)
    found = recorded.served(made.profile, rows, mode="enforce")
    (route,) = made.profile.routes.values()
    values = per_query(recorded.pools.rows(rows), route.policy)
    np.testing.assert_allclose(found.udcg, values["udcg"])
    np.testing.assert_allclose(found.kept, values["kept"])


def test_labelled_queries_leave_the_truth(recorded: Recorded) -> None:
    labelled = few_labels(recorded.dataset, 25, 4)
    others = {recorded.pools.query_ids[row] for row in recorded.others(labelled).tolist()}
    assert others.isdisjoint({query.query_id for query in labelled.queries})
    assert (len(others), recorded.sizes((20, 48, 49))) == (QUERIES - 25, [20, 48])


def test_assessor_down_serves_without_it(recorded: Recorded) -> None:
    labelled = few_labels(recorded.dataset, 30, 0)
    found = asking_figures(recorded, labelled, Settings(), answers(recorded, 3.0))
    assert found["unlike"] == 0.0


def test_forecasts_compare_where_answers_apply() -> None:
    run = {"share": 0.5, "net": 0.3, "forecast": 0.2, "enforced": 1.0}
    unknown = {**run, "net": 0.9, "forecast": np.nan}
    found = mean_figures([run, unknown, {**unknown, "share": 0.0, "enforced": 0.0}])
    assert (found["n_enforced"], found["n_forecast"]) == (2, 1)
    assert (found["enforced_net"], found["enforced_forecast"]) == (0.3, 0.2)
    assert mean_figures([unknown])["enforced_forecast"] is None
