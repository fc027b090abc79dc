"""The files beside a SQLite store: its reserve of disk space, and where damaged ones go.

The database file itself is never opened here: closing any descriptor of it would drop the locks
that SQLite holds in this process.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system: locks are left to SQLite
    fcntl = None  # type: ignore[assignment]

Identity = tuple[int, int]

CHECKPOINT_PAGES = 1_000
"""How long the log grows before it is moved into the file: what the reserve has to have room for,
since a full disk takes no log into a growing file."""

JOURNAL_BYTES = 16 * 2**20
"""The log may grow in a burst; it is cut back to this."""


def identity(file: Path) -> Identity | None:
    """Which file bears a name; None where none does."""
    try:
        found = os.stat(file)  # noqa: PTH116  asked before every transaction
    except OSError:
        return None
    return found.st_dev, found.st_ino


def quarantine(file: Path, seen: Identity | None) -> Path | None:
    """Move a damaged database aside, with its log; nothing is deleted.

    Args:
        file: The database.
        seen: The file in which the damage was seen.

    Returns:
        Where it lies now; None where another process has moved it already.

    Raises:
        OSError: it cannot be moved.
    """
    with _locked(file.parent):
        if seen is not None and identity(file) != seen:
            return None
        n = 1
        while (moved := file.with_name(f"{file.name}.corrupt-{n}")).exists():
            n += 1
        # The log first: the name must not pair a new database with an old log.
        for ending in ("-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                file.with_name(file.name + ending).rename(moved.with_name(moved.name + ending))
    return moved


def quarantined(file: Path) -> Path | None:
    """The damaged database that was moved aside last, if it still lies there."""
    prefix = f"{file.name}.corrupt-"
    numbers = [
        int(number)
        for found in file.parent.glob(f"{_escaped(prefix)}*")
        if (number := found.name.removeprefix(prefix)).isdecimal()
    ]
    return file.with_name(f"{prefix}{max(numbers)}") if numbers else None


def _escaped(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


class Reserve:
    """Disk space that a file beside the database holds, given up while a full disk is cleaned.

    A full disk has no room even for what deletes. While the space is given up nobody may fill it
    with samples, so that what is deleted is not outrun by what arrives.

    Args:
        database: The file beside which it lies.
        size: In bytes; 0 for none.
    """

    def __init__(self, database: Path, size: int) -> None:
        self.path = database.with_name(database.name + "-reserve")
        self.size = size

    def hold(self, *, resize: bool = False) -> bool:
        """Take the space where it is not held.

        Args:
            resize: Whether a reserve of another size is brought to this one's.

        Returns:
            Whether it is held; False where the disk has no room or someone is cleaning.
        """
        held = self._held()
        if self.size in (0, held) or (held > 0 and not resize):
            return True
        try:
            with _locked(self.path, wait=False) as descriptor:
                return _allocate(descriptor, self.size)
        except OSError:
            # Read-only places cannot be filled either; all others will say so when written to.
            return False

    @contextlib.contextmanager
    def given_up(self) -> Iterator[None]:
        """Within, the space is free for whoever cleans; held again afterwards, if there is room.

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
            return os.stat(self.path).st_size  # noqa: PTH116  asked before every append
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
    """A descriptor of a file or folder under an exclusive lock, which dies with the process."""
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags, 0o644)
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield descriptor
    finally:
        os.close(descriptor)
