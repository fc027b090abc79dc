"""Every profile that another replaces is kept beside the file, and can be returned to."""

import getpass
import re
import socket
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Route, ScoreKind
from ctxguard.errors import ProfileError
from ctxguard.profile.history import MOST_KEPT, former_profiles, roll_back
from ctxguard.profile.schema import Profile, RouteProfile
from tests.profiles import profile_with


def serving(k: int) -> Profile:
    route = RouteProfile(policy=RatioPolicy(k=k), score_kind=ScoreKind.COSINE)
    return profile_with({Route.EXTERNAL: route})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    serving(1).save(path)
    return path


def kept(file: Path) -> list[int]:
    return [each.profile.routes[Route.EXTERNAL].policy.k for each in former_profiles(file)]


def test_a_first_profile_and_the_same_again_replace_nothing(file: Path) -> None:
    serving(1).save(file)
    assert former_profiles(file) == ()


def test_the_former_is_kept_with_who_when_and_why(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "ann")
    monkeypatch.setattr(socket, "gethostname", lambda: "host7")
    serving(2).save(file, why="a larger context")
    [former] = former_profiles(file)
    assert former.profile == serving(1)
    assert (former.replaced_by, former.why) == ("ann@host7", "a larger context")
    assert abs(former.replaced_at - datetime.now(UTC)) < timedelta(minutes=5)


def test_the_newest_come_first_and_the_oldest_go(file: Path) -> None:
    for k in range(2, MOST_KEPT + 5):
        serving(k).save(file)
    assert kept(file) == list(range(MOST_KEPT + 3, 3, -1))


def test_a_rollback_is_a_replacement_like_any_other(file: Path) -> None:
    serving(2).save(file)
    chosen = roll_back(file, serving(1).profile_id[:6])
    assert Profile.load(file) == chosen.profile == serving(1)
    assert kept(file) == [2, 1]
    assert former_profiles(file)[0].why == f"rolled back to {serving(1).profile_id}"
    roll_back(file, serving(2).profile_id)
    assert Profile.load(file) == serving(2)


@pytest.mark.parametrize("wanted", ["", "ffffffffffff", "../profile"])
def test_a_profile_that_is_not_kept_is_refused_with_those_that_are(file: Path, wanted: str) -> None:
    serving(2).save(file)
    with pytest.raises(ProfileError, match=f"those that are kept are {serving(1).profile_id}"):
        roll_back(file, wanted)
    assert Profile.load(file) == serving(2)


def test_a_damaged_one_is_passed_over(file: Path) -> None:
    for k in (2, 3):
        serving(k).save(file)
    newest = max((file.parent / "profile.json.history").glob("*.json"))
    newest.write_bytes(newest.read_bytes()[:100])
    assert kept(file) == [1]


def test_a_file_that_is_no_profile_is_replaced_without_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text("no profile", encoding="utf-8")
    serving(1).save(file)
    assert Profile.load(file) == serving(1)
    assert former_profiles(file) == ()


def test_writers_at_once_lose_none_of_what_they_replaced(file: Path) -> None:
    threads = [
        threading.Thread(target=serving(k).save, args=[file]) for k in range(2, 2 + MOST_KEPT // 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = Profile.load(file).routes[Route.EXTERNAL].policy.k
    assert sorted([*kept(file), last]) == list(range(1, 2 + MOST_KEPT // 2))


def test_where_the_former_cannot_be_kept_the_profile_stays(file: Path) -> None:
    (file.parent / "profile.json.history").write_text("in the way", encoding="utf-8")
    with pytest.raises(OSError, match=re.escape("profile.json.history")):
        serving(2).save(file)
    assert Profile.load(file) == serving(1)
