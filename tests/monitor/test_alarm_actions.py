"""What is done when an alarm is raised: the log line, the switch to the safe policy."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Route, ScoreKind
from ctxguard.monitor.alarms import Alarm, AlarmKind, ReferenceKind, act_on
from ctxguard.profile.schema import Profile, RouteProfile
from tests.profiles import profile_with

PROFILE = profile_with(
    {
        Route.HYBRID: RouteProfile(
            policy=RatioPolicy(k=3, min_ratio=0.8),
            score_kind=ScoreKind.RATIO,
            safe_policy=RatioPolicy(k=10),
        )
    }
)
OTHER = PROFILE.model_copy(update={"fingerprint": {"embedder": "another"}})
UNSAFE = PROFILE.model_copy(
    update={
        "routes": {
            Route.HYBRID: PROFILE.routes[Route.HYBRID].model_copy(update={"safe_policy": None})
        }
    }
)
RECALL = Alarm(
    kind=AlarmKind.RECALL_LOSS,
    message="judged recall loss was about 0.2",
    time_seconds=1e9,
    route=Route.HYBRID,
    value=0.2,
    target=0.12,
    n=300,
    profile_id=PROFILE.profile_id,
    reference=ReferenceKind.PROMISE,
)
HARM = Alarm(AlarmKind.HARM, "harm", 1e9, Route.HYBRID)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    return path


class TestActions:
    def test_alarm_logs_ids_and_numbers(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            act_on(RECALL, PROFILE)
        assert caplog.messages == [
            "recall_loss route=hybrid value=0.2 target=0.12 reference=promise "
            "n=300 profile=" + PROFILE.profile_id
        ]

    @pytest.mark.parametrize(
        ("alarm", "said"),
        [
            (
                replace(RECALL, reference=ReferenceKind.BASELINE),
                "does not show that the promise is broken",
            ),
            (HARM, ""),
            (Alarm(AlarmKind.CORPUS_CHANGED, "changed", 1.0), ""),
            (Alarm(AlarmKind.JUDGE_DOWN, "down", 1.0), ""),
        ],
        ids=["baseline", "harm", "corpus", "judge"],
    )
    def test_no_other_alarm_switches(
        self, file: Path, alarm: Alarm, said: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        act_on(alarm, PROFILE, file)
        assert Profile.load(file) == PROFILE
        assert said in caplog.text

    @pytest.mark.parametrize(
        ("held", "alarmed", "said"),
        [
            (OTHER, PROFILE, "the alarm is about"),
            (UNSAFE, UNSAFE, "names no safe policy for hybrid"),
            (None, PROFILE, "cannot be read"),
        ],
        ids=["another profile", "no safe policy", "no file"],
    )
    def test_refused_switch_is_logged_quietly(
        self,
        file: Path,
        held: Profile | None,
        alarmed: Profile,
        said: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """And changes nothing."""
        file.unlink() if held is None else held.save(file)
        act_on(RECALL, alarmed, file)
        assert (Profile.load(file) if file.exists() else None) == held
        assert said in caplog.text
