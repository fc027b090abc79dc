"""Detects whether a file has changed since it was read."""

from pathlib import Path

FileVersion = tuple[int, int, int]
"""Modification time in ns, size in bytes, inode."""


def file_version(file: Path) -> FileVersion | None:
    """Return a value that changes when a file is written or replaced.

    Returns:
        None if the file does not exist or cannot be examined.
    """
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
