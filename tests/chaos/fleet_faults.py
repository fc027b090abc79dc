"""Writers that share a store, killed at any moment, again and again."""

import os
import random
import time
from dataclasses import dataclass
from itertools import count
from multiprocessing import RawArray, RawValue, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from serving import Report, Size, fault

from ctxguard.core.context import Context
from ctxguard.core.types import Hit
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.monitor.sampling.sampler import Sampler
from ctxguard.monitor.store import SampleStore
from ctxguard.monitor.store.writer import SampleWriter

_MANY = 100
_WRITERS = 4
_SILENT_SECONDS = 2 * 3600.0


@dataclass(frozen=True)
class _Writer:
    """A process that samples, and the memory in which it tells its id and its offers."""

    process: BaseProcess
    worker_id: Any
    offered: Any


def writers_killed(url: str, n: int) -> Report:
    """SIGKILL of n writers at any moment, while others go on; then of all of them."""
    rng = random.Random(3)
    guard = ContextGuard(
        lambda _, depth: [Hit(f"p{n}", 1.0 / (n + 1), text="text") for n in range(depth)][:3],
        score_kind="cosine",
    )
    context = guard.retrieve("a question")
    SampleStore.open(url).close()
    dead: list[_Writer] = []
    pending: list[int] = []

    def start() -> _Writer:
        shared = RawArray("c", 32), RawValue("q")
        asked = (url, Sampler(1.0, capacity=rng.choice((5, 10_000))), context, *shared)
        process = get_context("fork").Process(target=_write_for_ever, args=asked)
        process.start()
        return _Writer(process, *shared)

    def kill(one: _Writer) -> None:
        one.process.kill()
        one.process.join()
        dead.append(one)

    alive = [start() for _ in range(_WRITERS)]
    for _ in range(n):
        time.sleep(rng.uniform(0.0, 0.06))
        kill(alive.pop(rng.randrange(len(alive))))
        alive.append(start())
        with SampleStore.open(url) as store:
            pending.append(store.accounts().unaccounted)
    time.sleep(0.1)
    for one in alive:
        kill(one)
    # As it is read hours after its writers reported for the last time.
    with SampleStore.open(url, clock=lambda: time.time() + _SILENT_SECONDS) as store:
        found, rows = store.accounts(), sum(store.states().values())
        sampled = [store.accounts(worker_id=one.worker_id.value.decode()).sampled for one in dead]
    lost = ", ".join(f"{n} {reason.value}" for reason, n in found.lost.items() if n)
    return Report.of(
        f"{len(dead)} killed; {found.sampled} sampled = {found.stored} stored + "
        f"{sum(found.lost.values())} lost ({lost}) + {found.unaccounted} unaccounted",
        {
            "sampled = stored + lost + pending while others write": not any(pending),
            "nothing is pending when all are gone": found.pending == 0,
            "what counts as stored is stored": found.stored == rows > 0,
            # Of a few that are killed none may hold anything just then.
            "what they held is unaccounted for": found.unaccounted > 0 or len(dead) < _MANY,
            # The offer that was under way when it died may have been counted, or not.
            "none has sampled more than it was offered": all(
                own <= one.offered.value + 1 for own, one in zip(sampled, dead, strict=True)
            ),
            "the accounts of all are the sum of theirs": found.sampled == sum(sampled),
        },
    )


def _write_for_ever(
    url: str, sampler: Sampler, context: Context, worker_id: Any, offered: Any
) -> None:
    """Sample, tell of each offer that has returned, and write; until killed."""
    writer = SampleWriter(sampler, SampleStore.open(url), interval_seconds=0.005)
    worker_id.value = sampler.worker_id.encode()
    writer.start()
    parent, rng = os.getppid(), random.Random(os.getpid())
    for n in count(1):
        sampler.offer(context, 1.0, time.time())
        offered.value = n
        if rng.random() < 0.2:
            time.sleep(0.005)
        if os.getppid() != parent:
            os._exit(1)


@fault(
    "writers of a fleet killed",
    "sampled = stored + lost + pending while they live; then what they held is unaccounted for",
)
def _writers_of_a_fleet_killed(folder: Path, size: Size) -> Report:
    return writers_killed(f"sqlite:///{folder / 'samples.db'}", 12 if size is Size.SMALL else 500)
