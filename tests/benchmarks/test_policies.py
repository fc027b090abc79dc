"""The comparison of policies measures what calibration would measure, and cuts where it says."""

import numpy as np
import pytest

from benchmarks._baselines import RULES, Contexts, first_jump, fixed, largest_gap, perfect, ratio
from benchmarks._collection import View
from benchmarks._served import few_labels
from benchmarks.policies import gain, measure_contexts
from calibration.data.dataset import Dataset, Query
from calibration.evaluate import per_query
from calibration.pool_labels import label
from calibration.replay import Pools
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Route, ScoreKind

DEPTH = 8
KINDS = ("hard_negative", "distractor")


@pytest.fixture
def view() -> View:
    rng = np.random.default_rng(5)
    query_ids = tuple(f"q{row}" for row in range(40))
    scores = np.sort(rng.random((40, DEPTH)), axis=1)[:, ::-1].copy()
    ids = [tuple(f"p{column}" for column in range(DEPTH))] * 40
    ids[0] = ids[0][:3]
    scores[0, 3:] = np.nan
    qrels = {
        query_id: {"p0": int(rng.integers(0, 3)), "p2": int(rng.integers(0, 3)), "elsewhere": 1}
        for query_id in query_ids
    }
    qrels["q1"] = {"p0": 0}
    dataset = Dataset(
        "made up",
        tuple(Query(query_id, f"question {query_id}") for query_id in query_ids),
        qrels,
        {query_id: {"p1": KINDS[row % 2]} for row, query_id in enumerate(query_ids)},
    )
    pools = Pools(Route.HYBRID, ScoreKind.RATIO, query_ids, tuple(ids), scores, {}, {})
    return View(pools, label(pools, dataset))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("udcg_strict", "udcg_strict"),
        ("udcg_heuristic", "udcg"),
        ("recall", "recall"),
        ("precision", "precision"),
        ("kept", "kept"),
    ],
)
def test_every_metric_equals_the_one_that_calibration_reports(
    view: View, ours: str, theirs: str
) -> None:
    contexts = ratio((3,), np.array([0.7]))(view, view)
    expected = per_query(view.pools, view.labels, RatioPolicy(k=3, min_ratio=0.7)).values[theirs]
    np.testing.assert_allclose(measure_contexts(view, contexts)[ours], expected, atol=1e-12)


def test_an_empty_context_is_worth_nothing_and_has_no_precision(view: View) -> None:
    order = np.tile(np.arange(DEPTH), (40, 1))
    measured = measure_contexts(view, Contexts(order, np.zeros(40, dtype=np.int64), "nothing"))
    assert not measured["udcg_strict"].any()
    assert np.isnan(measured["precision"]).all()
    assert measured["empty"].all()


def test_no_policy_keeps_more_than_the_pool_holds(view: View) -> None:
    for policy in ("k 5", "k 10", "ratio", "absolute", "autocut", "largest gap", "top-p"):
        assert RULES[policy](view, view).kept[0] <= 3, policy


def test_nothing_is_worth_more_than_perfect_knowledge(view: View) -> None:
    best = measure_contexts(view, perfect(view, view))["udcg_strict"]
    for policy in ("k 3", "ratio", "absolute", "largest gap", "top-p"):
        assert (measure_contexts(view, RULES[policy](view, view))["udcg_strict"] <= best).all()


def test_a_calibrated_policy_is_no_worse_than_a_fixed_k_where_it_was_fitted(view: View) -> None:
    fixed_worth = measure_contexts(view, fixed(3)(view, view))["udcg_strict"].mean()
    assert measure_contexts(view, ratio()(view, view))["udcg_strict"].mean() >= fixed_worth


def test_autocut_stops_before_the_first_jump() -> None:
    assert first_jump(np.array([1.0, 0.99, 0.98, 0.4, 0.39, 0.38])) == 3


def test_autocut_keeps_everything_where_the_scores_fall_evenly() -> None:
    assert first_jump(np.array([4.0, 3.0, 2.0, 1.0])) == 4


def test_the_largest_gap_is_cut_wherever_it_is(view: View) -> None:
    kept = largest_gap(view, view).kept
    for row in range(1, 40):
        gaps = -np.diff(view.pools.scores[row])
        assert kept[row] == gaps.argmax() + 1


def test_few_labels_hold_exactly_the_answerable_queries_asked_for() -> None:
    queries = tuple(Query(f"q{row}", f"question {row}") for row in range(60))
    dataset = Dataset("d", queries, {f"q{row}": {"p": row % 2} for row in range(60)})
    few = few_labels(dataset, 10, seed=1)
    assert len(few.answerable) == 10
    assert 10 < len(few) < 60


def test_the_mean_over_sets_gives_each_set_the_same_weight() -> None:
    found = gain([np.full(1_000, 1.0), np.full(10, 0.0)], seed=0)
    assert (found.mean, found.lower, found.upper, found.n) == (0.5, 0.5, 0.5, 2)
