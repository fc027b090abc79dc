"""From judged samples to alarms: what counts against a promise, and what happens when it rings."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner
from watching import Watching

from ctxguard.cli import app
from ctxguard.context import Context
from ctxguard.monitor.alarms import AlarmActions, AlarmBoard, AlarmKind
from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.records import JudgingRates
from ctxguard.monitor.watch import acknowledge, alarms_up
from ctxguard.policy import RatioPolicy
from ctxguard.profile import Profile, RouteProfile
from ctxguard.types import Mode, Route, ScoreKind
from tests.profiles import CERTIFICATE, profile_with

MakeContext = Callable[..., Context]
POOL = [f"p{rank}" for rank in range(10)]
LOST = {"q": {"p9": 1}}
"""The only relevant passage is never served."""

PROFILE = profile_with(
    {
        Route.EXTERNAL: RouteProfile(
            policy=RatioPolicy(k=3),
            score_kind=ScoreKind.RATIO,
            certificate=CERTIFICATE,
            safe_policy=RatioPolicy(k=10),
        )
    },
)


def watching(
    *, rates: JudgingRates | None = None, url: str = "sqlite://", path: Path | None = None
) -> Watching:
    return Watching(
        LabelJudge(LOST),
        rates=JudgingRates(baseline=1.0) if rates is None else rates,
        url=url,
        alarms=AlarmBoard(PROFILE, drift=False),
        actions=AlarmActions(switch_path=path),
    )


def served(
    make_context: MakeContext, n: int, profile_id: str | None = PROFILE.profile_id
) -> list[Context]:
    return [
        replace(make_context(POOL, 3, request_id=f"r{i}"), profile_id=profile_id) for i in range(n)
    ]


def kinds(live: Watching) -> list[AlarmKind]:
    return [alarm.kind for alarm in live.monitor.alarms.active()]


def test_a_broken_promise_rings_and_asks_for_labels(make_context: MakeContext) -> None:
    live = watching()
    live.watch(*served(make_context, 60))
    assert kinds(live) == [AlarmKind.RECALL_LOSS]
    reasons = live.store.label_reasons()
    assert set(reasons.values()) == {"recall_loss"}
    assert 0 < len(reasons) <= 30


def test_the_profile_file_is_switched_to_its_safe_policy(
    make_context: MakeContext, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    live = watching(path=path)
    live.watch(*served(make_context, 60))
    assert Profile.load(path).routes[Route.EXTERNAL].policy == RatioPolicy(k=10)


@pytest.mark.parametrize("profile_id", [None, "another"])
def test_what_another_profile_served_does_not_count(
    make_context: MakeContext, profile_id: str | None
) -> None:
    live = watching()
    live.watch(*served(make_context, 60, profile_id))
    assert kinds(live) == []


def test_what_was_served_in_shadow_does_not_count(make_context: MakeContext) -> None:
    live = watching()
    live.watch(*[replace(one, mode=Mode.SHADOW) for one in served(make_context, 60)])
    assert kinds(live) == []


def test_a_loss_against_another_baseline_does_not_count(make_context: MakeContext) -> None:
    live = watching(rates=JudgingRates(baseline=1.0, baseline_k=5))
    live.watch(*served(make_context, 60))
    assert AlarmKind.RECALL_LOSS not in kinds(live)


def test_pools_judged_because_nothing_was_served_do_not_count(make_context: MakeContext) -> None:
    live = watching(rates=JudgingRates(baseline=0.0, pool=0.0, unanswered_pool=1.0))
    live.watch(*served(make_context, 60))
    assert AlarmKind.RECALL_LOSS not in kinds(live)


def test_alarms_outlive_the_monitor_until_someone_acknowledges_them(
    make_context: MakeContext,
) -> None:
    live = watching()
    live.watch(*served(make_context, 60))
    live.monitor.tend()
    series = live.monitor.series
    assert [alarm.kind for alarm in alarms_up(live.store, series)] == [AlarmKind.RECALL_LOSS]

    again = watching()
    again.monitor._watch._store = live.store
    again.monitor.restore_alarms()
    assert kinds(again) == [AlarmKind.RECALL_LOSS]

    assert acknowledge(live.store, series, AlarmKind.RECALL_LOSS, Route.EXTERNAL, None)
    live.monitor.tend()
    assert kinds(live) == []
    assert alarms_up(live.store, series) == []


def test_a_judge_that_is_down_warns_until_it_is_back(make_context: MakeContext) -> None:
    live = watching()
    judge = live.monitor.judge
    broken = lambda *_: (_ for _ in ()).throw(OSError("down"))  # noqa: E731
    judge.judge = broken
    live.watch(*served(make_context, 2))
    assert kinds(live) == [AlarmKind.JUDGE_DOWN]
    del judge.judge
    live.watch()
    assert kinds(live) == []


def test_the_command_shows_alarms_and_takes_them_down(
    make_context: MakeContext, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'samples.db'}"
    live = watching(url=url)
    live.watch(*served(make_context, 60))
    live.monitor.tend()
    run = CliRunner().invoke
    shown = run(app, ["alarms", "--store", url])
    assert shown.exit_code == 1
    assert "recall_loss" in shown.output
    told = run(
        app,
        ["alarms", "--store", url, "--acknowledge", "recall_loss", "--route", "external"],
    )
    assert told.exit_code == 0
    live.monitor.tend()
    assert "nothing rings" in run(app, ["alarms", "--store", url]).output
    assert run(app, ["alarms", "--store", url, "--acknowledge", "fire"]).exit_code == 2
