"""Keeps an unfinished index's vectors in a file, so that an interrupted build can resume.

The file begins with a mark of the model. Then come records of one size, which may be cut off at
the end: the digest of a text, its vector, and a checksum of both. Reads and writes that file, and
calls the embedder.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np

from ctxguard._support.atomic_write import PRIVATE, lock
from ctxguard.retrieval.protocols import Embedder, Float32Array

MOST_BYTES = 2**33
"""The size of a file at which nothing more is kept."""

_DIGEST_BYTES = 16
_CHECKSUM_BYTES = 4


class KeptVectors(AbstractContextManager["KeptVectors"]):
    """An embedder that saves passages' vectors, and reuses those already saved.

    Vectors of another model are dropped. While another process uses the file, nothing is saved.
    ``n_found`` is the number of vectors from earlier runs. The file is readable only by its owner;
    an ``OSError`` says that it cannot be opened, or is not a regular file.
    """

    def __init__(self, embedder: Embedder, file: Path) -> None:
        self._embedder, self._file = embedder, file
        self.name, self.dimension = embedder.name, embedder.dimension
        self.encode_query, self.fingerprint = embedder.encode_query, embedder.fingerprint
        # Where each text's vector begins, by its digest.
        self._at: dict[bytes, int] = {}
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
        """Delete the file, because the index is saved."""
        if self._is_ours:
            self._file.unlink(missing_ok=True)

    def __len__(self) -> int:
        return len(self._at)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._embedder, name)

    def encode_passages(self, texts: Sequence[str]) -> Float32Array:
        """Encode passages, saving the new ones; shape (n, dimension)."""
        digests = [
            hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).digest()
            for text in texts
        ]
        new = [row for row, each in enumerate(digests) if each not in self._at]
        vectors = np.empty((len(texts), self.dimension), np.float32)
        for row in set(range(len(texts))).difference(new):
            self._stream.seek(self._at[digests[row]])
            vectors[row] = np.frombuffer(self._stream.read(4 * self.dimension), "<f4")
        if new:
            made = self._embedder.encode_passages([texts[row] for row in new])
            if made.shape != (len(new), self.dimension):
                return made  # which an index refuses
            vectors[new] = made
            self._keep([digests[row] for row in new], made)
        return vectors

    def _read(self) -> None:
        """Note where each text's vector is in the file, and cut off an incomplete end."""
        about = f"ctxguard vectors 2, {self.dimension}, {self.fingerprint()}"
        mark, stream = hashlib.sha256(about.encode()).digest(), self._stream
        if stream.read(len(mark)) != mark:
            stream.seek(0)
            stream.truncate()
            stream.write(mark)
            stream.flush()
            return
        size, end = _DIGEST_BYTES + 4 * self.dimension + _CHECKSUM_BYTES, len(mark)
        while len(record := stream.read(size)) == size:
            kept = record[:-_CHECKSUM_BYTES]
            if _checksum(kept) == record[-_CHECKSUM_BYTES:]:
                self._at[kept[:_DIGEST_BYTES]] = end + _DIGEST_BYTES
            end += size
        stream.truncate(end)

    def _keep(self, digests: list[bytes], vectors: Float32Array) -> None:
        """Write vectors, except those that an index would refuse."""
        if not self._is_ours:
            return
        end = self._stream.seek(0, os.SEEK_END)
        for digest, vector in zip(digests, vectors, strict=True):
            kept = digest + vector.astype("<f4").tobytes()
            if np.isfinite(vector).all() and end + len(kept) + _CHECKSUM_BYTES <= MOST_BYTES:
                self._stream.write(kept + _checksum(kept))
                self._at[digest] = end + _DIGEST_BYTES
                end += len(kept) + _CHECKSUM_BYTES
        # Whatever ends the process from here on, the system has them.
        self._stream.flush()


def _checksum(kept: bytes) -> bytes:
    return crc32(kept).to_bytes(_CHECKSUM_BYTES, "little")
