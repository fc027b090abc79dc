"""An index is built a block at a time, and is the same whatever the block."""

import numpy as np
import pytest

from ctxguard.core.types import Passage
from ctxguard.errors import DataError
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index import hybrid_index, lexical, passages, pieces
from ctxguard.retrieval.index.hybrid_index import HybridIndex
from ctxguard.retrieval.protocols import Float32Array
from tests.doubles import WordTokenEmbedder

CORPUS = [
    *(Passage(f"p{n:02}", f"the fox number {n % 7} met fox {n} " * (n % 5 + 1)) for n in range(50)),
    Passage("q", "...", "no words"),
    Passage("r", "!"),
]


def built() -> HybridIndex:
    return HybridIndex.build(CORPUS, embedder=WordTokenEmbedder())


@pytest.mark.parametrize("size", [1, 3, 52, 53])
def test_block_size_does_not_show(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = built()
    for module, name in (
        (hybrid_index, "_BLOCK"),
        (lexical, "_BLOCK"),
        (pieces, "_BLOCK"),
        (passages, "_READ"),
    ):
        monkeypatch.setattr(module, name, size)
    parts = built()
    assert parts.lexical.terms.vocabulary == whole.lexical.terms.vocabulary
    assert parts.passages.lines.tobytes() == whole.passages.lines.tobytes()
    for name, values in whole._arrays().items():
        assert np.array_equal(parts._arrays()[name], values), name


def test_weights_are_those_of_bm25() -> None:
    """Each posting has the weight of its entry, whose row has unit length."""
    index = built().lexical
    rows, postings = index.terms.rows, index.weights
    entries: dict[tuple[int, int], float] = {}
    for number in range(len(index.terms.vocabulary)):
        own = slice(postings.starts[number], postings.starts[number + 1])
        assert (np.diff(postings.rows[own]) > 0).all()
        entries |= {
            (row, number): postings.scores[own][at] for at, row in enumerate(postings.rows[own])
        }
    for row in range(len(CORPUS)):
        own = slice(rows.starts[row], rows.starts[row + 1])
        weights = np.array([entries.pop((row, number)) for number in rows.numbers[own]])
        length = np.linalg.norm(weights) or 1.0
        assert postings.unit[own] == pytest.approx(weights / length, abs=1e-6)
    assert not entries


@pytest.mark.parametrize("n", [1, 512, 513, 1_100])
def test_progress_knows_its_total(n: int) -> None:
    many = [Passage(f"p{at:04}", f"fox {at}") for at in range(n)]
    seen: list[tuple[int, int]] = []
    retriever = HybridRetriever.build(
        [*many, Passage("empty", "")],
        embedder=WordTokenEmbedder(),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert (seen[0], seen[-1], {total for _, total in seen}) == ((0, n), (n, n), {n})
    assert sorted(seen) == seen
    seen.clear()
    changed = [*many[1:], Passage("new", "sun"), Passage(many[0].passage_id, "sea")]
    retriever.update(changed, lambda done, total: seen.append((done, total)))
    assert (seen[0], seen[-1]) == ((0, 2), (2, 2))


def test_broken_vector_of_later_block_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(WordTokenEmbedder):
        def encode_query(self, text: str) -> Float32Array:
            vector = super().encode_query(text)
            return vector * np.nan if text.startswith("!") else vector

    monkeypatch.setattr(hybrid_index, "_BLOCK", 8)
    with pytest.raises(DataError, match="'r'"):
        HybridIndex.build(CORPUS, embedder=Broken())
