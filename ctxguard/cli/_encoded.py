"""Vectors of a build that was interrupted, kept in a file beside the index for the next run."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ctxguard._support.regular_file import open_regular

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ctxguard.retrieval.protocols import Embedder, Float32Array, Progress

_BATCH = 256
"""Passages encoded between two writes, which an interrupt may cost."""
_DIGEST_BYTES = 16
_MAX_BYTES = 2**40


class KeptVectors:
    """An embedder that writes each vector to a file, and reads those that are there already.

    Whatever else an embedder has is that of the given one. A file of another model is begun anew; a
    record that was cut off is dropped.

    Args:
        embedder: It encodes what the file lacks.
        file: The file, which `discard` deletes.
    """

    def __init__(self, embedder: "Embedder", file: Path) -> None:
        self._embedder, self._file = embedder, file
        self._header = json.dumps([embedder.fingerprint(), embedder.dimension]).encode() + b"\n"
        self._record = np.dtype(
            [("digest", f"V{_DIGEST_BYTES}"), ("vector", np.float32, embedder.dimension)]
        )
        self._records = self._read()
        self._kept = {bytes(name): row for row, name in enumerate(self._records["digest"])}
        self._n_written = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._embedder, name)

    def encode_passages(
        self, texts: Sequence[str], progress: "Progress | None" = None
    ) -> "Float32Array":
        """Encode each text as `Embedder.encode_passages` does, those that are not kept yet."""
        names = [_digest(text) for text in texts]
        vectors = np.empty((len(texts), self._embedder.dimension), np.float32)
        missing = []
        for place, name in enumerate(names):
            row = self._kept.get(name)
            if row is None:
                missing.append(place)
            else:
                vectors[place] = self._records["vector"][row]
        n_kept = len(texts) - len(missing)
        for start in range(0, len(missing), _BATCH):
            places = missing[start : start + _BATCH]
            vectors[places] = self._embedder.encode_passages([texts[place] for place in places])
            self._write([names[place] for place in places], vectors[places])
            if progress is not None:
                progress(n_kept + start + len(places))
        if progress is not None and not missing:
            progress(n_kept)
        return vectors

    @property
    def is_empty(self) -> bool:
        """Whether the file holds no vector."""
        return not len(self._records) and not self._n_written

    def discard(self) -> None:
        """Delete the file: the index is complete."""
        self._file.unlink(missing_ok=True)

    def _write(self, names: Sequence[bytes], vectors: "Float32Array") -> None:
        records = np.empty(len(names), self._record)
        records["digest"] = np.frombuffer(b"".join(names), f"V{_DIGEST_BYTES}")
        records["vector"] = vectors
        with self._file.open("ab") as stream:
            stream.write(records.tobytes())
        self._n_written += len(names)

    def _read(self) -> "NDArray[np.void]":
        """Map the whole records that the file has; begin it anew where it is another model's."""
        size, begun = len(self._header), False
        if self._file.exists():
            with open_regular(self._file, _MAX_BYTES) as stream:
                begun = stream.read(size) == self._header
        if not begun:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_bytes(self._header)
        n_records = (self._file.stat().st_size - size) // self._record.itemsize
        os.truncate(self._file, size + n_records * self._record.itemsize)
        if not n_records:
            return np.empty(0, self._record)
        return np.memmap(self._file, self._record, "r", size, (n_records,))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(
        text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES
    ).digest()
