"""Replacing a file in one step."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path, *, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Write a file beside ``path``, and at the end of the block replace ``path`` by it.

    A reader sees the old file or the new one, never half of it. If the block or the writing
    raises, the file at ``path`` is unchanged and the one beside it is deleted.

    Args:
        path: The file to write; its folder must exist.
        mode: Permissions of the new file.

    Yields:
        A binary stream for the new content.

    Raises:
        OSError: the file cannot be written or replaced.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
