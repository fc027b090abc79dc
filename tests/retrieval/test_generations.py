"""Generations of an index: an answer comes from one alone, and the profile follows them."""

import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ctxguard.core.fusion import Fusion
from ctxguard.core.metadata_filter import Where
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Flag, Passage, Route
from ctxguard.errors import ConfigurationError, StageUnavailableError
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.guard.reload import IndexWatcher
from ctxguard.profile.comparison import ProfileCheck
from ctxguard.profile.schema import Profile
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index import hybrid_index, storage
from ctxguard.retrieval.index.storage import manifest_file
from tests.counted import Counted
from tests.doubles import WordHashEmbedder
from tests.guard.guards import profile_of
from tests.timing import until

N = 12


def generation(name: str, n: int = N) -> list[Passage]:
    """Passages whose ids recur in every generation, and whose texts say which one they are of."""
    return [
        Passage(f"p{i:02}", f"red fox number{i} of {name}", metadata={"of": name, "odd": i % 2})
        for i in range(n)
    ]


def built(name: str, n: int = N) -> HybridRetriever:
    return HybridRetriever.build(generation(name, n), embedder=WordHashEmbedder())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    built("first").save(tmp_path / "index")
    return tmp_path / "index"


@pytest.fixture
def retriever(folder: Path) -> HybridRetriever:
    return HybridRetriever.load(folder, embedder=WordHashEmbedder())


def names(retriever: HybridRetriever) -> set[str]:
    ranking = retriever.retrieve("red fox", depth=N)
    return {ranking.passages[n].text.split()[-1] for n in range(len(ranking))}


class TestReloading:
    def test_all_but_pinned_views_follow(self, retriever: HybridRetriever) -> None:
        view = retriever.with_fusion(Fusion("convex")).on_route(Route.LEXICAL)
        pinned = retriever.pinned()
        digest = pinned.fingerprint()["corpus_digest"]
        ranking = retriever.retrieve("red fox", depth=N)
        built("second", n=3).save(retriever.folder)
        assert names(retriever) == {"first"}
        assert retriever.reload()
        assert names(retriever) == names(view) == {"second"}
        assert (names(pinned), len(pinned), len(retriever)) == ({"first"}, N, 3)
        assert pinned.fingerprint()["corpus_digest"] == digest
        assert retriever.fingerprint()["corpus_digest"] != digest
        assert pinned.passage("p00").text.endswith("first")
        assert pinned.passage_ids != retriever.passage_ids
        assert {ranking.passages[n].text.split()[-1] for n in range(N)} == {"first"}

    def test_another_folder_can_be_given(self, retriever: HybridRetriever, tmp_path: Path) -> None:
        built("other").save(tmp_path / "other")
        assert retriever.reload(tmp_path / "other")
        assert (names(retriever), retriever.folder) == ({"other"}, tmp_path / "other")

    @pytest.mark.parametrize("use", [HybridRetriever.reload, IndexWatcher])
    def test_in_memory_index_cannot_reload(self, use: Callable[..., object]) -> None:
        with pytest.raises(ConfigurationError, match="built in memory"):
            use(built("first"))


@pytest.mark.skipif(os.name != "posix", reason="files in use cannot be deleted here")
@pytest.mark.parametrize("mapped_from", [0, 2**40], ids=["mapped", "read"])
def test_deleted_files_are_read_on(
    folder: Path, mapped_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrid_index, "_MAPPED_FROM_BYTES", mapped_from)
    retriever = HybridRetriever.load(folder, embedder=WordHashEmbedder())
    shutil.rmtree(folder)
    ranking = retriever.retrieve("red fox", depth=N, where=Where(odd=1))
    assert (len(ranking), retriever.passage("p03").text) == (N // 2, "red fox number3 of first")


def profile_for(retriever: HybridRetriever) -> Profile:
    fused = retriever.with_fusion(Fusion("convex", weight=0.5))
    return profile_of(
        RatioPolicy(k=3, min_ratio=0.999),
        route=Route.HYBRID,
        fusion=fused.fusion,
        fingerprint=fused.fingerprint(),
    )


class TestTheProfileFollows:
    @pytest.fixture
    def counted(self) -> Counted:
        return Counted()

    @pytest.fixture
    def guard(self, retriever: HybridRetriever, counted: Counted) -> ContextGuard:
        return ContextGuard(
            retriever,
            profile=profile_for(retriever),
            check=ProfileCheck(strict=True),
            telemetry=counted.telemetry,
        )

    def test_swap_suspends_another_corpus_thresholds(
        self,
        guard: ContextGuard,
        retriever: HybridRetriever,
        counted: Counted,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        before = guard.retrieve("red fox number3")
        assert (before.flags, len(before)) == ((), 1)
        built("second").save(retriever.folder)
        retriever.reload()
        with caplog.at_level(logging.WARNING, "ctxguard"):
            for _ in range(2):
                context = guard.retrieve("red fox number3")
                assert (context.flags, len(context)) == ((Flag.PROFILE_MISMATCH,), 3)
        assert [record.name for record in caplog.records if record.name != "bm25s"] == [
            "ctxguard.guard.context_guard"
        ]
        assert any(line.startswith("corpus_digest is") for line in guard.differences)
        assert counted.by_label("flags") == {("profile_mismatch",): 2}
        # Those of this one are, also after an update that is undone.
        retriever.update(generation("first"))
        assert guard.retrieve("red fox number3").flags == ()
        retriever.update([*generation("first"), Passage("new", "red fox")])
        assert guard.retrieve("red fox number3").flags == (Flag.PROFILE_MISMATCH,)
        guard.use_profile(profile_for(retriever))
        assert guard.retrieve("red fox number3").flags == ()

    def test_sketched_profile_stays_in_force(self, retriever: HybridRetriever) -> None:
        """A profile with a sketch stays in force while passages come and go."""
        profile = profile_for(retriever).model_copy(update={"corpus": retriever.corpus_sketch()})
        guard = ContextGuard(retriever, profile=profile, check=ProfileCheck(strict=True))
        new = Passage("new", "red fox number3", metadata={"of": "first"})
        retriever.update([*generation("first")[1:], new])
        assert guard.retrieve("red fox").flags == ()
        sketch = retriever.corpus_sketch()
        retriever.save(retriever.folder)
        assert retriever.reload()
        assert retriever.corpus_sketch() == sketch

    def test_unreadable_fingerprint_is_another_system(
        self, guard: ContextGuard, retriever: HybridRetriever, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(_: object) -> dict[str, str]:
            raise OSError("the weights are gone")

        monkeypatch.setattr(HybridRetriever, "fingerprint", broken)
        built("second").save(retriever.folder)
        retriever.reload()
        assert guard.retrieve("red fox").flags == (Flag.PROFILE_MISMATCH,)


def test_unbindable_retriever_is_counted_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retriever that cannot be bound any more is a counted failure."""

    def broken(_: object) -> None:
        raise OSError("gone")

    counted = Counted()
    retriever = built("first")
    guard = ContextGuard(retriever, telemetry=counted.telemetry)
    retriever.update(generation("first")[1:])
    monkeypatch.setattr(HybridRetriever, "pinned", broken)
    with pytest.raises(StageUnavailableError, match="OSError"):
        guard.retrieve("red fox")
    assert counted["failed_requests"] == 1


class Watched(Counted):
    """A loaded retriever, a watcher of its folder, and what was counted."""

    def __init__(self, retriever: HybridRetriever) -> None:
        super().__init__()
        self.watcher = IndexWatcher(retriever, interval_seconds=0.001, telemetry=self.telemetry)

    @property
    def outcomes(self) -> dict[str, int]:
        """The outcomes that came about, and how often."""
        return {outcome: n for (outcome,), n in self.by_label("index_reloads").items()}


class TestWatching:
    def test_new_generation_is_taken_by_itself(self, retriever: HybridRetriever) -> None:
        watched = Watched(retriever)
        with watched.watcher:
            built("second").save(retriever.folder)
            until(lambda: names(retriever) == {"second"})
        assert watched.outcomes == {"reloaded": 1}

    @pytest.mark.parametrize(
        ("spoil", "outcome"),
        [
            (shutil.rmtree, "unreadable"),
            (lambda folder: manifest_file(folder).unlink(), "unreadable"),
            (lambda folder: manifest_file(folder).write_text("{"), "malformed"),
            (lambda folder: manifest_file(folder).write_text('{"format": "x"}'), "malformed"),
            (lambda folder: next(folder.rglob("vectors.npy")).unlink(), "malformed"),
            (lambda folder: next(folder.rglob("vectors.npy")).write_bytes(b""), "malformed"),
            (lambda folder: shutil.rmtree(next(folder.glob("generation-*"))), "malformed"),
        ],
        ids=[
            *("no folder", "no manifest", "half a manifest", "foreign manifest"),
            *("a file is missing", "a file is empty", "no generation"),
        ],
    )
    def test_unusable_folder_keeps_generation_and_alarms(
        self,
        retriever: HybridRetriever,
        spoil: Callable[[Path], object],
        outcome: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """A folder that cannot be used leaves the generation before and raises the alarm."""
        watched = Watched(retriever)
        watched.watcher.check()
        built("broken").save(retriever.folder)
        spoil(retriever.folder)
        with caplog.at_level(logging.WARNING, "ctxguard"):
            looks = [watched.watcher.check() for _ in range(4)]
        assert (looks, names(retriever)) == ([outcome, None, None, None], {"first"})
        assert (watched.outcomes, watched["index_reload_failing"], len(caplog.records)) == (
            {outcome: 1},
            1,
            1,
        )
        shutil.rmtree(retriever.folder, ignore_errors=True)
        built("second").save(retriever.folder)
        assert watched.watcher.check() == "reloaded"
        assert (names(retriever), watched["index_reload_failing"]) == ({"second"}, 0)

    @pytest.mark.parametrize("times", [1, 9])
    def test_cleared_generation_is_no_failure(
        self, retriever: HybridRetriever, times: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A generation that is cleared away while it is read is not a failure."""
        watched = Watched(retriever)
        later = [built(f"later{n}") for n in range(times)]
        check_file = storage._check_file

        def save_another_first(file: Path, size: int, digest: str) -> None:
            if later:
                later.pop(0).save(retriever.folder)
            check_file(file, size, digest)

        built("second").save(retriever.folder)
        monkeypatch.setattr(storage, "_check_file", save_another_first)
        assert watched.watcher.check() == "reloaded"
        assert not later
        assert (watched.outcomes, watched["index_reload_failing"]) == ({"reloaded": 1}, 0)
        assert names(retriever) == {f"later{times - 1}"}

    def test_index_saved_constantly_never_fails(
        self, retriever: HybridRetriever, caplog: pytest.LogCaptureFixture
    ) -> None:
        watched, generations = Watched(retriever), [built("even"), built("odd")]

        def save_often() -> None:
            for turn in range(30):
                generations[turn % 2].save(retriever.folder)

        saving = threading.Thread(target=save_often)
        with caplog.at_level(logging.WARNING, "ctxguard"), watched.watcher:
            saving.start()
            saving.join()
        watched.watcher.check()
        assert (names(retriever), watched.outcomes.keys()) == ({"odd"}, {"reloaded"})
        assert (watched["index_reload_failing"], caplog.records) == (0, [])

    def test_deleted_serving_generation_is_no_failure(self, retriever: HybridRetriever) -> None:
        watched = Watched(retriever)
        assert watched.watcher.check() is None
        shutil.rmtree(next(retriever.folder.glob("generation-*")))
        assert watched.watcher.check() is None
        assert (names(retriever), watched.outcomes) == ({"first"}, {})

    def test_index_of_another_embedder_mismatches(self, retriever: HybridRetriever) -> None:
        watched = Watched(retriever)
        other = WordHashEmbedder(salt="other")
        HybridRetriever.build(generation("second"), embedder=other).save(retriever.folder)
        assert watched.watcher.check() == "mismatched"
        assert names(retriever) == {"first"}
