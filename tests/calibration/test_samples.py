"""Judged requests of a profile in shadow say when its policy may be served."""

import numpy as np
import pytest
from judged_samples import SERIES, WHOLE, truth_of, watched
from simulated_pools import DEPTH, guard_of, simulate
from watching import Watching

from calibration.evaluate import per_query
from calibration.pool_labels import label
from calibration.replay import replay
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Route
from ctxguard.monitor.estimation.full_judged_pools import ShadowedTraffic
from ctxguard.monitor.estimation.promotion import FEWEST_LABELLED, Rise
from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.sampling.sampler import JudgingRates
from ctxguard.monitor.store import LabelRow
from ctxguard.profile.schema import Profile, RouteProfile, RouteVerdict
from tests.profiles import profile_with


def rates_of(*, dropped: float, whole: float, if_no_hit: float) -> JudgingRates:
    return JudgingRates(dropped, whole, if_no_hit, 0.0)


def request_of(live: Watching, sample_id: int) -> SampleRecord:
    return SampleRecord.from_bytes(live.store.payloads([sample_id])[sample_id])


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
            context = guard.retrieve(query.text, request_id=f"r{place}")
            live.sampler.offer(context, 1.0, live.now)
        live.watch()
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
