"""Profiles and indexes that are replaced under load, by good ones and by bad."""

import random
import threading
import time
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from typing import get_args

from serving import (
    PATIENCE_SECONDS,
    Report,
    ServingProcess,
    Size,
    corpus,
    embedder_for,
    fault,
    in_words,
    profile_for,
)

from ctxguard.core.context import Context
from ctxguard.core.types import Flag
from ctxguard.guard.reload import IndexWatcher, ProfileWatcher
from ctxguard.guard.telemetry import ReloadOutcome
from ctxguard.retrieval.hybrid.retriever import HybridRetriever

_SWAP_SECONDS = 0.01
_PASSAGES = 60
_GENERATIONS = 8


@fault("profile swapped under load", "each request under one profile, from retrieval to decision")
def _profile_swapped(folder: Path, size: Size) -> Report:
    """Good and bad profiles take turns every 10 ms, while requests come."""
    serving = ServingProcess(folder, size)
    path = folder / "profile.json"
    known = {k: profile_for(serving.retriever, k=k) for k in (1, 2, 3, 7)}
    by_id = {one.profile_id: k for k, one in known.items()} | {serving.profile.profile_id: None}
    serving.profile.save(path)
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
    telemetry = serving.counted.telemetry
    with ProfileWatcher(serving.guard, path, interval_seconds=_SWAP_SECONDS, telemetry=telemetry):
        swapping = threading.Thread(target=swap, daemon=True)
        swapping.start()
        until_swaps = serving.by_size(30, 400)
        while swaps < until_swaps:
            answers += serving.serve(20)
        ended.set()
        swapping.join()

    def is_whole(answer: Context) -> bool:
        k = by_id.get(answer.profile_id or "", 0)
        policy = answer.decision.policy
        own = serving.profile.routes[answer.route].policy
        return policy == own if k is None else policy.k == k and len(answer.kept_ids) <= k

    outcomes = _reloads(serving, "profile")
    served = Counter([answer.profile_id for answer in answers])
    return serving.finish(
        f"{swaps} swaps ({in_words(outcomes)}); answers under {len(served)} profiles, none mixed",
        {
            "each under one profile that is known": set(served) <= set(by_id),
            "from its retrieval to its decision": all(map(is_whole, answers)),
            "good ones were taken up": outcomes["reloaded"] > 3 and len(served) > 2,
            "bad ones were refused": outcomes["malformed"] > 0 and outcomes["mismatched"] > 0,
        },
    )


@fault(
    "index swapped every 10 ms",
    "each answer from one generation, flagged where the profile is not for it",
)
def _index_swapped(folder: Path, size: Size) -> Report:
    """Another process saves a generation every 10 ms; it is taken up while requests come."""
    index = folder / "index"
    embedder = embedder_for(size)
    built = HybridRetriever.build(corpus(_PASSAGES), embedder=embedder)
    built.save(index)
    loaded = HybridRetriever.load(index, embedder=embedder)
    serving = ServingProcess(folder, size, retriever=loaded)
    saving = get_context("spawn").Process(target=_save_for_ever, args=(index, size))
    saving.start()
    answers: list[Context] = []
    telemetry = serving.counted.telemetry
    watcher = IndexWatcher(loaded, interval_seconds=_SWAP_SECONDS, telemetry=telemetry)

    def swaps() -> int:
        return _reloads(serving, "index")["reloaded"]

    started = time.monotonic()
    with watcher:
        wanted, at_least = serving.by_size(6, 400), serving.by_size(2, _GENERATIONS // 2)
        while swaps() < wanted and time.monotonic() - started < PATIENCE_SECONDS:
            if not swaps():
                started = time.monotonic()
            answers += serving.serve(20)
        every = 1e3 * (time.monotonic() - started) / max(swaps(), 1)
        # In the midst of saving, like as not.
        saving.kill()
        saving.join()
    left: int | str
    try:
        left = len(HybridRetriever.load(index, embedder=embedder))
    except Exception as error:
        left = type(error).__name__

    def generations_of(answer: Context) -> set[str]:
        return {passage.text.rsplit(" ", 1)[-1] for passage in answer.passages}

    def is_of_one(answer: Context) -> bool:
        found = generations_of(answer)
        rows = all(f" number{int(one.passage_id[1:])} " in one.text for one in answer.passages)
        foreign = found != {"g0"}
        return len(found) == 1 and rows and (Flag.PROFILE_MISMATCH in answer.flags) == foreign

    outcomes, generations = _reloads(serving, "index"), set().union(*map(generations_of, answers))
    return serving.finish(
        f"{in_words(outcomes)}, every {every:.0f} ms; answers from {len(generations)} "
        f"generations, none mixed; {left} passages left when the writer was killed",
        {
            "from one generation, flagged where the profile is not for it": all(
                map(is_of_one, answers)
            ),
            "many generations served": len(generations) > at_least
            and outcomes["reloaded"] >= wanted,
            "a writer that is killed leaves a whole index": left == _PASSAGES,
        },
    )


def _reloads(serving: ServingProcess, what: str) -> dict[str, int]:
    """How often each outcome of a reload was counted."""
    found = serving.counted.by_label(f"{what}_reloads")
    return {one: found.get((one,), 0) for one in get_args(ReloadOutcome)}


def _save_for_ever(index: Path, size: Size) -> None:
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
