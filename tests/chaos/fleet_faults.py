"""Writers on two hosts that share a store, killed at any moment, again and again.

A host is a name and a folder of counts. One of them is gone in the end, with its folder.
"""

import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from serving import PATIENCE_SECONDS, Result, Size

from ctxguard.core.context import Context
from ctxguard.core.types import Hit
from ctxguard.guard import ContextGuard
from ctxguard.monitor.sampling.sampler import Accounts, LostReason, Sampler, accounts
from ctxguard.monitor.sampling.writer import SampleWriter
from ctxguard.monitor.store import SampleStore
from ctxguard.monitor.store import workers as workers_module

HOSTS = ("host-a", "host-b")
_PER_HOST = 2


def writers_killed(folder: Path, size: Size) -> Result:
    """SIGKILL of writers of two hosts, while others go on; then of all of them."""
    n = 12 if size is Size.SMALL else 500
    fleet = Fleet(f"sqlite:///{folder / 'samples.db'}", folder)
    fleet.kill(n)
    found = fleet.end()
    lost = ", ".join(f"{n} {reason.value}" for reason, n in found.lost.items() if n)
    return Result(
        f"{fleet.killed} killed; {found.sampled} sampled = {found.stored} stored + "
        f"{sum(found.lost.values())} lost ({lost}) + {found.pending} pending",
        fleet.checks(found),
        (),
    )


@dataclass
class Fleet:
    """Writers of two hosts on one store.

    Args:
        url: The store.
        folder: Where each host has its folder of counts.

    Attributes:
        killed: How many were killed.
        wrong: What did not add up while others went on, in words.
    """

    url: str
    folder: Path
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
        """Kill n writers, each at any moment, and start another on its host each time."""
        for host in HOSTS * _PER_HOST:
            self._start(host)
        for _ in range(n):
            self._listen(self._rng.uniform(0.0, 0.06))
            one = self._alive.pop(self._rng.randrange(len(self._alive)))
            self._kill(one)
            self._start(one.host)
            self._check_while_others_write()

    def end(self) -> Accounts:
        """Kill all; one host starts again, the other is gone. What the store knows of them."""
        self._listen(0.1)
        while self._alive:
            self._kill(self._alive.pop())
        back, gone = HOSTS
        shutil.rmtree(self._counts(gone))
        with SampleStore.open(self.url) as store:
            writer = SampleWriter(Sampler(1.0, counts_folder=self._counts(back)), store)
            writer.start()
            deadline = time.monotonic() + PATIENCE_SECONDS
            while len(list(self._counts(back).iterdir())) > 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            writer.stop()
            with _silence_has_passed():
                store.settle_silent_workers()
            totals = store.worker_totals()
        return accounts(totals.sampled, totals.stored, totals.lost, totals.pending)

    def checks(self, found: Accounts) -> dict[str, bool]:
        """What must hold in the end."""
        back, gone = HOSTS
        with SampleStore.open(self.url) as store:
            rows = sum(store.states().values())
            workers = {worker.worker_id: worker for worker in store.workers()}
        settled = [one for one in self._dead if workers[one.worker_id].closed]
        # The offer that was under way when it died may have been counted, or not.
        exact = all(0 <= workers[one.worker_id].sampled - one.offered <= 1 for one in settled)
        told = all(workers[one.worker_id].sampled <= one.offered + 1 for one in self._dead)
        return {
            "sampled = stored + lost + pending at all times": not self.wrong,
            "and in the end": found.unaccounted == 0,
            "nothing is pending when all are gone": found.pending == 0,
            "what counts as stored is stored": found.stored == rows > 0,
            "what died with a process counts as killed": found.lost[LostReason.KILLED] > 0,
            "both hosts are known": {worker.host for worker in workers.values()} >= {*HOSTS},
            "all of the host that is back are settled": all(
                one in settled for one in self._dead if one.host == back
            ),
            "of the one that is gone, all but the last": sum(
                one not in settled for one in self._dead if one.host == gone
            )
            <= _PER_HOST,
            "exactly what each had counted": exact and told,
        }

    def _counts(self, host: str) -> Path:
        return self.folder / f"{host}.counts"

    def _start(self, host: str) -> None:
        reading, writing = os.pipe()
        capacity = self._rng.choice((5, 10_000))
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.close(reading)
            with suppress(BaseException):
                socket.gethostname = lambda: host
                sampler = Sampler(1.0, capacity=capacity, counts_folder=self._counts(host))
                _write_for_ever(self.url, sampler, self._context, writing)
            os._exit(1)
        os.close(writing)
        worker_id = os.read(reading, 32).decode()
        os.set_blocking(reading, False)
        self._alive.append(_Writer(host, worker_id, child, reading))

    def _kill(self, one: "_Writer") -> None:
        os.kill(one.pid, signal.SIGKILL)
        os.waitpid(one.pid, 0)
        os.set_blocking(one.pipe, True)
        while told := os.read(one.pipe, 65_536):
            one.offered += len(told)
        os.close(one.pipe)
        self._dead.append(one)
        self.killed += 1

    def _listen(self, seconds: float) -> None:
        """Read what the writers tell, since a full pipe would hold them up."""
        deadline = time.monotonic() + seconds
        while True:
            for one in self._alive:
                with suppress(BlockingIOError):
                    one.offered += len(os.read(one.pipe, 65_536))
            if time.monotonic() >= deadline:
                return
            time.sleep(0.001)

    def _check_while_others_write(self) -> None:
        with SampleStore.open(self.url) as store:
            totals = store.worker_totals()
        found = accounts(totals.sampled, totals.stored, totals.lost, totals.pending)
        if found.unaccounted:
            self.wrong.append(f"after {self.killed}: {found.unaccounted} unaccounted for")


@dataclass(eq=False)
class _Writer:
    """A process that samples, and how many offers it has told of."""

    host: str
    worker_id: str
    pid: int
    pipe: int
    offered: int = 0


def _write_for_ever(url: str, sampler: Sampler, context: Context, pipe: int) -> None:
    """Sample, tell of each offer that has returned, and write; until killed."""
    writer = SampleWriter(sampler, SampleStore.open(url), interval_seconds=0.005)
    os.write(pipe, sampler.worker_id.encode())
    writer.start()
    parent, rng = os.getppid(), random.Random(os.getpid())
    while os.getppid() == parent:
        sampler.offer(context, 1.0, time.time())
        os.write(pipe, b".")
        if rng.random() < 0.2:
            time.sleep(0.005)


@contextmanager
def _silence_has_passed() -> Iterator[None]:
    """Within, a process that has not written this instant is taken for dead."""
    usual = workers_module.SILENT_SECONDS
    workers_module.SILENT_SECONDS = 0.0
    try:
        yield
    finally:
        workers_module.SILENT_SECONDS = usual
