"""Ranking profiles side by side: figures, the dynamic-k curve, verdicts, paired differences."""

from collections.abc import Mapping, Sequence
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.compare.candidates import (
    Candidate,
    at_each_k,
    default_candidates,
    from_profile,
    parse_candidates,
)
from calibration.compare.comparison import Comparison, check_candidates, compare
from calibration.compare.paired_differences import (
    BETTER_WHEN,
    differences,
    paired_difference,
)
from calibration.compare.verdict import VerdictRule, harm_share
from calibration.data.dataset import Dataset, Query
from calibration.evaluate import QueryMetrics
from ctxguard.core.fusion import Fusion
from ctxguard.core.metrics import RELAXED_UTILITIES
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import DEFAULT_DEPTH, Hit, Ranking, Route, ScoreKind
from ctxguard.errors import CalibrationError, ConfigurationError, QueryError
from ctxguard.profile.schema import Interval, RouteProfile
from tests.profiles import profile_with


class Shelf:
    """Answers each question with the passages of a list, best first."""

    def __init__(
        self,
        answers: Mapping[str, Sequence[str]],
        kind: ScoreKind = ScoreKind.RATIO,
        route: Route = Route.HYBRID,
    ) -> None:
        self.answers = answers
        self.kind = kind
        self.route = route
        self.asked = 0

    def retrieve(self, query: str, *, depth: int = DEFAULT_DEPTH) -> Ranking:
        self.asked += 1
        if query not in self.answers:
            raise QueryError(f"{query!r} cannot be searched")
        hits = [Hit(p, 1.0 / (60 + rank)) for rank, p in enumerate(self.answers[query][:depth])]
        return Ranking.from_hits(hits, self.kind, self.route)


def questions(relevant_ranks: Sequence[int | None], depth: int = 6) -> tuple[Dataset, Shelf]:
    """A question for each rank, whose one relevant passage stands there; None: found nowhere."""
    queries, qrels, answers = [], {}, {}
    for number, rank in enumerate(relevant_ranks):
        query = Query(f"q{number}", f"question {number}")
        queries.append(query)
        qrels[query.query_id] = {f"good-{number}": 1}
        ids = [f"bad-{number}-{i}" for i in range(depth)]
        if rank is not None:
            ids[rank - 1] = f"good-{number}"
        answers[query.text] = ids
    return Dataset("shelf/test", tuple(queries), qrels), Shelf(answers)


def fixed(name: str, k: int, route: Route = Route.HYBRID) -> Candidate:
    return Candidate(name, RatioPolicy(k=k), route)


def compared(
    candidates: Sequence[Candidate], shelf: Shelf, dataset: Dataset, **settings: object
) -> Comparison:
    return compare(candidates, lambda _: shelf, dataset, depth=6, **settings)


def test_every_metric_stands_beside_its_interval_for_every_candidate() -> None:
    dataset, shelf = questions([1, 2, 1, None])
    found = compared([fixed("one", 1), fixed("two", 2)], shelf, dataset)
    one, two = found.candidates
    assert set(one.metrics) == set(BETTER_WHEN)
    assert one.metrics["recall"].value == 0.5
    assert two.metrics["recall"].value == 0.75
    assert two.metrics["kept"].value == 2.0
    assert two.metrics["recall"].n == 4
    lower, upper = two.metrics["recall"].lower, two.metrics["recall"].upper
    assert lower is not None
    assert upper is not None
    assert lower < 0.75 < upper


def test_the_curve_adds_up_gain_and_harm_rank_by_rank() -> None:
    dataset, shelf = questions([2, 2])
    curve = compared([fixed("only", 3)], shelf, dataset).candidates[0].curve
    second = 1 / np.log2(3)
    assert [point.k for point in curve.points] == [1, 2, 3, 4, 5, 6]
    assert curve.points[0].gain.value == 0.0
    assert curve.points[0].harm.value == 0.5
    assert curve.points[1].gain.value == pytest.approx(second)
    assert curve.points[1].udcg_strict.value == pytest.approx(second - 0.5)
    assert curve.points[2].harm.value == pytest.approx(0.5 + 0.25)
    assert curve.optimal_k == 2
    assert curve.within_noise == (2,)


def test_sizes_that_the_queries_cannot_tell_apart_are_said_to_be_within_noise() -> None:
    dataset, shelf = questions([1, 2, 1, 2, 1, 1, 2])
    curve = compared([fixed("only", 3)], shelf, dataset).candidates[0].curve
    assert curve.optimal_k == 2
    assert set(curve.within_noise) >= {1, 2}
    assert 6 not in curve.within_noise


@given(st.lists(st.sampled_from([1, 2, 3, 5, None]), min_size=2, max_size=6), st.integers(1, 6))
def test_the_curve_at_a_candidates_own_k_is_its_strict_udcg(
    ranks: list[int | None], k: int
) -> None:
    dataset, shelf = questions(ranks)
    only = compared([fixed("only", k)], shelf, dataset).candidates[0]
    point = only.curve.points[k - 1]
    assert point.udcg_strict.value == pytest.approx(only.metrics["udcg_strict"].value)
    assert point.harm.value == pytest.approx(only.metrics["harm"].value)
    harms = [each.harm.value for each in only.curve.points if each.harm.value is not None]
    assert harms == sorted(harms)


def test_a_threshold_stays_in_force_along_the_curve() -> None:
    dataset, shelf = questions([1, 1])
    strict = Candidate("strict", RatioPolicy(k=2, min_ratio=0.99))
    curve = compared([strict], shelf, dataset).candidates[0].curve
    assert {point.harm.value for point in curve.points} == {0.0}


def test_the_share_of_harm_is_harm_over_all_that_the_context_moves() -> None:
    share = harm_share(np.array([1.0, 2.0, 3.0]), np.array([0.0, 2.0, 0.0]))
    assert share.value == 0.25
    assert share.n == 3
    assert share.lower is not None
    assert share.upper is not None
    assert 0.0 <= share.lower < 0.25 < share.upper <= 1.0


def test_contexts_that_neither_help_nor_harm_have_no_share_of_harm() -> None:
    share = harm_share(np.zeros(3), np.zeros(3))
    assert (share.value, share.lower, share.upper, share.n) == (None, None, None, 3)
    assert VerdictRule().verdict(share) is None


@pytest.mark.parametrize(
    ("lower", "upper", "n", "verdict"),
    [
        (0.1, 0.33, 50, "SAFE"),
        (0.1, 0.34, 50, "RISKY"),
        (0.49, 0.9, 50, "RISKY"),
        (0.5, 0.9, 50, "DANGEROUS"),
        (0.0, 0.0, 19, "RISKY"),
        (0.9, 0.9, 19, "RISKY"),
    ],
)
def test_a_verdict_looks_at_the_ends_of_the_interval(
    lower: float, upper: float, n: int, verdict: str
) -> None:
    share = Interval(value=(lower + upper) / 2, lower=lower, upper=upper, n=n)
    assert VerdictRule().verdict(share) == verdict


def test_the_rule_is_told_with_the_limits_that_apply() -> None:
    safe, dangerous, risky = VerdictRule(safe=0.2, dangerous=0.4, fewest=7).sentences
    assert safe == "SAFE: the 95% interval of the share of harm ends at 0.2 or below."
    assert dangerous == ("DANGEROUS: the 95% interval of the share of harm begins at 0.4 or above.")
    assert "fewer than 7 queries" in risky
    assert "empty context" in VerdictRule().sentences[1]


@pytest.mark.parametrize(("safe", "dangerous"), [(0.6, 0.5), (-0.1, 0.5), (0.3, 1.1)])
def test_limits_that_do_not_rise_are_refused(safe: float, dangerous: float) -> None:
    with pytest.raises(ConfigurationError, match="must rise within"):
        VerdictRule(safe, dangerous)


def test_the_interval_of_the_share_of_harm_holds_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(3)
    held = 0
    for seed in range(200):
        gain, harm = random.exponential(1.0, 80), random.exponential(0.5, 80)
        share = harm_share(gain, harm, seed=seed)
        assert share.lower is not None
        assert share.upper is not None
        held += share.lower <= 1 / 3 <= share.upper
    assert 0.90 <= held / 200 <= 0.98


def test_scores_that_carry_rank_only_do_not_make_a_candidate_look_safe() -> None:
    dataset, shelf = questions([1] * 30)
    by_rank = Shelf(shelf.answers, ScoreKind.RANK)
    candidates = [fixed("scored", 6), Candidate("ranked", RatioPolicy(k=6), Route.DENSE)]
    by_rank.route = Route.DENSE
    found = compare(
        candidates, lambda c: by_rank if c.name == "ranked" else shelf, dataset, depth=6
    )
    scored, ranked = found.candidates
    assert ranked.metrics["distractor_rate"].value < scored.metrics["distractor_rate"].value
    assert ranked.harm_share == scored.harm_share
    assert ranked.verdict == scored.verdict == "DANGEROUS"


def test_a_difference_inside_the_noise_is_called_so() -> None:
    these = np.array([0.0, 1.0, 0.0, 1.0, 0.5, 1.0])
    those = np.array([1.0, 0.0, 0.0, 1.0, 0.5, 0.5])
    assert paired_difference("recall", these, those).outcome == "within noise"
    assert paired_difference("recall", these, these).outcome == "within noise"


@pytest.mark.parametrize(
    ("metric", "outcome"), [("recall", "better"), ("harm", "worse"), ("kept", "higher")]
)
def test_more_is_better_worse_or_neither_as_the_metric_has_it(metric: str, outcome: str) -> None:
    found = paired_difference(metric, np.array([1.0, 2.0, 3.0]), np.array([0.0, 1.0, 1.0]))
    assert found.outcome == outcome


def test_queries_on_which_a_metric_is_undefined_are_no_pair() -> None:
    found = paired_difference("recall", np.array([1.0, np.nan, 0.5]), np.array([0.0, 1.0, np.nan]))
    assert (found.value, found.n, found.outcome) == (1.0, 1, "no data")
    assert not found.is_regression()


def test_a_tolerance_accepts_a_small_loss_in_the_worse_direction() -> None:
    recall = paired_difference("recall", np.full(9, 0.8), np.full(9, 0.9))
    harm = paired_difference("harm", np.full(9, 0.9), np.full(9, 0.8))
    for difference in (recall, harm):
        assert difference.is_regression()
        assert difference.is_regression(tolerance=0.09)
        assert not difference.is_regression(tolerance=0.11)


def test_two_systems_that_are_alike_are_rarely_told_apart() -> None:
    random = np.random.default_rng(11)
    apart = 0
    for seed in range(300):
        skill = random.random(60)
        these, those = (random.random((2, 60)) < skill).astype(float)
        apart += paired_difference("recall", these, those, seed=seed).outcome != "within noise"
    assert apart / 300 <= 0.09


def test_runs_are_paired_by_query_whatever_their_order() -> None:
    these = QueryMetrics(("a", "b", "c"), {"recall": np.array([1.0, 0.5, 0.0])})
    those = QueryMetrics(("c", "b", "x"), {"recall": np.array([0.0, 0.5, 1.0])})
    found = differences(these, those)["recall"]
    assert (found.value, found.n) == (0.0, 2)


def test_differences_are_from_the_first_candidate_or_the_one_named() -> None:
    dataset, shelf = questions([2] * 8)
    candidates = [fixed("one", 1), fixed("two", 2)]
    found = compared(candidates, shelf, dataset)
    assert found.baseline == "one"
    assert found.differences["two"]["recall"].value == 1.0
    assert found.differences["two"]["recall"].outcome == "better"
    found = compared(candidates, shelf, dataset, baseline="two")
    assert found.differences["one"]["recall"].outcome == "worse"


def test_candidates_that_rank_alike_are_replayed_once() -> None:
    dataset, shelf = questions([1, 2, 3])
    compared([fixed("one", 1), fixed("two", 2)], shelf, dataset)
    assert shelf.asked == 3 + 1  # one to warm up


def test_latency_is_the_median_of_the_retrievals_after_one_to_warm_up() -> None:
    dataset, shelf = questions([1, 2, 3])
    # The clock is read before and after each answer: 9 s to warm up, then 1, 3 and 8 ms.
    readings = iter([0.0, 9.0, 10.0, 10.001, 11.0, 11.003, 12.0, 12.008])
    found = compared([fixed("only", 1)], shelf, dataset, clock=lambda: next(readings))
    assert found.candidates[0].latency_ms == pytest.approx(3.0)


def test_only_queries_that_every_candidate_answered_count_and_the_others_are_named() -> None:
    dataset, shelf = questions([1, 1, 3])
    partly = Shelf({"question 0": ["good-0"], "question 2": ["bad"]}, route=Route.DENSE)
    candidates = [fixed("all", 1), fixed("some", 1, Route.DENSE)]
    found = compare(candidates, lambda c: partly if c.name == "some" else shelf, dataset, depth=6)
    assert found.query_ids == ("q0", "q2")
    assert found.candidates[0].metrics["recall"].value == 0.5
    assert found.skipped == ("some: q1: 'question 1' cannot be searched",)


def test_candidates_that_answered_no_query_in_common_cannot_be_compared() -> None:
    dataset, shelf = questions([1, 1])
    first = Shelf({"question 0": ["good-0"]})
    second = Shelf({"question 1": ["good-1"]}, route=Route.DENSE)
    candidates = [fixed("a", 1), fixed("b", 1, Route.DENSE)]
    with pytest.raises(CalibrationError, match="no query was answered by every candidate"):
        compare(candidates, lambda c: first if c.name == "a" else second, dataset, depth=6)
    assert shelf.asked == 0


def test_the_same_seed_gives_the_same_comparison() -> None:
    dataset, shelf = questions([1, 2, None, 4, 1])
    ticks = count()
    first, second = (
        compared([fixed("a", 2), fixed("b", 4)], shelf, dataset, clock=lambda: next(ticks), seed=5)
        for _ in range(2)
    )
    assert first.differences == second.differences
    assert first.candidates[0].metrics == second.candidates[0].metrics
    assert first.candidates[1].curve == second.candidates[1].curve


def test_the_worth_of_a_passage_is_the_same_for_all_and_kept_with_the_figures() -> None:
    dataset, shelf = questions([1, 1])
    found = compared([fixed("only", 2)], shelf, dataset, utilities=RELAXED_UTILITIES)
    assert found.utilities is RELAXED_UTILITIES
    assert found.candidates[0].metrics["harm"].value == pytest.approx(0.2 / np.log2(3))


@pytest.mark.parametrize(
    ("candidates", "baseline", "message"),
    [
        ([], None, "no candidates"),
        ([fixed("a", 1), fixed("a", 2)], None, "two candidates are named 'a'"),
        ([fixed("a", 1)], "b", "baseline 'b' is not a candidate; choose from a"),
        ([fixed("a", 7)], None, "a: k = 7 is more than the depth 6"),
    ],
)
def test_a_comparison_that_makes_no_sense_is_refused_before_any_work(
    candidates: list[Candidate], baseline: str | None, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_candidates(candidates, baseline, 6)


def test_a_candidate_is_written_in_a_few_words() -> None:
    [found] = parse_candidates("wide = dense, k=8, min_ratio=0.7")
    assert found.name == "wide"
    assert (found.route, found.policy) == (Route.DENSE, RatioPolicy(k=8, min_ratio=0.7))
    [found] = parse_candidates("sharp=reciprocal_rank:2,rerank=models/mine")
    assert (found.route, found.reranker) == (Route.HYBRID_RERANK, "models/mine")
    assert found.fusion == Fusion("reciprocal_rank", constant=2)


def test_a_candidate_without_a_k_is_compared_at_each_k_asked_for() -> None:
    found = parse_candidates("x=lexical", [3, 8])
    assert [(each.name, each.policy.k) for each in found] == [("x@3", 3), ("x@8", 8)]
    assert [each.name for each in parse_candidates("x=lexical,k=5", [3, 8])] == ["x"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lexical", "is not NAME=SPEC"),
        ("=lexical", "is not NAME=SPEC"),
        ("x=", "'' in the candidate 'x=' cannot be read; write comma-separated"),
        ("x=lexicla", "'lexicla' in the candidate"),
        ("x=external", "'external' in the candidate"),
        ("x=lexical,dense", "gives its route twice"),
        ("x=lexical,convex", "one leg only"),
        ("x=k=2.5", "holds no whole number: '2.5'"),
        ("x=convex:much", "holds no number: 'much'"),
        ("x=convex:nan", "holds no number: 'nan'"),
        ("x=convex:2", r"must lie in \[0, 1\]"),
        ("x=k=0", "must be at least 1"),
        ("x=hybrid,min_ratio=0.7", "carry order only; add convex"),
    ],
)
def test_a_candidate_that_cannot_be_read_says_which_part(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_candidates(text)


def test_without_candidates_both_legs_and_every_fusion_are_compared_at_k_5() -> None:
    found = default_candidates()
    names = ["lexical", "dense", "reciprocal_rank", "convex:0.5", "ranker"]
    assert [each.name for each in found] == names
    assert {each.policy for each in found} == {RatioPolicy(k=5)}
    assert default_candidates(reranked=True)[-1].route is Route.HYBRID_RERANK


def test_a_smaller_k_than_min_keep_keeps_that_many() -> None:
    [found] = at_each_k([Candidate("x", RatioPolicy(k=5, min_keep=3))], [2])
    assert found.policy == RatioPolicy(k=2, min_keep=2)


def test_a_profile_brings_its_fullest_route_with_its_fusion_and_policy() -> None:
    def route(k: int) -> RouteProfile:
        return RouteProfile(policy=RatioPolicy(k=k), score_kind=ScoreKind.RATIO)

    profile = profile_with(
        {
            Route.LEXICAL: route(2),
            Route.HYBRID: route(4),
        },
        fusion=Fusion("convex", weight=0.3),
    )
    found = from_profile("mine", profile)
    assert (found.route, found.policy.k, found.fusion.weight) == (Route.HYBRID, 4, 0.3)
    assert found.profile_id == profile.profile_id
