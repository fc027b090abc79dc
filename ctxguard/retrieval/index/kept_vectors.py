"""Keeps an unfinished index's vectors in a file, so that an interrupted build can resume.

The file begins with a mark of the model. Then come blocks: the number of vectors and a checksum,
the digests of the texts, their vectors. An incompletely written block ends the file.
"""

import errno
import hashlib
import os
import stat
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np

from ctxguard._support.atomic_write import PRIVATE, lock
from ctxguard.retrieval.protocols import Embedder, Float32Array, Progress

MOST_BYTES = 2**33
"""Nothing more is kept in a file of this size."""

_HEAD = struct.Struct("<II")
_DIGEST_BYTES = 16
_MOST_AT_ONCE = 4_096


class KeptVectors(AbstractContextManager["KeptVectors"]):
    """An embedder that saves passages' vectors, and reuses those already saved.

    Vectors of another model are dropped. While another process uses the file, nothing is saved.

    Args:
        embedder: Encodes the others.
        file: Created, readable only by its owner, if it does not exist.

    Attributes:
        n_found: Number of vectors from earlier runs.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """

    def __init__(self, embedder: Embedder, file: Path) -> None:
        self._embedder, self._file = embedder, file
        self._at: dict[bytes, int] = {}
        self._vector_bytes = 4 * embedder.dimension
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        descriptor = os.open(file, flags | getattr(os, "O_NONBLOCK", 0), PRIVATE)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file", str(file))
        self._stream: BinaryIO = os.fdopen(descriptor, "r+b")
        self._is_ours = lock(descriptor)
        if self._is_ours:
            self._read()
        self.n_found = len(self._at)

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def delete(self) -> None:
        """Delete the file: the index is saved."""
        if self._is_ours:
            self._file.unlink(missing_ok=True)

    def __len__(self) -> int:
        return len(self._at)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._embedder, name)

    @property
    def name(self) -> str:
        """The name of the model."""
        return self._embedder.name

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return self._embedder.dimension

    def fingerprint(self) -> str:
        """Return the digest of the model's weights."""
        return self._embedder.fingerprint()

    def encode_query(self, text: str) -> Float32Array:
        """Encode a query as one unit vector, shape (dimension,)."""
        return self._embedder.encode_query(text)

    def encode_passages(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float32Array:
        """Encode passages, saving the new ones; shape (n, dimension)."""
        digests = [
            hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).digest()
            for text in texts
        ]
        new = [row for row, each in enumerate(digests) if each not in self._at]
        made = (
            self._embedder.encode_passages([texts[row] for row in new], progress) if new else None
        )
        if made is not None:
            self._keep([digests[row] for row in new], made)
            if len(new) == len(texts):
                return made
        vectors = np.empty((len(texts), self.dimension), np.float32)
        is_new = np.zeros(len(texts), np.bool_)
        is_new[new] = True
        vectors[new] = made if made is not None else 0.0
        for row in np.flatnonzero(~is_new).tolist():
            self._stream.seek(self._at[digests[row]])
            vectors[row] = np.frombuffer(self._stream.read(self._vector_bytes), "<f4")
        return vectors

    @property
    def _mark(self) -> bytes:
        about = f"ctxguard vectors 1, {self.dimension}, {self.fingerprint()}"
        return hashlib.sha256(about.encode()).digest()

    def _read(self) -> None:
        """Record the place of each text's vector, and cut off an incomplete end."""
        mark, stream = self._mark, self._stream
        end = len(mark)
        if stream.read(end) != mark:
            stream.seek(0)
            stream.truncate()
            stream.write(mark)
            stream.flush()
            return
        size = os.fstat(stream.fileno()).st_size
        while len(head := stream.read(_HEAD.size)) == _HEAD.size:
            n, checksum = _HEAD.unpack(head)
            n_bytes = n * (_DIGEST_BYTES + self._vector_bytes)
            if n > _MOST_AT_ONCE or end + _HEAD.size + n_bytes > size:
                break
            block = stream.read(n_bytes)
            if crc32(block) != checksum:
                break
            self._note(block[: n * _DIGEST_BYTES], end + _HEAD.size)
            end += _HEAD.size + n_bytes
        stream.seek(end)
        stream.truncate()

    def _note(self, digests: bytes, begin: int) -> None:
        """Record the place of each vector of the block whose digests begin at this offset."""
        for row, at in enumerate(range(0, len(digests), _DIGEST_BYTES)):
            place = begin + len(digests) + row * self._vector_bytes
            self._at[digests[at : at + _DIGEST_BYTES]] = place

    def _keep(self, digests: list[bytes], vectors: Float32Array) -> None:
        """Write vectors, except those that an index would refuse."""
        if not self._is_ours or vectors.shape != (len(digests), self.dimension):
            return
        for begin in range(0, len(digests), _MOST_AT_ONCE):
            some = np.asarray(vectors[begin : begin + _MOST_AT_ONCE], "<f4")
            rows = np.flatnonzero(np.isfinite(some).all(axis=1))
            names = b"".join([digests[begin + row] for row in rows.tolist()])
            block = names + some[rows].tobytes()
            end = self._stream.seek(0, os.SEEK_END)
            if not rows.size or end + len(block) > MOST_BYTES:
                return
            self._stream.write(_HEAD.pack(rows.size, crc32(block)) + block)
            # Whatever ends the process from here on, the system has them.
            self._stream.flush()
            self._note(names, end + _HEAD.size)
