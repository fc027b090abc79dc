"""Arrays that may be larger than memory, and the blocks of rows in which they are written."""

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ctxguard.errors import IndexFolderError
from ctxguard.retrieval.protocols import RowArray

IN_MEMORY_BYTES = 16 * 2**20
"""A larger array lies in a file."""

BLOCK_BYTES = 8 * 2**20


class Growing:
    """An array that is written in order: in memory, or in a file once it is large.

    The file has no name: it goes with the array, even if the process is killed. It lies in TMPDIR
    or else in /var/tmp, which unlike /tmp is on a disk.

    Args:
        dtype: The type of its elements.
    """

    def __init__(self, dtype: DTypeLike) -> None:
        self._dtype, self._row_shape = np.dtype(dtype), tuple[int, ...]()
        self._chunks: list[bytes] = []
        self._n_bytes = 0
        self._file: IO[bytes] | None = None

    def extend(self, rows: NDArray[Any] | bytes) -> None:
        """Append rows, or the bytes of elements.

        Raises:
            IndexFolderError: the file cannot be written.
        """
        if not isinstance(rows, bytes):
            self._row_shape = rows.shape[1:]
            rows = rows.astype(self._dtype, copy=False).tobytes()
        self._n_bytes += len(rows)
        self._chunks.append(rows)
        if self._file is None and self._n_bytes > IN_MEMORY_BYTES:
            self._file = _unnamed_file()
        if self._file is not None:
            self._write(self._file)

    def _write(self, file: IO[bytes]) -> None:
        try:
            file.writelines(self._chunks)
            file.flush()
        except OSError as error:
            raise IndexFolderError(
                f"an index is put together in files, and one could not be written ({error}); set "
                "TMPDIR to a folder with room for the index"
            ) from error
        self._chunks = []

    def buffer(self) -> bytes | mmap.mmap:
        """Return all that was written; nothing can be appended any more."""
        if self._file is not None:
            with self._file as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        written, self._chunks = b"".join(self._chunks), []
        return written

    def array(self) -> NDArray[Any]:
        """Return all that was written as a read-only array, as `buffer` does."""
        return np.frombuffer(self.buffer(), self._dtype).reshape(-1, *self._row_shape)


def _unnamed_file() -> IO[bytes]:
    folder = os.environ.get("TMPDIR") or "/var/tmp"  # noqa: S108 - the file has no name there
    return tempfile.TemporaryFile(dir=folder if os.access(folder, os.W_OK) else None)


def collected(dtype: DTypeLike, parts: Iterable[NDArray[Any]]) -> NDArray[Any]:
    """Concatenate arrays, which may together be larger than memory, read-only."""
    whole = Growing(dtype)
    for part in parts:
        whole.extend(part)
    return whole.array()


def blocks(
    sizes: NDArray[Any], most_bytes: int = BLOCK_BYTES, most_rows: int | None = None
) -> Iterator[RowArray]:
    """Yield all rows in order, so many at a time that they take a bounded number of bytes.

    Args:
        sizes: The bytes of each row, shape (n,). A larger one comes alone.
        most_bytes: The most bytes of a block.
        most_rows: The most rows of a block; None for any number.

    >>> [rows.tolist() for rows in blocks(np.array([1, 2, 1, 9, 1]), most_bytes=3)]
    [[0, 1], [2], [3], [4]]
    """
    ends, first = np.cumsum(sizes, dtype=np.int64), 0
    while first < ends.size:
        room = int(ends[first - 1] if first else 0) + most_bytes
        end = max(int(np.searchsorted(ends, room, "right")), first + 1)
        end = end if most_rows is None else min(end, first + most_rows)
        yield np.arange(first, end)
        first = end
