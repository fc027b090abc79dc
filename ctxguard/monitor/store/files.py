"""The files beside a SQLite store: reserved disk space, and damaged files moved aside.

A database file that is there is never opened here: closing any descriptor of it would release the
locks that SQLite holds in this process.
"""

import contextlib
import glob
import os
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system: locks are left to SQLite
    fcntl = None  # type: ignore[assignment]

Identity = tuple[int, int]

_PRIVATE = 0o600
"""Samples hold what users asked."""

CHECKPOINT_PAGES = 1_000
"""Size of the log at which it is moved into the file. The reserve needs room for as much, since on
a full disk the file cannot grow."""

JOURNAL_BYTES = 16 * 2**20
"""Size to which the log is truncated after a burst."""


def identity(file: Path) -> Identity | None:
    """The device and inode of a file; None if there is none."""
    try:
        status = os.stat(file)  # noqa: PTH116  called before every transaction
    except OSError:
        return None
    return status.st_dev, status.st_ino


def make_private(file: Path) -> None:
    """Make an empty database that only this user can read, where there is none.

    SQLite gives its log the same permissions. Those of a file that is there are its owner's
    choice.
    """
    # Opening the database says what is wrong with the folder.
    with contextlib.suppress(OSError):
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        os.close(os.open(os.path.realpath(file), flags, _PRIVATE))


@contextlib.contextmanager
def kept_in_place(file: Path) -> Iterator[None]:
    """Within, no other process moves the database or its log aside.

    Where the folder cannot be opened nothing is kept: opening the database says what is wrong.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(_locked(file.parent))
        yield


def quarantine(file: Path, seen: Identity | None) -> Path | None:
    """Move a damaged database aside, with its log; nothing is deleted.

    Args:
        file: The database.
        seen: The identity of the file in which the damage was seen.

    Returns:
        Its new path; None if another process has moved it already.

    Raises:
        OSError: it cannot be moved.
    """
    with _locked(file.parent):
        if seen is not None and identity(file) != seen:
            return None
        n = 1
        while (moved := file.with_name(f"{file.name}.corrupt-{n}")).exists():
            n += 1
        # The log first, so that a new database is never paired with an old log.
        for ending in ("-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                file.with_name(file.name + ending).rename(moved.with_name(moved.name + ending))
    return moved


def quarantined(file: Path) -> Path | None:
    """The damaged database that was moved aside last, if it is still there."""
    prefix = f"{file.name}.corrupt-"
    numbers = [
        int(number)
        for path in file.parent.glob(f"{glob.escape(prefix)}*")
        if (number := path.name.removeprefix(prefix)).isdecimal()
    ]
    return file.with_name(f"{prefix}{max(numbers)}") if numbers else None


class Reserve:
    """Disk space that a file beside the database reserves, freed while a full disk is cleaned.

    Deleting needs space too. While the reserved space is free no samples are stored, so that
    deletion is not outrun.

    Args:
        database: The database file.
        size: Bytes to reserve; 0 for none.
    """

    def __init__(self, database: Path, size: int) -> None:
        self.path = database.with_name(database.name + "-reserve")
        self.size = size

    def hold(self, *, resize: bool = False) -> bool:
        """Reserve the space unless it is reserved.

        Args:
            resize: Whether a reserve of another size is changed to this size.

        Returns:
            Whether it is reserved; False if the disk has no room or another process is cleaning.
        """
        held = self._held()
        if self.size in (0, held) or (held > 0 and not resize):
            return True
        try:
            with _locked(self.path, wait=False) as descriptor:
                return _allocate(descriptor, self.size)
        except OSError:
            # A read-only place cannot be filled either; any other will fail when written to.
            return False

    @contextlib.contextmanager
    def given_up(self) -> Iterator[None]:
        """Within, the space is free for cleaning; reserved again afterwards, if there is room.

        Raises:
            OSError: another process is cleaning, or the file cannot be reached.
        """
        if self.size == 0:
            yield
            return
        with _locked(self.path, wait=False) as descriptor:
            os.ftruncate(descriptor, 0)
            try:
                yield
            finally:
                _allocate(descriptor, self.size)

    def _held(self) -> int:
        try:
            return os.stat(self.path).st_size  # noqa: PTH116  called before every append
        except OSError:
            return 0


def _allocate(descriptor: int, size: int) -> bool:
    try:
        os.ftruncate(descriptor, min(size, os.fstat(descriptor).st_size))
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            for start in range(0, size, 2**20):
                os.pwrite(descriptor, bytes(min(2**20, size - start)), start)
    except OSError:
        os.ftruncate(descriptor, 0)
        return False
    return True


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[int]:
    """A descriptor of a file or folder under an exclusive lock, which ends with the process."""
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags, _PRIVATE)
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield descriptor
    finally:
        os.close(descriptor)
