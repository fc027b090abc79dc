"""Reading a file that somebody named: all of it, if it is a file and no larger than expected."""

import errno
import os
import stat
from pathlib import Path


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
        # Read to one more, for a file that grows meanwhile or has no size, as those in /proc.
        content = b"" if about.st_size > limit_bytes else file.read(limit_bytes + 1)
    if about.st_size > limit_bytes or len(content) > limit_bytes:
        raise OSError(errno.EFBIG, f"over {limit_bytes / 2**20:g} MiB", str(path))
    return content
