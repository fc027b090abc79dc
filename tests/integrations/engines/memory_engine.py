"""An engine in memory: brute-force cosines, and BM25 by its formula over every passage."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ctxguard.core.types import Hit, Passage, Ranking
from ctxguard.errors import ConfigurationError
from ctxguard.integrations.engines.engine import (
    DENSE,
    LEXICAL,
    IndexedPassage,
    IndexSettings,
    LegQuery,
    checked_batch,
)

K1, B = 1.5, 0.75


@dataclass
class MemoryEngine:
    """As `ctxguard.integrations.engines.engine.Engine`.

    Attributes:
        before_write: Called before every write; raises to interrupt it.
        finished: How often ``finish`` was called.
    """

    settings: IndexSettings
    rows: dict[str, IndexedPassage] = field(default_factory=dict)
    before_write: Callable[[], None] = lambda: None
    finished: int = 0

    def fingerprint(self) -> Mapping[str, str]:
        return {"engine": "memory"}

    def search(self, query: LegQuery, /) -> Mapping[str, Ranking]:
        allowed = [
            row
            for row in self.rows.values()
            if all(set(row.filter_tokens) & set(group) for group in query.any_of)
        ]
        found = {}
        if query.terms is not None:
            scores = self._bm25(query.terms)
            scored = [(scores[row.passage.passage_id], row) for row in allowed]
            found[LEXICAL] = _best([each for each in scored if each[0] > 0.0], query.depth, "ratio")
        if query.vector is not None:
            if query.vector.shape != (self.settings.dimension,):
                raise ConfigurationError(f"the query's vector has shape {query.vector.shape}")
            cosines = [(float(row.vector @ query.vector), row) for row in allowed]
            found[DENSE] = _best(cosines, query.depth, "cosine")
        return found

    def _bm25(self, terms: Sequence[str]) -> dict[str, float]:
        counts = {name: Counter(row.terms) for name, row in self.rows.items()}
        lengths = {name: len(row.terms) for name, row in self.rows.items()}
        mean = sum(lengths.values()) / max(len(lengths), 1)
        n = len(counts)
        having = {term: sum(term in each for each in counts.values()) for term in set(terms)}
        weights = {
            term: math.log(1 + (n - having[term] + 0.5) / (having[term] + 0.5)) for term in having
        }
        return {
            name: sum(
                weights[term] * tf / (tf + K1 * (1 - B + B * lengths[name] / mean))
                for term in terms
                if (tf := each[term])
            )
            for name, each in counts.items()
        }

    def read(self, passage_ids: Sequence[str], /) -> Mapping[str, Passage]:
        return {name: self.rows[name].passage for name in passage_ids if name in self.rows}

    def count(self) -> int:
        return len(self.rows)

    def revisions(self, passage_ids: Sequence[str] | None = None, /) -> Mapping[str, int]:
        names = self.rows if passage_ids is None else passage_ids
        return {name: self.rows[name].revision for name in names if name in self.rows}

    def smallest_digests(self, n: int, /) -> Sequence[int]:
        return sorted(row.digest for row in self.rows.values())[:n]

    def write(self, passages: Sequence[IndexedPassage], /) -> None:
        self.before_write()
        for row in checked_batch(passages, self.settings.dimension):
            self.rows[row.passage.passage_id] = row

    def delete(self, passage_ids: Sequence[str], /) -> None:
        for name in passage_ids:
            self.rows.pop(name, None)

    def finish(self) -> None:
        self.finished += 1

    def close(self) -> None:
        pass


def _best(scored: list[tuple[float, IndexedPassage]], depth: int, kind: str) -> Ranking:
    best = sorted(scored, key=lambda each: (-each[0], each[1].passage.passage_id))[:depth]
    return Ranking.from_hits(
        [
            Hit(
                row.passage.passage_id,
                float(np.clip(score, -1.0, 1.0)) if kind == "cosine" else score,
                row.passage.text,
                row.passage.title,
                metadata=row.passage.metadata,
            )
            for score, row in best
        ],
        kind,
    )
