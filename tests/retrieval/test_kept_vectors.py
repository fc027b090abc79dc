"""Vectors of an interrupted build are taken up, and only those that are whole and of the model."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ctxguard.core.types import Passage
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index import kept_vectors
from ctxguard.retrieval.index.kept_vectors import KeptVectors
from ctxguard.retrieval.protocols import Float32Array
from tests.doubles import CountedEmbedder as Counted

TEXTS = [f"passage {word} of {n}" for n, word in enumerate(["red", "fox", "sun", "sea", "rose"])]
MANY = [Passage(f"p{n:04}", f"passage number {n} of many") for n in range(1_300)]


def kept(file: Path, texts: Sequence[str] = TEXTS, embedder: Counted | None = None) -> list[str]:
    """Encode texts by a file; return those that the model encoded."""
    embedder = Counted() if embedder is None else embedder
    with KeptVectors(embedder, file) as vectors:
        found = vectors.encode_passages(texts)
    assert found.tolist() == Counted().encode_passages(texts).tolist()
    return embedder.encoded


@pytest.mark.parametrize("until", [0, 600, 1_100])
@pytest.mark.parametrize("n_before", [0, 1], ids=["build", "update"])
def test_an_interrupted_run_goes_on(tmp_path: Path, until: int, n_before: int) -> None:
    file, first, second = tmp_path / "i.unfinished", Counted(until), Counted()
    before = HybridRetriever.build(MANY[:1], embedder=Counted()).generation

    def run(encoder: KeptVectors) -> HybridRetriever:
        if not n_before:
            return HybridRetriever.build(MANY, embedder=encoder)
        retriever = HybridRetriever(before, embedder=encoder)
        assert retriever.update(MANY).encoded == len(MANY) - n_before
        return retriever

    with KeptVectors(first, file) as encoder, pytest.raises(KeyboardInterrupt):
        run(encoder)
    with KeptVectors(second, file) as encoder:
        assert encoder.n_found == len(first.encoded) == until // 512 * 512
        built = run(encoder)
        encoder.delete()
    assert len(second.encoded) == len(MANY) - n_before - len(first.encoded)
    assert not file.exists()
    anew = HybridRetriever.build(MANY, embedder=Counted())
    assert (built.generation.dense.vectors == anew.generation.dense.vectors).all()
    assert built.fingerprint() == anew.fingerprint()


def test_only_what_is_new_is_encoded(tmp_path: Path) -> None:
    assert kept(tmp_path / "f", TEXTS[:3]) == TEXTS[:3]
    assert (kept(tmp_path / "f", TEXTS[::-1]), kept(tmp_path / "f")) == (TEXTS[:2:-1], [])


MARK_BYTES = 32


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with the vector of each text."""
    kept(tmp_path / "f")
    return tmp_path / "f"


def test_cut_file_gives_what_is_whole(file: Path) -> None:
    """A crash may end a file anywhere, and what is cut off is written again."""
    content = file.read_bytes()
    each = (len(content) - MARK_BYTES) // len(TEXTS)
    for size in {0, 1, 31, 32, 39, *(MARK_BYTES + 2 * each + at for at in (-1, 0, 5, each - 1))}:
        file.write_bytes(content[:size])
        n_whole = max(size - MARK_BYTES, 0) // each
        assert (kept(file), kept(file)) == (TEXTS[n_whole:], [])


def test_changed_byte_loses_its_vector(file: Path) -> None:
    content = file.read_bytes()
    each = (len(content) - MARK_BYTES) // len(TEXTS)
    for at in (0, 33, 36, 150, MARK_BYTES + 2 * each, len(content) - 1):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        lost = TEXTS if at < MARK_BYTES else [TEXTS[(at - MARK_BYTES) // each]]
        assert kept(file) == lost


def test_vectors_of_another_model_are_dropped(tmp_path: Path) -> None:
    with KeptVectors(Counted(salt="other"), tmp_path / "f") as other:
        other.encode_passages(TEXTS)
    assert kept(tmp_path / "f") == TEXTS


def test_unusable_vectors_are_not_kept(tmp_path: Path) -> None:
    class Broken(Counted):
        def encode_passages(self, texts: Sequence[str]) -> Float32Array:
            vectors = super().encode_passages(texts)
            vectors[1] = np.nan
            return vectors

    with KeptVectors(Broken(), tmp_path / "f") as broken:
        broken.encode_passages(TEXTS)
    assert kept(tmp_path / "f") == TEXTS[1:2]


def test_one_of_two_runs_keeps(tmp_path: Path) -> None:
    with KeptVectors(Counted(), tmp_path / "f") as first:
        first.encode_passages(TEXTS[:2])
        with KeptVectors(Counted(), tmp_path / "f") as second:
            assert second.encode_passages(TEXTS).shape == (len(TEXTS), second.dimension)
            second.delete()
    assert kept(tmp_path / "f") == TEXTS[2:]


def test_a_file_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_vectors, "MOST_BYTES", 1_000)
    kept(tmp_path / "f")
    assert (tmp_path / "f").stat().st_size <= kept_vectors.MOST_BYTES
    assert kept(tmp_path / "f") == TEXTS[3:]


def test_file_is_regular_and_private(tmp_path: Path) -> None:
    kept(tmp_path / "f")
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "f")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "absent/f", "."):
        with pytest.raises(OSError):  # noqa: PT011  whatever the system calls it
            KeptVectors(Counted(), tmp_path / name)
