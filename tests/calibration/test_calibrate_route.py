"""One route: the family of policies, the best of them, and what is certified of it."""

from dataclasses import replace

import numpy as np
import pytest
from simulated_pools import DEPTH, Recorded, calibrated, labelled, ranking_of, simulate

from calibration.calibrate import Calibration, calibrate
from calibration.calibrate_route import RouteOutcome, Settings
from calibration.certify import Promise
from calibration.data.dataset import Dataset, Query
from calibration.evaluate import per_query
from calibration.grid import ratio_grid
from calibration.pool_labels import label
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Leg, Route, ScoreKind
from ctxguard.errors import CalibrationError, ConfigurationError

PROMISE = Promise(alpha=0.1, delta=0.1)


def outcome_of(result: Calibration) -> RouteOutcome:
    return result.outcomes[Route.HYBRID]


class TestChoice:
    @pytest.mark.parametrize("family", ["ratio", "expected_utility"])
    def test_the_policy_is_the_best_of_the_grid_on_the_choosing_queries(self, family: str) -> None:
        outcome = outcome_of(calibrated(120, policy=family))
        utility = outcome.chosen_grid.means.udcg_strict
        row, column = outcome.chosen_grid.means.best()
        assert utility[row, column] == utility.max()
        assert outcome.profile.policy == outcome.chosen_grid.policy((row, column))
        assert outcome.profile.policy.kind == family

    def test_it_is_the_best_by_decisions_one_at_a_time_as_well(self) -> None:
        result = calibrated(60, policy="ratio")
        pools = result.pools[Route.HYBRID].subset([q.query_id for q in result.chosen_on.queries])
        labels = label(pools, result.dataset)

        def mean(policy: RatioPolicy) -> float:
            return float(per_query(pools, labels, policy).values["udcg_strict"].mean())

        chosen = result.profile.routes[Route.HYBRID].policy
        assert isinstance(chosen, RatioPolicy)
        for k in range(1, DEPTH + 1, 2):
            for ratio in (0.0, 0.3, 0.6, 0.8, 0.95):
                assert mean(replace(chosen, k=k, min_ratio=ratio)) <= mean(chosen) + 1e-12

    def test_of_equally_good_policies_the_safest_then_the_smallest(self) -> None:
        pools, labels = labelled([ranking_of([3.0, 1.0])], [{"p0": 1}], depth=2)
        grid = ratio_grid(pools, labels)
        assert grid.policy(grid.means.best()) == RatioPolicy(k=1, min_ratio=0.0)

    def test_expected_utility_beats_five_passages_on_queries_held_out(self) -> None:
        result = calibrated(200)
        pools = result.pools[Route.HYBRID].subset([q.query_id for q in result.held_out.queries])  # type: ignore[union-attr]
        labels = label(pools, result.dataset)
        five = per_query(pools, labels, RatioPolicy(k=5)).evidence().metrics["udcg_strict"]
        held_out = result.profile.routes[Route.HYBRID].held_out
        assert held_out is not None
        ours = held_out.metrics["udcg_strict"]
        assert ours.lower is not None
        assert five.upper is not None
        assert ours.lower > five.upper

    def test_min_keep_is_that_of_every_policy(self) -> None:
        policy = outcome_of(calibrated(80, min_keep=0)).profile.policy
        assert policy.min_keep == 0

    def test_rank_only_scores_are_cut_by_k_alone(self) -> None:
        retriever, dataset = simulate(60)
        fused = {
            text: replace(ranking, kind=ScoreKind.RANK, legs={})
            for text, ranking in retriever.rankings.items()
        }
        result = calibrate(Recorded(fused), dataset, Settings(depth=DEPTH))
        policy = result.profile.routes[Route.HYBRID].policy
        assert isinstance(policy, RatioPolicy)
        assert policy.min_ratio == 0.0
        assert policy.k == 2


class TestFamily:
    def test_below_twenty_labels_no_probability_is_fitted(self) -> None:
        route = outcome_of(calibrated(30)).profile
        assert route.policy.kind == "ratio"
        assert "15 answerable queries to choose on, and a probability needs 20" in route.why

    def test_from_twenty_on_two_scorers_give_one(self) -> None:
        route = outcome_of(calibrated(40)).profile
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
        assert outcome_of(calibrated(30, policy="expected_utility")).profile.why == (
            "expected_utility was asked for"
        )

    def test_a_probability_without_any_leg_is_refused(self) -> None:
        retriever, dataset = simulate(30)
        bare = {text: replace(r, legs={}) for text, r in retriever.rankings.items()}
        with pytest.raises(CalibrationError, match=r"no leg's scores.*--policy ratio"):
            calibrate(Recorded(bare), dataset, Settings("expected_utility", depth=DEPTH))

    def test_a_leg_without_a_score_is_refused_with_the_way_out(self) -> None:
        retriever, dataset = simulate(60)
        text, ranking = next(iter(retriever.rankings.items()))
        dense = ranking.legs["dense"].scores.copy()
        dense[3] = np.nan
        holed = replace(ranking, legs={**ranking.legs, "dense": Leg(dense, ScoreKind.COSINE)})
        holed_retriever = Recorded({**retriever.rankings, text: holed})
        with pytest.raises(CalibrationError, match=r"lacks a leg's score.*--policy ratio"):
            calibrate(holed_retriever, dataset, Settings(depth=DEPTH, held_out=0.0))
        asked = Settings("ratio", depth=DEPTH, held_out=0.0, allow_uncertified=True)
        calibrate(holed_retriever, dataset, asked)


class TestSafePolicy:
    """What is served when the certificate fails gives up no recall against its baseline."""

    @pytest.mark.parametrize("baseline_k", [3, 10])
    @pytest.mark.parametrize("family", ["ratio", "expected_utility"])
    def test_it_loses_nothing_of_the_baseline(self, family: str, baseline_k: int) -> None:
        result = calibrated(60, policy=family, baseline_k=baseline_k)
        policy = outcome_of(result).profile.safe_policy
        assert policy == RatioPolicy(k=baseline_k)
        pools = result.pools[Route.HYBRID]
        labels = label(pools, result.dataset, baseline_k=baseline_k)
        assert np.nanmax(per_query(pools, labels, policy).values["recall_loss"]) == 0.0

    def test_against_the_whole_pool_no_policy_that_was_weighed_loses_less(self) -> None:
        outcome = outcome_of(calibrated(60, policy="ratio", baseline_k=None))
        policy = outcome.profile.safe_policy
        assert policy == RatioPolicy(k=DEPTH)
        assert outcome.chosen_grid.means.recall_loss[-1, 0] == np.nanmin(
            outcome.chosen_grid.means.recall_loss
        )


class TestCostOfTheChoice:
    """Without a promise, the certificate says what the chosen policy costs in recall."""

    def test_it_bounds_the_loss_on_queries_that_took_no_part_in_the_choice(self) -> None:
        result = calibrated(200, unanswerable=0.2)
        assert result.held_out is not None
        certificate = outcome_of(result).profile.certificate
        assert certificate is not None
        assert certificate.recall_loss < certificate.alpha < 0.3
        assert certificate.beta is None
        assert certificate.baseline == "k=10"
        assert certificate.n_queries == len(result.held_out) == 100
        assert certificate.n_recall <= len(result.held_out.answerable) < 100

    def test_more_labels_give_a_tighter_bound(self) -> None:
        few, many = (outcome_of(calibrated(n)).profile.certificate for n in (60, 600))
        assert few is not None
        assert many is not None
        assert many.alpha - many.recall_loss < few.alpha - few.recall_loss

    def test_the_baseline_can_be_the_whole_pool(self) -> None:
        certificate = outcome_of(calibrated(60, baseline_k=None)).profile.certificate
        assert certificate is not None
        assert certificate.baseline == "pool"

    def test_a_choice_that_loses_everything_is_certified_to_lose_at_most_everything(self) -> None:
        # One passage of ten is relevant and is ranked last: keeping the first alone harms least.
        queries = tuple(Query(f"q{i}", f"question {i}") for i in range(40))
        ranking = ranking_of([10.0 - rank for rank in range(10)])
        dataset = Dataset("last", queries, {query.query_id: {"p9": 1} for query in queries})
        retriever = Recorded({query.text: ranking for query in queries})
        route = outcome_of(calibrate(retriever, dataset, Settings("ratio", depth=10))).profile
        assert route.policy.k == 1
        assert route.certificate is not None
        assert (route.certificate.alpha, route.certificate.recall_loss) == (1.0, 1.0)

    def test_where_nothing_is_held_out_an_uncertified_profile_must_be_asked_for(self) -> None:
        with pytest.raises(CalibrationError, match=r"held out.*--allow-uncertified"):
            calibrated(60, held_out=0.0)
        route = outcome_of(calibrated(60, held_out=0.0, allow_uncertified=True)).profile
        assert route.certificate is None
        assert route.held_out is None

    def test_where_no_held_out_query_is_answerable_nothing_is_claimed(self) -> None:
        retriever, dataset = simulate(40)
        asked = Settings("ratio", depth=DEPTH, allow_uncertified=True)
        probe = calibrate(retriever, dataset, asked)
        answerable = {q.query_id for q in probe.chosen_on.queries}
        qrels = {q: grades for q, grades in dataset.qrels.items() if q in answerable}
        result = calibrate(retriever, replace(dataset, qrels=qrels), asked)
        route = outcome_of(result).profile
        assert route.certificate is None
        assert route.held_out is not None
        assert route.held_out.metrics["recall"].n == 0
        assert route.held_out.metrics["harm"].n == 20


class TestPromise:
    def test_many_labels_certify_a_policy(self) -> None:
        result = calibrated(400, promise=PROMISE)
        outcome = outcome_of(result)
        certificate, certification = outcome.profile.certificate, outcome.certification
        assert certificate is not None
        assert certification is not None
        assert (certificate.alpha, certificate.delta) == (0.1, 0.1)
        assert certificate.p_value <= 0.1
        assert certificate.recall_loss <= 0.1
        assert certificate.n_queries == certification.n_harm == 120
        assert "at most 0.1" in certificate.statement
        assert certification.grid_index is not None
        assert outcome.chosen_grid.settings(certification.grid_index)[0] == outcome.profile.policy.k

    def test_the_policy_keeps_its_promise_on_queries_held_out(self) -> None:
        held_out = outcome_of(calibrated(400, promise=PROMISE)).profile.held_out
        assert held_out is not None
        loss = held_out.metrics["recall_loss"].value
        assert loss is not None
        assert loss <= 0.1

    def test_harm_can_be_promised_as_well(self) -> None:
        both = Promise(alpha=0.1, beta=0.5)
        certificate = outcome_of(calibrated(400, noise=0.1, promise=both)).profile.certificate
        assert certificate is not None
        assert certificate.beta == 0.5
        assert certificate.harm <= 0.5

    def test_the_choice_without_a_test_is_shown_beside_it(self) -> None:
        certification = outcome_of(calibrated(400, promise=PROMISE)).certification
        assert certification is not None
        choices = {choice.rule: choice for choice in certification.rule_choices}
        assert list(choices) == ["betting", "uncorrected"]
        assert choices["betting"].grid_index == certification.grid_index
        uncorrected = choices["uncorrected"].tested
        assert uncorrected is not None
        assert uncorrected["recall_loss"] <= 0.1

    def test_few_labels_are_refused_with_the_number_that_would_do(self) -> None:
        with pytest.raises(CalibrationError, match=r"from 15 answerable test.*about \d+ answer"):
            calibrated(50, promise=PROMISE, policy="ratio")

    def test_a_promise_that_no_policy_keeps_says_to_relax_it(self) -> None:
        impossible = Promise(alpha=0.5, beta=0.01)
        with pytest.raises(CalibrationError, match=r"harm ≤ 0\.01.*relax the promise"):
            calibrated(200, noise=0.8, promise=impossible)

    def test_an_uncertified_policy_is_taken_only_where_allowed_and_says_so(self) -> None:
        outcome = outcome_of(
            calibrated(50, promise=PROMISE, policy="ratio", allow_uncertified=True)
        )
        assert outcome.profile.certificate is None
        assert outcome.profile.policy == outcome.uncertified
        assert "uncertified" in outcome.profile.why

    @pytest.mark.parametrize(
        "settings", [{"alpha": 0.0}, {"alpha": 1.0}, {"delta": 1.5}, {"beta": 0.0}, {"beta": -1.0}]
    )
    def test_a_promise_that_means_nothing_is_refused(self, settings: dict[str, float]) -> None:
        with pytest.raises(ConfigurationError, match=str(next(iter(settings)))):
            Promise(**settings)


class TestSegments:
    def test_segments_that_can_be_certified_get_a_policy_of_their_own(self) -> None:
        result = calibrated(600, noise=0.1, promise=PROMISE, segment_by="segment")
        route = result.profile.routes[Route.HYBRID]
        assert result.profile.segment_by == "segment"
        assert set(route.segments) == {"a", "b"}
        for segment in route.segments.values():
            assert segment.certificate.delta == pytest.approx(0.05)
            assert segment.certificate.p_value <= 0.05

    def test_a_segment_that_cannot_falls_back_to_the_routes_policy(self) -> None:
        retriever, dataset = simulate(400, noise=0.1)
        rare = tuple(
            replace(query, metadata={"segment": "rare" if number % 40 == 0 else "common"})
            for number, query in enumerate(dataset.queries)
        )
        settings = Settings(depth=DEPTH, promise=PROMISE, segment_by="segment")
        result = calibrate(retriever, replace(dataset, queries=rare), settings)
        assert set(result.profile.routes[Route.HYBRID].segments) == {"common"}

    def test_an_unknown_column_is_refused(self) -> None:
        with pytest.raises(CalibrationError, match="no query has the column 'tenant'"):
            calibrated(400, promise=PROMISE, segment_by="tenant")
