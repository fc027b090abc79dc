"""Ranking profiles side by side, and beside a comparison that was saved."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_pools import Recorded, ranking_of

from calibration.compare.candidates import (
    Candidate,
    at_each_k,
    default_candidates,
    from_profile,
    parse_candidates,
)
from calibration.compare.comparison import Comparison, check_candidates, compare, risk_of
from calibration.compare.saved_comparison import (
    RegressionCheck,
    SavedComparison,
    check_metrics,
    check_regressions,
    values_as_json,
)
from calibration.data.dataset import Dataset, Query
from calibration.results import COMPARED
from ctxguard.core.fusion import Fusion
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Route, ScoreKind
from ctxguard.errors import CalibrationError, ConfigurationError, DataError
from ctxguard.measure.interval import Interval
from ctxguard.measure.worth import BLOG, READERS, STRICT, Utilities
from ctxguard.profile.schema import RouteProfile
from tests.profiles import profile_with


def shelf_of(
    answers: Mapping[str, Sequence[str]],
    kind: ScoreKind = ScoreKind.RATIO,
    route: Route = Route.HYBRID,
) -> Recorded:
    """Answers each question with the passages of a list, best first."""
    return Recorded(
        {
            text: ranking_of(1.0 / np.arange(60, 60 + len(ids)), ids=ids, kind=kind, route=route)
            for text, ids in answers.items()
        }
    )


def questions(relevant_ranks: Sequence[int | None], depth: int = 6) -> tuple[Dataset, Recorded]:
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
    return Dataset("shelf/test", tuple(queries), qrels), shelf_of(answers)


def fixed(name: str, k: int, route: Route = Route.HYBRID) -> Candidate:
    return Candidate(name, RatioPolicy(k=k), route)


def compared(
    candidates: Sequence[Candidate], shelf: Recorded, dataset: Dataset, **settings: object
) -> Comparison:
    return compare(candidates, lambda _: shelf, dataset, depth=6, **settings)


def test_metrics_stand_beside_intervals() -> None:
    dataset, shelf = questions([1, 2, 1, None])
    found = compared([fixed("one", 1), fixed("two", 2)], shelf, dataset)
    assert found.results.policies == ("one", "two")
    assert found.results.metrics == COMPARED
    assert found.results.of("one", "recall").mean.value == 0.5
    assert found.results.of("two", "kept").mean.value == 2.0
    recall = found.results.of("two", "recall").mean
    assert (recall.value, recall.n) == (0.75, 4)
    assert recall.bounds[0] < 0.75 < recall.bounds[1]


def test_curve_adds_gain_and_harm() -> None:
    dataset, shelf = questions([2, 2])
    curve = compared([fixed("only", 3)], shelf, dataset).candidates[0]
    second = 1 / np.log2(3)
    means = [each.value for each in curve.udcg_by_k]
    assert len(means) == 6
    assert means[:3] == pytest.approx([-0.02, second - 0.02, second - 0.03])
    assert curve.optimal_k == 2
    assert curve.within_noise == (2,)


def test_indistinguishable_sizes_are_within_noise() -> None:
    dataset, shelf = questions([1, 2, 1, 2, 1, 1, 2])
    curve = compared([fixed("only", 3)], shelf, dataset, utilities=STRICT).candidates[0]
    assert curve.optimal_k == 2
    assert set(curve.within_noise) >= {1, 2}
    assert 6 not in curve.within_noise


@settings(max_examples=30)
@given(st.lists(st.sampled_from([1, 2, 3, 5, None]), min_size=2, max_size=6), st.integers(1, 6))
def test_curve_at_k_is_udcg(ranks: list[int | None], k: int) -> None:
    dataset, shelf = questions(ranks)
    found = compared([fixed("only", k)], shelf, dataset)
    own, expected = (found.candidates[0].udcg_by_k[k - 1], found.results.of("only", "udcg").mean)
    assert own.value == pytest.approx(expected.value)
    assert own.n == expected.n


def test_threshold_holds_along_the_curve() -> None:
    dataset, shelf = questions([1, 1])
    strict = Candidate("strict", RatioPolicy(k=2, min_ratio=0.99))
    curve = compared([strict], shelf, dataset).candidates[0]
    assert len({each.value for each in curve.udcg_by_k}) == 1


@pytest.mark.parametrize(
    ("lower", "upper", "n", "risk"),
    [
        (0.1, 0.33, 50, "SAFE"),
        (0.1, 0.34, 50, "RISKY"),
        (0.49, 0.9, 50, "RISKY"),
        (0.5, 0.9, 50, "DANGEROUS"),
        (0.0, 0.0, 19, "RISKY"),
        (0.9, 0.9, 19, "RISKY"),
    ],
)
def test_risk_looks_at_interval_ends(lower: float, upper: float, n: int, risk: str) -> None:
    share = Interval(value=(lower + upper) / 2, lower=lower, upper=upper, n=n)
    assert risk_of(share) == risk


def test_rank_only_looks_no_safer() -> None:
    dataset, shelf = questions([1] * 30)
    answers = {text: ranking.passage_ids for text, ranking in shelf.rankings.items()}
    by_rank = shelf_of(answers, ScoreKind.RANK, Route.DENSE)
    candidates = [fixed("scored", 6), Candidate("ranked", RatioPolicy(k=6), Route.DENSE)]
    found = compare(
        candidates,
        lambda c: by_rank if c.name == "ranked" else shelf,
        dataset,
        depth=6,
        utilities=STRICT,
    )
    scored, ranked = found.candidates
    assert ranked.harm_share == scored.harm_share
    assert ranked.risk == scored.risk == "DANGEROUS"


def test_differences_are_from_named_candidate() -> None:
    dataset, shelf = questions([2] * 8)
    candidates = [fixed("one", 1), fixed("two", 2)]
    found = compared(candidates, shelf, dataset)
    assert found.results.reference == "one"
    assert found.results.of("one", "recall").difference is None
    gained = found.results.of("two", "recall").difference
    assert (gained.value, gained.outcome) == (1.0, "better")
    found = compared(candidates, shelf, dataset, baseline="two")
    assert found.results.of("one", "recall").difference.outcome == "worse"


def test_alike_rankings_replay_once() -> None:
    dataset, shelf = questions([1, 2, 3])
    compared([fixed("one", 1), fixed("two", 2)], shelf, dataset)
    assert len(shelf.asked) == 3 + 1  # one to warm up


def test_latency_is_median_after_warmup() -> None:
    dataset, shelf = questions([1, 2, 3])
    # The clock is read before and after each answer: 9 s to warm up, then 1, 3 and 8 ms.
    readings = iter([0.0, 9.0, 10.0, 10.001, 11.0, 11.003, 12.0, 12.008])
    found = compared([fixed("only", 1)], shelf, dataset, clock=lambda: next(readings))
    assert found.candidates[0].latency_ms == pytest.approx(3.0)


def test_only_commonly_answered_count() -> None:
    dataset, shelf = questions([1, 1, 3])
    partly = shelf_of({"question 0": ["good-0"], "question 2": ["bad"]}, route=Route.DENSE)
    candidates = [fixed("all", 1), fixed("some", 1, Route.DENSE)]
    found = compare(candidates, lambda c: partly if c.name == "some" else shelf, dataset, depth=6)
    assert found.query_ids == ("q0", "q2")
    assert found.results.of("all", "recall").mean.value == 0.5
    assert found.skipped == ("some: q1: 'question 1' cannot be searched",)


def test_nothing_in_common_cannot_compare() -> None:
    dataset, _ = questions([1, 1])
    shelves = {
        "a": shelf_of({"question 0": ["good-0"]}),
        "b": shelf_of({"question 1": ["good-1"]}, route=Route.DENSE),
    }
    candidates = [fixed("a", 1), fixed("b", 1, Route.DENSE)]
    with pytest.raises(CalibrationError, match="no query was answered by every candidate"):
        compare(candidates, lambda each: shelves[each.name], dataset, depth=6)


def test_worth_is_shared_and_kept() -> None:
    dataset, shelf = questions([1, 1])
    found = compared([fixed("only", 2)], shelf, dataset, utilities=BLOG)
    assert found.utilities is BLOG
    assert found.results.of("only", "harm").mean.value == pytest.approx(0.5 / np.log2(3))


@pytest.mark.parametrize(
    ("candidates", "baseline", "message"),
    [
        ([], None, "no candidates"),
        ([fixed("a", 1), fixed("a", 2)], None, "two candidates are named 'a'"),
        ([fixed("a", 1)], "b", "baseline 'b' is not a candidate; choose from a"),
        ([fixed("a", 7)], None, "a: k = 7 is more than the depth 6"),
    ],
)
def test_senseless_comparison_is_refused_first(
    candidates: list[Candidate], baseline: str | None, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_candidates(candidates, baseline, 6)


def test_candidate_is_a_few_words() -> None:
    """Without a k it is compared at each k asked for."""
    [wide] = parse_candidates("wide = dense, k=8, min_ratio=0.7")
    assert wide == Candidate("wide", RatioPolicy(k=8, min_ratio=0.7), Route.DENSE)
    [sharp] = parse_candidates("sharp=reciprocal_rank:2,rerank=models/mine")
    assert (sharp.route, sharp.reranker) == (Route.HYBRID_RERANK, "models/mine")
    assert sharp.fusion == Fusion("reciprocal_rank", constant=2)
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
        ("x=lexical,convex", "only one leg"),
        ("x=k=2.5", "needs a whole number, not '2.5'"),
        ("x=convex:much", "needs a number, not 'much'"),
        ("x=convex:nan", "needs a number, not 'nan'"),
        ("x=convex:2", r"must lie in \[0, 1\]"),
        ("x=k=0", "must be at least 1"),
        ("x=hybrid,min_ratio=0.7", "carry only order; add convex"),
    ],
)
def test_unreadable_candidate_names_the_part(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_candidates(text)


def test_default_compares_legs_and_fusions() -> None:
    found = default_candidates()
    names = ["lexical", "dense", "reciprocal_rank", "convex:0.5", "ranker"]
    assert [each.name for each in found] == names
    assert {each.policy for each in found} == {RatioPolicy(k=5)}
    assert default_candidates(reranked=True)[-1].route is Route.HYBRID_RERANK


def test_min_keep_beats_smaller_k() -> None:
    [found] = at_each_k([Candidate("x", RatioPolicy(k=5, min_keep=3))], [2])
    assert found.policy == RatioPolicy(k=2, min_keep=2)


def test_profile_brings_its_fullest_route() -> None:
    def route(k: int) -> RouteProfile:
        return RouteProfile(policy=RatioPolicy(k=k), score_kind=ScoreKind.RATIO)

    profile = profile_with(
        {Route.LEXICAL: route(2), Route.HYBRID: route(4)}, fusion=Fusion("convex", weight=0.3)
    )
    found = from_profile("mine", profile)
    assert (found.route, found.policy.k, found.fusion.weight) == (Route.HYBRID, 4, 0.3)
    assert found.profile_id == profile.profile_id


DATASET = Dataset(
    "shelf/test",
    tuple(Query(f"q{i}", f"question {i}") for i in range(9)),
    {f"q{i}": {"good": 1} for i in range(9)},
)


def by_k(ks: Mapping[str, int], utilities: Utilities = READERS) -> Comparison:
    """Candidates by name, each with its k: a larger one does more harm."""
    candidates = [Candidate(name, RatioPolicy(k=k)) for name, k in ks.items()]
    relevant_first = ranking_of([4.0, 3.0, 2.0, 1.0], ids=["good", "a", "b", "c"])
    shelf = Recorded({query.text: relevant_first for query in DATASET.queries})
    return compare(candidates, lambda _: shelf, DATASET, utilities=utilities)


def document(comparison: Comparison, **other: object) -> dict[str, object]:
    """What ``ctxguard evaluate --candidate … --json`` prints, as far as it is read back."""
    return {
        "data": DATASET.name,
        "dataset_digest": DATASET.digest(),
        "utilities": asdict(comparison.utilities),
        "query_ids": list(comparison.query_ids),
        "candidates": [
            {"name": each.candidate.name, "per_query": values_as_json(each.per_query)}
            for each in comparison.candidates
        ],
        **other,
    }


def saved(comparison: Comparison, **other: object) -> SavedComparison:
    return SavedComparison.model_validate_json(json.dumps(document(comparison, **other)))


def checks(
    new: Comparison,
    earlier: SavedComparison,
    *,
    tolerance: float = 0.0,
    metrics: Sequence[str] = (),
) -> dict[str, RegressionCheck]:
    made = check_regressions(
        new, earlier, DATASET.digest(), metrics=check_metrics(metrics), tolerance=tolerance
    )
    return {check.candidate: check for check in made}


def test_values_read_back_as_were() -> None:
    comparison = by_k({"mine": 2}, Utilities(by_grade={1: 0.25}))
    comparison.candidates[0].per_query["recall"][0] = np.nan
    assert document(comparison)["candidates"][0]["per_query"]["recall"][:2] == [None, 1.0]
    [candidate] = saved(comparison).candidates
    assert saved(comparison).utilities == Utilities(by_grade={1: 0.25})
    for metric, expected in comparison.candidates[0].per_query.items():
        np.testing.assert_array_equal(np.array(candidate.per_query[metric], float), expected)


@pytest.mark.parametrize(
    ("new", "earlier", "expected"),
    [
        ({"mine": 3, "other": 1}, {"other": 1, "mine": 1}, {"mine": "mine", "other": "other"}),
        ({"renamed": 3}, {"mine": 1}, {"renamed": "mine"}),
        ({"mine": 1, "new": 3}, {"mine": 1, "other": 1}, {"mine": "mine", "new": None}),
    ],
    ids=["of its name", "the only one", "not saved"],
)
def test_candidate_meets_its_saved_namesake(
    new: dict[str, int], earlier: dict[str, int], expected: dict[str, str | None]
) -> None:
    made = checks(by_k(new), saved(by_k(earlier)))
    assert {name: check.saved for name, check in made.items()} == expected
    for name, check in made.items():
        assert check.regressed == (new[name] == 3 and check.saved is not None)
        assert set(check.differences) == ({"udcg", "recall"} if check.saved else set())


def test_runs_pair_by_query() -> None:
    """Saved queries may stand in another order, and others may be among them."""
    new = by_k({"mine": 2})
    [candidate] = saved(new).candidates
    per_query = {name: (0.5, *values[::-1]) for name, values in candidate.per_query.items()}
    earlier = saved(new).model_copy(
        update={
            "query_ids": ("another", *new.query_ids[::-1]),
            "candidates": (candidate.model_copy(update={"per_query": per_query}),),
        }
    )
    recall = checks(new, earlier)["mine"].differences["recall"]
    assert (recall.value, recall.n) == (0.0, len(new.query_ids))


@pytest.mark.parametrize(
    ("earlier", "tolerance", "says"),
    [
        (saved(by_k({"a": 1, "b": 1})), 0.0, "none of these candidates; it has a, b"),
        (saved(by_k({"mine": 1}), dataset_digest="e" * 64), 0.0, "on the same queries and labels"),
        (saved(by_k({"mine": 1}, STRICT)), 0.0, "uses different utilities"),
        (
            saved(by_k({"mine": 1}), candidates=[{"name": "mine", "per_query": {}}]),
            0.0,
            "mine has no values of udcg",
        ),
        *[
            (saved(by_k({"mine": 1})), tolerance, "must be ≥ 0 and finite")
            for tolerance in (-0.1, float("nan"), float("inf"))
        ],
    ],
    ids=["nothing", "labels", "utilities", "metric", "negative", "nan", "infinite"],
)
def test_blind_check_is_refused(earlier: SavedComparison, tolerance: float, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        checks(by_k({"mine": 1}), earlier, tolerance=tolerance)


def test_mismatched_values_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "base.json"
    file.write_text(json.dumps(document(by_k({"mine": 1}), query_ids=["q0"])))
    with pytest.raises(DataError, match="mine has 9 values of recall for 1 queries"):
        SavedComparison.load(file)
