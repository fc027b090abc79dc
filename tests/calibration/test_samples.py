"""Judged traffic becomes calibration data, and a profile made of it is compared in shadow."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from judged_samples import SERIES, WHOLE, GradedBy, serve, spoilt, truth_of, watched, watching
from simulated_pools import DEPTH, calibrated, guard_of, simulate
from watching import Watching

from calibration.calibrate_route import Settings
from calibration.evaluate import per_query
from calibration.from_traffic import (
    JudgedTraffic,
    Recalibration,
    judged_traffic,
    recalibrate,
    served_today,
)
from calibration.pool_labels import label
from calibration.replay import replay
from ctxguard.core.fusion import Fusion
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Passage, Route
from ctxguard.errors import CalibrationError, ConfigurationError
from ctxguard.monitor.estimation.full_judged_pools import ShadowedTraffic
from ctxguard.monitor.estimation.promotion import FEWEST_LABELLED, Rise
from ctxguard.monitor.judges import Judgment, LabelJudge
from ctxguard.monitor.redaction import Text
from ctxguard.monitor.sampling.inclusion import JudgingRates
from ctxguard.monitor.sampling.privacy import Privacy
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import LabelRow
from ctxguard.profile.schema import Profile, RouteProfile, RouteVerdict
from tests.profiles import profile_with


def rates_of(*, dropped: float, whole: float, if_no_hit: float) -> JudgingRates:
    return JudgingRates(dropped, whole, if_no_hit, 0.0)


def request_of(live: Watching, sample_id: int) -> SampleRecord:
    return SampleRecord.from_bytes(live.store.payloads([sample_id])[sample_id])


class TestGathering:
    def test_a_wholly_judged_pool_is_a_labelled_query(self) -> None:
        live = watched(30)
        _, truth = simulate(30)
        found = judged_traffic(live.store, SERIES)
        assert found.route is Route.HYBRID
        assert found.left_out == {}
        assert {query.text for query in found.dataset.queries} == {q.text for q in truth.queries}
        relevant = {q.text: truth.relevant(q.query_id) for q in truth.queries}
        for query in found.dataset.queries:
            assert found.dataset.relevant(query.query_id) == relevant[query.text]
            assert len(found.dataset.qrels[query.query_id]) == DEPTH

    def test_what_the_labels_do_not_hold_stays_unjudged(self) -> None:
        retriever, dataset = simulate(10)
        partial = {
            query.text: {**dataset.relevant(query.query_id), "judged elsewhere": 0}
            for query in dataset.queries
        }
        live = watching(retriever, dataset, judge=LabelJudge(partial))
        found = judged_traffic(live.store, SERIES)
        assert found.left_out == {}
        for query in found.dataset.queries:
            held = set(partial[query.text]) & set(found.rankings[query.text].passage_ids)
            assert set(found.dataset.qrels[query.query_id]) == held

    def test_what_was_retrieved_is_there_to_decide_on_again(self) -> None:
        retriever, _ = simulate(5)
        found = judged_traffic(watched(5).store, SERIES)
        for text, ranking in found.rankings.items():
            made = retriever.rankings[text]
            assert ranking.passage_ids == tuple(made.passage_ids)
            assert ranking.scores == pytest.approx(made.scores, rel=1e-6)
            assert set(ranking.legs) == {"dense", "lexical"}
            assert (ranking.kind, ranking.route) == (made.kind, made.route)

    def test_pools_that_were_judged_in_part_are_left_out(self) -> None:
        rates = rates_of(dropped=0.2, whole=0.5, if_no_hit=0.5)
        live = watched(60, rates=rates)
        whole = sum(request_of(live, sample_id).full_pool for sample_id in range(1, 61))
        found = judged_traffic(live.store, SERIES)
        assert len(found.dataset) == found.requests == whole
        assert found.left_out == {"whose pool was judged in part": 60 - whole}
        # Half are whole already: the note says what all of them would give and cost.
        dropped = DEPTH - 3
        assert (
            "where requests are sampled, sample_to(…, rates=JudgingRates(full_pool_rate=1)) would "
            f"make about {60 - whole} of {60 - whole} such requests usable, each for {dropped} "
            "dropped passages to judge"
        ) in found.dataset.notes

    def test_pools_judged_because_nothing_served_was_relevant_weigh_less(self) -> None:
        rates = rates_of(dropped=0.0, whole=0.25, if_no_hit=1.0)
        retriever, dataset = simulate(200, noise=0.5, unanswerable=0.3)
        live = watching(retriever, dataset, rates=rates)
        found = judged_traffic(live.store, SERIES)
        relevant = {query.text: dataset.relevant(query.query_id) for query in dataset.queries}
        for query in found.dataset.queries:
            first = retriever.rankings[query.text].passage_ids[:3]
            has_hit = bool(relevant[query.text].keys() & set(first))
            assert query.weight == (1.0 if has_hit else 0.25)
        without_hit = sum(
            not relevant[text].keys() & set(ranking.passage_ids[:3])
            for text, ranking in retriever.rankings.items()
        )
        weights = [query.weight for query in found.dataset.queries]
        assert weights.count(0.25) == without_hit > weights.count(1.0) > 0
        assert found.requests > found.effective_requests > 4 * weights.count(1.0) * 0.25
        assert "make about" in found.dataset.notes[-1]

    def test_pools_judged_because_nothing_served_was_relevant_teach_nothing(self) -> None:
        rates = rates_of(dropped=0.0, whole=0.0, if_no_hit=1.0)
        retriever, dataset = simulate(20, unanswerable=1.0)
        live = watching(retriever, dataset, rates=rates)
        assert request_of(live, 1).to_judge(has_hit=False)
        never = r"20 whose pool is judged in full only where nothing relevant was served"
        with pytest.raises(CalibrationError, match=rf"{never}; .*full_pool_rate=0.5\)"):
            judged_traffic(live.store, SERIES)

    def test_where_every_dropped_passage_is_judged_every_pool_is_whole(self) -> None:
        rates = rates_of(dropped=1.0, whole=0.0, if_no_hit=0.0)
        assert len(judged_traffic(watched(10, rates=rates).store, SERIES).dataset) == 10

    def test_a_pool_with_a_verdict_missing_is_left_out(self) -> None:
        """The judge says nothing of the last candidate of every second query."""

        def grade(query: str, passage_id: str) -> int | None:
            return None if query[-1] in "13579" and passage_id == last[query] else 1

        retriever, dataset = simulate(10)
        texts = [query.text for query in dataset.queries]
        last = {text: retriever.rankings[text].passage_ids[-1] for text in texts}
        found = judged_traffic(watching(retriever, dataset, judge=GradedBy(grade)).store, SERIES)
        assert len(found.dataset) == 5
        assert found.left_out == {"with passages that have no verdict": 5}

    def test_peoples_words_replace_the_judges(self) -> None:
        live = watched(10)
        record = request_of(live, 1)
        first, second, third = record.passage_ids[:3]
        live.store.add_labels(
            [
                LabelRow(record.request_id, first, 3, None, "ann", 1.0),
                LabelRow(record.request_id, second, 0, "distractor", "ann", 1.0),
                LabelRow(record.request_id, third, 3, None, "users", 1.0, source="feedback"),
            ]
        )
        judged = judged_traffic(watched(10).store, SERIES).dataset
        found = judged_traffic(live.store, SERIES).dataset
        assert found.qrels["1"][first] == 3
        assert found.qrels["1"][second] == 0
        assert found.distractors["1"] == {second: "distractor"}
        assert found.qrels["1"][third] == judged.qrels["1"][third]
        assert found.qrels["2"] == judged.qrels["2"]

    def test_a_passage_that_only_people_graded_counts_as_judged(self) -> None:
        """The judge says nothing of dropped passages."""

        def grade(query: str, passage_id: str) -> int | None:
            return 1 if passage_id in retriever.rankings[query].passage_ids[:3] else None

        retriever, dataset = simulate(2)
        live = watching(retriever, dataset, judge=GradedBy(grade))
        record = request_of(live, 1)
        live.store.add_labels(
            [LabelRow(record.request_id, name, 0, None, "ann", 1.0) for name in record.passage_ids]
        )
        found = judged_traffic(live.store, SERIES)
        assert [query.query_id for query in found.dataset.queries] == ["1"]

    def test_those_who_ask_the_same_are_one_question_that_weighs_as_much_as_all(self) -> None:
        retriever, dataset = simulate(4)
        texts = [query.text for query in dataset.queries]
        live = watching(retriever, dataset, [*texts, texts[0], texts[0], texts[1]])
        found = judged_traffic(live.store, SERIES)
        weights = [query.weight for query in sorted(found.dataset.queries, key=lambda q: q.text)]
        assert weights == pytest.approx([1.0, 2 / 3, 1 / 3, 1 / 3])
        assert (found.requests, found.effective_requests, found.left_out) == (7, 7.0, {})
        assert found.effective_questions == pytest.approx(49 / 15)

    def test_a_request_weighs_1_by_its_probability(self) -> None:
        retriever, dataset = simulate(3)
        texts = [query.text for query in dataset.queries]
        live = Watching(truth_of(dataset), rates=WHOLE)
        contexts = serve(retriever, [*texts, texts[0]])
        live.watch(*contexts[:1], probability=0.1)
        live.watch(*contexts[1:], probability=0.5)
        found = judged_traffic(live.store, SERIES)
        weights = {query.text: query.weight for query in found.dataset.queries}
        assert weights == pytest.approx({texts[0]: 1.0, texts[1]: 2 / 12, texts[2]: 2 / 12})
        assert found.effective_requests == pytest.approx(16**2 / (100 + 4 + 4 + 4))

    def test_where_verdicts_on_a_question_differ_they_count_by_weight(self) -> None:
        """A fifth of the requests is judged to have no hit, and all of those are judged in full."""

        class Moody:
            name, version, max_grade, reads_text = "labels", "1", 1, False

            def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment | None]:
                served = retriever.rankings[query].passage_ids[:3]
                grade = int(passages[0].passage_id in served and random.random() < 0.8)
                return [Judgment(passage.passage_id, grade) for passage in passages]

        random = Random(0)
        rates = rates_of(dropped=0.0, whole=0.2, if_no_hit=1.0)
        retriever, dataset = simulate(120)
        live = Watching(Moody(), rates=rates)
        live.watch(*serve(retriever, [query.text for query in dataset.queries] * 10))
        found = judged_traffic(live.store, SERIES).dataset
        total = sum(query.weight for query in found.queries)
        hits = sum(query.weight for query in found.queries if found.relevant(query.query_id))
        # Four standard errors of 120 questions.
        assert hits / total == pytest.approx(0.8, abs=4 * (0.16 / 120) ** 0.5)

    def test_what_people_said_of_one_request_holds_of_all_that_ask_the_same(self) -> None:
        retriever, dataset = simulate(2)
        text = dataset.queries[0].text
        live = watching(retriever, dataset, [text, text])
        record = request_of(live, 1)
        first, second = record.passage_ids[:2]
        live.store.add_labels(
            [
                LabelRow("r0", first, 3, None, "ann", 1.0),
                LabelRow("r0", second, 3, None, "ann", 1.0),
                LabelRow("r1", second, 0, None, "ann", 2.0),
            ]
        )
        found = judged_traffic(live.store, SERIES).dataset
        (grades,) = found.qrels.values()
        assert (grades[first], grades[second]) == (3, 0)

    def test_that_few_questions_are_most_of_the_traffic_is_said(self) -> None:
        retriever, dataset = simulate(40)
        texts = [query.text for query in dataset.queries]
        live = watching(retriever, dataset, [*texts, *texts[:2] * 29])
        found = judged_traffic(live.store, SERIES)
        count, dominance, judge = found.dataset.notes
        assert count.startswith("98 judged requests ask 40 questions.")
        assert count.endswith("in all like 98 requests and 5 questions of equal weight")
        assert dominance.startswith("2 of 40 questions are 61% of the traffic. All weigh as much")
        assert "as 3 of the most frequent" in dominance
        assert "the labels are the grades of judge 'labels 1'" in judge
        even = judged_traffic(watched(40).store, SERIES).dataset.notes
        assert len(even) == 2

    @pytest.fixture
    def two_routes(self) -> Watching:
        """Six hybrid answers and two lexical ones."""
        retriever, dataset = simulate(8)
        contexts = serve(retriever, [query.text for query in dataset.queries])
        for place in (0, 5):
            decision = contexts[place].decision
            ranking = replace(decision.ranking, route=Route.LEXICAL)
            contexts[place] = replace(
                contexts[place], decision=replace(decision, ranking=ranking), route=Route.LEXICAL
            )
        live = Watching(truth_of(dataset), rates=WHOLE)
        live.watch(*contexts)
        return live

    def test_the_commonest_route_is_taken_and_the_others_are_counted(
        self, two_routes: Watching
    ) -> None:
        found = judged_traffic(two_routes.store, SERIES)
        assert (found.route, len(found.dataset)) == (Route.HYBRID, 6)
        assert found.left_out == {"of another route (lexical)": 2}
        found = judged_traffic(two_routes.store, SERIES, route=Route.LEXICAL)
        assert (found.route, len(found.dataset)) == (Route.LEXICAL, 2)
        with pytest.raises(CalibrationError, match=r"dense: .*6 of another route \(hybrid\)"):
            judged_traffic(two_routes.store, SERIES, route=Route.DENSE)

    def test_queries_whose_text_is_not_kept_are_not_judged_and_so_not_used(self) -> None:
        retriever, dataset = simulate(3)
        live = watching(retriever, dataset, privacy=Privacy(query=Text.OMITTED))
        with pytest.raises(CalibrationError, match=r"no judged request .*: none is judged"):
            judged_traffic(live.store, SERIES)


ASKED = Settings(depth=DEPTH, objective="utility")


@pytest.fixture(scope="module")
def traffic() -> JudgedTraffic:
    return judged_traffic(watched(160).store, SERIES)


@pytest.fixture(scope="module")
def in_force() -> Profile:
    return spoilt(calibrated(60).profile)


@pytest.fixture(scope="module")
def found(traffic: JudgedTraffic, in_force: Profile) -> Recalibration:
    return recalibrate(traffic, in_force, ASKED)


class TestRecalibrating:
    def test_a_bad_policy_is_replaced_by_a_better_one(self, found: Recalibration) -> None:
        for metric in ("recall", "udcg_strict"):
            difference = found.results.of("new", metric).difference
            assert difference.outcome == "better"
        # Compared on queries that took no part in the choice.
        chosen = {query.query_id for query in found.calibration.chosen_on.queries}
        held_out = {query.query_id for query in found.calibration.held_out.queries}
        assert not chosen & held_out
        assert found.held_out == len(held_out) == 160 - len(chosen)
        assert found.results.of("new", "kept").mean.n == found.held_out

    def test_nothing_but_the_route_is_changed(
        self, found: Recalibration, in_force: Profile
    ) -> None:
        assert found.profile.routes[Route.LEXICAL] == in_force.routes[Route.LEXICAL]
        assert found.profile.routes[Route.HYBRID] != in_force.routes[Route.HYBRID]
        for part in ("fusion", "utilities", "fingerprint"):
            assert getattr(found.profile, part) == getattr(in_force, part)
        assert any(in_force.profile_id in note for note in found.profile.provenance.notes)
        made = found.profile.routes[Route.HYBRID]
        assert made.certificate.baseline == "k=5"
        assert made.safe_policy is not None
        assert Profile.model_validate_json(found.profile.to_json()) == found.profile

    def test_a_route_that_the_profile_does_not_know_is_named(
        self, traffic: JudgedTraffic, in_force: Profile
    ) -> None:
        lexical = in_force.model_copy(
            update={"routes": {Route.LEXICAL: in_force.routes[Route.LEXICAL]}}
        )
        with pytest.raises(CalibrationError, match=r"no policy for route hybrid.* it has lexical"):
            recalibrate(traffic, lexical, Settings(depth=DEPTH))

    def test_without_held_out_queries_there_is_no_comparison(
        self, traffic: JudgedTraffic, in_force: Profile
    ) -> None:
        with pytest.raises(ConfigurationError, match="no query would be held out"):
            recalibrate(traffic, in_force, Settings(depth=DEPTH, held_out=0.0))


def grade_by_people(live: Watching, n: int, *, relevant: int, since: int = 0) -> None:
    """People grade the pools of n requests: the retriever's first few are relevant."""
    records = [request_of(live, place + 1) for place in range(since, since + n)]
    live.store.add_labels(
        [
            LabelRow(record.request_id, name, int(rank < relevant), None, "ann", 1.0)
            for record in records
            for rank, name in enumerate(record.passage_ids)
        ]
    )


class TestWithoutAFormerProfile:
    """The first profile may come from judged traffic alone."""

    def test_the_first_k_that_were_served_stand_for_the_former(
        self, traffic: JudgedTraffic
    ) -> None:
        today = served_today(traffic, fusion=Fusion(), fingerprint={"embedder": "a"})
        found = recalibrate(traffic, today, Settings(held_out=0.5))
        assert (traffic.serving_k, traffic.depth) == (3, DEPTH)
        assert today.routes[Route.HYBRID].policy == RatioPolicy(k=3)
        made = found.profile
        assert made.fingerprint == {"embedder": "a"}
        assert made.provenance.depth == DEPTH
        assert made.routes[Route.HYBRID].safe_policy == RatioPolicy(k=3)
        assert made.provenance.notes[-1] == "route hybrid was calibrated from judged traffic"
        assert found.results.of("old", "kept").mean.value == 3.0

    def test_what_a_policy_had_cut_says_nothing_of_today(self) -> None:
        retriever, dataset = simulate(20)
        guard = guard_of(retriever, calibrated(60).profile, mode="enforce", depth=DEPTH)
        live = Watching(truth_of(dataset), rates=WHOLE)
        live.watch(*[guard.retrieve(query.text) for query in dataset.queries])
        assert judged_traffic(live.store, SERIES).serving_k is None


class TestRiseByTraffic:
    """Requests that a profile in shadow decided say when its policy may be served."""

    @staticmethod
    def in_shadow(policy: RatioPolicy, *, decision: str = "shadow") -> Profile:
        verdict = RouteVerdict.model_validate(
            {"decision": decision, "n": 0, "serving_k": 3, "tolerance": 0.01, "max_loss": 0.05}
        )
        retriever, _ = simulate(1)
        kind = next(iter(retriever.rankings.values())).kind
        route = RouteProfile(
            policy=policy, score_kind=kind, verdict=verdict, safe_policy=RatioPolicy(k=3)
        )
        return profile_with({Route.HYBRID: route}, fingerprint=retriever.fingerprint())

    @staticmethod
    def judged(n: int, profile: Profile, judge: LabelJudge | None = None) -> Watching:
        """Judged requests that this profile decided, fifty a day."""
        retriever, dataset = simulate(n)
        guard = guard_of(retriever, profile, depth=DEPTH)
        live = Watching(judge or truth_of(dataset), rates=WHOLE)
        for place, query in enumerate(dataset.queries):
            live.now += 86_400 / 50
            live.watch(guard.retrieve(query.text, request_id=f"r{place}"))
        return live

    @staticmethod
    def look(live: Watching, profile: Profile, *, exact: bool = True) -> Rise:
        [found] = ShadowedTraffic(live.store, SERIES, profile, exact=exact).look().values()
        return found

    def test_a_policy_that_loses_nothing_rises_with_enough_of_them(self) -> None:
        profile = self.in_shadow(RatioPolicy(k=4))
        few, many = (self.look(self.judged(n, profile), profile) for n in (15, 100))
        assert (few.risen, many.risen, many.n) == (False, True, 100)
        # Nothing is forecast from fewer than 20.
        assert few.missing is None
        assert many.statement.endswith("it may be enforced")

    def test_a_damaged_sample_is_left_out(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        profile = self.in_shadow(RatioPolicy(k=4))
        live = self.judged(30, profile)
        payloads = live.store.payloads
        monkeypatch.setattr(
            live.store,
            "payloads",
            lambda ids: {n: b"damaged" if n == 1 else each for n, each in payloads(ids).items()},
        )
        assert self.look(live, profile).n == 29
        assert "sample 1 is left out" in caplog.text

    def test_the_days_until_then_follow_from_the_traffic_so_far(self) -> None:
        profile = self.in_shadow(RatioPolicy(k=4))
        found = self.look(self.judged(20, profile), profile)
        assert found.missing
        assert found.days_missing == pytest.approx(found.missing / 50, rel=0.1)
        assert f"which takes about {found.days_missing:.1f} days" in found.statement

    def test_its_difference_is_that_of_decisions_one_at_a_time(self) -> None:
        profile = self.in_shadow(RatioPolicy(k=1))
        found = self.look(self.judged(60, profile), profile)
        retriever, dataset = simulate(60)
        pools = replay(retriever, dataset.queries, depth=DEPTH)
        labels = label(pools, dataset)
        recall = [
            np.nanmean(per_query(pools, labels, RatioPolicy(k=k)).values["recall"]) for k in (1, 3)
        ]
        assert found.difference == pytest.approx(recall[0] - recall[1])
        assert (found.risen, found.missing) == (False, None)

    def test_a_later_look_reads_what_is_new_and_says_the_same_as_a_first(self) -> None:
        profile = self.in_shadow(RatioPolicy(k=4))
        live = self.judged(40, profile)
        watching = ShadowedTraffic(live.store, SERIES, profile, exact=True)
        [first] = watching.look().values()
        grade_by_people(live, 10, relevant=4)
        [second] = watching.look().values()
        assert second != first
        assert second == self.look(live, profile)

    def test_a_judge_that_errs_raises_nothing_before_people_have_graded(self) -> None:
        profile = self.in_shadow(RatioPolicy(k=4))
        live = self.judged(100, profile)
        watching = ShadowedTraffic(live.store, SERIES, profile, exact=False)
        [found] = watching.look().values()
        assert (found.risen, found.missing, found.labels_missing) == (False, 0, FEWEST_LABELLED)
        assert "until people have graded 40 more of them" in found.statement
        for n in (FEWEST_LABELLED - 1, FEWEST_LABELLED):
            grade_by_people(live, n, relevant=1)
            [found] = watching.look().values()
            assert found.labels_missing == FEWEST_LABELLED - n
            assert found.risen is (n == FEWEST_LABELLED)

    @pytest.mark.parametrize("disagreed", [0, 1])
    def test_one_loss_in_forty_that_only_people_see_keeps_it_in_shadow(
        self, disagreed: int
    ) -> None:
        """The judge calls nothing relevant but the first passage, which the policy keeps."""
        profile = self.in_shadow(RatioPolicy(k=1))
        retriever, _ = simulate(200)
        firsts = {text: {ranking.passage_ids[0]: 1} for text, ranking in retriever.rankings.items()}
        live = self.judged(200, profile, LabelJudge(firsts))
        grade_by_people(live, FEWEST_LABELLED - disagreed, relevant=1)
        grade_by_people(live, disagreed, relevant=2, since=FEWEST_LABELLED - disagreed)
        found = self.look(live, profile, exact=False)
        assert found.labels_missing == 0
        assert found.wealth >= 10
        assert found.risen is not bool(disagreed)

    def test_requests_that_another_profile_decided_do_not_count(self) -> None:
        profile = self.in_shadow(RatioPolicy(k=4))
        found = self.look(watched(100), profile)
        assert (found.n, found.risen) == (0, False)
        assert found.statement == "no judged request was decided by the profile in force"

    @pytest.mark.parametrize("decision", ["enforce", "keep"])
    def test_what_is_not_in_shadow_has_nowhere_to_rise(self, decision: str) -> None:
        profile = self.in_shadow(RatioPolicy(k=4), decision=decision)
        assert ShadowedTraffic(watched(20).store, SERIES, profile, exact=True).look() == {}
