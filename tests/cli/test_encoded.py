"""Vectors that outlast an interrupted build."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from ctxguard.cli import _encoded
from ctxguard.cli._encoded import KeptVectors
from ctxguard.errors import DataError
from ctxguard.retrieval.protocols import Float32Array, Progress
from tests.doubles import WordHashEmbedder

TEXTS = [f"text {n}" for n in range(10)]


class Interrupted(WordHashEmbedder):
    """Stops after a number of texts, and counts what it encodes."""

    def __init__(self, stop: int = 1_000) -> None:
        super().__init__()
        self.stop, self.n = stop, 0

    def encode_passages(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float32Array:
        if self.n + len(texts) > self.stop:
            raise KeyboardInterrupt
        self.n += len(texts)
        return super().encode_passages(texts, progress)


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_encoded, "_BATCH", 3)


def test_the_next_run_goes_on_where_one_was_interrupted(tmp_path: Path) -> None:
    file = tmp_path / "i.vectors"
    with pytest.raises(KeyboardInterrupt):
        KeptVectors(Interrupted(stop=7), file).encode_passages(TEXTS)
    embedder, seen = Interrupted(), []
    vectors = KeptVectors(embedder, file).encode_passages(TEXTS, seen.append)
    assert embedder.n == 4
    assert seen[-1] == len(TEXTS)
    np.testing.assert_array_equal(vectors, WordHashEmbedder().encode_passages(TEXTS))


def test_another_models_vectors_are_not_taken_and_another_file_is_begun_anew(
    tmp_path: Path,
) -> None:
    file = tmp_path / "i.vectors"
    file.write_bytes(b'["another", 3]\n' + bytes(1_000))
    KeptVectors(WordHashEmbedder(), file).close()
    assert not file.exists(), "it held no vector"
    for model in ("one", "another"):
        embedder = Interrupted()
        embedder.fingerprint = lambda name=model: name
        kept = KeptVectors(embedder, file)
        kept.encode_passages(TEXTS)
        kept.close()
        assert embedder.n == len(TEXTS)
    assert file.exists()


def test_a_file_that_cannot_be_used_any_more_is_named_with_the_mend(tmp_path: Path) -> None:
    file = tmp_path / "i.vectors"
    kept = KeptVectors(WordHashEmbedder(), file)
    with closing(sqlite3.connect(file)) as other:
        other.execute("DROP TABLE kept")
    with pytest.raises(DataError, match=r"i\.vectors: .*delete the file"):
        kept.encode_passages(TEXTS)
    kept.close()
