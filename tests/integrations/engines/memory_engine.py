"""An engine in memory: brute-force cosines, and BM25 of an index that each search builds."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, cast

import numpy as np

from ctxguard.core.types import Ranking
from ctxguard.errors import CtxguardError, StageError
from ctxguard.integrations.engines.address import EngineAddress, nothing_there
from ctxguard.integrations.engines.engine import Engine, LegQuery
from ctxguard.integrations.engines.stored import IndexedPassage, IndexSettings
from ctxguard.retrieval.hybrid.search import DENSE, LEXICAL
from ctxguard.retrieval.index.lexical import Bm25sIndex


class _Spaces:
    """Terms that are terms already."""

    name, fingerprint, scripts = "spaces", "spaces", None

    def analyse(self, text: str) -> list[str]:
        return text.split()


class MemoryEngine(Engine):
    """As `ctxguard.integrations.engines.engine.Engine`.

    Attributes:
        failing: Legs that raise when they are asked.
        finished: How often ``finish`` was called.
        before_evidence: Called before vectors are read; raises to fail.
    """

    name = "memory"
    kept: ClassVar[dict[str, "MemoryEngine"]] = {}
    """The indexes that were made, by name."""

    def __init__(self, address: EngineAddress) -> None:
        super().__init__(address)
        self.stored: dict[str, IndexedPassage] = {}
        self.failing: set[str] = set()
        self.finished = 0
        self.before_evidence: Callable[[], None] = lambda: None

    @classmethod
    def open(cls, address: EngineAddress, settings: IndexSettings | None = None) -> Self:
        """Return an index that was made as the same object, with what a test has set of it."""
        opened = super().open(address, settings)
        return cast(Self, cls.kept[opened.address.name])

    def stored_settings(self) -> str:
        if self.address.name not in self.kept:
            raise nothing_there(self.address)
        return self.kept[self.address.name].settings.to_json()

    def make(self) -> bool:
        return self.kept.setdefault(self.address.name, self) is self

    def fingerprint(self) -> Mapping[str, str]:
        return {"engine": "memory"}

    def find(self, query: LegQuery) -> Mapping[str, Ranking | CtxguardError]:
        if failing := self.failing & set(query.legs):
            raise StageError(self.name, f"{', '.join(sorted(failing))}: out of order")
        allowed = [
            row
            for row in self.stored.values()
            if all(set(row.stored()["filter_tokens"]) & set(group) for group in query.any_of)
        ]
        found: dict[str, Ranking | CtxguardError] = {}
        if query.terms is not None:
            scores = self._bm25(query.terms)
            scored = [(scores[row.passage.passage_id], row) for row in allowed]
            found[LEXICAL] = self._best(LEXICAL, [each for each in scored if each[0] > 0], query)
        if query.vector is not None:
            cosines = [float(np.clip(row.vector @ query.vector, -1.0, 1.0)) for row in allowed]
            found[DENSE] = self._best(DENSE, list(zip(cosines, allowed, strict=True)), query)
        return found

    def _best(
        self, leg: str, scored: list[tuple[float, IndexedPassage]], query: LegQuery
    ) -> Ranking | CtxguardError:
        best = sorted(scored, key=lambda each: (-each[0], each[1].passage.passage_id))
        return self.leg(leg, [(row.stored(), each) for each, row in best[: query.depth]], query)

    def _bm25(self, terms: Sequence[str]) -> dict[str, float]:
        texts = [" ".join(row.terms) for row in self.stored.values()]
        scores = Bm25sIndex.build(texts, _Spaces()).scores(" ".join(terms))
        return dict(zip(self.stored, scores.tolist(), strict=True))

    def rows(
        self, fields: Sequence[str], passage_ids: Sequence[str] | None = None
    ) -> list[Mapping[str, Any]]:
        if "vector" in fields:
            self.before_evidence()
        names = self.stored if passage_ids is None else passage_ids
        found = [self.stored[name] for name in names if name in self.stored]
        return [{**row.stored(), "vector": row.vector} for row in found]

    def count(self) -> int:
        return len(self.stored)

    def smallest_digests(self, n: int) -> Sequence[int]:
        return sorted(row.stored()["digest"] for row in self.stored.values())[:n]

    def insert(self, passages: Sequence[IndexedPassage]) -> None:
        self.stored |= {row.passage.passage_id: row for row in passages}

    def delete(self, passage_ids: Sequence[str]) -> None:
        for name in passage_ids:
            self.stored.pop(name, None)

    def finish(self) -> None:
        self.finished += 1

    def typed(self, error: Exception, *, says_why: bool = False) -> CtxguardError:
        raise NotImplementedError

    def close(self) -> None:
        pass
