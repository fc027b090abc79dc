"""Reading a file that somebody named: all of it, if it is a file and no larger than expected."""

import errno
import os
import stat
from pathlib import Path

_PART_BYTES = 2**20


def read_regular(path: Path, limit_bytes: int) -> bytes:
    """The content of a regular file.

    A pipe that nobody writes to does not block, and a device is not read without end.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than the limit.
    """
    try:
        # Without O_NONBLOCK, to open a pipe waits for its writer. Windows has neither.
        flags = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | os.O_RDONLY
        descriptor = os.open(path, flags)
    except ValueError as error:
        raise OSError(errno.EINVAL, f"no name of a file ({error})", str(path)) from None
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        # To its end, for a file that grows meanwhile or has no size, as those in /proc. In parts:
        # memory for all that is asked for would be taken before anything is read.
        content = bytearray()
        if about.st_size <= limit_bytes:
            while len(content) <= limit_bytes and (part := file.read(_PART_BYTES)):
                content += part
    if max(about.st_size, len(content)) > limit_bytes:
        raise OSError(errno.EFBIG, f"over {limit_bytes / 2**20:g} MiB", str(path))
    return bytes(content)
