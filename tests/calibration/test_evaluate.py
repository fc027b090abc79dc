"""Evaluation: hand-made contexts with known metrics, and intervals with the coverage they claim."""

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_measures import AP, RR, P, R, Success, nDCG
from simulated_pools import cases, labelled, ranking_of

from calibration.evaluate import (
    IN_POOL,
    KEYWORD_METRICS,
    LABEL_METRICS,
    Measured,
    intervals,
    per_query,
    per_query_keywords,
)
from calibration.pools import LabelledPools
from calibration.results import tabulate
from ctxguard.core.decision import Decision, decide
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import ScoreKind
from ctxguard.measure import interval
from ctxguard.measure.interval import Interval, bootstrap_interval, resampled_means
from ctxguard.measure.worth import BLOG, READERS, Utilities

LOG = math.log2
EXACT = 1e-9
K2 = RatioPolicy(k=2)


def of_grades(ranked: list[int], every: list[int], k: int = 10) -> dict[str, float]:
    """Metrics of the first k of a ranking with these grades, of all that the labels hold."""
    missed = (Counter(every) - Counter(filter(None, ranked))).elements()
    qrels = {f"p{at}": grade for at, grade in enumerate(ranked)}
    qrels |= {f"far{at}": grade for at, grade in enumerate(missed)}
    ranking = ranking_of([float(-at) for at in range(len(ranked))], kind=ScoreKind.LOGIT)
    # Beside one that gives the labels a relevant grade.
    pools = labelled([ranking, ranking_of([1.0], kind=ScoreKind.LOGIT)], [qrels, {"p0": 1}])
    found = per_query(pools, RatioPolicy(k=k))
    assert found.keys() == {*LABEL_METRICS, IN_POOL}
    return {name: float(values[0]) for name, values in found.items()}


def at_ranks(relevant: list[int], length: int) -> list[int]:
    return [int(rank in relevant) for rank in range(1, length + 1)]


class TestWorkedExamples:
    def test_reciprocal_ranks_and_their_mean(self, examples: dict[str, Any]) -> None:
        for case in examples["reciprocal_rank"]:
            found = of_grades(at_ranks(case["relevant_ranks"], 5), [1])
            assert found["mrr"] == pytest.approx(case["exact"], abs=EXACT)
        for case in examples["mean_reciprocal_rank"]:
            rankings = [at_ranks([rank], 5) for rank in case["first_relevant_ranks"]]
            found = [of_grades(ranking, [1])["mrr"] for ranking in rankings]
            assert np.mean(found) == pytest.approx(case["exact"], abs=EXACT)

    def test_recall(self, examples: dict[str, Any]) -> None:
        counted, ranked = examples["recall_at_k"]
        first = at_ranks(list(range(1, counted["relevant_in_top_k"] + 1)), counted["k"])
        found = of_grades(first, [1] * counted["relevant_total"], counted["k"])
        assert found["recall"] == pytest.approx(counted["exact"], abs=EXACT)
        grades, every = at_ranks(ranked["relevant_ranks"], 10), [1] * ranked["relevant_total"]
        for k, exact in ranked["at"].items():
            found = of_grades(grades, every, int(k))
            assert found["recall"] == pytest.approx(exact, abs=EXACT)

    def test_ndcg_with_linear_gain(self, examples: dict[str, Any]) -> None:
        for case in examples["ndcg_linear_gain"]:
            found = of_grades(case["grades_in_rank_order"], case["all_grades"])
            assert found["ndcg"] == pytest.approx(case["exact"], abs=EXACT)

    def test_keyword_relevance(self, examples: dict[str, Any]) -> None:
        for case in examples["keyword_relevance"]:
            texts = {f"p{at}": "no word of it" for at in range(5)}
            for keyword, rank in zip(case["keywords"], case["first_ranks"], strict=True):
                if rank is not None:
                    texts[f"p{rank - 1}"] = f"Our {keyword.lower()}."
            pools = labelled([ranking_of([5.0, 4.0, 3.0, 2.0, 1.0])], [{"p0": 1}])
            found = per_query_keywords(
                pools, {"q0": case["keywords"]}, RatioPolicy(k=5), texts.__getitem__
            )
            assert found["keyword_mrr"][0] == pytest.approx(case["mrr_exact"], abs=EXACT)
            assert found["keyword_recall"][0] == pytest.approx(case["recall_at_5_exact"], abs=EXACT)

    def test_heuristic_rules_and_presets(self, examples: dict[str, Any]) -> None:
        presets = examples["distractor_heuristics"]["presets"]
        assert presets["default"]["score_ratio"] == BLOG.score_ratio
        assert presets["default"]["penalty"] == BLOG.irrelevant
        relevant, distractor, near_top, early, otherwise = (
            worth for _, worth in examples["distractor_heuristics"]["rules"]
        )
        ranking = ranking_of([1.0, 0.9, 0.71, 0.705, 0.7])
        pools = labelled(
            [ranking],
            [{"p0": 1, "p2": 0, "p3": 0, "p4": 0}],
            distractors=[{"p1": "distractor"}],
            utilities=BLOG,
        )
        found = per_query(pools, RatioPolicy(k=5))["udcg"][0]
        worths = [relevant, distractor, early, near_top, otherwise]
        assert found == pytest.approx(worth_of(worths)[0], abs=EXACT)


def test_label_figures_equal_ir_measures() -> None:
    rng, qrels, runs = random.Random(1), [], []
    for _ in range(150):
        grades = {f"d{at}": rng.choice([0, 0, 1, 2, 3]) for at in range(rng.randint(1, 25))}
        pool = [*grades, *(f"unjudged{at}" for at in range(rng.randint(5, 20)))]
        qrels.append({**grades, "d0": rng.randint(1, 3)})
        runs.append(rng.sample(pool, rng.randint(5, len(pool))))
    falling = [float(-at) for at in range(45)]
    rankings = [ranking_of(falling[: len(run)], ids=run, kind=ScoreKind.LOGIT) for run in runs]
    pools = labelled(rankings, qrels, depth=45)
    ours = {k: per_query(pools, RatioPolicy(k=k)) for k in (5, 45)}
    exponential = replace(pools, rules=Utilities(gain="exponential"))
    by_name = {f"q{at}": own for at, own in enumerate(qrels)}
    scored = {f"q{at}": dict(zip(run, falling, strict=False)) for at, run in enumerate(runs)}
    for measure, found in (
        (R @ 5, ours[5]["recall"]),
        (R @ 45, ours[45]["recall"]),
        (P @ 5, ours[5]["precision"]),
        (Success @ 5, ours[5]["hit_rate"]),
        (RR @ 5, ours[5]["mrr"]),
        (RR, ours[45]["mrr"]),
        (AP @ 5, ours[5]["average_precision"]),
        (AP, ours[45]["average_precision"]),
        (nDCG @ 10, ours[45]["ndcg"]),
        (nDCG @ 10, ours[5]["ndcg_at_10"]),
        (nDCG(gains={1: 1, 2: 3, 3: 7}) @ 10, per_query(exponential, RatioPolicy(k=45))["ndcg"]),
    ):
        # One call each: asked together, ir_measures may apply the gains of one nDCG to the other.
        theirs = {each.query_id: each.value for each in measure.iter_calc(by_name, scored)}
        assert dict(zip(pools.query_ids, found, strict=True)) == pytest.approx(theirs, abs=EXACT)
    for query_id, run, figure in zip(by_name, runs, ours[45]["precision_judged"], strict=True):
        known = len(by_name[query_id].keys() & set(run))
        condensed = P(judged_only=True) @ max(known, 1)
        expected = condensed.calc_aggregate(
            {query_id: by_name[query_id]}, {query_id: scored[query_id]}
        )
        assert figure == pytest.approx(expected if known else math.nan, abs=EXACT, nan_ok=True)


def share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def dcg(grades: list[int], rules: Utilities) -> float:
    gains = [2.0**grade - 1.0 if rules.gain == "exponential" else grade for grade in grades[:10]]
    return sum(gain / LOG(rank + 1) for rank, gain in enumerate(gains, 1))


def worth_of(utilities: list[float]) -> tuple[float, float]:
    """UDCG and the harm in it."""
    shares = [each / LOG(rank + 1) for rank, each in enumerate(utilities, 1)]
    return sum(shares), -sum(min(share, 0.0) for share in shares)


def one_by_one(decision: Decision, labels: LabelledPools, row: int) -> dict[str, float]:
    """The measures of one context, as they are defined."""
    kept, n, rules = list(decision.kept), len(decision.ranking), labels.rules
    upstream, grades = labels.grades[row, :n].tolist(), labels.grades[row, kept].tolist()
    best, judged = labels.best_grades[row].tolist(), labels.judged[row, kept].tolist()
    misleading = labels.misleading[row, kept].tolist()
    suspected = labels.utilities[row, kept].tolist()
    for at, candidate in enumerate(decision.decisions[: len(kept)]):
        by_label = grades[at] > 0 or misleading[at]
        by_label |= 0 in (rules.by_grade or {}) and (judged[at] or labels.positives_only)
        by_score = (candidate.relative_score or 0.0) > (rules.score_ratio or 0.0)
        if rules.score_ratio is not None and not (by_label or by_score or at < rules.rank_limit):
            suspected[at] = 0.0
    ranks = [rank for rank, grade in enumerate(grades, 1) if grade > 0]
    precisions = sum(found / rank for found, rank in enumerate(ranks, 1))
    relevant, penalised = sum(grade > 0 for grade in best), sum(each < 0 for each in suspected)
    suspects, any_misleads = rules.score_ratio is not None, labels.misleading.any()
    in_baseline = set(np.flatnonzero(labels.relevant[row] & labels.in_baseline[row]).tolist())
    first, size, in_pool = (1.0 / ranks[0] if ranks else 0.0), len(kept), sum(map(bool, upstream))
    return {
        "recall": share(len(ranks), relevant),
        "pooled_recall": share(len(ranks), in_pool),
        "precision": share(len(ranks), size),
        "precision_judged": math.nan if labels.positives_only else share(len(ranks), sum(judged)),
        "mrr": first if relevant else math.nan,
        "served_mrr": first if kept else math.nan,
        "ndcg": share(dcg(grades, rules), dcg(best, rules)),
        "udcg": worth_of(suspected)[0],
        "harm": worth_of(suspected)[1],
        "misleading": sum(misleading) if any_misleads else math.nan,
        "distractor_rate": share(penalised, size) if suspects else math.nan,
        "harm_undiscounted": 0.5 * penalised if suspects else math.nan,
        "kept": size,
        "tokens": math.nan if kept else 0.0,
        "recall_loss": share(len(in_baseline - set(kept)), len(in_baseline)),
        "recall_at_depth": share(in_pool, relevant),
        "ndcg_at_10": share(dcg(upstream, rules), dcg(best, rules)),
        "judged": share(sum(judged), size),
        "hit_rate": float(bool(ranks)) if relevant else math.nan,
        "average_precision": share(precisions, relevant),
        "context_precision": precisions / max(len(ranks), 1) if kept else math.nan,
        "in_pool": in_pool,
    }


RULES = [
    READERS,
    BLOG,
    replace(BLOG, rank_limit=0),  # the score alone makes a passage suspect
    # Labels alone do.
    Utilities(by_grade={0: -0.3, 1: 0.2}, gain="exponential", rank_limit=0, score_ratio=1.0),
]


@settings(max_examples=50, deadline=None)
@given(
    cases(rules=RULES),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.3, 0.75]),
    st.sampled_from([1.0, 0.5]),
)
def test_figures_equal_single_query_measures(
    pools: LabelledPools, k: int, min_ratio: float, temperature: float
) -> None:
    ratio = min_ratio * (pools.kind is not ScoreKind.RANK)
    policy = RatioPolicy(k=k, min_ratio=ratio, temperature=temperature)
    found = per_query(pools, policy)
    for row, ranking in enumerate(pools.rankings()):
        decision = decide(ranking, policy)
        assert {name: column[row] for name, column in found.items()} == pytest.approx(
            one_by_one(decision, pools, row), rel=1e-12, nan_ok=True
        )


def means(measured: Measured) -> dict[str, Interval]:
    return intervals({name: measured[name] for name in LABEL_METRICS}, measured)


class TestAsLive:
    """Figures that the board shows of live traffic under the same names."""

    def test_pooled_recall_is_one_ratio(self) -> None:
        two = ranking_of([3.0, 2.0, 1.0])
        pools = labelled([two, two], [{"p0": 1}, {"p0": 1, "p1": 1, "p2": 1, "far": 1}])
        found = means(per_query(pools, RatioPolicy(k=1)))
        assert found["recall"].value == pytest.approx((1 + 1 / 4) / 2)
        assert found["pooled_recall"].value == pytest.approx(2 / 4)
        assert found["pooled_recall"].n == 2

    def test_difference_is_of_two_ratios(self) -> None:
        pool = ranking_of([4.0, 3.0, 2.0, 1.0])
        pools = labelled([pool, pool], [{"p0": 1}, {"p0": 1, "p1": 1, "p3": 1}])
        of = {k: per_query(pools, RatioPolicy(k=k)) for k in (1, 2)}
        table = tabulate({"one": of[1], "two": of[2]})
        means = [table.of(name, "pooled_recall").mean.value for name in ("one", "two")]
        assert means == pytest.approx([2 / 4, 3 / 4])
        assert table.of("two", "pooled_recall").difference.value == pytest.approx(1 / 4)

    def test_mean_says_its_query_count(self) -> None:
        """MRR leaves out queries without a relevant passage, and served MRR does not."""
        pools = labelled([ranking_of([2.0])] * 4, [{"p0": 1}, {"p0": 0}, {}, {"far": 1}])
        found = means(per_query(pools, K2))
        counts = {name: (found[name].value, found[name].n) for name in ("recall", "mrr", "kept")}
        assert counts == {"recall": (0.5, 2), "mrr": (0.5, 2), "kept": (1.0, 4)}
        assert (found["served_mrr"].value, found["served_mrr"].n) == (0.25, 4)
        assert found["recall_loss"].n == 1


class TestBootstrap:
    @pytest.mark.parametrize("at_once", [7, 300])
    def test_samples_ignore_batch_size(self, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
        values = np.random.default_rng(0).random((40, 3))
        expected = resampled_means(values, resamples=300)
        monkeypatch.setattr(interval, "_RESAMPLED", at_once)
        np.testing.assert_array_equal(resampled_means(values, resamples=300), expected)

    @pytest.mark.parametrize(
        ("values", "value", "n"),
        [([np.nan, 1.0, 0.0, np.nan], 0.5, 2), ([np.nan], None, 0), ([], None, 0), ([0.3], 0.3, 1)],
    )
    def test_undefined_values_are_left_out(
        self, values: list[float], value: float | None, n: int
    ) -> None:
        found = bootstrap_interval(np.array(values))
        assert (found.value, found.n) == (value, n)
        assert (found.bounds is None) == (n < 2)

    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.floats(-5.0, 5.0), min_size=2, max_size=30))
    def test_interval_holds_mean_within_values(self, values: list[float]) -> None:
        found = bootstrap_interval(np.array(values), resamples=200)
        inside = [min(values), found.bounds[0], found.value, found.bounds[1], max(values)]
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
    def test_covers_truth_as_it_claims(self, n: int, least: float) -> None:
        """On a skewed metric: mostly 1, sometimes a fraction, as recall is."""
        random = np.random.default_rng(1)
        truth = 0.8 + 0.2 * 0.5
        covered = 0
        repeats = 300
        for repeat in range(repeats):
            values = np.where(random.random(n) < 0.8, 1.0, random.random(n))
            found = bootstrap_interval(values, seed=repeat, resamples=400)
            covered += found.bounds[0] <= truth <= found.bounds[1]
        assert least <= covered / repeats <= 0.99


def test_keywords_are_sought_in_context() -> None:
    pools = labelled([ranking_of([3.0, 2.0, 1.0])] * 2, [{"p0": 1}, {}], depth=3)
    texts = {"p0": "Fill the kettle.", "p1": "Boil water in the Kettle", "p2": "vinegar"}
    keywords = {"q0": ("boil water", "kettle", "vinegar")}
    found = per_query_keywords(pools, keywords, K2, texts.__getitem__)
    assert found.keys() == KEYWORD_METRICS.keys()
    assert found["keyword_recall"] == pytest.approx([2 / 3, np.nan], nan_ok=True)
    expected = [(1 / 2 + 1 + 0) / 3, np.nan]
    assert found["keyword_mrr"] == pytest.approx(expected, nan_ok=True)
