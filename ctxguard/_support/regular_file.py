"""Reads a file that a user named, if it is regular and within a size limit; detects changes."""

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

_PART_BYTES = 2**20

FileVersion = tuple[int, int, int]
"""Modification time in ns, size in bytes, inode."""


def file_version(file: Path) -> FileVersion | None:
    """Return a value that changes when a file is written or replaced; None without the file."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


@contextmanager
def open_regular(path: Path, limit_bytes: int = sys.maxsize) -> Iterator[BufferedReader]:
    """Open a regular file for reading, of any size unless there is a limit.

    A pipe without a writer does not block, and a device is never read endlessly.

    Raises:
        OSError: it cannot be opened, is not a regular file, or is larger than the limit.
    """
    try:
        # Without O_NONBLOCK, to open a pipe waits for its writer. Windows has neither.
        flags = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | os.O_RDONLY
        descriptor = os.open(path, flags)
    except ValueError as error:
        raise OSError(errno.EINVAL, f"not a valid file name ({error})", str(path)) from None
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if about.st_size > limit_bytes:
            raise _too_large(path, limit_bytes)
        yield file


def read_regular(path: Path, limit_bytes: int) -> bytes:
    """Read a regular file; errors as for ``open_regular``."""
    # To its end, for a file that grows meanwhile or has no size, as those in /proc. In parts:
    # memory for all that is asked for would be taken before anything is read.
    content = bytearray()
    with open_regular(path, limit_bytes) as file:
        while part := file.read(_PART_BYTES):
            content += part
            if len(content) > limit_bytes:
                raise _too_large(path, limit_bytes)
    return bytes(content)


def _too_large(path: Path, limit_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"over {limit_bytes / 2**20:g} MiB", str(path))
