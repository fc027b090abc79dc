"""A segment: passages that are stored together with their lexical and dense index.

A segment never changes. An index holds one, its base, and for passages that were added later a
second one, its tail. Each is a folder of its own in a saved index; whatever else is kept for each
passage belongs there too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import Passage
from ctxguard.retrieval.index.dense import DenseIndex
from ctxguard.retrieval.index.forward import ForwardIndex
from ctxguard.retrieval.index.lexical import (
    LexicalEngine,
    build_lexical,
    join_lexical,
    load_lexical,
)
from ctxguard.retrieval.index.part_files import Maps, PartFiles
from ctxguard.retrieval.index.passages import PassageTable, searchable_text
from ctxguard.retrieval.index.sentences import SentenceIndex
from ctxguard.retrieval.protocols import Analyser, Float32Array, LexicalIndex, RowArray

SignalLevel = Literal["full", "text", "none"]
"""What is kept for signals: words in order and sentence vectors, words alone, or nothing."""


class Encoded(NamedTuple):
    """What a model made of some passages.

    Attributes:
        vectors: Unit vectors, shape (n, dimension).
        sentences: Their sentences; None where they are not kept.
    """

    vectors: Float32Array
    sentences: SentenceIndex | None


@dataclass(frozen=True, slots=True)
class Segment:
    """Passages with what is kept for each; row i is the same passage in all of it.

    Attributes:
        segment_id: No other segment has it.
        passages: The passages, in the order of their ids.
        lexical: Their BM25 index.
        dense: Their vectors.
        forward: Their words in order; None where they are not kept.
        sentences: Their sentences; None where they are not kept.
        maps: The files of it that are mapped.
    """

    segment_id: str
    passages: PassageTable
    lexical: LexicalIndex
    dense: DenseIndex
    forward: ForwardIndex | None
    sentences: SentenceIndex | None
    maps: Maps = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        passages: Sequence[Passage],
        encoded: Encoded,
        *,
        engine: LexicalEngine,
        analyser: Analyser,
        exact_limit: int,
        signals: SignalLevel,
    ) -> "Segment":
        """Index passages that `validate_passages` returned, with what was encoded of them."""
        texts = map(searchable_text, passages)
        return cls(
            token_hex(8),
            PassageTable.of(passages),
            build_lexical(engine, map(searchable_text, passages), analyser),
            DenseIndex.build(encoded.vectors, exact_limit=exact_limit),
            None if signals == "none" else ForwardIndex.build(texts, analyser),
            encoded.sentences,
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
        forward = [segment.forward for segment in segments if segment.forward is not None]
        sentences = [segment.sentences for segment in segments if segment.sentences is not None]
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
            ForwardIndex.joined(forward, rows) if len(forward) == len(segments) else None,
            SentenceIndex.joined(sentences, rows) if len(sentences) == len(segments) else None,
        )

    def save(self, folder: Path) -> None:
        """Write plain files into a folder that is there."""
        self.passages.save(folder)
        self.lexical.save(folder)
        self.dense.save(folder)
        if self.forward is not None:
            self.forward.save(folder)
        if self.sentences is not None:
            self.sentences.save(folder)

    @classmethod
    def load(
        cls,
        files: PartFiles,
        segment_id: str,
        *,
        engine: LexicalEngine,
        analyser: Analyser,
        with_codes: bool,
        exact_limit: int,
    ) -> "Segment":
        """Read what ``save`` wrote.

        Raises:
            ValueError, KeyError, TypeError, OSError: files that ``save`` did not write together.
        """
        segment = cls(
            segment_id,
            PassageTable.load(files),
            load_lexical(engine, files, analyser),
            DenseIndex.load(files, with_codes=with_codes, exact_limit=exact_limit),
            ForwardIndex.load(files, analyser),
            SentenceIndex.load(files),
            files.maps,
        )
        sizes = {len(segment.passages), len(segment.lexical), len(segment.dense)}
        if segment.forward is not None:
            sizes.add(len(segment.forward))
        if segment.sentences is not None:
            sizes.add(len(segment.sentences))
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
