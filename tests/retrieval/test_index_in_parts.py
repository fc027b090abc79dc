"""An index is put together some passages at a time: the same one, in bounded memory."""

import json
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from ctxguard.core.types import Passage
from ctxguard.errors import DataError, IndexFolderError
from ctxguard.retrieval import HybridRetriever
from ctxguard.retrieval.index import forward, growing, hybrid_index, kernels, lexical, passages
from ctxguard.retrieval.index.growing import Growing
from ctxguard.retrieval.protocols import Float32Array, NibbleArray, Progress, Sentences

_DIMENSION, _PIECES, _WORDS = 1_024, 100, 400


class _FromText:
    """An embedder whose vectors and sentences cost nothing to compute."""

    name = "from the text"
    dimension = _DIMENSION

    def encode_query(self, text: str) -> Float32Array:
        seed = sum(text.encode())
        return np.random.default_rng(seed).standard_normal(_DIMENSION, np.float32)

    def encode_passages(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float32Array:
        if progress is not None:
            progress(len(texts))
        none = np.zeros((0, _DIMENSION), np.float32)
        return np.stack([*none, *map(self.encode_query, texts)])

    def fingerprint(self) -> str:
        return "from the text"

    def token_encoder(self) -> "_Sentences":
        return _Sentences()


class _Sentences:
    def encode_passages(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> tuple[Float32Array, Sentences]:
        n, ends = len(texts), np.arange(len(texts) + 1)
        vectors = _FromText().encode_passages(texts, progress)
        pieces = np.array([[len(text) % _PIECES] * 3 for text in texts], np.uint16)
        return vectors, Sentences(
            np.sign(vectors).astype(np.int8).view(np.uint8),
            np.full(n, 3, np.uint8),
            pieces.reshape(-1),
            np.stack([ends, 3 * ends], axis=1),
        )

    def token_table(self) -> NibbleArray:
        return np.ones((_PIECES, _DIMENSION), np.uint8)


def _corpus(n: int, first: int = 0) -> Iterator[Passage]:
    """Yield passages in another order than that of their ids."""
    for at in range(first, first + n):
        rng = np.random.default_rng(at)
        words = [f"word{number}" for number in rng.integers(_WORDS, size=30).tolist()]
        yield Passage(f"{(at * 7919) % 100_003:06d}", f"{' '.join(words)}. The end of {at}.")


def _built(corpus: Iterator[Passage]) -> HybridRetriever:
    return HybridRetriever.build(corpus, embedder=_FromText(), signals="full")


def _files(retriever: HybridRetriever, folder: Path) -> dict[str, object]:
    retriever.save(folder)
    return dict(json.loads((folder / "manifest.json").read_text())["files"])


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make the parts small."""

    def apply() -> None:
        monkeypatch.setattr(growing, "IN_MEMORY_BYTES", 2**14)
        monkeypatch.setattr(growing.blocks, "__defaults__", (2**14, None))
        monkeypatch.setattr(passages, "_MOST_ENCODED", 100)
        monkeypatch.setattr(lexical, "_HELD", 1_000)
        monkeypatch.setattr(forward, "_HELD", 1_000)
        monkeypatch.setattr(kernels, "_POSTINGS", 1_000)

    return apply


@pytest.mark.parametrize("changed", [False, True])
def test_it_is_the_index_that_is_put_together_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_parts: Callable[[], None],
    *,
    changed: bool,
) -> None:
    monkeypatch.setattr(hybrid_index, "MERGE_FROM", 100)
    made = []
    for at, prepare in enumerate((lambda: None, in_parts)):
        prepare()
        retriever = _built(_corpus(700))
        if changed:
            # More than later segments hold, so that all become one.
            retriever.delete(retriever.passage_ids[::5])
            retriever.upsert(_corpus(500, first=600))
            assert len(retriever.generation.segments) == 1
        made.append(_files(retriever, tmp_path / str(at)))
    assert made[0] == made[1]


def test_its_memory_grows_far_less_than_its_data(
    monkeypatch: pytest.MonkeyPatch, in_parts: Callable[[], None]
) -> None:
    in_parts()
    monkeypatch.setattr(hybrid_index, "MERGE_FROM", 100)

    def peak_bytes(n: int) -> int:
        tracemalloc.start()
        try:
            retriever = _built(_corpus(n))
            retriever.upsert(_corpus(n // 2, first=n))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(200)  # what is loaded and cached once
    n = 500
    of_data = 1.5 * n * (4 * _DIMENSION + _DIMENSION + 400)
    assert peak_bytes(2 * n) - peak_bytes(n) < 0.5 * of_data


def test_a_repeated_id_is_found_before_anything_is_encoded() -> None:
    def encoded(done: int) -> None:
        raise AssertionError(f"{done} passages were encoded")

    repeated = [*_corpus(3), *_corpus(1)]
    with pytest.raises(DataError, match="1 of 4 passages repeat the id of another"):
        HybridRetriever.build(repeated, embedder=_FromText(), signals="none", progress=encoded)


def test_progress_counts_over_all_parts(in_parts: Callable[[], None]) -> None:
    in_parts()
    seen: list[int] = []
    HybridRetriever.build(_corpus(350), embedder=_FromText(), signals="none", progress=seen.append)
    assert len(seen) > 1
    assert seen == sorted(seen)
    assert seen[-1] == 350


def test_a_disk_without_room_is_named_with_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "IN_MEMORY_BYTES", 0)
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(growing, "_unnamed_file", lambda: full)
        with pytest.raises(IndexFolderError, match=r"No space left.*set TMPDIR"):
            Growing(np.uint8).extend(b"text")
