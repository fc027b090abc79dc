"""Profiles and indexes that are replaced under load, by good ones and by bad."""

import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from scene import (
    Scene,
    Seen,
    Size,
    all_of,
    corpus,
    embedder_for,
    in_background,
    most,
    profile_for,
)

from ctxguard.context import Context
from ctxguard.reload import IndexWatcher, ProfileWatcher
from ctxguard.retrieval import HybridRetriever
from ctxguard.telemetry import ReloadOutcome
from ctxguard.types import Flag

_SWAP_SECONDS = 0.01
_PASSAGES = 60
_GENERATIONS = 8


def bad_profiles(folder: Path, size: Size) -> Seen:
    """Half a profile, another program's file, one of another system, a folder, none at all."""
    scene = Scene(folder, size)
    path = folder / "profile.json"
    good = scene.profile
    good.save(path)
    watcher = ProfileWatcher(
        scene.guard, path, interval_seconds=_SWAP_SECONDS, telemetry=scene.telemetry
    )
    assert scene.retriever is not None
    foreign = good.model_copy(update={"fingerprint": {**good.fingerprint, "corpus_digest": "x"}})
    text = good.to_json()
    bad: dict[str, Callable[[], object]] = {
        "half": lambda: path.write_text(text[: len(text) // 2]),
        "no JSON": lambda: path.write_bytes(b"\xff\xfe\x00not a profile"),
        "another program's": lambda: path.write_text('{"name": "something else"}'),
        "nested": lambda: path.write_text("[" * 200_000),
        "foreign": lambda: foreign.save(path),
        "a folder": lambda: (path.unlink(), path.mkdir()),
        "gone": path.rmdir,
    }
    outcomes: dict[str, str] = {}
    answers: list[Context] = []
    for name, spoil in bad.items():
        spoil()
        outcome = watcher.check()
        outcomes[name] = "unnoticed" if outcome is None else outcome.value
        answers += all_of(scene.serve(scene.n(10, 50)))
    is_alarmed = _value(scene, "ctxguard_profile_reload_failing") == 1.0
    other = profile_for(scene.retriever, k=2)
    other.save(path)
    taken = watcher.check()
    with_other = all_of(scene.serve(10))
    refused = {ReloadOutcome.MALFORMED, ReloadOutcome.MISMATCHED, ReloadOutcome.UNREADABLE}
    return scene.finish(
        f"{', '.join([f'{name}: {what}' for name, what in outcomes.items()])}; then {taken}",
        {
            "every bad file is refused": set(outcomes.values()) <= {one.value for one in refused},
            "a foreign one as such": outcomes["foreign"] == ReloadOutcome.MISMATCHED,
            "the last good one stays in force": {each.profile_id for each in answers}
            == {good.profile_id}
            and all(map(scene.decided_by_its_route, answers)),
            "with an alarm": is_alarmed,
            "until a good one comes": taken is ReloadOutcome.RELOADED
            and {each.profile_id for each in with_other} == {other.profile_id}
            and _value(scene, "ctxguard_profile_reload_failing") == 0.0,
            "every request is answered": scene.tally.failed == scene.tally.shed == 0,
        },
    )


def profile_swapped(folder: Path, size: Size) -> Seen:
    """Good and bad profiles take turns every 10 ms, while requests come."""
    scene = Scene(folder, size)
    assert scene.retriever is not None
    path = folder / "profile.json"
    known = {k: profile_for(scene.retriever, k=k) for k in (1, 2, 3, 7)}
    by_id = {one.profile_id: k for k, one in known.items()} | {scene.profile.profile_id: None}
    scene.profile.save(path)
    ended, swaps = threading.Event(), 0

    def swap() -> None:
        nonlocal swaps
        rng = random.Random(3)
        while not ended.wait(_SWAP_SECONDS):
            one = known[rng.choice([1, 2, 3, 7])]
            if rng.random() < 0.3:
                # In place, so that half of it may be read.
                path.write_text(one.to_json()[: rng.randrange(400)])
            elif rng.random() < 0.3:
                one.model_copy(update={"fingerprint": {"embedder": "another"}}).save(path)
            else:
                one.save(path)
            swaps += 1

    answers: list[Context] = []
    with ProfileWatcher(
        scene.guard, path, interval_seconds=_SWAP_SECONDS, telemetry=scene.telemetry
    ):
        swapping = in_background(swap)
        until_swaps = scene.n(60, 400)
        while swaps < until_swaps:
            answers += all_of(scene.serve(20))
        ended.set()
        swapping.join()

    def is_whole(answer: Context) -> bool:
        k = by_id.get(answer.profile_id or "", 0)
        policy = answer.decision.policy
        own = scene.profile.routes[answer.route].policy
        return policy == own if k is None else policy.k == k and len(answer.kept_ids) <= k

    outcomes = {one.value: _reloads(scene, "profile", one) for one in ReloadOutcome}
    served = Counter([answer.profile_id for answer in answers])
    return scene.finish(
        f"{swaps} swaps ({most(outcomes)}); answers under {len(served)} profiles, none mixed",
        {
            "every request is answered": scene.tally.failed == scene.tally.shed == 0,
            "each under one profile that is known": set(served) <= set(by_id),
            "from its retrieval to its decision": all(map(is_whole, answers)),
            "good ones were taken up": outcomes["reloaded"] > 3 and len(served) > 2,
            "bad ones were refused": outcomes["malformed"] > 0 and outcomes["mismatched"] > 0,
        },
    )


def index_swapped(folder: Path, size: Size) -> Seen:
    """Another process saves a generation every 10 ms; it is taken up while requests come."""
    index = folder / "index"
    embedder = embedder_for(size)
    built = HybridRetriever.build(corpus(_PASSAGES), embedder=embedder)
    built.save(index)
    loaded = HybridRetriever.load(index, embedder=embedder)
    scene = Scene(folder, size, retriever=loaded)
    saving = subprocess.Popen([sys.executable, __file__, str(index), size.value])
    answers: list[Context] = []
    watcher = IndexWatcher(loaded, interval_seconds=_SWAP_SECONDS, telemetry=scene.telemetry)
    generations: set[str] = set()
    started = time.monotonic()
    with watcher:
        wanted = scene.n(40, 400)
        while _swaps(scene) < wanted and time.monotonic() - started < 60.0:
            if not _swaps(scene):
                started = time.monotonic()
            some = all_of(scene.serve(20))
            for each in some:
                generations.update([_generation(passage.text) for passage in each.passages])
            answers += some
        every = 1e3 * (time.monotonic() - started) / max(_swaps(scene), 1)
        # In the midst of saving, like as not.
        saving.send_signal(signal.SIGKILL)
        saving.wait()
    try:
        left = len(HybridRetriever.load(index, embedder=embedder))
    except Exception as error:
        left = -1
        scene.log.lines.append(f"after the writer was killed: {type(error).__name__}")

    def is_of_one(answer: Context) -> bool:
        found = {_generation(passage.text) for passage in answer.passages}
        rows = all(f" number{int(one.passage_id[1:])} " in one.text for one in answer.passages)
        foreign = found != {"g0"}
        return len(found) == 1 and rows and (Flag.PROFILE_MISMATCH in answer.flags) == foreign

    outcomes = {one.value: _reloads(scene, "index", one) for one in ReloadOutcome}
    return scene.finish(
        f"{most(outcomes)}, every {every:.0f} ms; answers from {len(generations)} "
        f"generations, none mixed; {left} passages left when the writer was killed",
        {
            "every request is answered": scene.tally.failed == scene.tally.shed == 0,
            "from one generation, flagged where the profile is not for it": all(
                map(is_of_one, answers)
            ),
            "many generations served": len(generations) > _GENERATIONS // 2
            and outcomes["reloaded"] >= wanted,
            "a writer that is killed leaves a whole index": left == _PASSAGES,
        },
    )


def _swaps(scene: Scene) -> int:
    return _reloads(scene, "index", ReloadOutcome.RELOADED)


def _generation(text: str) -> str:
    return text.rsplit(" ", 1)[-1]


def _reloads(scene: Scene, what: str, outcome: ReloadOutcome) -> int:
    return int(_value(scene, f"ctxguard_{what}_reloads_total", outcome=outcome.value))


def _value(scene: Scene, name: str, **labels: str) -> float:
    return scene.registry.get_sample_value(name, labels) or 0.0


def save_for_ever(index: Path, size: Size) -> None:
    """Save one generation after the other, built beforehand: the swaps are what counts here."""
    embedder = embedder_for(size)
    built = [
        HybridRetriever.build(corpus(_PASSAGES, generation=f"g{number}"), embedder=embedder)
        for number in range(1, _GENERATIONS + 1)
    ]
    while True:
        for one in built:
            one.save(index)
            time.sleep(_SWAP_SECONDS)


if __name__ == "__main__":
    save_for_ever(Path(sys.argv[1]), Size(sys.argv[2]))
