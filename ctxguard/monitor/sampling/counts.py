"""Counters of one process that survive if it is killed.

They are in a memory-mapped file, whose pages belong to the system and not to the process, so that
what was counted before a SIGKILL is there after it. Every thread writes to its own slot, so that
counting takes no lock. The process holds a lock on the file, which the system releases however the
process ends: an unlocked file is that of a dead process.

Neighbours on the host are not trusted: the folder is its user's alone, and a file that another user
wrote, or that this module cannot have written, is left alone.
"""

import fcntl
import mmap
import os
import stat
import struct
import threading
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from ctxguard.errors import ConfigurationError

_MAGIC = b"ctxcount"
_HEADER = struct.Struct("<8sII32s")
_HEADER_BYTES = 64
_SLOTS = 1024
_SUFFIX = ".counts"
_MOST_COUNTERS = 64
_MOST = 2**53
"""More than any process counts; sums of it stay within the store's integers."""


class Counts:
    """Counters of this process.

    Args:
        n: How many counters.
        folder: Folder of the file; None keeps the counters in memory.

    Raises:
        ConfigurationError: the folder cannot be written to, or others can write to it.

    Attributes:
        worker_id: Unique id of this process's counts, 32 hexadecimal digits.

    >>> counts = Counts(2)
    >>> counts.count(1), counts.count(1), counts.totals()
    (None, None, [0, 2])
    """

    def __init__(self, n: int, folder: Path | str | None = None) -> None:
        self.n = n
        self.worker_id = uuid4().hex
        size = _HEADER_BYTES + 8 * n * _SLOTS
        self._descriptor: int | None = None
        self._path = None if folder is None else Path(folder) / f"{self.worker_id}{_SUFFIX}"
        self._map = mmap.mmap(-1, size) if self._path is None else self._open(self._path, size)
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, n, _SLOTS, self.worker_id.encode())
        self._values = memoryview(self._map)[_HEADER_BYTES:].cast("q")
        self._mine = threading.local()
        # The first slot is shared, under a lock, by threads that find no free slot.
        self._overflow = threading.Lock()
        self._free = [n * slot for slot in range(_SLOTS - 1, 0, -1)]

    def _open(self, path: Path, size: int) -> mmap.mmap:
        descriptor = None
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_private(path.parent)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            # Locked before it has a size, and an empty file is left alone by others.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if descriptor is not None:
                path.unlink()
                os.close(descriptor)
            raise ConfigurationError(
                f"{path}: {error.strerror}; the counts of sampled requests need a folder that "
                "can be written to"
            ) from error
        self._descriptor = descriptor
        return mmap.mmap(descriptor, size)

    def count(self, counter: int, by: int = 1) -> None:
        """Add to a counter."""
        try:
            slot = self._mine.slot
        except AttributeError:
            slot = self._mine.slot = _Slot(self._free)
        if slot.base:
            self._values[slot.base + counter] += by
        else:
            with self._overflow:
                self._values[counter] += by

    def total(self, counter: int) -> int:
        """One counter over all threads."""
        return sum(self._values[counter :: self.n])

    def totals(self) -> list[int]:
        """Every counter over all threads."""
        return [self.total(counter) for counter in range(self.n)]

    def leave(self, *, remove: bool = False) -> None:
        """Close the file and count in memory; for a forked child, and when all is stored.

        A forked child shares the lock, which ends when the last descriptor is closed. The map
        has a descriptor of its own.

        Args:
            remove: Whether nobody needs the file any more.
        """
        if self._descriptor is None:
            return
        if remove and self._path is not None:
            with suppress(OSError):
                self._path.unlink()
        mapped, self._values = self._values, memoryview(array("q", self._values))
        mapped.release()
        self._map.close()
        os.close(self._descriptor)
        self._descriptor = None


def _require_private(folder: Path) -> None:
    """Raise ConfigurationError for a folder in which others could put or change files."""
    status = folder.stat(follow_symlinks=False)
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigurationError(
            f"{folder} must belong to user {os.geteuid()}, and no other may write to it, as it "
            "holds the counts of sampled requests: remove it, or chmod 700 it"
        )


class _Slot:
    """A thread's slot; free again when the thread ends, with what was counted in it."""

    def __init__(self, free: list[int]) -> None:
        self._free = free
        try:
            self.base = free.pop()
        except IndexError:
            self.base = 0

    def __del__(self) -> None:
        if self.base:
            self._free.append(self.base)


@dataclass(frozen=True, slots=True)
class DeadCounts:
    """The counts of a process that has ended."""

    worker_id: str
    totals: tuple[int, ...]


def counts_of_dead_processes(folder: Path | str) -> Iterator[DeadCounts]:
    """The counts of processes that were killed; each file is removed after it was yielded.

    A file that another process is reading, that is damaged, or that another user owns is left
    alone.
    """
    # Opening a named pipe would wait for a writer, without O_NONBLOCK.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    for path in sorted(Path(folder).glob(f"*{_SUFFIX}")):
        try:
            descriptor = os.open(path, flags)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            counts = _read(descriptor)
            # A file without a name was handled by the process that held the lock before.
            if counts is None or os.fstat(descriptor).st_nlink == 0:
                continue
            if counts.worker_id != path.stem:
                continue
            yield counts
            path.unlink(missing_ok=True)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)


def _read(descriptor: int) -> DeadCounts | None:
    """The counts in a file; None where ``Counts`` of this user cannot have written it."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        return None
    header = os.pread(descriptor, _HEADER_BYTES, 0)
    if len(header) < _HEADER_BYTES:
        return None
    magic, n, slots, worker_id = _HEADER.unpack_from(header)
    if magic != _MAGIC or slots != _SLOTS or not 0 < n <= _MOST_COUNTERS:
        return None
    size = 8 * n * slots
    content = os.pread(descriptor, size, _HEADER_BYTES)
    if len(content) != size or status.st_size != _HEADER_BYTES + size:
        return None
    values = memoryview(content).cast("q")
    if not all(0 <= value <= _MOST for value in values):
        return None
    totals = tuple([sum(values[counter::n]) for counter in range(n)])
    return DeadCounts(worker_id.decode("ascii", "replace"), totals)
