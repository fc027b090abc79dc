"""Judging in batches: written together while the judge is quick, at once where it is slow."""

import json
import logging
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from contexts import make_context
from storing import replace_payload
from watching import Watching, counted

from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Passage, Route, ScoreKind
from ctxguard.errors import StoreLockedError
from ctxguard.monitor.alarms.feed import AlarmMonitor
from ctxguard.monitor.judges import Judgment, Ledger
from ctxguard.monitor.judging import worker
from ctxguard.monitor.judging.budget import BudgetLimits
from ctxguard.monitor.judging.sample_judge import SampleJudge
from ctxguard.monitor.sampling.record import MOST_BYTES
from ctxguard.monitor.sampling.sampler import JudgingRates
from ctxguard.monitor.service import JudgingOutcome, Monitor
from ctxguard.monitor.store import Finished, SampleStore, State
from ctxguard.profile.schema import RouteProfile
from tests.profiles import profile_with

POOL = [f"p{rank}" for rank in range(4)]
ONLY_SERVED = JudgingRates(0, 0, 0, 0)


class TellingJudge:
    """Grades everything 0, after it has told how many samples it has seen."""

    name = "telling"
    version = "1"
    max_grade = 100_000
    exact = True

    def __init__(self, seen: Callable[[int], int | None] | None = None) -> None:
        self.n = 0
        self.seen = seen

    def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment | None]:
        self.n += 1
        grade = None if self.seen is None else self.seen(self.n)
        return [Judgment(passage.passage_id, grade or 0) for passage in passages]


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples were finished with each call to a store."""
    sizes: list[int] = []
    finish = SampleStore.finish

    def noting(store: SampleStore, series: str, finished: Sequence[Finished], *rest: Any) -> Any:
        if finished:
            sizes.append(len(finished))
        return finish(store, series, finished, *rest)

    monkeypatch.setattr(SampleStore, "finish", noting)
    return sizes


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, the judge counts as quick."""
    monkeypatch.setattr(worker, "HELD_SECONDS", 60.0)


def watching(n: int, judge: TellingJudge | None = None, **settings: object) -> Watching:
    live = Watching(TellingJudge() if judge is None else judge, rates=ONLY_SERVED, **settings)
    live.serve(*[make_context(POOL, 2, request_id=f"r{i}") for i in range(n)])
    return live


@pytest.mark.usefixtures("patient")
class TestQuickJudge:
    def test_at_most_hundred_await_a_transaction(self, writes: list[int]) -> None:
        live = watching(130)
        assert live.monitor.step(130) == 130
        assert writes == [100, 30]
        assert live.monitor.report().outcomes[JudgingOutcome.JUDGED] == 130

    def test_budget_holds_within_a_batch(self) -> None:
        """The budget holds within a batch and what was spent is kept with it."""
        budget = BudgetLimits(calls_per_hour=10)
        live = watching(40, budget=budget)
        live.monitor.step()
        spent = counted(live.monitor.report(), "grades")
        again = Monitor(live.store, TellingJudge(), budget=budget, clock=lambda: live.now)
        while again.step():
            pass
        assert 0 < spent <= counted(again.report(), "grades") <= 10

    def test_interrupted_batch_writes_the_judged(self) -> None:
        def interrupted(n: int) -> None:
            if n == 4:
                raise KeyboardInterrupt

        live = watching(5, TellingJudge(interrupted))
        with pytest.raises(KeyboardInterrupt):
            live.monitor.step()
        assert live.store.states()[State.JUDGED] == 3
        assert live.monitor.report().outcomes[JudgingOutcome.JUDGED] == 3
        assert live.store.states()[State.PENDING] == 2

    def test_no_grade_is_paid_for_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worker, "MAX_HELD", 3)
        live = watching(5)
        judge = live.monitor.judge
        with monkeypatch.context() as patch:
            patch.setattr(SampleStore, "finish", locked)
            for _ in range(3):
                with pytest.raises(StoreLockedError):
                    live.monitor.step()
        assert judge.n == 3
        assert live.monitor.report().outcomes[JudgingOutcome.JUDGED] == 0
        live.monitor.step()
        assert judge.n == 5
        assert live.store.states()[State.JUDGED] == 5
        assert live.monitor.report().outcomes[JudgingOutcome.JUDGED] == 5

    def test_unwritable_grade_is_given_up_alone(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def spoilt(judge: SampleJudge, sample_id: int, *rest: Any) -> Finished:
            found = as_graded(judge, sample_id, *rest)
            return replace(found, grades=object()) if sample_id == 3 else found

        as_graded = SampleJudge.as_graded
        monkeypatch.setattr(SampleJudge, "as_graded", spoilt)
        live = watching(6)
        with caplog.at_level(logging.WARNING):
            live.monitor.step()
        states = live.store.states()
        assert (states[State.JUDGED], states[State.UNREADABLE]) == (5, 1)
        report = live.monitor.report()
        assert report.outcomes[JudgingOutcome.JUDGED] == 5
        assert sum(n for (name, *_), n in report.counts.items() if name == "judged_samples") == 5
        assert live.monitor.errors == 1
        assert "the result of sample 3 could not be stored" in caplog.text


def locked(*_: object) -> None:
    raise StoreLockedError("others hold it")


def edited(**fields: object) -> Callable[[bytes], bytes]:
    def edit(payload: bytes) -> bytes:
        document = {**json.loads(zlib.decompress(payload)), **fields}
        return zlib.compress(json.dumps(document).encode())

    return edit


PROFILE = profile_with(
    {Route.EXTERNAL: RouteProfile(policy=RatioPolicy(k=2), score_kind=ScoreKind.RATIO)}
)

POISON: dict[str, Callable[[bytes], bytes]] = {
    "no record": lambda _: b"no record",
    "of a newer release": edited(format=99),
    "cut off": lambda payload: payload[:-9],
    "deep": lambda _: zlib.compress(b"[" * 1_000_000),
    "a bomb": lambda _: zlib.compress(b'"' + b" " * MOST_BYTES + b'"'),
    "no such candidate": edited(served=[999]),
    "a candidate before the first": edited(dropped=[-1]),
    "a place that is none": edited(sampled=[True]),
    "a score too many": edited(scores="AAAAAAAAAAAAAAAAAAAAAAAAAAA="),
    "legs that are none": edited(legs=[1]),
    "ids that are numbers": edited(passage_ids=[1, 2, 3, 4]),
    "a query that is none": edited(query={"a": 1}),
    "a probability of 2": edited(probability=2.0),
    "no time": edited(time_seconds=float("nan")),
    **{
        f"{count!r:.9} tokens": edited(tokens=[count, 0, 0, 0])
        for count in (-1, 0.5, 10**400, "3", None, True)
    },
    **{
        f"the filter {where}": edited(where=where)
        for where in ({}, {"tenant": [0.5]}, {"tenant": None}, [], "a")
    },
    "a huge number": edited(baseline_k=10**400, rates={"baseline_k": 10**400}),
}


@pytest.mark.usefixtures("patient")
class TestPoison:
    @pytest.mark.parametrize("kind", POISON)
    def test_unjudgeable_sample_is_left_out_alone(self, kind: str) -> None:
        """A sample that cannot be judged is left out and its neighbours are judged."""
        live = watching(5)
        replace_payload(live.store, 3, POISON[kind](live.store.records([3])[3].to_bytes()))
        assert live.monitor.step() == 5
        states = live.store.states()
        assert (states[State.JUDGED], states[State.UNREADABLE]) == (4, 1)
        ((passage_id, reason, why),) = live.store.rejected([3])[3]
        assert (passage_id, reason) == ("", "unreadable")
        assert why.startswith("a sample ")

    def test_failing_alarm_stops_no_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = count(1)

        def fail(*_: object, **__: object) -> None:
            if next(calls) == 3:
                raise ZeroDivisionError

        monkeypatch.setattr(AlarmMonitor, "note_loss", fail)
        live = watching(5, profile=PROFILE)
        assert live.monitor.step() == 5
        assert live.monitor.errors == 1


class TestSlowJudge:
    def test_each_of_its_grades_is_written_at_once(
        self, writes: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker, "HELD_SECONDS", 0.0)
        live = watching(4)
        live.monitor.step()
        assert writes == [1, 1, 1, 1]

    def test_unreached_in_time_waits_for_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worker, "_IN_HAND_SECONDS", 0.0)
        live = watching(5)
        assert live.monitor.step() == 1
        states = live.store.states()
        assert (states[State.JUDGED], states[State.PENDING]) == (1, 4)


class Refusing(TellingJudge):
    """Gives one grade, and then answers in prose."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(redact=str)

    def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment | None]:
        self.ledger.add(calls=len(passages))
        grades = super().judge(query, passages)
        return grades if self.n == 1 else [None] * len(passages)


def test_once_answering_judge_may_refuse() -> None:
    """As often as it likes; one that never answered is stopped (``tests.cli``)."""
    live = watching(30, Refusing())
    while live.monitor.step():
        pass
    assert not live.store.states()[State.PENDING]
