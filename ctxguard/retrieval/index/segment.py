"""A segment: passages that are stored together with their lexical and dense index.

A segment never changes. An index holds one, its base, and for passages that were added later a
second one, its tail. Each is a folder of its own in a saved index; whatever else is kept for each
passage belongs there too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import Passage
from ctxguard.retrieval.index.dense import DenseIndex
from ctxguard.retrieval.index.lexical import (
    LexicalEngine,
    build_lexical,
    join_lexical,
    load_lexical,
)
from ctxguard.retrieval.index.passages import PassageTable, searchable_text
from ctxguard.retrieval.protocols import Analyser, Float32Array, LexicalIndex, RowArray


@dataclass(frozen=True, slots=True)
class Segment:
    """Passages with their lexical and dense index; row i is the same passage in all three.

    Attributes:
        segment_id: No other segment has it.
        passages: The passages, in the order of their ids.
        lexical: Their BM25 index.
        dense: Their vectors.
    """

    segment_id: str
    passages: PassageTable
    lexical: LexicalIndex
    dense: DenseIndex

    @classmethod
    def build(
        cls,
        passages: Sequence[Passage],
        vectors: Float32Array,
        *,
        engine: LexicalEngine,
        analyser: Analyser,
        exact_limit: int,
    ) -> "Segment":
        """Index passages that `validate_passages` returned, with their unit vectors."""
        return cls(
            token_hex(8),
            PassageTable.of(passages),
            build_lexical(engine, map(searchable_text, passages), analyser),
            DenseIndex.build(vectors, exact_limit=exact_limit),
        )

    @classmethod
    def joined(
        cls,
        parts: "Sequence[tuple[Segment, NDArray[np.bool_]]]",
        engine: LexicalEngine,
        *,
        exact_limit: int,
    ) -> "Segment":
        """One segment of several, without encoding or analysing anything.

        Args:
            parts: Segments, and which of their rows to keep. No id is kept twice.
            engine: Their lexical engine.
            exact_limit: As for `DenseIndex.build`.
        """
        segments = [segment for segment, _ in parts]
        rows = _new_rows(parts)
        n = sum(int(keep.sum()) for _, keep in parts)
        vectors = np.empty((n, segments[0].dense.dimension), np.float32)
        for segment, new in zip(segments, rows, strict=True):
            vectors[new[new >= 0]] = segment.dense.vectors[new >= 0]
        return cls(
            token_hex(8),
            PassageTable.joined([segment.passages for segment in segments], rows),
            join_lexical(engine, [segment.lexical for segment in segments], rows),
            DenseIndex.build(vectors, exact_limit=exact_limit),
        )

    def save(self, folder: Path) -> None:
        """Write plain files into a folder that is there."""
        self.passages.save(folder)
        self.lexical.save(folder)
        self.dense.save(folder)

    @classmethod
    def load(
        cls,
        folder: Path,
        segment_id: str,
        *,
        engine: LexicalEngine,
        analyser: Analyser,
        with_codes: bool,
        exact_limit: int,
    ) -> "Segment":
        """Read what ``save`` wrote, the large files memory-mapped.

        Raises:
            ValueError, KeyError, TypeError, OSError: files that ``save`` did not write together.
        """
        segment = cls(
            segment_id,
            PassageTable.load(folder),
            load_lexical(engine, folder, analyser),
            DenseIndex.load(folder, with_codes=with_codes, exact_limit=exact_limit),
        )
        sizes = {len(segment.passages), len(segment.lexical), len(segment.dense)}
        if len(sizes) > 1:
            raise ValueError(f"its parts hold different numbers of passages: {sorted(sizes)}")
        return segment


def _new_rows(parts: Sequence[tuple[Segment, NDArray[np.bool_]]]) -> list[RowArray]:
    """The row of each row of each part in the segment that joins them, −1 for those not kept."""
    ids = np.concatenate([np.array(part.passages.ids, object)[keep] for part, keep in parts])
    order = np.argsort(ids, kind="stable")
    joined = np.empty(order.size, np.int64)
    joined[order] = np.arange(order.size)
    rows, start = [], 0
    for _, keep in parts:
        new = np.full(keep.size, -1, np.int64)
        new[keep] = joined[start : start + int(keep.sum())]
        start += int(keep.sum())
        rows.append(new)
    return rows
