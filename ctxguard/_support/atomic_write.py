"""Replaces a file atomically, and removes leftovers of killed writers next to it.

A temporary file or folder is locked while it is written. The system releases the lock of a process
that was killed, so that the next writer of the same name can tell leftovers from work in progress.
Writes only in the folder of the file, which it creates, with its ancestors, if it is missing.
"""

import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

if sys.platform != "win32":  # There nothing is locked, and nothing cleared.
    import fcntl

PRIVATE, PRIVATE_FOLDER = 0o600, 0o700
"""Permissions of files and folders that only their owner may read."""
SHARED = 0o644
"""Permissions of files that hold no texts and that a service reads as another user."""


@contextmanager
def atomic_write(path: Path, *, mode: int = PRIVATE) -> Iterator[BinaryIO]:
    """Write a file beside ``path``, and at the end of the block replace ``path`` with it.

    A reader sees the old file or the new one, never half of it. If the block or the writing
    raises, the file at ``path`` is unchanged and the one beside it is deleted. One that a killed
    writer left is deleted too. A missing folder is created.

    Args:
        path: The file to write.
        mode: Permissions of the new file, by default its owner's alone: most files hold
            texts, or facts about them. Whoever may read the file may enter its new folder.

    Raises:
        OSError: the file cannot be written or replaced.
    """
    path.parent.mkdir(mode=0o300 | mode | (mode & 0o444) >> 2, parents=True, exist_ok=True)
    prefix = f".{path.name}."
    clear_abandoned(path.parent, prefix)
    descriptor, temporary = _new_temporary(path.parent, prefix)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            if sys.platform == "win32":  # Windows replaces no open file
                stream.close()
            temporary.chmod(mode)
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _new_temporary(folder: Path, prefix: str) -> tuple[int, Path]:
    """Make a new file, open and locked."""
    while True:
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=prefix)
        # Another process may have taken it for abandoned before it was locked.
        if lock(descriptor) and os.fstat(descriptor).st_nlink:
            return descriptor, Path(name)
        os.close(descriptor)


def lock(descriptor: int) -> bool:
    """Lock an open file or folder until it is closed; False if another process holds the lock.

    True on systems without locks, where nothing is cleared either.
    """
    if sys.platform != "win32":
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass
    return True


def clear_abandoned(folder: Path, prefix: str) -> None:
    """Delete the temporary files and folders with this prefix that no living process has locked."""
    named_by_tempfile = re.compile(re.escape(prefix) + "[a-z0-9_]{8}")
    with suppress(OSError):
        for entry in list(folder.iterdir()):
            if named_by_tempfile.fullmatch(entry.name):
                with suppress(OSError):
                    _delete_if_abandoned(entry)


def _delete_if_abandoned(entry: Path) -> None:
    if sys.platform == "win32":
        return
    descriptor = os.open(entry, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink()
    finally:
        os.close(descriptor)
