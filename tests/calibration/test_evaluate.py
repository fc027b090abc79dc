"""Evaluation: hand-made contexts with known metrics, and intervals with the coverage they claim."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_pools import Case, cases, labelled, ranking_of

from calibration import evaluate
from calibration.evaluate import (
    KEYWORD_METRICS,
    LABEL_METRICS,
    PROFILE_METRICS,
    bootstrap_interval,
    per_query,
    per_query_keywords,
    resampled_means,
)
from calibration.pool_labels import PoolLabels
from calibration.results import tabulate
from ctxguard.core import metrics as measures
from ctxguard.core.decision import Decision, decide
from ctxguard.core.metrics import DEFAULT_UTILITIES, Utilities
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import ScoreKind

LOG = math.log2
K2 = RatioPolicy(k=2)


def metrics(
    scores: list[float | None],
    qrels: dict[str, int],
    policy: RatioPolicy = K2,
) -> dict[str, float]:
    """Of passages p0, p1, … for one query, beside one that gives the labels a relevant grade."""
    pools, labels = labelled([ranking_of(scores), ranking_of([1.0])], [qrels, {"p0": 1}])
    found = per_query(pools, labels, policy)
    assert found.query_ids == ("q0", "q1")
    assert found.values.keys() == LABEL_METRICS.keys()
    return {name: float(values[0]) for name, values in found.values.items()}


class TestHandMade:
    def test_a_context_of_one_relevant_and_one_irrelevant_passage(self) -> None:
        found = metrics([10.0, 8.0, 5.0, 1.0], {"p1": 1, "p2": 1, "p0": 0, "far": 1})
        ideal = 1 + 1 / LOG(3) + 1 / LOG(4)
        expected = {
            **dict.fromkeys(("precision", "mrr", "harm", "distractor_rate", "recall_loss"), 0.5),
            **dict.fromkeys(("harm_undiscounted", "context_precision"), 0.5),
            **dict.fromkeys(("udcg", "udcg_strict"), -0.5 + 1 / LOG(3)),
            **dict.fromkeys(("judged", "hit_rate"), 1.0),
            "recall": 1 / 3,
            "kept": 2.0,
            "recall_at_depth": 2 / 3,
            "average_precision": 0.5 / 3,
            "ndcg": 1 / LOG(3) / ideal,
            "ndcg_at_10": (1 / LOG(3) + 1 / LOG(4)) / ideal,
        }
        assert {name: found[name] for name in expected} == pytest.approx(expected)

    def test_the_threshold_changes_the_context_but_not_the_retrievers_own_metrics(self) -> None:
        qrels = {"p0": 1, "p2": 1}
        loose = metrics([10.0, 8.0, 5.0], qrels, RatioPolicy(k=3))
        tight = metrics([10.0, 8.0, 5.0], qrels, RatioPolicy(k=3, min_ratio=0.7))
        assert (loose["kept"], tight["kept"]) == (3.0, 2.0)
        assert (loose["recall"], tight["recall"]) == (1.0, 0.5)
        for name in ("recall_at_depth", "ndcg_at_10"):
            assert loose[name] == tight[name]

    @pytest.mark.parametrize(("temperature", "suspected"), [(1.0, (2, 3, 4)), (0.5, (2, 3))])
    def test_beyond_the_third_rank_a_passage_is_suspected_by_its_score_at_the_temperature(
        self, temperature: float, suspected: tuple[int, ...]
    ) -> None:
        policy = RatioPolicy(k=4, temperature=temperature)
        found = metrics([8.0, 6.0, 6.0, 6.0], {"p0": 1}, policy)
        assert found["udcg"] == pytest.approx(1.0 - sum(0.5 / LOG(n + 1) for n in suspected))


def one_by_one(decision: Decision, labels: PoolLabels, row: int) -> dict[str, float | None]:
    """The measures of `ctxguard.core.metrics` of one context."""
    kept, n, rules = list(decision.kept), len(decision.ranking), labels.rules
    upstream, grades = labels.grades[row, :n].tolist(), labels.grades[row, kept].tolist()
    every, judged = labels.best_grades[row].tolist(), labels.judged[row, kept].tolist()
    known = None if labels.positives_only else judged
    of_label: dict[str, Any] = {
        "top_grade": labels.top_grade,
        "negatives": labels.negatives[row, kept].tolist(),
        "judged": known,
        "utilities": rules,
    }
    relative = [verdict.relative_score for verdict in decision.verdicts[: len(kept)]]
    compared = None if None in relative else relative
    strict = measures.udcg(measures.strict_utilities(grades, **of_label))
    heuristic = measures.heuristic_utilities(grades, compared, **of_label)
    in_baseline = set(np.flatnonzero(labels.relevant[row] & labels.in_baseline[row]).tolist())
    served = len(in_baseline & set(kept))
    expected = {
        "recall": measures.context_recall(grades, every),
        "pooled_recall": measures.context_recall(grades, upstream),
        "precision": measures.precision_at_k(grades),
        "precision_judged": None if known is None else measures.judged_precision(grades, known),
        "mrr": measures.reciprocal_rank(grades, every),
        "served_mrr": (measures.reciprocal_rank(grades, every) or 0.0) if kept else None,
        "ndcg": measures.ndcg(grades, every, 10, gain=rules.gain),
        "udcg": measures.udcg(heuristic).value,
        "udcg_strict": strict.value,
        "harm": strict.harm,
        "distractor_rate": measures.distractor_rate(heuristic),
        "harm_undiscounted": measures.harm_undiscounted(heuristic),
        "kept": len(kept),
        "tokens": None if kept else 0.0,
        "recall_loss": 1.0 - served / len(in_baseline) if in_baseline else None,
        "recall_at_depth": measures.context_recall(upstream, every),
        "ndcg_at_10": measures.ndcg(upstream, every, 10, gain=rules.gain),
        "judged": sum(judged) / len(kept) if kept else None,
        "hit_rate": measures.hit_rate_at_k(grades, every, max(len(kept), 1)),
        "average_precision": measures.average_precision(grades, every),
        "context_precision": measures.context_precision(grades),
    }
    return {name: math.nan if value is None else value for name, value in expected.items()}


RULES = [
    DEFAULT_UTILITIES,
    Utilities(rank_limit=0),  # the score alone makes a passage suspect
    # Labels alone do.
    Utilities(by_grade={0: -0.3, 1: 0.2}, gain="exponential", rank_limit=0, score_ratio=1.0),
]


class TestAllAtOnce:
    @settings(max_examples=50, deadline=None)
    @given(
        cases(rules=RULES),
        st.integers(1, 9),
        st.sampled_from([0.0, 0.3, 0.75]),
        st.sampled_from([1.0, 0.5]),
    )
    def test_every_figure_is_that_of_the_measures_of_one_query(
        self, case: Case, k: int, min_ratio: float, temperature: float
    ) -> None:
        pools, labels = case
        ratio = min_ratio * (pools.kind is not ScoreKind.RANK)
        policy = RatioPolicy(k=k, min_ratio=ratio, temperature=temperature)
        found = per_query(pools, labels, policy).values
        for row, ranking in enumerate(pools.rankings()):
            decision = decide(ranking, policy)
            assert {name: column[row] for name, column in found.items()} == pytest.approx(
                one_by_one(decision, labels, row), rel=1e-12, nan_ok=True
            )


class TestAsLive:
    """Figures that the board shows of live traffic under the same names."""

    def test_pooled_recall_is_one_ratio_over_all_and_recall_the_mean_of_queries(self) -> None:
        two = ranking_of([3.0, 2.0, 1.0])
        pools, labels = labelled([two, two], [{"p0": 1}, {"p0": 1, "p1": 1, "p2": 1, "far": 1}])
        found = per_query(pools, labels, RatioPolicy(k=1)).evidence().metrics
        assert found["recall"].value == pytest.approx((1 + 1 / 4) / 2)
        assert found["pooled_recall"].value == pytest.approx(2 / 4)
        assert found["pooled_recall"].n == 2

    def test_its_difference_is_that_of_the_two_ratios(self) -> None:
        pool = ranking_of([4.0, 3.0, 2.0, 1.0])
        pools, labels = labelled([pool, pool], [{"p0": 1}, {"p0": 1, "p1": 1, "p3": 1}])
        of = {k: per_query(pools, labels, RatioPolicy(k=k)) for k in (1, 2)}
        table = tabulate({"one": of[1], "two": of[2]})
        means = [table.of(name, "pooled_recall").mean.value for name in ("one", "two")]
        assert means == pytest.approx([2 / 4, 3 / 4])
        assert table.of("two", "pooled_recall").difference.value == pytest.approx(1 / 4)

    def test_mrr_leaves_out_queries_without_a_relevant_passage_and_served_mrr_does_not(
        self,
    ) -> None:
        pools, labels = labelled([ranking_of([2.0])] * 2, [{"p0": 1}, {"p0": 0}])
        found = per_query(pools, labels, K2).evidence().metrics
        assert (found["mrr"].value, found["mrr"].n) == (1.0, 1)
        assert (found["served_mrr"].value, found["served_mrr"].n) == (0.5, 2)


class TestUndefined:
    def test_a_mean_says_over_how_many_queries_it_is_defined(self) -> None:
        pools, labels = labelled([ranking_of([2.0])] * 3, [{"p0": 1}, {}, {"far": 1}])
        evidence = per_query(pools, labels, K2).evidence()
        assert evidence.queries == 3
        assert evidence.metrics["recall"].n == 2
        assert evidence.metrics["recall"].value == 0.5
        assert evidence.metrics["recall_loss"].n == 1
        assert evidence.metrics["kept"].n == 3


class TestBootstrap:
    @pytest.mark.parametrize("at_once", [7, 300])
    def test_samples_do_not_depend_on_how_many_are_drawn_at_once(
        self, monkeypatch: pytest.MonkeyPatch, at_once: int
    ) -> None:
        values = np.random.default_rng(0).random((40, 3))
        expected = resampled_means(values, resamples=300)
        monkeypatch.setattr(evaluate, "_RESAMPLED", at_once)
        np.testing.assert_array_equal(resampled_means(values, resamples=300), expected)

    @pytest.mark.parametrize(
        ("values", "value", "n"),
        [([np.nan, 1.0, 0.0, np.nan], 0.5, 2), ([np.nan], None, 0), ([], None, 0), ([0.3], 0.3, 1)],
    )
    def test_undefined_values_are_left_out_and_one_has_no_spread(
        self, values: list[float], value: float | None, n: int
    ) -> None:
        interval = bootstrap_interval(np.array(values))
        assert (interval.value, interval.n) == (value, n)
        assert (interval.bounds is None) == (n < 2)

    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.floats(-5.0, 5.0), min_size=2, max_size=30))
    def test_the_interval_holds_the_mean_and_stays_within_the_values(
        self, values: list[float]
    ) -> None:
        interval = bootstrap_interval(np.array(values), resamples=200)
        inside = [min(values), interval.bounds[0], interval.value, interval.bounds[1], max(values)]
        assert all(low <= high + 1e-9 for low, high in pairwise(inside))

    def test_a_seed_gives_the_same_interval(self) -> None:
        values = np.random.default_rng(0).random(40)
        assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)
        assert bootstrap_interval(values, seed=3) != bootstrap_interval(values, seed=4)

    def test_columns_are_resampled_together(self) -> None:
        first = np.random.default_rng(0).random(30)
        means = resampled_means(np.column_stack([first, first + 1.0]))
        assert means[:, 1] - means[:, 0] == pytest.approx(1.0)

    @pytest.mark.parametrize(
        ("n", "least"), [(50, 0.90), (200, 0.92)], ids=["50 queries", "200 queries"]
    )
    def test_it_covers_the_truth_about_as_often_as_it_claims(self, n: int, least: float) -> None:
        """On a skewed metric: mostly 1, sometimes a fraction, as recall is."""
        random = np.random.default_rng(1)
        truth = 0.8 + 0.2 * 0.5
        covered = 0
        repeats = 300
        for repeat in range(repeats):
            values = np.where(random.random(n) < 0.8, 1.0, random.random(n))
            interval = bootstrap_interval(values, seed=repeat, resamples=400)
            covered += interval.bounds[0] <= truth <= interval.bounds[1]
        assert least <= covered / repeats <= 0.99


def test_a_profile_carries_its_own_metrics_alone() -> None:
    pools, labels = labelled([ranking_of([2.0, 1.0])], [{"p0": 1}])
    evidence = per_query(pools, labels, K2).evidence(metrics=PROFILE_METRICS)
    assert evidence.metrics.keys() == PROFILE_METRICS.keys()


def test_keywords_are_looked_for_in_the_context_alone() -> None:
    pools, _ = labelled([ranking_of([3.0, 2.0, 1.0])] * 2, [{"p0": 1}, {}], depth=3)
    texts = {"p0": "Fill the kettle.", "p1": "Boil water in the Kettle", "p2": "vinegar"}
    keywords = {"q0": ("boil water", "kettle", "vinegar")}
    found = per_query_keywords(pools, keywords, K2, texts.__getitem__)
    assert found.values.keys() == KEYWORD_METRICS.keys()
    assert found.values["keyword_recall"] == pytest.approx([2 / 3, np.nan], nan_ok=True)
    expected = [(1 / 2 + 1 + 0) / 3, np.nan]
    assert found.values["keyword_mrr"] == pytest.approx(expected, nan_ok=True)
