"""One route: the family of policies, the best of them, and what is certified of it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_pools import (
    DEPTH,
    Recorded,
    calibrated,
    indistinct,
    labelled,
    outcome_of,
    ranking_of,
    simulate,
)

from calibration import risk
from calibration.calibrate import calibrate
from calibration.calibrate_route import (
    FEWEST_TO_CHOOSE,
    RouteOutcome,
    Settings,
    calibrate_route,
    climbed,
)
from calibration.certify import Promise
from calibration.data.dataset import Dataset, Query
from calibration.evaluate import per_query
from calibration.grid import ratio_grid
from calibration.pool_labels import label
from calibration.replay import replay
from calibration.settings import Objective
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Route
from ctxguard.errors import ConfigurationError
from ctxguard.profile.schema import Profile

PROMISE = Promise(alpha=0.1, delta=0.1)


class TestChoice:
    @pytest.mark.parametrize("family", ["ratio", "expected_utility"])
    def test_the_policy_is_the_best_of_the_grid_on_the_choosing_queries(self, family: str) -> None:
        outcome = outcome_of(calibrated(120, policy=family, objective="utility"))
        utility = outcome.chosen_grid.means.udcg_strict
        row, column = outcome.chosen_grid.means.best()
        assert utility[row, column] == utility.max()
        assert outcome.profile.policy == outcome.chosen_grid.policy((row, column))
        assert outcome.profile.policy.kind == family
        assert outcome.highest_utility.policy == outcome.profile.policy

    def test_of_equally_good_policies_the_safest_then_the_smallest(self) -> None:
        pools, labels = labelled([ranking_of([3.0, 1.0])], [{"p0": 1}], depth=2)
        grid = ratio_grid(pools, labels)
        assert grid.policy(grid.means.best()) == RatioPolicy(k=1, min_ratio=0.0)

    def test_min_keep_is_that_of_every_policy(self) -> None:
        policy = outcome_of(calibrated(80, min_keep=0, objective="utility")).profile.policy
        assert policy.min_keep == 0


class TestFamily:
    def test_below_twenty_labels_no_probability_is_fitted(self) -> None:
        route = outcome_of(calibrated(30, held_out=0.5)).profile
        assert route.policy.kind == "ratio"
        assert "15 answerable queries to choose on, and a probability needs 20" in route.why

    def test_from_twenty_on_two_scorers_give_one(self) -> None:
        route = outcome_of(calibrated(40, objective="utility")).profile
        assert route.policy.kind == "expected_utility"
        assert "2 scorers" in route.why

    def test_a_single_scorer_gives_none(self) -> None:
        retriever, dataset = simulate(60)
        alone = {
            text: replace(ranking, legs={"dense": ranking.legs["dense"]})
            for text, ranking in retriever.rankings.items()
        }
        route = calibrate(Recorded(alone), dataset, Settings(depth=DEPTH)).profile.routes[
            Route.HYBRID
        ]
        assert route.policy.kind == "ratio"
        assert "a single scorer" in route.why

    def test_what_was_asked_for_is_done(self) -> None:
        route = outcome_of(calibrated(30, policy="expected_utility")).profile
        assert route.why.startswith("expected_utility was asked for")


class TestToday:
    """What is served today is what recall is compared with, and what can always be kept."""

    def test_where_the_scores_say_nothing_it_is_kept(self) -> None:
        outcome = outcome_of(calibrate(*indistinct(100), Settings(depth=DEPTH)))
        assert outcome.profile.policy == RatioPolicy(k=5)
        assert outcome.profile.certificate is None
        assert (outcome.profile.verdict.decision, outcome.profile.verdict.value) == ("keep", None)
        assert outcome.profile.safe_policy == outcome.today.policy == RatioPolicy(k=5)
        assert "the first 5 as today" in outcome.profile.why
        assert outcome.place[0].policy(outcome.place[1][0]) == RatioPolicy(k=5)

    @pytest.mark.parametrize(("family", "k"), [("ratio", 1), ("expected_utility", 10)])
    def test_the_safe_policy_serves_it_whatever_was_chosen(self, family: str, k: int) -> None:
        asked = {"policy": family, "serving_k": k, "objective": "utility"}
        outcome = outcome_of(calibrated(60, **asked))
        assert outcome.profile.policy != RatioPolicy(k=k)
        assert outcome.profile.safe_policy == outcome.today.policy == RatioPolicy(k=k)

    def test_it_stands_first_among_the_options_all_on_the_same_queries(self) -> None:
        result = calibrated(200)
        outcome = outcome_of(result)
        held_out = [query.query_id for query in result.held_out.queries]
        names = [option.name for option in outcome.options]
        assert names[:2] == ["first 5, as today", "chosen"]
        assert names[-1] == "highest utility"
        assert all(list(o.metrics.query_ids) == held_out for o in outcome.options)
        assert outcome.chosen.policy == outcome.profile.policy

    def test_a_retriever_that_returns_fewer_passages_is_served_as_it_is(self) -> None:
        retriever, dataset = simulate(60, depth=3)
        route = outcome_of(calibrate(retriever, dataset, Settings(depth=DEPTH))).profile
        assert route.chosen_on is not None
        assert route.held_out is not None
        assert route.policy.k <= 5


class TestVerdict:
    """Held-out queries say whether the choice may be served."""

    def test_many_clear_labels_let_it_be_served(self) -> None:
        outcome = outcome_of(calibrated(300, noise=0.1))
        verdict = outcome.profile.verdict
        assert (verdict.decision, verdict.serving_k, verdict.n) == ("enforce", 5, 150)
        assert outcome.profile.policy != outcome.today.policy
        held_out = outcome.profile.held_out.metrics
        assert held_out["kept"].value < 4.0
        assert held_out["recall"].value > 0.98

    @pytest.mark.parametrize("n", [20, 49])
    def test_labels_too_few_to_hold_out_choose_together_and_never_enforce(self, n: int) -> None:
        result = calibrated(n, noise=0.1, objective="utility")
        assert len(result.chosen_on) == n
        verdict = result.profile.verdict
        assert (verdict.decision, verdict.n) == ("shadow", 0)

    def test_where_too_few_of_those_held_out_are_answerable_all_choose(self) -> None:
        """Ten questions, asked five times each, cannot be dealt out as 20 and 30."""
        retriever, dataset = simulate(50)
        texts = [query.text for query in dataset.queries]
        again = tuple(
            replace(query, text=texts[10 * (row // 10)])
            for row, query in enumerate(dataset.queries)
        )
        result = calibrate(retriever, replace(dataset, queries=again), Settings(depth=DEPTH))
        n_held_out = 0 if result.held_out is None else len(result.held_out.answerable)
        assert n_held_out == 0 or n_held_out >= 20

    def refuted(self, objective: Objective) -> RouteOutcome:
        """A calibration whose held-out queries have their relevant passages at the end."""
        retriever, dataset = simulate(300, noise=0.1, relevant=2)
        asked = Settings(depth=DEPTH, objective=objective)
        held_out = calibrate(retriever, dataset, asked).held_out
        qrels = {
            **dataset.qrels,
            **{
                query.query_id: {retriever.rankings[query.text].passage_ids[4]: 1}
                for query in held_out.queries
            },
        }
        return outcome_of(calibrate(retriever, replace(dataset, qrels=qrels), asked))

    def test_a_choice_that_the_held_out_queries_refute_gives_way_to_today(self) -> None:
        outcome = self.refuted("keep-recall")
        verdict = outcome.profile.verdict
        assert verdict.decision == "keep"
        assert verdict.upper < -0.01
        assert outcome.profile.policy == RatioPolicy(k=5)
        assert outcome.profile.certificate is None
        assert "refute" in outcome.profile.why
        assert outcome.options[2].name == "chosen, then refuted"
        assert outcome.place[0].policy(outcome.place[1][0]) == RatioPolicy(k=5)

    def test_one_whose_loss_was_asked_for_stays_in_shadow(self) -> None:
        route = self.refuted("utility").profile
        assert route.verdict.decision == "shadow"
        assert route.policy.kind == "expected_utility"

    def test_a_promise_accepts_the_loss_that_it_allows(self) -> None:
        verdict = outcome_of(calibrated(400, promise=PROMISE)).profile.verdict
        assert (verdict.tolerance, verdict.max_loss) == (0.1, 0.1)


class TestBudget:
    def test_no_context_is_chosen_whose_mean_exceeds_the_budget(self) -> None:
        retriever, dataset = simulate(60, relevant=8)
        pools = replay(retriever, dataset.queries, depth=DEPTH)
        pools = replace(pools, tokens=np.where(np.isnan(pools.scores), np.nan, 10.0))
        ks = []
        for budget in (None, 60):
            asked = Settings(depth=DEPTH, objective="utility", max_tokens=budget)
            outcome = calibrate_route(pools, dataset, dataset, None, asked)
            ks.append(outcome.profile.policy.k)
        assert ks[0] > 6 >= ks[1]

    def test_what_is_served_today_is_tried_whatever_the_budget(self) -> None:
        result = calibrated(60, max_tokens=1)
        assert outcome_of(result).today.policy == RatioPolicy(k=5)


class TestFewLabels:
    @given(st.integers(0, 1_000))
    def test_enough_to_choose_on_are_never_given_up(self, answerable: int) -> None:
        share = Settings().held_out_share(answerable)
        assert 0.0 <= share <= 0.5
        assert answerable * (1.0 - share) >= min(answerable, FEWEST_TO_CHOOSE) - 1e-9

    @pytest.mark.parametrize("n", [1, 5, 20, 34])
    def test_few_labels_make_a_profile_and_certify_nothing(self, n: int, tmp_path: Path) -> None:
        result = calibrated(n)
        assert result.held_out is None
        result.profile.save(tmp_path / "profile.json")
        route = Profile.load(tmp_path / "profile.json").routes[Route.HYBRID]
        assert route.certificate is None
        assert route.held_out is None

    @pytest.mark.parametrize("seed", range(5))
    def test_42_sparse_labels_lose_no_recall_worth_naming(self, seed: int) -> None:
        """One relevant passage per query, as where a person labels what answered."""
        retriever, dataset = simulate(42, relevant=1, noise=0.25, seed=seed)
        truth_retriever, truth = simulate(600, relevant=1, noise=0.25, seed=seed + 100)
        route = outcome_of(calibrate(retriever, dataset, Settings(depth=DEPTH))).profile
        pools = replay(truth_retriever, truth.queries, depth=DEPTH)
        labels = label(pools, truth, baseline_k=5)
        recall = [
            np.nanmean(per_query(pools, labels, policy).values["recall"])
            for policy in (RatioPolicy(k=5), route.policy)
        ]
        assert recall[1] - recall[0] > -0.04


class TestCostOfTheChoice:
    """Without a promise, the certificate says what the chosen policy costs in recall."""

    def test_it_bounds_loss_and_difference_on_queries_that_took_no_part(self) -> None:
        result = calibrated(200, unanswerable=0.2, objective="utility")
        outcome = outcome_of(result)
        certificate = outcome.profile.certificate
        assert certificate.recall_loss < certificate.alpha < 0.3
        assert (certificate.beta, certificate.baseline) == (None, "k=5")
        assert certificate.n_queries == len(result.held_out) == 100
        assert certificate.n_recall <= len(result.held_out.answerable) < 100
        found = certificate.recall_difference
        assert found.n == len(result.held_out.answerable)
        paired = outcome.chosen.metrics.values["recall"] - outcome.today.metrics.values["recall"]
        paired = paired[~np.isnan(paired)]
        assert found.value == pytest.approx(paired.mean(), abs=1e-6)
        shuffled = paired[np.random.default_rng(0).permutation(paired.size)]
        bound = risk.betting_lower_bound(shuffled, 0.1)
        assert bound - 1e-4 <= found.lower <= bound

    def test_it_says_how_many_labels_would_make_it_tight(self) -> None:
        # Below the mean lost nothing is loose: the first k itself needs some queries as well.
        outcome = outcome_of(calibrated(200, noise=0.1))
        assert 0 < outcome.labels_needed < 1_000

    def test_a_choice_that_loses_everything_is_certified_to_lose_at_most_everything(self) -> None:
        # One passage of five is relevant and is ranked last: keeping the first alone harms least.
        queries = tuple(Query(f"q{i}", f"question {i}") for i in range(60))
        ranking = ranking_of([10.0 - rank for rank in range(10)])
        dataset = Dataset("last", queries, {query.query_id: {"p4": 1} for query in queries})
        retriever = Recorded({query.text: ranking for query in queries})
        asked = Settings(policy="ratio", objective="utility", depth=10)
        outcome = outcome_of(calibrate(retriever, dataset, asked))
        route = outcome.profile
        assert route.policy.k == 1
        assert (route.certificate.alpha, route.certificate.recall_loss) == (1.0, 1.0)
        assert route.certificate.recall_difference.lower == -1.0
        assert route.certificate.promises_nothing
        assert outcome.labels_needed is None
        # The default gives up none of it.
        kept = outcome_of(calibrate(retriever, dataset, Settings(policy="ratio", depth=10))).profile
        assert kept.policy == RatioPolicy(k=5)

    def test_where_no_held_out_query_is_answerable_nothing_is_claimed(self) -> None:
        retriever, dataset = simulate(40)
        asked = Settings(policy="ratio", objective="utility", depth=DEPTH, held_out=0.5)
        probe = calibrate(retriever, dataset, asked)
        answerable = {q.query_id for q in probe.chosen_on.queries}
        qrels = {q: grades for q, grades in dataset.qrels.items() if q in answerable}
        outcome = outcome_of(calibrate(retriever, replace(dataset, qrels=qrels), asked))
        route = outcome.profile
        assert route.certificate is None
        assert outcome.labels_needed is None
        assert route.held_out.metrics["recall"].n == 0
        assert route.held_out.metrics["harm"].n == 20


class TestPromise:
    def test_many_labels_certify_a_policy(self) -> None:
        result = calibrated(400, promise=PROMISE)
        outcome = outcome_of(result)
        certificate, certification = outcome.profile.certificate, outcome.certification
        assert (certificate.alpha, certificate.delta) == (0.1, 0.1)
        assert certificate.p_value <= 0.1
        assert certificate.recall_loss <= 0.1
        assert certificate.n_queries == certification.n_harm == 120
        assert "at most 0.1" in certificate.statement
        assert certification.grid_index is not None
        assert outcome.chosen_grid.settings(certification.grid_index)[0] == outcome.profile.policy.k
        assert outcome.profile.held_out.metrics["recall_loss"].value <= 0.1

    def test_harm_can_be_promised_as_well(self) -> None:
        both = Promise(alpha=0.1, beta=0.5)
        certificate = outcome_of(calibrated(400, noise=0.1, promise=both)).profile.certificate
        assert certificate.beta == 0.5
        assert certificate.harm <= 0.5

    def test_few_labels_keep_what_is_served_today_and_say_what_would_do(self) -> None:
        outcome = outcome_of(
            calibrated(60, noise=0.25, promise=Promise(alpha=0.02), policy="ratio")
        )
        assert outcome.certification.grid_index is None
        assert outcome.profile.policy == RatioPolicy(k=5)
        assert "no other policy that gains utility is certified" in outcome.profile.why
        certificate = outcome.profile.certificate
        assert (certificate.recall_loss, certificate.test) == (0.0, "by definition")
        assert certificate.alpha == 0.02

    def test_a_promise_of_harm_that_no_policy_keeps_is_not_made(self) -> None:
        impossible = Promise(alpha=0.5, beta=0.01)
        outcome = outcome_of(calibrated(200, noise=0.8, promise=impossible))
        assert outcome.profile.policy == RatioPolicy(k=5)
        assert outcome.profile.certificate is None

    @pytest.mark.parametrize(
        "settings", [{"alpha": 0.0}, {"alpha": 1.0}, {"delta": 1.5}, {"beta": 0.0}, {"beta": -1.0}]
    )
    def test_a_promise_that_means_nothing_is_refused(self, settings: dict[str, float]) -> None:
        with pytest.raises(ConfigurationError, match=str(next(iter(settings)))):
            Promise(**settings)


class TestLadder:
    """Several choices are tested on the held-out queries, from the most careful one on."""

    def chosen(self, n: int, *, ladder: bool, seed: int = 2) -> RouteOutcome:
        retriever, dataset = simulate(n, noise=0.3, seed=seed)
        settings = Settings(depth=DEPTH, serving_k=3, policy="ratio", seed=seed, ladder=ladder)
        return outcome_of(calibrate(retriever, dataset, settings))

    def test_a_careful_choice_is_enforced_where_the_default_stays_in_shadow(self) -> None:
        plain, ladder = (self.chosen(120, ladder=each).profile for each in (False, True))
        assert (plain.verdict.decision, ladder.verdict.decision) == ("shadow", "enforce")
        assert ladder.policy.k > plain.policy.k
        assert ladder.why.endswith("of 2 choices, from a careful one on, the boldest to enforce")

    def test_a_bound_allows_for_all_that_were_to_be_tested(self) -> None:
        plain, ladder = (self.chosen(200, ladder=each, seed=4) for each in (False, True))
        assert plain.profile.policy == ladder.profile.policy
        bounds = [each.profile.certificate for each in (plain, ladder)]
        assert all(each is not None and each.delta == 0.1 for each in bounds)
        assert bounds[0].alpha < bounds[1].alpha  # type: ignore[union-attr]

    def test_with_fewer_labels_there_is_one_choice(self) -> None:
        plain, ladder = (self.chosen(99, ladder=each).profile for each in (False, True))
        assert plain == ladder

    @given(st.lists(st.integers(0, 5)), st.sets(st.integers(0, 5)))
    def test_no_choice_is_taken_beyond_the_first_that_may_not_be_enforced(
        self, places: list[int], passing: set[int]
    ) -> None:
        rungs = [(place, 0) for place in places]
        index, n = climbed(rungs, lambda each: each[0] in passing)
        assert n == max(len(set(places)), 1)
        if index is None:
            assert not places
            return
        before = list(dict.fromkeys(places))[: list(dict.fromkeys(places)).index(index[0])]
        assert set(before) <= passing
        if index[0] not in passing:
            assert before == []
