"""The store or the judge fails under load: samples wait or are lost by reason, requests go on."""

import ctypes
import resource
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path

from accounting import ProcessAccounts
from serving import PATIENCE_SECONDS, Report, ServingProcess, Size, fault, in_words, until

from ctxguard.core.types import Passage
from ctxguard.monitor.judges import Judgment, LabelJudge
from ctxguard.monitor.sampling.sampler import LostReason
from ctxguard.monitor.service import JudgingOutcome, Monitor
from ctxguard.monitor.store import State
from ctxguard.monitor.store import engine as engine_module

_MEBIBYTE = 2**20
_DISK_BYTES = {Size.SMALL: 8 * _MEBIBYTE, Size.FULL: 48 * _MEBIBYTE}
_NEW_MOUNTS = 0x00020000
_PRIVATE_MOUNTS = (1 << 14) | (1 << 18)
_NEVER_SECONDS = 3600.0


@fault(
    "disk full", "samples wait, are stored once there is room, or lost as store_failed at the end"
)
def _disk_full(folder: Path, size: Size) -> Report:
    """The store's disk fills up, is freed, and is full again when the process ends."""
    mounted = folder / "disk"
    mounted.mkdir()
    disk = _Disk(mounted, _DISK_BYTES[size])
    engine_module.BUSY_SECONDS = 0.5
    serving = ServingProcess(mounted, size, exit_seconds=1.0)
    n = serving.by_size(40, 400)
    serving.serve(n)
    serving.writer.flush(PATIENCE_SECONDS)
    stored_before = serving.writer.accounts().stored
    disk.fill()
    serving.serve(n)
    noticed = until(lambda: "samples wait for" in serving.log)
    waiting = serving.writer.accounts()
    disk.free()
    freed = serving.writer.flush(PATIENCE_SECONDS)
    after = serving.writer.accounts()
    ready, full = folder / "ready", folder / "full"

    def serve_on_a_full_disk() -> None:
        ready.touch()
        until(full.exists)
        disk.limit()
        serving.serve(n)

    child = serving.fork(serve_on_a_full_disk)
    until(ready.exists)
    disk.fill()
    full.touch()
    ended, beside = child(), serving.fork(lambda: serving.serve(n))()
    disk.free()
    lost = _lost(ended)
    return serving.finish(
        f"{disk}: {waiting.pending} waited while it was full, all stored once it was freed; a "
        f"process that ended on a full disk lost {in_words(lost)}",
        {
            "samples are stored before": stored_before == 2 * n,
            "wait while it is full": waiting.pending > 0 and not sum(waiting.lost.values()),
            "are stored once there is room": freed
            and (after.pending, sum(after.lost.values())) == (0, 0),
            "or lost for a reason when the process ends": set(lost) <= _AT_THE_END and bool(lost),
            "one that is forked on a full disk answers": beside is not None
            and beside.metrics["ok"] == 2 * n,
            "the log says so": noticed and (not disk.is_small or "StoreFullError" in serving.log),
        },
        ended,
        beside,
    )


_AT_THE_END = {LostReason.STORE_FAILED.value, LostReason.CLOSED.value}


def _lost(ended: ProcessAccounts | None) -> dict[str, int]:
    return {} if ended is None else {why.value: n for why, n in ended.samples.lost.items() if n}


class _Disk:
    """A disk of few megabytes, which goes with this process; else a limit on each file's size."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self._filler = folder / "of another program"
        libc = ctypes.CDLL(None, use_errno=True)
        options = f"size={size_bytes}".encode()
        self.is_small = (
            hasattr(libc, "unshare")
            and libc.unshare(_NEW_MOUNTS) == 0
            and libc.mount(b"none", b"/", None, _PRIVATE_MOUNTS, None) == 0
            and libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, options) == 0
        )
        self._usual = resource.getrlimit(resource.RLIMIT_FSIZE)

    def __str__(self) -> str:
        return "a small disk" if self.is_small else "files that may not grow"

    def fill(self) -> None:
        """From now on nothing can be written any more."""
        self.limit()
        if not self.is_small:
            return
        with suppress(OSError), self._filler.open("wb", buffering=0) as content:
            while True:
                content.write(bytes(4096))

    def limit(self) -> None:
        """Where it is a limit that stands for the disk, each process has its own."""
        if not self.is_small:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, self._usual[1]))

    def free(self) -> None:
        """There is room again."""
        if self.is_small:
            self._filler.unlink()
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._usual)


@fault(
    "store locked by another process",
    "samples wait, are stored once it is free, or lost as store_failed at the end",
)
def _store_locked(folder: Path, size: Size) -> Report:
    """Another process holds the store's lock, lets go, and holds it again at the end."""
    engine_module.BUSY_SECONDS = 0.2
    serving = ServingProcess(folder, size, exit_seconds=1.0)
    n = serving.by_size(40, 400)
    with _locked(folder / "samples.db"):
        serving.serve(n)
        stuck = until(lambda: "StoreLockedError" in serving.log)
        waiting = serving.writer.accounts()
    freed = serving.writer.flush(PATIENCE_SECONDS)
    after = serving.writer.accounts()
    with _locked(folder / "samples.db"):
        ended = serving.fork(lambda: serving.serve(n))()
    lost = _lost(ended)
    return serving.finish(
        f"{waiting.pending} waited while it was locked, all stored then; a process that ended "
        f"while it was locked lost {in_words(lost)}",
        {
            "samples wait while it is locked": stuck
            and (waiting.pending, waiting.stored) == (2 * n, 0),
            "are stored once it is free": freed and (after.pending, after.stored) == (0, 2 * n),
            "or lost for a reason when the process ends": set(lost) <= _AT_THE_END
            and sum(lost.values()) == 2 * n,
        },
        ended,
    )


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Another process has taken the write lock, and keeps it."""
    spawning = get_context("spawn")
    held = spawning.Event()
    holder = spawning.Process(target=_hold_lock, args=(file, held))
    holder.start()
    held.wait(PATIENCE_SECONDS)
    yield
    holder.kill()
    holder.join()


def _hold_lock(file: Path, held: Event) -> None:
    connection = sqlite3.connect(file, isolation_level=None, timeout=PATIENCE_SECONDS)
    connection.execute("BEGIN IMMEDIATE")
    held.set()
    time.sleep(_NEVER_SECONDS)


class DownNowAndThen(LabelJudge):
    """A judge that knows the labels, while it can be reached."""

    is_down = False

    def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment | None]:
        if self.is_down:
            raise ConnectionError(f"no route to the judge of {query}")
        return super().judge(query, passages)


@fault("judge down during load", "samples wait, and are judged when it is back")
def _judge_down(folder: Path, size: Size) -> Report:
    """The judge cannot be reached while requests come, and then can."""
    serving = ServingProcess(folder, size)
    judge = DownNowAndThen({query: {"p00001": 1} for query in serving.queries})
    monitor = Monitor(serving.store, judge)
    monitor.start(interval_seconds=0.02, refresh_seconds=0.1)
    n = serving.by_size(20, 200)
    serving.serve(n)
    up = until(lambda: monitor.report().outcomes[JudgingOutcome.JUDGED] == 2 * n)
    judge.is_down = True
    serving.serve(n)
    noticed = until(lambda: monitor.report().outcomes[JudgingOutcome.JUDGE_FAILED] > 0)
    while_down = monitor.report()
    judge.is_down = False
    serving.writer.flush()
    caught_up = until(lambda: monitor.report().waiting == 0)
    after = monitor.report()
    monitor.stop()
    states = serving.store.states()
    gone = states[State.INCOMPLETE]
    return serving.finish(
        f"{while_down.outcomes[JudgingOutcome.JUDGE_FAILED]} attempts failed, {while_down.waiting} "
        f"waited, then {states[State.JUDGED]} judged and {gone} to be asked about again",
        {
            "samples are judged before": up,
            "wait while it is down": noticed and while_down.waiting > 0,
            "and are judged once it is up, or asked about again later": caught_up
            and states[State.JUDGED] + gone == 4 * n
            and states[State.JUDGED] >= 3 * n,
            "the monitor's accounts are the writer's": after.accounts.sampled == 4 * n,
        },
    )
