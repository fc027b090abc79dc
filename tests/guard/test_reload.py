"""A profile is reloaded while serving: by one swap, and a bad file leaves the last good one.

Of a file that changes meanwhile only what is there to stay is a failure. Of indexes,
tests/retrieval/test_generations.py.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from ctxguard.core.fusion import Fusion
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Hit, Ranking, Route, ScoreKind
from ctxguard.errors import ConfigurationError, ProfileFormatError, ProfileMismatchError
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.guard.reload import ProfileWatcher
from ctxguard.guard.telemetry import Telemetry
from ctxguard.profile.schema import Profile, RouteProfile
from tests.profiles import profile_with
from tests.timing import PATIENCE_SECONDS, until

SYSTEM = {"embedder": "mini", "corpus_size": "6"}
HITS = [Hit(f"p{n}", 10.0 - n, f"text number {n}") for n in range(6)]


@dataclass
class Fused:
    """A retriever that says in its answer which fusion it was asked under."""

    weight: float = 0.0
    system: dict[str, str] = field(default_factory=lambda: dict(SYSTEM))
    pause: Callable[[], object] = lambda: None

    def with_fusion(self, fusion: Fusion) -> "Fused":
        return Fused(fusion.weight, self.system, self.pause)

    def fingerprint(self) -> dict[str, str]:
        return self.system

    def retrieve(self, query: str, *, depth: int = 100) -> Ranking:
        self.pause()
        hits = [Hit(f"w={self.weight}", 11.0, "told"), *HITS]
        return Ranking.from_hits(hits, ScoreKind.RATIO)


def profile_of(k: int, *, fingerprint: dict[str, str] | None = None) -> Profile:
    """A profile whose k and fusion weight belong together: k passages under weight k / 10."""
    return profile_with(
        {Route.EXTERNAL: RouteProfile(policy=RatioPolicy(k=k), score_kind=ScoreKind.RATIO)},
        fusion=Fusion("convex", weight=k / 10),
        fingerprint=SYSTEM if fingerprint is None else fingerprint,
    )


class Scene:
    """A guard that serves by a profile's file, a watcher of it, and what was counted."""

    def __init__(self, folder: Path, retriever: Fused | None = None) -> None:
        self.path = folder / "profile.json"
        profile_of(2).save(self.path)
        self.registry = CollectorRegistry()
        self.telemetry = Telemetry(self.registry, all_metrics=True)
        self.guard = ContextGuard(
            Fused() if retriever is None else retriever, profile=self.path, telemetry=self.telemetry
        )
        self.watcher = ProfileWatcher(
            self.guard, self.path, interval_seconds=0.01, telemetry=self.telemetry
        )

    def k(self) -> int:
        return len(self.guard.retrieve("q?"))

    def counted(self, outcome: str) -> float:
        name = "ctxguard_profile_reloads_total"
        return self.registry.get_sample_value(name, {"outcome": outcome}) or 0.0

    @property
    def failing(self) -> float | None:
        return self.registry.get_sample_value("ctxguard_profile_reload_failing")


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    assert made.watcher.stop()


class TestUseProfile:
    @pytest.mark.parametrize("from_file", [False, True])
    def test_next_request_uses_new_profile(
        self, scene: Scene, tmp_path: Path, from_file: bool
    ) -> None:
        profile_of(4).save(tmp_path / "other.json")
        scene.guard.use_profile(tmp_path / "other.json" if from_file else profile_of(4))
        context = scene.guard.retrieve("q?")
        assert (len(context), context.passages[0].passage_id) == (4, "w=0.4")
        assert scene.guard.profile == profile_of(4)

    def test_foreign_profile_is_refused_and_changes_nothing(self, scene: Scene) -> None:
        """A profile of another system is refused and the one in force stays."""
        foreign = profile_of(4, fingerprint={**SYSTEM, "embedder": "large"})
        with pytest.raises(ProfileMismatchError, match="embedder is 'mini', was 'large'"):
            scene.guard.use_profile(foreign)
        assert scene.k() == 2

    def test_policy_by_hand_takes_no_profile(self) -> None:
        guard = ContextGuard(Fused(), policy=RatioPolicy())
        with pytest.raises(ConfigurationError, match="set by hand"):
            guard.use_profile(profile_of(2))

    def test_request_ends_under_its_first_profile(self, tmp_path: Path) -> None:
        """A request that has begun ends under the profile that it began with."""
        begun, go_on = threading.Event(), threading.Event()

        def pause() -> None:
            begun.set()
            go_on.wait(PATIENCE_SECONDS)

        scene = Scene(tmp_path, Fused(pause=pause))
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(scene.guard.retrieve, "q?")
            begun.wait(PATIENCE_SECONDS)
            scene.guard.use_profile(profile_of(5))
            go_on.set()
            context = answer.result()
        assert (context.passages[0].passage_id, len(context), scene.k()) == ("w=0.2", 2, 5)

    def test_no_request_sees_half_a_swap(self, scene: Scene) -> None:
        profiles = [profile_of(k) for k in (2, 3, 5)]
        stop = threading.Event()

        def swap() -> None:
            while not stop.is_set():
                for profile in profiles:
                    scene.guard.use_profile(profile)

        swapping = threading.Thread(target=swap)
        swapping.start()
        try:
            with ThreadPoolExecutor(4) as pool:
                contexts = list(pool.map(scene.guard.retrieve, ["q?"] * 2000))
        finally:
            stop.set()
            swapping.join()
        seen = {(context.passages[0].passage_id, len(context)) for context in contexts}
        assert seen <= {("w=0.2", 2), ("w=0.3", 3), ("w=0.5", 5)}
        assert len(seen) > 1


class TestWatching:
    def test_changed_file_is_taken_once(self, scene: Scene) -> None:
        assert scene.watcher.check() is None
        for look in ("reloaded", None):
            profile_of(4).save(scene.path)
            assert (scene.watcher.check(), scene.watcher.check()) == (look, None)
        assert (scene.k(), scene.counted("reloaded")) == (4, 1)

    def test_change_before_watching_is_taken(self, tmp_path: Path) -> None:
        """What changed between the guard's reading and the watcher's is taken up."""
        scene = Scene(tmp_path)
        profile_of(4).save(scene.path)
        assert scene.watcher.check() == "reloaded"

    def test_moved_link_is_a_change(self, scene: Scene, tmp_path: Path) -> None:
        for k in (2, 4):
            profile_of(k).save(tmp_path / f"v{k}.json")
        scene.path.unlink()
        scene.path.symlink_to("v2.json")
        scene.watcher.check()
        (tmp_path / "next").symlink_to("v4.json")
        (tmp_path / "next").replace(scene.path)
        assert scene.watcher.check() == "reloaded"
        assert scene.k() == 4

    def test_thread_takes_changes_by_itself(self, scene: Scene) -> None:
        with scene.watcher:
            profile_of(4).save(scene.path)
            until(lambda: scene.k() == 4)
            profile_of(3).save(scene.path)
            until(lambda: scene.k() == 3)

    def test_stopped_thread_can_start_again(self, scene: Scene) -> None:
        scene.watcher.start().start()
        assert (
            sum(thread.name == "ctxguard-profile-watcher" for thread in threading.enumerate()) == 1
        )
        assert scene.watcher.stop()
        profile_of(4).save(scene.path)
        time.sleep(0.05)
        assert scene.k() == 2
        scene.watcher.start()
        until(lambda: scene.k() == 4)

    @pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
    def test_invalid_interval_is_refused(self, scene: Scene, seconds: float) -> None:
        with pytest.raises(ConfigurationError, match="interval_seconds"):
            ProfileWatcher(scene.guard, scene.path, interval_seconds=seconds)


def anew(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


FOREIGN = profile_of(4, fingerprint={"embedder": "large", "corpus_size": "6"})
NO_PIPES = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes")
SPOILING: dict[str, tuple[str, Callable[[Path], object]]] = {
    "malformed": ("malformed", lambda path: path.write_text("{not json")),
    "half written": ("malformed", lambda path: path.write_bytes(path.read_bytes()[:200])),
    "empty": ("malformed", lambda path: path.write_bytes(b"")),
    "binary": ("malformed", lambda path: path.write_bytes(b"\xff\xfe\x00garbage")),
    "newer": ("malformed", lambda path: replaced(path, '_version": 1', '_version": 99')),
    "unknown field": (
        "malformed",
        lambda path: replaced(path, '"routes"', '"surprise": 1, "routes"'),
    ),
    "foreign": ("mismatched", FOREIGN.save),
    "vanished": ("unreadable", Path.unlink),
    "a folder": ("unreadable", lambda path: anew(path, Path.mkdir)),
    "a pipe": ("unreadable", lambda path: anew(path, os.mkfifo)),
}


def replaced(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


class TestBadFiles:
    @pytest.mark.parametrize(
        "kind", [pytest.param(kind, marks=NO_PIPES if "pipe" in kind else ()) for kind in SPOILING]
    )
    def test_bad_file_keeps_last_good_profile(
        self, scene: Scene, kind: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Each failure is logged and counted once, with the path and never the contents."""
        outcome, spoil = SPOILING[kind]
        scene.watcher.check()
        assert scene.failing == 0
        spoil(scene.path)
        with caplog.at_level(logging.DEBUG, "ctxguard"):
            looks = [scene.watcher.check() for _ in range(5)]
        assert looks == [outcome, None, None, None, None]
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        said = record.getMessage()
        assert repr(str(scene.path)) in said
        assert outcome in said
        for content in ("not json", "garbage", "surprise", "99", "large"):
            assert content not in said
        assert (scene.k(), scene.guard.retrieve("q?").flags, scene.failing) == (2, (), 1)
        assert scene.counted(outcome) == 1
        if scene.path.is_dir():
            scene.path.rmdir()
        profile_of(4).save(scene.path)
        assert scene.watcher.check() == "reloaded"
        assert (scene.k(), scene.failing) == (4, 0)

    def test_another_failure_is_logged_again(
        self, scene: Scene, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, "ctxguard"):
            for kind in ("malformed", "foreign", "vanished"):
                SPOILING[kind][1](scene.path)
                scene.watcher.check()
        assert (len(caplog.records), scene.failing) == (3, 1)

    def test_unseen_changes_are_found_by_retry(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As where permission is given back, or a network share comes back."""
        profile_of(4).save(scene.path)

        def refused(path: Path) -> Profile:
            raise ProfileFormatError("refused") from PermissionError(13, "Permission denied")

        with monkeypatch.context() as patched:
            patched.setattr(Profile, "load", refused)
            assert scene.watcher.check() == "unreadable"
        assert scene.watcher.check() == "reloaded"
        assert scene.k() == 4

    def test_refused_profile_is_taken_once_fitting(self, tmp_path: Path) -> None:
        """A refused profile is taken up once the system is the one it was made for."""
        system = dict(SYSTEM)
        scene = Scene(tmp_path, Fused(system=system))
        profile_of(4, fingerprint={**SYSTEM, "corpus_size": "7"}).save(scene.path)
        assert scene.watcher.check() == "mismatched"
        system["corpus_size"] = "7"
        assert scene.watcher.check() == "reloaded"
        assert scene.k() == 4

    def test_two_watchers_raise_the_alarm_apart(self, scene: Scene, tmp_path: Path) -> None:
        other = tmp_path / "other.json"
        second = ProfileWatcher(scene.guard, other, telemetry=scene.telemetry)
        second.check()
        SPOILING["malformed"][1](scene.path)
        scene.watcher.check()
        assert scene.failing == 2
        profile_of(4).save(other)
        second.check()
        assert scene.failing == 1


class TestProfileMeanwhile:
    def test_file_completed_while_read_is_taken(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Half of a file that is whole by the end of the look is taken up."""
        scene.watcher.check()
        load = Profile.load

        def load_while_it_is_written(path: Path) -> Profile:
            # Saving reads the profile that it replaces.
            monkeypatch.setattr(Profile, "load", load)
            try:
                return load(path)
            finally:
                profile_of(4).save(scene.path)

        scene.path.write_bytes(scene.path.read_bytes()[:100])
        monkeypatch.setattr(Profile, "load", load_while_it_is_written)
        assert scene.watcher.check() == "reloaded"

    def test_ever_changing_bad_file_is_failure(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A file that is bad however often it changes is a failure."""
        scene.watcher.check()
        load = Profile.load

        def load_and_spoil_anew(path: Path) -> Profile:
            scene.path.write_bytes(scene.path.read_bytes() + b"{")
            return load(path)

        scene.path.write_bytes(b"{")
        monkeypatch.setattr(Profile, "load", load_and_spoil_anew)
        assert scene.watcher.check() == "malformed"


def child_says(work: Callable[[], bool]) -> bool:
    """Whether ``work`` is true in a forked child."""
    child = os.fork()
    if child == 0:
        good = False
        try:
            good = work()
        finally:
            os._exit(0 if good else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
class TestForks:
    def test_a_forked_child_goes_on_watching(self, scene: Scene) -> None:
        with scene.watcher:

            def work() -> bool:
                profile_of(5).save(scene.path)
                until(lambda: scene.k() == 5)
                return scene.watcher.stop()

            assert child_says(work)
            until(lambda: scene.k() == 5)

    def test_nothing_watched_starts_nothing(self, scene: Scene) -> None:
        assert child_says(lambda: threading.active_count() == 1)

    def test_held_locks_hold_no_child(self, scene: Scene) -> None:
        with scene.watcher._checking, scene.guard._rebinding:

            def work() -> bool:
                profile_of(4).save(scene.path)
                return scene.watcher.check() == "reloaded" and scene.k() == 4

            assert child_says(work)
