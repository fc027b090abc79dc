"""Writers that share a store, killed at any moment, again and again."""

import mmap
import os
import random
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from serving import Report, Size

from ctxguard.core.context import Context
from ctxguard.core.types import Hit
from ctxguard.guard import ContextGuard
from ctxguard.monitor.sampling.sampler import Accounts, Sampler
from ctxguard.monitor.store import SampleStore
from ctxguard.monitor.store.writer import SampleWriter

_MANY = 100
_WRITERS = 4
_ID_BYTES = 32
_SILENT_SECONDS = 2 * 3600.0


def writers_killed(folder: Path, size: Size) -> Report:
    """SIGKILL of writers, while others go on; then of all of them."""
    n = 12 if size is Size.SMALL else 500
    fleet = Fleet(f"sqlite:///{folder / 'samples.db'}")
    fleet.kill(n)
    found = fleet.end()
    lost = ", ".join(f"{n} {reason.value}" for reason, n in found.lost.items() if n)
    return Report.of(
        f"{fleet.killed} killed; {found.sampled} sampled = {found.stored} stored + "
        f"{sum(found.lost.values())} lost ({lost}) + {found.unaccounted} unaccounted",
        fleet.checks(found),
    )


@dataclass
class Fleet:
    """Writers on one store.

    Args:
        url: The store.

    Attributes:
        killed: How many were killed.
        wrong: What did not add up while others went on, in words.
    """

    url: str
    killed: int = 0
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(3)
        guard = ContextGuard(
            lambda _, depth: [Hit(f"p{n}", 1.0 / (n + 1), text="text") for n in range(depth)][:3],
            score_kind="cosine",
        )
        self._context = guard.retrieve("a question")
        SampleStore.open(self.url).close()
        self._alive: list[_Writer] = []
        self._dead: list[_Writer] = []

    def kill(self, n: int) -> None:
        """Kill n writers, each at any moment, and start another each time."""
        for _ in range(_WRITERS):
            self._start()
        for _ in range(n):
            time.sleep(self._rng.uniform(0.0, 0.06))
            one = self._alive.pop(self._rng.randrange(len(self._alive)))
            self._kill(one)
            self._start()
            self._check_while_others_write()

    def end(self) -> Accounts:
        """Kill all; what the store knows of them."""
        time.sleep(0.1)
        while self._alive:
            self._kill(self._alive.pop())
        with open_later(self.url) as store:
            return store.accounts()

    def checks(self, found: Accounts) -> dict[str, bool]:
        """What must hold in the end."""
        with open_later(self.url) as store:
            rows = sum(store.states().values())
            known = {one.worker_id: store.accounts(worker_id=one.worker_id) for one in self._dead}
        return {
            "sampled = stored + lost + pending while others write": not self.wrong,
            "nothing is pending when all are gone": found.pending == 0,
            "what counts as stored is stored": found.stored == rows > 0,
            # Of a few that are killed none may hold anything just then.
            "what they held is unaccounted for": found.unaccounted > 0 or len(self._dead) < _MANY,
            # The offer that was under way when it died may have been counted, or not.
            "none has sampled more than it was offered": all(
                known[one.worker_id].sampled <= one.offered + 1 for one in self._dead
            ),
            "the accounts of all are the sum of theirs": found.sampled
            == sum(one.sampled for one in known.values()),
        }

    def _start(self) -> None:
        one = _Writer(mmap.mmap(-1, _ID_BYTES + 8))
        capacity = self._rng.choice((5, 10_000))
        sys.stdout.flush()
        one.pid = os.fork()
        if one.pid == 0:
            with suppress(BaseException):
                one.write_for_ever(self.url, Sampler(1.0, capacity=capacity), self._context)
            os._exit(1)
        self._alive.append(one)

    def _kill(self, one: "_Writer") -> None:
        os.kill(one.pid, signal.SIGKILL)
        os.waitpid(one.pid, 0)
        self._dead.append(one)
        self.killed += 1

    def _check_while_others_write(self) -> None:
        with SampleStore.open(self.url) as store:
            found = store.accounts()
        if found.unaccounted:
            self.wrong.append(f"after {self.killed}: {found.unaccounted} unaccounted for")


@dataclass(eq=False)
class _Writer:
    """A process that samples, and the memory in which it tells its id and its offers."""

    shared: mmap.mmap
    pid: int = 0

    @property
    def worker_id(self) -> str:
        """Its id in the store."""
        return self.shared[:_ID_BYTES].decode()

    @property
    def offered(self) -> int:
        """How many of its offers have returned."""
        return int.from_bytes(self.shared[_ID_BYTES:], "little")

    def write_for_ever(self, url: str, sampler: Sampler, context: Context) -> None:
        """Sample, tell of each offer that has returned, and write; until killed."""
        writer = SampleWriter(sampler, SampleStore.open(url), interval_seconds=0.005)
        self.shared[:_ID_BYTES] = sampler.worker_id.encode()
        writer.start()
        parent, rng = os.getppid(), random.Random(os.getpid())
        for offered in count(1):
            sampler.offer(context, 1.0, time.time())
            self.shared[_ID_BYTES:] = offered.to_bytes(8, "little")
            if rng.random() < 0.2:
                time.sleep(0.005)
            if os.getppid() != parent:
                return


def open_later(url: str) -> SampleStore:
    """The store as it is read hours after its writers reported for the last time."""
    return SampleStore.open(url, clock=lambda: time.time() + _SILENT_SECONDS)
