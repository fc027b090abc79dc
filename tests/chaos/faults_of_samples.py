"""What befalls samples on their way to the store, and those who judge them: no request notices."""

import ctypes
import resource
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from bookkeeping import Books
from children import begin_child, told_by_child
from scene import Scene, Seen, Size, all_of, most, until

from ctxguard.monitor.judges import Judgment, LabelJudge
from ctxguard.monitor.monitor import Monitor, Outcome
from ctxguard.monitor.records import Record
from ctxguard.monitor.sampler import Accounts, LostReason, accounts
from ctxguard.monitor.store import State
from ctxguard.monitor.store import database as database_module
from ctxguard.monitor.writer import Privacy, account_for_the_dead
from ctxguard.types import Passage

_MEBIBYTE = 2**20
_DISK_BYTES = {Size.SMALL: 8 * _MEBIBYTE, Size.FULL: 48 * _MEBIBYTE}
_NEW_MOUNTS = 0x00020000
_PRIVATE_MOUNTS = (1 << 14) | (1 << 18)
_NEVER_SECONDS = 3600.0


def queue_full(folder: Path, size: Size) -> Seen:
    """Nobody empties the queue."""
    capacity = 16
    scene = Scene(folder, size, capacity=capacity, interval_seconds=_NEVER_SECONDS)
    n = scene.n(50, 500)
    answers = all_of(scene.serve(n))
    before = scene.writer.accounts()
    return scene.finish(
        f"{before.pending} waited, {before.lost[LostReason.QUEUE_FULL]} lost as queue_full, "
        "the rest stored at the end",
        {
            "every request is answered": len(answers) == 2 * n,
            "the queue holds what it may": capacity <= before.pending <= capacity + 8,
            "the others are lost for that reason": before.lost[LostReason.QUEUE_FULL]
            == 2 * n - before.pending,
            "what waited is stored": scene.writer.flush()
            and scene.writer.accounts().stored == before.pending,
        },
    )


def disk_full(folder: Path, size: Size) -> Seen:
    """The store's disk fills up, is freed, and is full again when the process ends."""
    mounted = folder / "disk"
    mounted.mkdir()
    disk = _Disk(mounted, _DISK_BYTES[size])
    database_module.BUSY_SECONDS = 0.5
    scene = Scene(mounted, size, exit_seconds=1.0)
    n = scene.n(40, 400)
    scene.serve(n)
    scene.writer.flush(10.0)
    stored_before = scene.writer.accounts().stored
    disk.fill()
    scene.serve(n)
    noticed = until(lambda: any("samples wait for" in line for line in scene.log.lines))
    waiting = scene.writer.accounts()
    disk.free()
    freed = scene.writer.flush(20.0)
    after = scene.writer.accounts()
    ready, full = folder / "ready", folder / "full"

    def serve_on_a_full_disk() -> None:
        ready.touch()
        until(full.exists)
        disk.limit()
        scene.serve(n)

    child = begin_child(scene, serve_on_a_full_disk)
    until(ready.exists)
    disk.fill()
    full.touch()
    ended = told_by_child(child)
    beside = told_by_child(begin_child(scene, lambda: scene.serve(n)))
    disk.free()
    ended = settled(scene, ended)
    lost = {} if ended is None or ended.samples is None else _lost(ended.samples)
    return scene.finish(
        f"{disk}: {waiting.pending} waited while it was full, all stored once it was freed; a "
        f"process that ended on a full disk lost {most(lost)}",
        {
            "every request is answered": scene.tally.failed == scene.tally.shed == 0,
            "samples are stored before": stored_before == 2 * n,
            "wait while it is full": waiting.pending > 0 and not sum(waiting.lost.values()),
            "are stored once there is room": freed
            and (after.pending, sum(after.lost.values())) == (0, 0),
            "or lost for a reason when the process ends": set(lost) <= _AT_THE_END and bool(lost),
            "one that is forked on a full disk answers": beside is not None
            and beside.counted.ok == 2 * n,
            "the log says so": noticed
            and (not disk.is_small or "StoreFullError" in "".join(scene.log.lines)),
        },
        *([] if ended is None else [ended]),
        *([] if beside is None else [_gone(beside)]),
    )


_AT_THE_END = {LostReason.STORE_FAILED.value, LostReason.CLOSED.value, LostReason.KILLED.value}


def _lost(samples: Accounts) -> dict[str, int]:
    return {reason.value: n for reason, n in samples.lost.items() if n}


def _gone(books: Books) -> Books:
    """The books of a process that had no room for counts on the disk, as it told them itself.

    What it still had in hand died with it.
    """
    samples = books.samples
    assert samples is not None
    killed = samples.lost[LostReason.KILLED] + samples.pending
    lost = {**samples.lost, LostReason.KILLED: killed}
    return replace(books, samples=replace(samples, pending=0, lost=lost))


def settled(scene: Scene, books: Books | None) -> Books | None:
    """The books of a child that is gone, with its samples as the store was told of them."""
    if books is None:
        return None
    account_for_the_dead(scene.store, scene.folder / "samples.db.counts")
    (worker,) = [one for one in scene.store.workers() if one.worker_id == books.worker_id]
    samples = accounts(worker.sampled, worker.stored, worker.lost)
    wrong = list(books.wrong)
    if samples.pending or not worker.closed:
        wrong.append(f"{samples.pending} samples are pending of a process that is gone")
    if samples.sampled != books.counted.ok + books.counted.degraded:
        wrong.append(f"{samples.sampled} samples of {books.counted.ok} answers")
    rows = scene.store.stored_count(worker.worker_id)
    return replace(books, samples=samples, stored_rows=rows, wrong=tuple(wrong))


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


def redactor_raises(folder: Path, size: Size) -> Seen:
    """A redactor that fails on some texts."""
    marked = "swordfish"

    def redact(text: str) -> str:
        if marked in text:
            raise ValueError(f"cannot make sense of {text}")
        return text

    scene = Scene(folder, size, privacy=Privacy(redactor=redact))
    for number in range(0, len(scene.queries), 3):
        scene.queries[number] += f" {marked}"
    n = scene.n(40, 400)
    answers = all_of(scene.serve(n))
    secretive = sum(marked in answer.query for answer in answers)
    scene.writer.stop()
    lost = scene.writer.accounts().lost
    payloads = scene.store.payloads(range(1, 2 * n + 1)).values()
    written = "".join(str(Record.from_bytes(payload)) for payload in payloads)
    return scene.finish(
        f"{lost[LostReason.REDACTION_FAILED]} lost as redaction_failed, the others stored",
        {
            "every request is answered": len(answers) == 2 * n,
            "what could not be redacted is lost": lost[LostReason.REDACTION_FAILED]
            == sum(lost.values())
            == secretive
            > 0,
            "and was never written": marked not in written and len(payloads) == 2 * n - secretive,
            "nor logged": marked not in "\n".join(scene.log.lines),
        },
    )


def store_locked(folder: Path, size: Size) -> Seen:
    """Another process holds the store's lock, lets go, and holds it again at the end."""
    database_module.BUSY_SECONDS = 0.2
    scene = Scene(folder, size, exit_seconds=1.0)
    n = scene.n(40, 400)
    holder = _hold_lock(folder / "samples.db")
    scene.serve(n)
    stuck = until(lambda: any("StoreLockedError" in line for line in scene.log.lines), 20.0)
    waiting = scene.writer.accounts()
    holder.kill()
    holder.wait()
    freed = scene.writer.flush(20.0)
    after = scene.writer.accounts()
    holder = _hold_lock(folder / "samples.db")
    started = time.monotonic()
    books = told_by_child(begin_child(scene, lambda: scene.serve(n)))
    took = time.monotonic() - started
    holder.kill()
    holder.wait()
    ended = settled(scene, books)
    lost = {} if ended is None or ended.samples is None else _lost(ended.samples)
    return scene.finish(
        f"{waiting.pending} waited while it was locked, all stored then; a process that ended "
        f"while it was locked lost {most(lost)}",
        {
            "every request is answered": scene.tally.failed == scene.tally.shed == 0,
            "samples wait while it is locked": stuck
            and (waiting.pending, waiting.stored) == (2 * n, 0),
            "are stored once it is free": freed and (after.pending, after.stored) == (0, 2 * n),
            "or lost for a reason when the process ends": set(lost) <= _AT_THE_END
            and sum(lost.values()) == 2 * n,
            "which it does in time": took < 30.0,
        },
        *([] if ended is None else [ended]),
    )


def _hold_lock(file: Path) -> "subprocess.Popen[str]":
    holder = subprocess.Popen(
        [sys.executable, __file__, str(file)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    return holder


def hold_lock(file: str) -> None:
    """Take the write lock, say so, and keep it."""
    connection = sqlite3.connect(file, isolation_level=None, timeout=30.0)
    connection.execute("BEGIN IMMEDIATE")
    sys.stdout.write("held\n")
    sys.stdout.flush()
    time.sleep(_NEVER_SECONDS)


class DownNowAndThen:
    """A judge that knows the labels, while it can be reached."""

    version = "1"
    exact = True
    name = "labels behind a network"

    def __init__(self, inner: LabelJudge) -> None:
        self._inner = inner
        self.max_grade = inner.max_grade
        self.is_down = False

    def judge(self, query: str, passages: Sequence[Passage]) -> Sequence[Judgment | None]:
        if self.is_down:
            raise ConnectionError(f"no route to the judge of {query}")
        return self._inner.judge(query, passages)


def judge_down(folder: Path, size: Size) -> Seen:
    """The judge cannot be reached while requests come, and then can."""
    scene = Scene(folder, size)
    qrels = {query: {"p00001": 1} for query in scene.queries}
    judge = DownNowAndThen(LabelJudge(qrels))
    monitor = Monitor(scene.store, judge)
    monitor.start(interval_seconds=0.02, refresh_seconds=0.1)
    n = scene.n(20, 200)
    scene.serve(n)
    up = until(lambda: monitor.report().outcomes[Outcome.JUDGED] == 2 * n, 60.0)
    judge.is_down = True
    scene.serve(n)
    noticed = until(lambda: monitor.report().outcomes[Outcome.JUDGE_FAILED] > 0)
    while_down = monitor.report()
    judge.is_down = False
    scene.writer.flush()
    caught_up = until(lambda: monitor.report().waiting == 0, 60.0)
    after = monitor.report()
    monitor.stop()
    states = scene.store.states()
    gone = states.get(State.FAILED, 0)
    return scene.finish(
        f"{while_down.outcomes[Outcome.JUDGE_FAILED]} attempts failed, {while_down.waiting} "
        f"waited, then {states[State.JUDGED]} judged and {gone} given up after five attempts",
        {
            "every request is answered": scene.tally.failed == scene.tally.shed == 0,
            "samples are judged before": up,
            "wait while it is down": noticed and while_down.waiting > 0,
            "and are judged once it is up, or given up and counted": caught_up
            and states[State.JUDGED] + gone == 4 * n
            and states[State.JUDGED] >= 3 * n,
            "the monitor's accounts are the writer's": after.accounts.sampled == 4 * n,
        },
    )


if __name__ == "__main__":
    hold_lock(sys.argv[1])
