"""Files that change while a watcher looks at them: only what is there to stay is a failure."""

import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Passage, Route, ScoreKind
from ctxguard.guard import ContextGuard
from ctxguard.guard.reload import IndexWatcher, ProfileWatcher
from ctxguard.profile.schema import Profile, RouteProfile
from ctxguard.request.telemetry import ReloadOutcome, Telemetry
from ctxguard.retrieval import HybridRetriever
from ctxguard.retrieval.index import storage
from ctxguard.testing import WordHashEmbedder
from tests.profiles import profile_with


def built(name: str) -> HybridRetriever:
    """Passages that are all of one generation, and say so."""
    passages = [Passage(f"p{n:02}", f"red fox number{n} of {name}") for n in range(12)]
    return HybridRetriever.build(passages, embedder=WordHashEmbedder())


def names(retriever: HybridRetriever) -> set[str]:
    ranking = retriever.retrieve("red fox")
    return {ranking.passages[n].text.split()[-1] for n in range(len(ranking))}


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


class Index:
    """A saved index, a retriever loaded from it, a watcher, and what was counted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        built("first").save(folder)
        self.retriever = HybridRetriever.load(folder, embedder=WordHashEmbedder())
        self.registry = CollectorRegistry()
        self.watcher = IndexWatcher(
            self.retriever, interval_seconds=0.001, telemetry=Telemetry(self.registry)
        )

    def counted(self) -> dict[str, float]:
        """The outcomes that came about, and how often."""
        found = {
            outcome.value: self.registry.get_sample_value(
                "ctxguard_index_reloads_total", {"outcome": outcome.value}
            )
            for outcome in ReloadOutcome
        }
        return {outcome: count for outcome, count in found.items() if count}

    @property
    def failing(self) -> float | None:
        return self.registry.get_sample_value("ctxguard_index_reload_failing")


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path / "index")


class TestIndex:
    @pytest.mark.parametrize("times", [1, 3, 9])
    def test_a_generation_that_is_cleared_away_while_it_is_read_is_no_failure(
        self, index: Index, times: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        later = [built(f"later{n}") for n in range(times)]
        check_digest = storage.check_digest

        def save_another_first(file: Path, expected: str) -> None:
            if later:
                later.pop(0).save(index.folder)
            check_digest(file, expected)

        built("second").save(index.folder)
        monkeypatch.setattr(storage, "check_digest", save_another_first)
        assert index.watcher.check() is ReloadOutcome.RELOADED
        assert not later
        assert index.counted() == {"reloaded": 1}
        assert index.failing == 0
        assert names(index.retriever) == {f"later{times - 1}"}

    def test_an_index_saved_every_few_milliseconds_never_fails(
        self, index: Index, caplog: pytest.LogCaptureFixture
    ) -> None:
        generations = [built("even"), built("odd")]

        def save_often() -> None:
            for turn in range(150):
                generations[turn % 2].save(index.folder)

        saving = threading.Thread(target=save_often)
        with caplog.at_level(logging.WARNING, "ctxguard"), index.watcher:
            saving.start()
            saving.join()
        index.watcher.check()
        assert names(index.retriever) == {"odd"}
        assert index.counted().keys() == {"reloaded"}
        assert index.failing == 0
        assert warnings_in(caplog) == []

    @pytest.mark.parametrize(
        ("spoil", "outcome"),
        [
            (shutil.rmtree, "unreadable"),
            (lambda folder: next(folder.rglob("vectors.npy")).unlink(), "malformed"),
            (lambda folder: next(folder.rglob("vectors.npy")).write_bytes(b""), "malformed"),
            (lambda folder: shutil.rmtree(next(folder.glob("generation-*"))), "malformed"),
        ],
        ids=["no folder", "a file is missing", "a file is empty", "no generation"],
    )
    def test_a_folder_that_is_broken_to_stay_is_counted_and_told_once(
        self,
        index: Index,
        spoil: Callable[[Path], object],
        outcome: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        built("second").save(index.folder)
        spoil(index.folder)
        with caplog.at_level(logging.WARNING, "ctxguard"):
            looks = [index.watcher.check() for _ in range(4)]
        assert looks == [ReloadOutcome(outcome), None, None, None]
        assert index.counted() == {outcome: 1}
        assert index.failing == 1
        assert len(warnings_in(caplog)) == 1
        assert names(index.retriever) == {"first"}


def save_profile(file: Path, k: int) -> None:
    route = RouteProfile(policy=RatioPolicy(k=k), score_kind=ScoreKind.RATIO)
    profile_with({Route.EXTERNAL: route}).save(file)


class TestProfile:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        save_profile(tmp_path / "profile.json", 2)
        return tmp_path / "profile.json"

    @pytest.fixture
    def watcher(self, file: Path) -> ProfileWatcher:
        telemetry = Telemetry(CollectorRegistry())
        guard = ContextGuard(profile=file, telemetry=telemetry)
        watcher = ProfileWatcher(guard, file, telemetry=telemetry)
        watcher.check()
        return watcher

    def test_half_of_a_file_that_is_whole_by_the_end_of_the_look_is_taken_up(
        self, file: Path, watcher: ProfileWatcher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        load = Profile.load

        def load_while_it_is_written(path: Path) -> Profile:
            # Saving reads the profile that it replaces.
            monkeypatch.setattr(Profile, "load", load)
            try:
                return load(path)
            finally:
                save_profile(file, 4)

        file.write_bytes(file.read_bytes()[:100])
        monkeypatch.setattr(Profile, "load", load_while_it_is_written)
        assert watcher.check() is ReloadOutcome.RELOADED
        assert watcher.last_error is None

    def test_a_file_that_is_bad_however_often_it_changes_is_a_failure(
        self, file: Path, watcher: ProfileWatcher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        load = Profile.load

        def load_and_spoil_anew(path: Path) -> Profile:
            file.write_bytes(file.read_bytes() + b"{")
            return load(path)

        file.write_bytes(b"{")
        monkeypatch.setattr(Profile, "load", load_and_spoil_anew)
        assert watcher.check() is ReloadOutcome.MALFORMED
