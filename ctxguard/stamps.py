"""Whether a file is still the one that was read."""

from pathlib import Path

Stamp = tuple[int, int, int]


def file_stamp(file: Path) -> Stamp | None:
    """What changes when a file is written or replaced: its time in ns, size and inode.

    None where there is no such file, or it cannot be looked at.
    """
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
