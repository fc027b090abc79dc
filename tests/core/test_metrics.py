"""Metrics against worked examples, against ir_measures, and at their edges."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ir_measures
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ir_measures import AP, RR, P, R, Success, nDCG

from ctxguard.core import metrics
from ctxguard.core.metrics import Mean, Negative, Utilities
from ctxguard.errors import ConfigurationError

EXACT = 1e-9

grades = st.lists(st.integers(0, 3), max_size=30)
worths = st.lists(st.floats(-1, 1), max_size=30)


@pytest.fixture(scope="module")
def examples(golden: Path) -> dict[str, Any]:
    return json.loads(golden.read_text(encoding="utf-8"))


def at_ranks(relevant_ranks: list[int], length: int) -> list[int]:
    return [int(rank in relevant_ranks) for rank in range(1, length + 1)]


def test_worked_reciprocal_ranks(examples: dict[str, Any]) -> None:
    for case in examples["reciprocal_rank"]:
        value = metrics.reciprocal_rank(at_ranks(case["relevant_ranks"], 5), [1])
        assert value == pytest.approx(case["exact"], abs=EXACT)


def test_worked_mean_reciprocal_rank(examples: dict[str, Any]) -> None:
    for case in examples["mean_reciprocal_rank"]:
        ranks = case["first_relevant_ranks"]
        result = metrics.mean(metrics.reciprocal_rank(at_ranks([rank], 5), [1]) for rank in ranks)
        assert result.value == pytest.approx(case["exact"], abs=EXACT)
        assert result.n == len(ranks)


def test_worked_recall(examples: dict[str, Any]) -> None:
    counted, ranked = examples["recall_at_k"]
    judged = [1] * counted["relevant_total"]
    found = at_ranks(list(range(1, counted["relevant_in_top_k"] + 1)), counted["k"])
    assert metrics.recall_at_k(found, judged, counted["k"]) == pytest.approx(
        counted["exact"], abs=EXACT
    )
    judged = [1] * ranked["relevant_total"]
    for k, exact in ranked["at"].items():
        found = at_ranks(ranked["relevant_ranks"], 10)
        assert metrics.recall_at_k(found, judged, int(k)) == pytest.approx(exact, abs=EXACT)


def test_worked_ndcg_with_linear_gain(examples: dict[str, Any]) -> None:
    for case in examples["ndcg_linear_gain"]:
        ranked, judged, k = case["grades_in_rank_order"], case["all_grades"], case.get("k")
        ideal = sorted(judged, reverse=True)
        assert metrics.dcg(ranked, k) == pytest.approx(case["dcg_exact"], abs=EXACT)
        assert metrics.dcg(ideal, k) == pytest.approx(case["idcg_exact"], abs=EXACT)
        assert metrics.ndcg(ranked, judged, k) == pytest.approx(case["exact"], abs=EXACT)


def test_worked_keyword_relevance(examples: dict[str, Any]) -> None:
    for case in examples["keyword_relevance"]:
        texts = ["no word of it"] * 5
        for keyword, rank in zip(case["keywords"], case["first_ranks"], strict=True):
            if rank is not None:
                texts[rank - 1] = f"Our {keyword.lower()}."
        first_ranks = metrics.keyword_first_ranks(case["keywords"], texts)
        assert first_ranks == case["first_ranks"]
        assert metrics.keyword_reciprocal_rank(first_ranks) == pytest.approx(
            case["mrr_exact"], abs=EXACT
        )
        assert metrics.keyword_recall_at_k(first_ranks, 5) == pytest.approx(
            case["recall_at_5_exact"], abs=EXACT
        )


def test_worked_udcg(examples: dict[str, Any]) -> None:
    for case in examples["udcg"]:
        result = metrics.udcg(case["utilities_in_rank_order"])
        assert result.value == pytest.approx(case["exact"], abs=EXACT)
        assert result.gain == pytest.approx(case["gain_exact"], abs=EXACT)
        assert result.harm == pytest.approx(case["harm_exact"], abs=EXACT)


def test_worked_reference_udcg(examples: dict[str, Any]) -> None:
    reference = examples["udcg_reference"]
    assert reference["penalty"] == metrics.REFERENCE_PENALTY
    for case in reference["cases"]:
        value = metrics.udcg_reference(case["relevant"], case["abstain"])
        assert value == pytest.approx(case["exact"], abs=EXACT)


def test_worked_heuristic_rules_and_presets(examples: dict[str, Any]) -> None:
    presets = examples["distractor_heuristics"]["presets"]
    for name, utilities in {
        "default": metrics.DEFAULT_UTILITIES,
        "strict (medical, legal)": metrics.STRICT_UTILITIES,
        "relaxed (creative writing)": metrics.RELAXED_UTILITIES,
    }.items():
        assert presets[name]["score_ratio"] == utilities.score_ratio
        assert presets[name]["penalty"] == utilities.irrelevant
    relevant, distractor, near_top, early, otherwise = (
        worth for _, worth in examples["distractor_heuristics"]["rules"]
    )
    assert metrics.heuristic_utilities(
        [1, 0, 0, 0, 0],
        [1.0, 0.9, 0.4, 0.71, 0.7],
        top_grade=1,
        negatives=[None, Negative.DISTRACTOR, None, None, None],
    ) == [relevant, distractor, early, near_top, otherwise]


def untied_collection(seed: int) -> tuple[dict[str, dict[str, int]], dict[str, list[str]]]:
    """Judgments, and rankings in which judged and unjudged passages are mixed."""
    rng = random.Random(seed)
    qrels, runs = {}, {}
    for query in range(150):
        judged = {f"d{i}": rng.choice([0, 0, 1, 2, 3]) for i in range(rng.randint(1, 25))}
        judged["d0"] = rng.randint(1, 3)
        pool = [*judged, *(f"unjudged{i}" for i in range(rng.randint(0, 20)))]
        qrels[f"q{query}"] = judged
        runs[f"q{query}"] = rng.sample(pool, rng.randint(1, len(pool)))
    return qrels, runs


@pytest.mark.parametrize("min_grade", [1, 2])
def test_measures_equal_ir_measures_on_untied_runs(min_grade: int) -> None:
    qrels, runs = untied_collection(seed=min_grade)
    qrels = {query: labels for query, labels in qrels.items() if max(labels.values()) >= min_grade}
    gains = {1: 1, 2: 3, 3: 7}
    ours = {
        R(rel=min_grade) @ 5: lambda r, j: metrics.recall_at_k(r, j, 5, min_grade=min_grade),
        R(rel=min_grade) @ 100: lambda r, j: metrics.context_recall(r, j, min_grade=min_grade),
        P(rel=min_grade) @ 5: lambda r, j: metrics.precision_at_k(r, 5, min_grade=min_grade),
        Success(rel=min_grade) @ 5: lambda r, j: metrics.hit_rate_at_k(
            r, j, 5, min_grade=min_grade
        ),
        RR(rel=min_grade): lambda r, j: metrics.reciprocal_rank(r, j, min_grade=min_grade),
        RR(rel=min_grade) @ 5: lambda r, j: metrics.reciprocal_rank(r, j, 5, min_grade=min_grade),
        AP(rel=min_grade): lambda r, j: metrics.average_precision(r, j, min_grade=min_grade),
        AP(rel=min_grade) @ 5: lambda r, j: metrics.average_precision(r, j, 5, min_grade=min_grade),
        nDCG: metrics.ndcg,
        nDCG @ 10: lambda r, j: metrics.ndcg(r, j, 10),
        nDCG(gains=gains): lambda r, j: metrics.ndcg(r, j, gain="exponential"),
        nDCG(gains=gains) @ 10: lambda r, j: metrics.ndcg(r, j, 10, gain="exponential"),
    }
    scored = {
        query: {passage: float(-rank) for rank, passage in enumerate(runs[query])}
        for query in qrels
    }
    for measure, our_measure in ours.items():
        # One call each: asked together, ir_measures may apply the gains of one nDCG to the other.
        results = list(ir_measures.iter_calc([measure], qrels, scored))
        assert len(results) == len(qrels)
        for theirs in results:
            labels = qrels[theirs.query_id]
            ranked = [labels.get(passage, 0) for passage in runs[theirs.query_id]]
            value = our_measure(ranked, list(labels.values()))
            assert value == pytest.approx(theirs.value, abs=EXACT), theirs


def test_precision_over_judged_passages_equals_that_of_ir_measures() -> None:
    qrels, runs = untied_collection(seed=3)
    for query, labels in qrels.items():
        ranked = [labels.get(passage, 0) for passage in runs[query]]
        known = [passage in labels for passage in runs[query]]
        if not any(known):
            assert metrics.judged_precision(ranked, known) is None
            continue
        scored = {query: {passage: float(-rank) for rank, passage in enumerate(runs[query])}}
        measure = P(judged_only=True) @ sum(known)
        theirs = ir_measures.calc_aggregate([measure], {query: labels}, scored)[measure]
        assert metrics.judged_precision(ranked, known) == pytest.approx(theirs, abs=EXACT)


@pytest.mark.parametrize(
    "value",
    [
        metrics.recall_at_k([0, 0], [0], 2),
        metrics.recall_at_k([1], [1], 1, min_grade=2),
        metrics.context_recall([], []),
        metrics.hit_rate_at_k([0], [0], 1),
        metrics.reciprocal_rank([0], [0]),
        metrics.average_precision([0], [0]),
        metrics.ndcg([0], [0]),
        metrics.ndcg([], []),
        metrics.precision_at_k([]),
        metrics.context_precision([]),
        metrics.distractor_rate([]),
        metrics.udcg_reference([], []),
        metrics.keyword_reciprocal_rank([]),
        metrics.keyword_recall_at_k([], 5),
    ],
)
def test_what_nothing_can_decide_is_undefined(value: float | None) -> None:
    assert value is None


def test_a_relevant_passage_that_was_not_retrieved_is_a_miss_and_not_undefined() -> None:
    assert metrics.recall_at_k([0], [1], 1) == 0.0
    assert metrics.reciprocal_rank([], [1]) == 0.0
    assert metrics.average_precision([0], [1]) == 0.0
    assert metrics.ndcg([], [2]) == 0.0
    assert metrics.hit_rate_at_k([], [1], 3) == 0.0


def test_a_mean_says_over_how_many_queries() -> None:
    assert metrics.mean([0.0, None, 1.0, None]) == Mean(0.5, 2)
    assert metrics.mean([]) == Mean(None, 0)


def test_precision_at_k_counts_missing_passages_and_precision_of_a_context_does_not() -> None:
    assert metrics.precision_at_k([1, 1], 5) == 0.4
    assert metrics.precision_at_k([1, 1]) == 1.0


def test_context_precision_is_blind_to_what_the_context_misses() -> None:
    assert metrics.context_precision([1, 0]) == 1.0
    assert metrics.average_precision([1, 0], [1, 1]) == 0.5
    assert metrics.context_precision([0, 0]) == 0.0


def test_a_negative_grade_gains_nothing() -> None:
    assert metrics.dcg([-1, 1]) == metrics.dcg([0, 1])
    assert metrics.dcg([-1], gain="exponential") == 0.0


@given(grades.filter(any))
def test_the_ideal_order_scores_one(judged: list[int]) -> None:
    ideal = sorted(judged, reverse=True)
    assert metrics.ndcg(ideal, judged) == 1.0
    assert metrics.average_precision(ideal, judged) == pytest.approx(1.0)
    assert metrics.reciprocal_rank(ideal, judged) == 1.0
    assert metrics.context_recall(ideal, judged) == 1.0


@given(worths)
def test_udcg_is_gain_less_harm_and_neither_is_negative(utilities: list[float]) -> None:
    result = metrics.udcg(utilities)
    assert result.gain >= 0.0
    assert result.harm >= 0.0
    plain = sum(worth / math.log2(rank + 1) for rank, worth in enumerate(utilities, start=1))
    assert result.value == pytest.approx(plain, abs=EXACT)


def test_an_empty_context_neither_helps_nor_harms() -> None:
    assert metrics.udcg([]) == metrics.Udcg(gain=0.0, harm=0.0)


def test_the_first_heuristic_that_matches_wins() -> None:
    utilities = metrics.heuristic_utilities(
        [2, 1, 0, 0],
        [1.0, 1.0, 1.0, 1.0],
        top_grade=2,
        negatives=[Negative.DISTRACTOR, None, Negative.DISTRACTOR, Negative.HARD_NEGATIVE],
        utilities=Utilities(irrelevant=-0.1),
    )
    assert utilities == [1.0, 0.5, -1.0, -0.5]


def test_scores_that_carry_rank_only_leave_the_rank_rule_alone() -> None:
    utilities = metrics.heuristic_utilities([0] * 5, None, top_grade=1)
    assert utilities == [-0.5, -0.5, -0.5, 0.0, 0.0]


def test_the_strict_form_charges_for_the_tail_that_the_heuristics_give_away() -> None:
    ranked = [1, 0, 0, 0, 0]
    low_tail = [1.0, 0.1, 0.1, 0.1, 0.1]
    assert metrics.heuristic_utilities(ranked, low_tail, top_grade=1)[3:] == [0.0, 0.0]
    assert metrics.strict_utilities(ranked, top_grade=1) == [1.0, -0.5, -0.5, -0.5, -0.5]


def test_an_unjudged_passage_has_a_utility_of_its_own() -> None:
    ranked, known = [1, 0, 0, 0, 0], [True, True, False, False, False]
    own = Utilities(unjudged=-0.3)
    assert metrics.strict_utilities(ranked, top_grade=1, judged=known, utilities=own) == [
        *[1.0, -0.5],
        *[-0.3] * 3,
    ]
    relative = [1.0, 0.9, 0.8, 0.1, 0.1]
    assert metrics.heuristic_utilities(
        ranked, relative, top_grade=1, judged=known, utilities=own
    ) == [1.0, -0.5, -0.3, 0.0, 0.0]


def test_a_map_names_what_judged_not_relevant_is_worth_and_not_what_unjudged_is() -> None:
    mapped = Utilities(by_grade={0: -0.4})
    worths = metrics.strict_utilities([0, 0], top_grade=1, judged=[True, False], utilities=mapped)
    assert worths == [-0.4, -0.2]


def test_the_worst_utility_is_the_lowest_of_any_case() -> None:
    assert Utilities().worst == -1.0
    assert Utilities(unjudged=-2.0).worst == -2.0
    assert Utilities(by_grade={0: -3.0}).worst == -3.0


@given(grades, st.data())
def test_strict_udcg_is_never_above_the_heuristic_one(
    ranked: list[int], data: st.DataObject
) -> None:
    relative = data.draw(st.lists(st.floats(0, 1), min_size=len(ranked), max_size=len(ranked)))
    for preset in (metrics.DEFAULT_UTILITIES, metrics.STRICT_UTILITIES, metrics.RELAXED_UTILITIES):
        heuristic = metrics.heuristic_utilities(ranked, relative, top_grade=3, utilities=preset)
        strict = metrics.strict_utilities(ranked, top_grade=3, utilities=preset)
        assert metrics.udcg(strict).value <= metrics.udcg(heuristic).value


def test_no_preset_charges_less_for_a_labelled_negative_than_for_a_suspected_one() -> None:
    for preset in (metrics.DEFAULT_UTILITIES, metrics.STRICT_UTILITIES, metrics.RELAXED_UTILITIES):
        assert preset.distractor <= preset.hard_negative <= preset.irrelevant <= preset.unjudged


def test_partial_worth_is_for_positive_grades_below_the_collections_highest() -> None:
    assert metrics.strict_utilities([1], top_grade=1) == [1.0]
    assert metrics.strict_utilities([1], top_grade=2) == [0.5]


def test_a_map_of_grades_replaces_the_preset_for_the_grades_it_names() -> None:
    mapped = Utilities(by_grade={0: -0.2, 1: 0.3})
    negatives = [None, None, None, Negative.HARD_NEGATIVE]
    strict = metrics.strict_utilities(
        [2, 1, 0, 0], top_grade=2, negatives=negatives, utilities=mapped
    )
    assert strict == [1.0, 0.3, -0.2, -0.5]
    heuristic = metrics.heuristic_utilities(
        [0, 0, 0, 0], None, top_grade=2, negatives=negatives, utilities=mapped
    )
    assert heuristic == [-0.2, -0.2, -0.2, -0.5]


def test_the_reference_form_takes_one_mean_over_all_passages() -> None:
    relevant = metrics.udcg_reference([True, False, False], [0.0, 1.0, 1.0])
    assert relevant == pytest.approx(1 / (1 + math.exp(-1 / 3)))


def test_keywords_match_whole_words_only_and_without_regard_to_case() -> None:
    assert metrics.keyword_first_ranks(["Queue"], ["queueing", "a QUEUE."]) == [2]
    assert metrics.keyword_first_ranks(["C++", "C"], ["C++ only", "plain c"]) == [1, 1]
    assert metrics.keyword_first_ranks(["straße"], ["die STRASSE"]) == [1]
    assert metrics.keyword_first_ranks(["wait for"], ["wait\n  for it"]) == [1]
    assert metrics.keyword_first_ranks(["a.c"], ["abc", "a.c"]) == [2]


@pytest.mark.parametrize(
    "settings",
    [
        {"irrelevant": 0.5},
        {"distractor": 1.0},
        {"hard_negative": float("nan")},
        {"relevant": -1.0},
        {"partial": float("inf")},
        {"score_ratio": 70.0},
        {"rank_limit": -1},
        {"by_grade": {1: float("nan")}},
    ],
)
def test_utilities_of_the_wrong_sign_or_scale_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Utilities(**settings)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.recall_at_k([1], [1], 0), "k 0 must be at least 1"),
        (lambda: metrics.keyword_recall_at_k([1], -1), "k -1"),
        (lambda: metrics.recall_at_k([1, 1], [1], 2), "2 relevant passages are ranked but only 1"),
        (lambda: metrics.dcg([1], gain="squared"), "'squared' is unknown"),  # type: ignore[arg-type]
        (
            lambda: metrics.heuristic_utilities([1, 0], [1.0], top_grade=1),
            "relative_scores has 1 values for 2 passages",
        ),
        (lambda: metrics.strict_utilities([1], top_grade=1, negatives=[]), "negatives has 0 val"),
        (lambda: metrics.udcg_reference([True], []), "abstain has 0 values"),
        (lambda: metrics.strict_utilities([3], top_grade=2), "grade 3 lies above top_grade 2"),
        (lambda: metrics.strict_utilities([0], top_grade=0), "top_grade 0"),
        (lambda: metrics.udcg_reference([True], [1.2]), r"abstain 1\.2 must lie in \[0, 1\]"),
        (lambda: metrics.keyword_first_ranks([" "], ["text"]), "keyword ' ' is empty"),
    ],
)
def test_what_cannot_be_measured_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()


def test_infinities_of_both_signs_have_no_mean() -> None:
    found = metrics.mean([math.inf, 1.0, -math.inf])
    assert found.n == 3
    assert found.value is not None
    assert math.isnan(found.value)
