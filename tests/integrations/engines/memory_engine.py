"""An engine in memory: brute-force cosines, and BM25 by its formula over every passage."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ctxguard.errors import CtxguardError, StageError
from ctxguard.integrations.engines.engine import (
    DENSE,
    KINDS,
    LEXICAL,
    Engine,
    LegQuery,
    LegRows,
    Row,
    Statistics,
    StoredRecord,
    version_of,
)
from ctxguard.integrations.engines.stored import IndexedPassage, IndexSettings

K1, B = 1.5, 0.75


class MemoryEngine(Engine):
    """As `ctxguard.integrations.engines.engine.Engine`.

    Attributes:
        before_write: Called before every write; raises to interrupt it.
        failing: Legs that raise when they are asked.
        finished: How often ``finish`` was called.
        before_evidence: Called before evidence is read; raises to fail.
        kept_statistics: The counts of the corpus.
    """

    name = "memory"

    def __init__(self, settings: IndexSettings) -> None:
        self.settings = settings
        self.stored: dict[str, IndexedPassage] = {}
        self.before_write: Callable[[], None] = lambda: None
        self.failing: set[str] = set()
        self.finished = 0
        self.before_evidence: Callable[[], None] = lambda: None
        self.kept_statistics: Statistics | None = None

    def stored_settings(self) -> str:
        return self.settings.to_json()

    def make(self) -> bool:
        return True

    def fingerprint(self) -> Mapping[str, str]:
        return {"engine": "memory"}

    def find(self, query: LegQuery) -> Mapping[str, LegRows | CtxguardError]:
        if failing := self.failing & set(query.legs):
            raise StageError(self.name, f"{', '.join(sorted(failing))}: out of order")
        allowed = [
            row
            for row in self.stored.values()
            if all(set(row.filter_tokens) & set(group) for group in query.any_of)
        ]
        found: dict[str, LegRows | CtxguardError] = {}
        if query.terms is not None:
            scores = self._bm25(query.terms)
            scored = [(scores[row.passage.passage_id], row) for row in allowed]
            found[LEXICAL] = _best(LEXICAL, [each for each in scored if each[0] > 0], query.depth)
        if query.vector is not None:
            cosines = [float(np.clip(row.vector @ query.vector, -1.0, 1.0)) for row in allowed]
            found[DENSE] = _best(DENSE, list(zip(cosines, allowed, strict=True)), query.depth)
        return found

    def _bm25(self, terms: Sequence[str]) -> dict[str, float]:
        counts = {name: Counter(row.terms) for name, row in self.stored.items()}
        lengths = {name: len(row.terms) for name, row in self.stored.items()}
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

    def rows(
        self, fields: Sequence[str], passage_ids: Sequence[str] | None = None
    ) -> list[Mapping[str, Any]]:
        names = self.stored if passage_ids is None else passage_ids
        return [self.stored[name].stored() for name in names if name in self.stored]

    def count(self) -> int:
        return len(self.stored)

    def smallest_digests(self, n: int) -> Sequence[int]:
        return sorted(row.digest for row in self.stored.values())[:n]

    def evidence(self, passage_ids: Sequence[str]) -> dict[str, StoredRecord]:
        self.before_evidence()
        return {
            name: StoredRecord(self.stored[name].vector, self.stored[name].record)
            for name in passage_ids
            if name in self.stored
        }

    def records(self, size: int) -> list[list[bytes]]:
        records = [row.record for row in self.stored.values()]
        return [records[at : at + size] for at in range(0, len(records), size)]

    def statistics(self, known: str | None) -> Statistics | None:
        found = self.kept_statistics
        return None if found is None or found.version == known else found

    def keep_statistics(self, content: bytes) -> None:
        self.kept_statistics = Statistics(version_of(content), content)

    def insert(self, passages: Sequence[IndexedPassage]) -> None:
        self.before_write()
        self.stored |= {row.passage.passage_id: row for row in passages}

    def delete(self, passage_ids: Sequence[str]) -> None:
        for name in passage_ids:
            self.stored.pop(name, None)

    def finish(self) -> None:
        self.finished += 1

    def close(self) -> None:
        pass


def _best(leg: str, scored: list[tuple[float, IndexedPassage]], depth: int) -> LegRows:
    best = sorted(scored, key=lambda each: (-each[0], each[1].passage.passage_id))[:depth]
    return LegRows([Row(row.passage, score) for score, row in best], KINDS[leg])
