"""One route: the family of policies, the best of them, and what is certified of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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

from calibration.calibrate import calibrate, dealt
from calibration.calibrate_route import LabelledRoute, Option, RouteOutcome, calibrate_route
from calibration.choice import Folded, highest_utility
from calibration.data.dataset import Dataset, Query
from calibration.evaluate import per_query
from calibration.grid import ratio_grid
from calibration.pools import label
from calibration.replay import replay
from calibration.settings import Context, Settings
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Ranking, Route, ScoreKind
from ctxguard.measure import risk
from ctxguard.measure.worth import STRICT
from ctxguard.profile.schema import Profile


class TestChoice:
    @pytest.mark.parametrize("family", ["ratio", "expected_utility"])
    def test_highest_utility_is_grids_best(self, family: str) -> None:
        outcome = outcome_of(calibrated(120, policy=family, context="utility"))
        grid = outcome.route.choosing.grid
        assert outcome.profile.policy.kind == family
        every = [*np.ndindex(len(grid.ks), grid.thresholds.size)]
        gains = np.take_along_axis(grid.beyond_today[1], grid.kept(every), axis=1).mean(axis=0)
        best = np.flatnonzero(gains >= gains.max() - 1e-12)
        assert outcome.profile.policy in [grid.policy(every[place]) for place in best]

    @pytest.mark.parametrize("context", ["leaner", "balanced", "richer"])
    def test_asked_choice_stands_beside_others(self, context: str) -> None:
        outcome = outcome_of(calibrated(150, noise=0.15, relevant=3, context=context))
        found = {**outcome.others, context: outcome.chosen}
        assert {*found} == {"leaner", "balanced", "richer"}
        kept = {name: option.metrics["kept"].mean() for name, option in found.items()}
        udcg = {name: option.metrics["udcg"].mean() for name, option in found.items()}
        assert kept["leaner"] <= kept["balanced"] <= 5.0 <= kept["richer"] <= 10.0
        assert udcg["richer"] >= udcg["balanced"] - 0.01
        assert found["leaner"].verdict.decision == "enforce"

    @pytest.mark.parametrize("n", [60, 80, 150])
    def test_boldest_enforceable_choice_is_taken(self, n: int) -> None:
        outcome = outcome_of(calibrated(n, noise=0.15, relevant=3))
        own = outcome.route.choosing
        decisions = []
        for rule in outcome.route.rules("balanced"):
            place = own.chosen(rule)
            if place is None:
                continue
            policy = own.grid.policy(place)
            option = outcome.route.option("one", policy, *own.contexts(own.by_others(rule), 5))
            decisions.append((policy, option.verdict.decision))
        enforced = [policy for policy, decision in decisions if decision == "enforce"]
        assert decisions
        assert outcome.profile.policy == (enforced[0] if enforced else RatioPolicy(k=5))

    def test_held_out_queries_choose_nothing(self) -> None:
        outcome = outcome_of(calibrated(150, noise=0.2, relevant=4, held_out=0.5))
        assert len(outcome.route.rules("balanced")) == 1

    def test_smallest_of_equals_is_taken(self) -> None:
        pools = labelled([ranking_of([3.0, 1.0])], [{"p0": 1}], depth=2)
        grid = ratio_grid(pools)
        every = tuple(np.ndindex(len(grid.ks), grid.thresholds.size))
        best = Folded(grid, every).chosen(highest_utility)
        assert grid.policy(best) == RatioPolicy(k=1, min_ratio=0.0)

    def test_policies_share_min_keep(self) -> None:
        policy = outcome_of(calibrated(80, min_keep=0, context="utility")).profile.policy
        assert policy.min_keep == 0


def as_ranks(ranking: Ranking) -> Ranking:
    return ranking_of(ranking.scores, ids=ranking.passage_ids, kind=ScoreKind.RANK)


@pytest.mark.parametrize(
    ("n", "scored", "asked", "kind", "why"),
    [
        (30, None, {"held_out": 0.5}, "ratio", "15 answerable queries to choose on, but a"),
        (40, None, {}, "expected_utility", "2 scorers"),
        (60, lambda own: replace(own, legs={}), {}, "expected_utility", "1 scorer"),
        (60, as_ranks, {}, "ratio", "only ranks"),
        (30, None, {"policy": "expected_utility"}, "expected_utility", "was asked for"),
    ],
    ids=["below 20 labels", "two scorers", "a single one", "only ranks", "asked for"],
)
def test_labels_and_scores_decide_by_default(
    n: int, scored: Callable[[Ranking], Ranking] | None, asked: dict[str, Any], kind: str, why: str
) -> None:
    retriever, dataset = simulate(n)
    if scored is not None:
        retriever = Recorded({text: scored(own) for text, own in retriever.rankings.items()})
    settings = Settings(depth=DEPTH, **{"context": "utility", **asked})
    route = outcome_of(calibrate(retriever, dataset, settings)).profile
    assert route.policy.kind == kind
    assert why in route.why


class TestToday:
    """What is served today is what recall is compared with, and what can always be kept."""

    def test_kept_where_scores_say_nothing(self) -> None:
        outcome = outcome_of(calibrate(*indistinct(100), Settings(depth=DEPTH)))
        assert outcome.profile.policy == RatioPolicy(k=5)
        assert outcome.profile.certificate is None
        verdict = outcome.profile.verdict
        assert (verdict.decision, verdict.recall.value, verdict.tokens.value) == ("keep", 0.0, 0.0)
        assert outcome.profile.safe_policy == outcome.today.policy == RatioPolicy(k=5)
        assert "the first 5 as today" in outcome.profile.why

    @pytest.mark.parametrize(("family", "k"), [("ratio", 1), ("expected_utility", 10)])
    def test_safe_policy_serves_it(self, family: str, k: int) -> None:
        asked = {"policy": family, "serving_k": k, "context": "utility"}
        outcome = outcome_of(calibrated(60, **asked))
        assert outcome.profile.policy != RatioPolicy(k=k)
        assert outcome.profile.safe_policy == outcome.today.policy == RatioPolicy(k=k)

    def test_short_answers_are_served_unchanged(self) -> None:
        retriever, dataset = simulate(60, depth=3)
        route = outcome_of(calibrate(retriever, dataset, Settings(depth=DEPTH))).profile
        assert route.evidence is not None
        assert route.policy.k <= 5


class TestVerdict:
    """Queries that had no part in the choice say whether it may be served."""

    def test_many_clear_labels_serve_it(self) -> None:
        outcome = outcome_of(calibrated(300, noise=0.1))
        verdict = outcome.profile.verdict
        assert (verdict.decision, verdict.serving_k, verdict.n) == ("enforce", 5, 300)
        assert verdict.shown_by == outcome.profile.evidence.shown_by == "folds"
        assert outcome.profile.policy != outcome.today.policy
        found = outcome.profile.evidence.metrics
        assert found["kept"].value < 4.0
        assert found["recall"].value > 0.98
        gains = outcome.chosen.metrics["udcg"] - outcome.today.metrics["udcg"]
        assert verdict.udcg.value == pytest.approx(gains.mean(), abs=1e-5)
        assert verdict.tokens.value == pytest.approx(found["kept"].value / 5.0 - 1.0, abs=1e-5)

    def test_manual_held_out_say_alone(self) -> None:
        outcome = outcome_of(calibrated(300, noise=0.1, held_out=0.5))
        verdict = outcome.profile.verdict
        assert (verdict.decision, verdict.n, verdict.shown_by) == ("enforce", 150, "held_out")
        assert outcome.profile.certificate is not None
        assert outcome_of(calibrated(300, noise=0.1)).profile.certificate is None

    def test_few_labels_enforce_more_answer(self) -> None:
        result = calibrated(30, noise=0.1, relevant=8, context="richer")
        assert result.held_out is None
        verdict = outcome_of(result).profile.verdict
        assert verdict.decision == "enforce"
        assert verdict.recall.lower > 0.25

    def test_todays_order_continues_if_paying(self) -> None:
        """The scores say nothing of the first five, and all of the next three are relevant."""
        queries = tuple(Query(f"q{i}", f"question {i}") for i in range(40))
        random = np.random.default_rng(0)
        rankings, qrels = {}, {}
        for query in queries:
            first = {f"p{i}": 1 for i in random.choice(5, 3, replace=False)}
            qrels[query.query_id] = {**first, "p5": 1, "p6": 1, "p7": 1}
            rankings[query.text] = ranking_of([1.0] * 8 + [0.1] * 4, kind=ScoreKind.RANK)
        dataset = Dataset("longer", queries, qrels)
        asked = Settings(depth=12, context="richer")
        outcome = outcome_of(calibrate(Recorded(rankings), dataset, asked))
        route, verdict = outcome.profile, outcome.profile.verdict
        assert verdict.decision == "enforce"
        kept = outcome.chosen.kept
        assert kept[:, :5].all()
        assert kept.sum(axis=1).mean() > 5
        assert route.policy.min_keep == 5 or not verdict.extends

    def test_foldless_choice_is_not_enforced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """All labels choose, four fifths of them nothing: what was measured is today's."""
        monkeypatch.setattr(Folded, "share_chosen", lambda *_: 0.2)
        simulated = simulate(60, noise=0.1, relevant=8)
        verdict = outcome_of(calibrate(*simulated, Settings(context="richer"))).profile.verdict
        assert (verdict.decision, verdict.recall) == ("shadow", None)
        assert "it takes 75 or more" in verdict.statement

    @pytest.mark.parametrize("relevant", [1, 3])
    @pytest.mark.parametrize("n", [36, 38, 40])
    def test_what_no_fold_chooses_is_undecided(self, n: int, relevant: int) -> None:
        """Today's contexts were measured in its place, and gain nothing over themselves."""
        few, enough = None, n
        for expected in ("shadow", "enforce"):
            made = calibrated(enough, noise=0.05, relevant=relevant, serving_k=10)
            found = outcome_of(made).route.offer("leaner").verdict
            assert found.decision == expected
            few, enough = few or found, found.n_needed
        assert few.recall is None

    def test_leaner_costs_no_more_than_balanced(self) -> None:
        """What may be enforced at fewer tokens is what a leaner context asks for."""
        for n, noise in [(30, 0.05), (40, 0.1), (60, 0.2)]:
            offers = outcome_of(calibrated(n, noise=noise)).route.offers
            leaner, balanced = offers["leaner"], offers["balanced"]
            if balanced.verdict.decision == "enforce":
                assert leaner.verdict.decision == "enforce"
                assert leaner.cost <= balanced.cost

    def test_richer_is_richer_or_balanced(self) -> None:
        """Contexts no richer than today's are chosen by what balanced ones are chosen by."""
        seen = 0
        for n, noise, relevant in [(60, 0.05, 1), (60, 0.1, 1), (80, 0.2, 1), (60, 0.2, 2)]:
            route = outcome_of(calibrated(n, noise=noise, relevant=relevant)).route
            balanced, richer = route.offers["balanced"], route.offers["richer"]
            if balanced.verdict.decision == "enforce" and richer.cost <= route.today.cost:
                assert richer.policy == balanced.policy
                seen += 1
        assert seen > 0

    @pytest.mark.parametrize("held_out", [0.0, 0.5])
    def test_held_out_queries_tell_no_leaner(
        self, held_out: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A certificate holds for what was chosen without them: a leaner choice stays its own."""
        asked = Settings(depth=DEPTH, held_out=held_out)
        route = outcome_of(calibrate(*simulate(80, noise=0.1), asked)).route

        def offer(self: LabelledRoute, wanted: str) -> Option:
            decision = "enforce" if wanted == "balanced" else "shadow"
            verdict = route.today.verdict.model_copy(update={"decision": decision})
            return replace(route.today, verdict=verdict)

        monkeypatch.setattr(LabelledRoute, "offer", offer)
        expected = "shadow" if held_out else "enforce"
        del route.offers
        assert route.offers["leaner"].verdict.decision == expected

    @pytest.mark.parametrize("context", ["leaner", "balanced"])
    @pytest.mark.parametrize(("relevant", "noise"), [(1, 0.05), (3, 0.1)])
    def test_forty_labels_enforce_lossless_filter(
        self, relevant: int, noise: float, context: Context
    ) -> None:
        """Ten passages are served today; nothing but the labels is given."""
        asked: dict[str, Any] = {"serving_k": 10, "context": context}
        outcome = outcome_of(calibrated(40, noise=noise, relevant=relevant, **asked))
        verdict = outcome.profile.verdict
        assert verdict.decision == "enforce"
        assert verdict.recall.value >= 0.0
        assert verdict.tokens.upper < 0.0
        assert outcome.chosen.metrics["kept"].mean() < 9.0

    def refuted(self, asked: Settings) -> RouteOutcome:
        """A calibration whose held-out queries have their relevant passages at the end."""
        retriever, dataset = simulate(300, noise=0.1, relevant=2)
        _, held_out = dealt(dataset, asked)
        qrels = {
            **dataset.qrels,
            **{
                query.query_id: {retriever.rankings[query.text].passage_ids[4]: 1}
                for query in held_out.queries
            },
        }
        return outcome_of(calibrate(retriever, replace(dataset, qrels=qrels), asked))

    def test_refuted_choice_yields_to_today(self) -> None:
        outcome = self.refuted(Settings(depth=DEPTH, held_out=0.5))
        verdict = outcome.profile.verdict
        assert verdict.decision == "keep"
        assert verdict.recall.upper < -0.01
        assert verdict.statement.startswith("keep: worse than the first 5")
        assert outcome.profile.policy == RatioPolicy(k=5)
        assert outcome.profile.certificate is None
        assert "the first 5 as today, since nothing is shown to be better" in outcome.profile.why

    def test_accepted_loss_stays_in_shadow(self) -> None:
        route = self.refuted(Settings(depth=DEPTH, held_out=0.5, context="utility")).profile
        assert route.verdict.decision == "shadow"
        assert route.policy.kind == "expected_utility"

    def test_evidence_bounds_alarmed_loss(self) -> None:
        outcome = outcome_of(calibrated(200))
        losses = outcome.chosen.metrics["recall_loss"]
        at_most, baseline_k, source = outcome.profile.recall_promise
        assert (baseline_k, source) == (5, "evidence of calibration")
        assert np.nanmean(losses) < at_most < np.nanmean(losses) + 0.1
        # What is served today loses nothing of itself, so there is nothing to watch.
        kept = outcome_of(calibrate(*indistinct(100), Settings(depth=DEPTH))).profile
        assert kept.recall_promise is None


def test_no_mean_exceeds_the_budget() -> None:
    retriever, dataset = simulate(60, relevant=8)
    pools = label(replay(retriever, dataset.queries, depth=DEPTH), dataset, baseline_k=5)
    pools = replace(pools, tokens=np.where(pools.retrieved, 10.0, np.nan))
    ks = []
    for budget in (None, 60, 1):
        asked = Settings(depth=DEPTH, context="utility", max_tokens=budget)
        outcome = calibrate_route(pools, dataset, None, asked)
        ks.append(outcome.profile.policy.k)
        # What is served today is tried whatever the budget.
        assert outcome.today.policy == RatioPolicy(k=5)
    assert ks[0] > 6 >= ks[1]


class TestFewLabels:
    @pytest.mark.parametrize("n", [1, 5, 19, 20, 34])
    def test_few_labels_certify_nothing(self, n: int, tmp_path: Path) -> None:
        result = calibrated(n)
        assert result.held_out is None
        result.profile.save(tmp_path / "profile.json")
        route = Profile.load(tmp_path / "profile.json").routes[Route.HYBRID]
        assert route.certificate is None
        assert route.evidence.shown_by == "folds"
        if n < 20:
            assert route.verdict.decision != "enforce"
            assert route.verdict.recall is None

    @pytest.mark.parametrize("seed", range(5))
    def test_42_labels_lose_little_recall(self, seed: int) -> None:
        """One relevant passage per query, as where a person labels what answered."""
        retriever, dataset = simulate(42, relevant=1, noise=0.25, seed=seed)
        truth_retriever, truth = simulate(300, relevant=1, noise=0.25, seed=seed + 100)
        route = outcome_of(calibrate(retriever, dataset, Settings(depth=DEPTH))).profile
        pools = label(replay(truth_retriever, truth.queries, depth=DEPTH), truth, baseline_k=5)
        recall = [
            np.nanmean(per_query(pools, policy)["recall"])
            for policy in (RatioPolicy(k=5), route.policy)
        ]
        assert recall[1] - recall[0] > -0.04


class TestCostOfTheChoice:
    """Without a promise, the certificate says what the chosen policy costs in recall."""

    def test_bounds_hold_on_untouched_queries(self) -> None:
        result = calibrated(200, unanswerable=0.2, context="utility", held_out=0.5)
        outcome = outcome_of(result)
        certificate = outcome.profile.certificate
        assert certificate.recall_loss < certificate.alpha < 0.3
        assert certificate.baseline_k == 5
        assert certificate.n_recall <= len(result.held_out.answerable) < 100
        found = certificate.recall_difference
        assert found.n == len(result.held_out.answerable)
        paired = outcome.chosen.metrics["recall"] - outcome.today.metrics["recall"]
        paired = paired[~np.isnan(paired)]
        assert found.value == pytest.approx(paired.mean(), abs=1e-6)
        shuffled = paired[np.random.default_rng(0).permutation(paired.size)]
        bound = risk.betting_lower_bound(shuffled, 0.1)
        assert bound - 1e-4 <= found.lower <= bound

    def test_total_loss_is_certified_so(self) -> None:
        # One passage of five is relevant and is ranked last: keeping the first alone harms least.
        queries = tuple(Query(f"q{i}", f"question {i}") for i in range(60))
        ranking = ranking_of([10.0 - rank for rank in range(10)])
        dataset = Dataset("last", queries, {query.query_id: {"p4": 1} for query in queries})
        retriever = Recorded({query.text: ranking for query in queries})
        asked = Settings(
            policy="ratio", context="utility", utilities=STRICT, depth=10, held_out=0.5
        )
        outcome = outcome_of(calibrate(retriever, dataset, asked))
        route = outcome.profile
        assert route.policy.k == 1
        assert (route.certificate.alpha, route.certificate.recall_loss) == (1.0, 1.0)
        assert route.certificate.recall_difference.lower == -1.0
        assert route.certificate.promises_nothing
        # The default gives up none of it.
        kept = outcome_of(calibrate(retriever, dataset, Settings(policy="ratio", depth=10))).profile
        assert kept.policy == RatioPolicy(k=5)

    def test_unanswerable_held_out_claim_nothing(self) -> None:
        retriever, dataset = simulate(40)
        asked = Settings(policy="ratio", context="utility", depth=DEPTH, held_out=0.5)
        answerable = {q.query_id for q in dealt(dataset, asked)[0].queries}
        qrels = {q: grades for q, grades in dataset.qrels.items() if q in answerable}
        outcome = outcome_of(calibrate(retriever, replace(dataset, qrels=qrels), asked))
        route = outcome.profile
        assert route.certificate is None
        assert route.evidence.metrics["recall"].n == 0
        assert route.evidence.metrics["harm"].n == 20


class TestPromise:
    def test_many_labels_certify_a_policy(self) -> None:
        result = calibrated(400, alpha=0.1)
        outcome = outcome_of(result)
        certificate, certification = outcome.profile.certificate, outcome.certification
        assert (certificate.alpha, certificate.delta) == (0.1, 0.1)
        assert certificate.recall_loss <= 0.1
        assert certification.n_queries == 120
        assert "at most 0.1" in certificate.statement
        assert certification.grid_index is not None
        assert outcome.profile.evidence.metrics["recall_loss"].value <= 0.1
        verdict = outcome.profile.verdict
        assert (verdict.tolerance, verdict.max_loss) == (0.1, 0.1)

    def test_few_labels_keep_today(self) -> None:
        outcome = outcome_of(calibrated(60, noise=0.25, alpha=0.02, policy="ratio"))
        assert outcome.certification.grid_index is None
        assert outcome.profile.policy == RatioPolicy(k=5)
        assert "no other policy that gains utility is certified" in outcome.profile.why
        assert outcome.profile.certificate is None
