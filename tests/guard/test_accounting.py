"""Every request and every candidate is counted once, and no observer can fail a request."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from ctxguard.core.assembly import Assembly
from ctxguard.core.decision import decide
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import DropReason, Flag, Hit, Mode, Ranking, Route, ScoreKind, StageFailure
from ctxguard.errors import CtxguardError, StageUnavailableError
from ctxguard.guard.telemetry import Telemetry, default_telemetry
from tests.counted import Counted
from tests.guard.guards import (
    ASSEMBLIES,
    HITS,
    POLICIES,
    RANKING,
    SEVENTY,
    Answering,
    Failing,
    Sampled,
    guard_of,
    rankings,
    served,
)

UNREADABLE_FIRST = [replace(HITS[0], text=None), *HITS[1:]]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hits", "stage", "outcome", "label"),
    [
        (HITS, "dense", "degraded", "dense"),
        (HITS, "tenant-417", "degraded", "other"),
        # A failure in assembly is counted, but the answer is not degraded.
        (UNREADABLE_FIRST, None, "ok", "assembly"),
    ],
)
def test_missing_stage_degrades_and_is_named(
    hits: list[Hit], stage: str | None, outcome: str, label: str, counted: Counted
) -> None:
    failures = () if stage is None else (StageFailure(stage, "timed out"),)
    ranking = replace(Ranking.from_hits(hits, ScoreKind.RATIO), failures=failures)
    context = guard_of(Answering(ranking), telemetry=counted.telemetry).retrieve("q?")
    assert (Flag.DEGRADED in context.flags) == (stage is not None)
    assert context.failures[: len(failures)] == failures
    assert [counted.requests(each) for each in ("ok", "degraded")] == [
        int(outcome == "ok"),
        int(outcome == "degraded"),
    ]
    assert counted.by_label("stage_failures") == {(label, "error"): 1}


class TestAccounting:
    @given(
        st.lists(st.one_of(rankings(), st.just(None), st.just("no result")), max_size=6),
        POLICIES,
        ASSEMBLIES,
        st.sampled_from(list(Mode)),
    )
    @settings(max_examples=40)
    def test_every_request_and_candidate_counts_once(
        self, answers: list[object], policy: RatioPolicy, assembly: Assembly, mode: Mode
    ) -> None:
        counted = Counted()
        remaining = iter(answers)
        guard = guard_of(
            lambda query, depth: next(remaining),
            policy=policy,
            assembly=assembly,
            mode=mode,
            telemetry=counted.telemetry,
        )
        contexts = []
        for answer in answers:
            try:
                contexts.append(guard.retrieve("q?"))
            except CtxguardError:
                # Not a ranking, or one of which no passage can be read.
                assert not isinstance(answer, Ranking) or not any(
                    isinstance(answer.passages[at].text, str) for at in decide(answer, policy).order
                )
        ok, degraded = counted.requests("ok"), counted.requests("degraded")
        assert ok + degraded + counted["failed_requests"] == len(answers)
        assert counted["failed_requests"] == len(answers) - len(contexts)
        assert degraded == sum(bool(context.decision.ranking.failures) for context in contexts)
        candidates = sum(context.candidates for context in contexts)
        assert counted["kept_candidates"] + sum(counted.dropped().values()) == candidates
        assert counted["kept_candidates"] == sum(
            len(context.would_keep_ids) for context in contexts
        )
        for reason in DropReason:
            told = sum(v.reason is reason for context in contexts for v in context.decisions)
            if mode is not Mode.OFF:
                assert counted.dropped().get(reason, 0) == told

    def test_requests_count_by_mode_and_route(self, counted: Counted) -> None:
        answer = replace(RANKING, route=Route.LEXICAL)
        guard_of(Answering(answer), mode="shadow", telemetry=counted.telemetry).retrieve("q?")
        assert counted.by_label("requests") == {("shadow", "lexical", "ok"): 1}

    def test_times_and_sizes_are_observed_once(self, counted: Counted) -> None:
        guard = guard_of(policy=SEVENTY, telemetry=counted.telemetry)
        guard.retrieve("q?")
        guard.filter("q?", RANKING)
        value = counted.registry.get_sample_value
        assert value("ctxguard_guard_seconds_count") == 2
        assert value("ctxguard_retrieve_seconds_count") == 1
        assert value("ctxguard_context_passages_sum") == 6

    def test_guards_share_one_metrics_set(self) -> None:
        registry = CollectorRegistry()
        assert default_telemetry(registry, all_metrics=True) is default_telemetry(registry)


class TestSampling:
    def test_request_is_selected_and_offered_once(self) -> None:
        sampler = Sampled()

        def search(query: str, depth: int) -> Ranking:
            sampler.events.append("retrieval")
            return RANKING

        context = guard_of(search, sampler=sampler).retrieve("q?", request_id="r7")
        assert sampler.events == ["draw r7", "retrieval", "offer r7"]
        assert sampler.contexts == [context]

    @pytest.mark.parametrize(
        ("takes", "by_hand", "offered"),
        [(True, False, 0.25), (True, True, 0.25), (False, True, 0.0), (False, False, None)],
    )
    def test_chosen_samples_carry_their_probability(
        self, takes: bool, by_hand: bool, offered: float | None
    ) -> None:
        sampler = Sampled(takes=takes)
        guard = guard_of(sampler=sampler)
        guard.retrieve("q?", sample=by_hand)
        asyncio.run(guard.aretrieve("q?", sample=by_hand))
        guard.filter("q?", RANKING, sample=by_hand)
        assert sampler.probabilities == ([] if offered is None else [offered] * 3)

    def test_without_sampler_samples_change_nothing(self) -> None:
        context = guard_of(policy=SEVENTY).retrieve("q?", sample=True, session_id="s1")
        assert (len(context), context.session_id) == (3, "s1")

    def test_a_failed_request_is_not_offered(self) -> None:
        sampler = Sampled()
        with pytest.raises(StageUnavailableError):
            guard_of(Failing(OSError()), sampler=sampler).retrieve("q?")
        assert sampler.contexts == []

    def test_missing_ids_become_distinct(self) -> None:
        guard = guard_of()
        assert len({guard.retrieve("q?").request_id for _ in range(100)}) == 100

    @pytest.mark.parametrize(
        ("method", "error"), [("draw", OSError), ("offer", OSError), ("draw", None)]
    )
    def test_faulty_sampler_fails_no_request(
        self, method: str, error: type[Exception] | None, counted: Counted
    ) -> None:
        def broken(*_: object) -> None:
            if error is not None:
                raise error("disk full")

        sampler = Sampled()
        setattr(sampler, method, broken)
        guard = guard_of(policy=SEVENTY, sampler=sampler, telemetry=counted.telemetry)
        assert served(guard.retrieve("q?")) == ["a", "b", "c"]
        assert served(asyncio.run(guard.aretrieve("q?"))) == ["a", "b", "c"]
        assert counted.by_label("observer_failures") == {("sampler",): 2}
        assert counted.requests("ok") == 2

    def test_faulty_telemetry_fails_no_request(self) -> None:
        class Broken(Telemetry):
            def answered(self, *_: object) -> None:
                raise RuntimeError("broken")

        class Dead(Broken):
            raised = observer_failed = Broken.answered

        counted = Counted(Broken)
        assert len(guard_of(policy=SEVENTY, telemetry=counted.telemetry).retrieve("q?")) == 3
        assert counted.by_label("observer_failures") == {("telemetry",): 1}
        dead = Dead(CollectorRegistry())
        assert len(guard_of(policy=SEVENTY, telemetry=dead).retrieve("q?")) == 3
        with pytest.raises(StageUnavailableError, match="OSError at"):
            guard_of(Failing(OSError("down")), telemetry=dead).retrieve("q?")
