"""`ctxguard rollback`: what a file held before, and the way back to it."""

from pathlib import Path

import pytest
from live_traffic import profile_of
from prometheus_client import CollectorRegistry
from running import Run

from ctxguard.core.policies import RatioPolicy
from ctxguard.guard import ContextGuard
from ctxguard.guard.reload import ProfileWatcher
from ctxguard.profile.schema import Profile
from ctxguard.request.telemetry import Telemetry

FIRST, SECOND = (profile_of(RatioPolicy(k=k)) for k in (3, 7))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    FIRST.save(path)
    SECOND.save(path, why="a larger context")
    return path


def test_without_an_id_it_lists_who_replaced_what_when_and_why(run: Run, file: Path) -> None:
    result = run("rollback", file)
    assert result.exit_code == 0, result.stderr
    assert f"in force  profile {SECOND.profile_id}" in result.stdout
    assert FIRST.profile_id in result.stdout
    assert "a larger context" in result.stdout
    assert "@" in result.stdout
    assert "UTC" in result.stdout


def test_a_guard_that_watches_the_file_serves_by_the_former_again(run: Run, file: Path) -> None:
    telemetry = Telemetry(CollectorRegistry())
    guard = ContextGuard(profile=file, telemetry=telemetry)
    watcher = ProfileWatcher(guard, file, telemetry=telemetry)
    result = run("rollback", file, FIRST.profile_id[:5])
    assert result.exit_code == 0, result.stderr
    assert f"holds profile {FIRST.profile_id} again" in " ".join(result.stdout.split())
    watcher.check()
    assert guard.profile == FIRST == Profile.load(file)
    assert SECOND.profile_id in run("rollback", file).stdout
    run.refused("rollback", file, "0123", says=SECOND.profile_id)
    assert Profile.load(file) == FIRST


def test_a_file_with_one_profile_has_nothing_to_return_to(run: Run, tmp_path: Path) -> None:
    FIRST.save(tmp_path / "only.json")
    result = run("rollback", tmp_path / "only.json")
    assert result.exit_code == 0
    assert "never held another profile" in " ".join(result.stdout.split())
