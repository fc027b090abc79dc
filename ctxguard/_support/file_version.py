"""Tells whether a file is still the one that was read."""

from pathlib import Path

FileVersion = tuple[int, int, int]
"""Modification time in ns, size in bytes, inode."""


def file_version(file: Path) -> FileVersion | None:
    """Return a value that changes when a file is written or replaced.

    Returns:
        None if there is no such file, or it cannot be looked at.
    """
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
