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


def test_alarm_logs_ids_and_numbers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        act_on(RECALL, PROFILE)
    assert caplog.messages == [
        "recall_loss route=hybrid value=0.2 target=0.12 reference=promise "
        "n=300 profile=" + PROFILE.profile_id
    ]


BY_BASELINE = replace(RECALL, reference=ReferenceKind.BASELINE)
UNSWITCHED: dict[str, tuple[Alarm, Profile, Profile | None, str]] = {
    "baseline": (BY_BASELINE, PROFILE, PROFILE, "does not show that the promise is broken"),
    "harm": (HARM, PROFILE, PROFILE, ""),
    "corpus": (Alarm(AlarmKind.CORPUS_CHANGED, "changed", 1.0), PROFILE, PROFILE, ""),
    "judge": (Alarm(AlarmKind.JUDGE_DOWN, "down", 1.0), PROFILE, PROFILE, ""),
    "safe already": (RECALL, PROFILE, PROFILE.safe(), ""),
    "another profile": (RECALL, PROFILE, OTHER, "the alarm is about"),
    "no safe policy": (RECALL, UNSAFE, UNSAFE, "names no safe policy for hybrid"),
    "no file": (RECALL, PROFILE, None, "cannot be read"),
}
"""An alarm, the profile that it is about, and the one that the file holds."""


@pytest.mark.parametrize("case", UNSWITCHED)
def test_no_other_alarm_switches(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The file stays, and it is logged why."""
    alarm, alarmed, held, said = UNSWITCHED[case]
    file = tmp_path / "profile.json"
    if held is not None:
        held.save(file)
    act_on(alarm, alarmed, file)
    assert (Profile.load(file) if file.exists() else None) == held
    assert said in caplog.text
