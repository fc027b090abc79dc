"""Vectors of a build that was interrupted, kept in a file beside the index for the next run."""

import hashlib
import json
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ctxguard.errors import DataError

if TYPE_CHECKING:
    from ctxguard.retrieval.protocols import Embedder, Float32Array, Progress

_BATCH = 256
"""Passages encoded between two writes, which an interrupt may cost."""


class KeptVectors:
    """An embedder that writes each vector to a file, and reads those that are there already.

    Whatever else an embedder has is that of the given one. A file of another kind is begun anew.

    Args:
        embedder: It encodes what the file lacks.
        file: The file, a SQLite database of vectors by a digest of model and text.
    """

    def __init__(self, embedder: "Embedder", file: Path) -> None:
        self._embedder, self._file = embedder, file
        model = json.dumps([embedder.fingerprint(), embedder.dimension])
        self._model = hashlib.blake2b(model.encode(), digest_size=16)
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._vectors = _opened(file)
        except sqlite3.DatabaseError:
            file.unlink()
            self._vectors = _opened(file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._embedder, name)

    def encode_passages(
        self, texts: Sequence[str], progress: "Progress | None" = None
    ) -> "Float32Array":
        """Encode each text as `Embedder.encode_passages` does, those that are not kept yet.

        Raises:
            DataError: the file is damaged, or cannot be written.
        """
        try:
            return self._encode(texts, progress)
        except sqlite3.Error as error:
            text = f"{error}; delete the file, or free some space, and run the command again"
            raise DataError(text, path=self._file) from error

    def _encode(self, texts: Sequence[str], progress: "Progress | None") -> "Float32Array":
        names = [self._digest(text) for text in texts]
        vectors = np.empty((len(texts), self._embedder.dimension), np.float32)
        missing = []
        for place, name in enumerate(names):
            kept = self._vectors.execute("SELECT vector FROM kept WHERE name = ?", (name,))
            if (row := kept.fetchone()) is None:
                missing.append(place)
            else:
                vectors[place] = np.frombuffer(row[0], np.float32)
        n_kept = len(texts) - len(missing)
        for start in range(0, len(missing), _BATCH):
            places = missing[start : start + _BATCH]
            vectors[places] = self._embedder.encode_passages([texts[place] for place in places])
            rows = [(names[place], vectors[place].tobytes()) for place in places]
            with self._vectors:
                self._vectors.executemany("INSERT OR IGNORE INTO kept VALUES (?, ?)", rows)
            if progress is not None:
                progress(n_kept + start + len(places))
        if progress is not None and not missing:
            progress(n_kept)
        return vectors

    def close(self) -> None:
        """Close the file; delete it if it holds no vector."""
        is_empty = False
        with suppress(sqlite3.Error):
            is_empty = self._vectors.execute("SELECT 1 FROM kept LIMIT 1").fetchone() is None
        self._vectors.close()
        if is_empty:
            self._file.unlink()

    def _digest(self, text: str) -> bytes:
        digest = self._model.copy()
        digest.update(text.encode("utf-8", "surrogatepass"))
        return digest.digest()


def _opened(file: Path) -> sqlite3.Connection:
    vectors = sqlite3.connect(file, check_same_thread=False)
    vectors.execute("CREATE TABLE IF NOT EXISTS kept (name BLOB PRIMARY KEY, vector BLOB)")
    return vectors
