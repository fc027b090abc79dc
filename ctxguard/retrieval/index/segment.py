"""A segment: passages that are stored together with their lexical and dense index.

A segment never changes. An index is a list of them: one as it is built, and others for passages
that were added later. Each is a folder of its own in a saved index; any other data of a passage
belongs there too.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal

import numpy as np

from ctxguard.retrieval.index.dense import DenseIndex
from ctxguard.retrieval.index.forward import ForwardIndex
from ctxguard.retrieval.index.growing import Growing
from ctxguard.retrieval.index.lexical import LexicalEngine, lexical_index
from ctxguard.retrieval.index.part_files import Maps, PartFiles
from ctxguard.retrieval.index.passages import PassageTable, searchable_text
from ctxguard.retrieval.index.rows import Rows
from ctxguard.retrieval.index.sentences import SentenceIndex, collected
from ctxguard.retrieval.protocols import Analyser, Float32Array, LexicalIndex, RowArray, Sentences

SignalLevel = Literal["full", "text", "none"]
"""The data kept for signals: words in order and sentence vectors, words alone, or none."""

Encoded = tuple[Float32Array, Sentences | None]
"""Unit vectors of passages, shape (n, dimension), and their sentences, None if not kept."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Passages with the data kept for each; row i is the same passage in all of it.

    Attributes:
        segment_id: Unique to the segment.
        passages: The passages, in the order of their ids.
        lexical: Their BM25 index.
        dense: Their vectors.
        forward: Their words in order; None if they are not kept.
        sentences: Their sentences; None if they are not kept.
        maps: Its mapped files.
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
        passages: PassageTable,
        encode: Callable[[RowArray], Encoded],
        *,
        engine: LexicalEngine,
        analyser: Analyser,
        exact_limit: int,
        signals: SignalLevel,
        n_pieces: int,
    ) -> "Segment":
        """Index passages, of which some thousand at a time are in memory.

        Args:
            passages: At least one.
            encode: Gives a model's results for some rows.
            engine: The lexical engine.
            analyser: Splits them into terms.
            exact_limit: As for `DenseIndex.build`.
            signals: The data kept for signals.
            n_pieces: Number of word pieces that the model has; 0 without sentences.
        """
        vectors, sentences = Growing(np.float32), None

        def encoded() -> Iterator[Sentences]:
            for rows in passages.blocks():
                own_vectors, own_sentences = encode(rows)
                vectors.extend(own_vectors)
                if own_sentences is not None:
                    yield own_sentences

        if n_pieces:
            sentences = SentenceIndex.build(collected(encoded()), n_pieces)
        else:
            deque(encoded(), maxlen=0)
        words = map(searchable_text, passages)
        return cls(
            token_hex(8),
            passages,
            lexical_index(engine).build(map(searchable_text, passages), analyser),
            DenseIndex.build(vectors.array(), exact_limit=exact_limit),
            None if signals == "none" else ForwardIndex.build(words, analyser),
            sentences,
        )

    @classmethod
    def over(cls, segments: "Sequence[Segment]", rows: Rows, engine: LexicalEngine) -> "Segment":
        """Read segments as one; it is not to be saved.

        Args:
            segments: At least one, of one model, engine and analyser.
            rows: Their rows.
            engine: Their lexical engine.
        """
        if rows.is_plain:
            return segments[0]
        lexical: Any = [each.lexical for each in segments]
        forward = [each.forward for each in segments if each.forward is not None]
        sentences = [each.sentences for each in segments if each.sentences is not None]
        return cls(
            "",
            PassageTable.over([each.passages for each in segments], rows),
            lexical_index(engine).over(lexical, rows),
            DenseIndex.over([each.dense for each in segments], rows),
            ForwardIndex.over(forward, rows) if len(forward) == len(segments) else None,
            SentenceIndex.over(sentences, rows) if len(sentences) == len(segments) else None,
            {file: mapped for each in segments for file, mapped in each.maps.items()},
        )

    def merged(self, exact_limit: int) -> "Segment":
        """Store the passages as one segment, without encoding or analysing anything.

        Args:
            exact_limit: As for `DenseIndex.build`.
        """
        lexical: Any = self.lexical
        return Segment(
            token_hex(8),
            self.passages.merged(),
            lexical.merged(),
            self.dense.merged(exact_limit),
            None if self.forward is None else self.forward.merged(),
            None if self.sentences is None else self.sentences.merged(),
        )

    def save(self, folder: Path) -> None:
        """Write plain files into a folder that is there."""
        for each in (self.passages, self.lexical, self.dense, self.forward, self.sentences):
            if each is not None:
                each.save(folder)

    @classmethod
    def load(
        cls,
        files: PartFiles,
        segment_id: str,
        *,
        engine: LexicalEngine,
        analyser: Analyser,
        exact_limit: int,
    ) -> "Segment":
        """Read the files of ``save``.

        Raises:
            ValueError, KeyError, TypeError, OSError: files that ``save`` did not write together.
        """
        passages = PassageTable.load(files)
        parts = (
            lexical_index(engine).load(files, analyser),
            DenseIndex.load(files, exact_limit=exact_limit),
            ForwardIndex.load(files, analyser),
            SentenceIndex.load(files),
        )
        sizes = {len(each) for each in (passages, *parts) if each is not None}
        if len(sizes) > 1:
            raise ValueError(f"its parts hold different numbers of passages: {sorted(sizes)}")
        return cls(segment_id, passages, *parts, files.maps)
