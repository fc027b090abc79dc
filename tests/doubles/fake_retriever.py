"""A retriever for tests that need one without an engine."""

from collections.abc import Sequence

from ctxguard.core.metadata_filter import Where
from ctxguard.core.types import DEFAULT_DEPTH, Hit, Passage, Ranking, ScoreKind
from ctxguard.retrieval.analysers.english import ENGLISH


class FakeRetriever:
    """Finds passages in memory by the number of words that they share with the query.

    It notes its ``queries``, and raises its ``error``, if it is given one.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        self.queries: list[str] = []
        self.error: Exception | None = None
        self._passages = tuple(passages)
        self._words = [
            set(ENGLISH.analyse(f"{passage.title} {passage.text}")) for passage in passages
        ]

    def retrieve(
        self, query: str, *, depth: int = DEFAULT_DEPTH, where: Where | None = None
    ) -> Ranking:
        """Return up to ``depth`` passages that share most words, ties by id; none without any."""
        self.queries.append(query)
        if self.error is not None:
            raise self.error
        wanted = set(ENGLISH.analyse(query))
        hits = [
            Hit(
                passage.passage_id,
                float(len(wanted & words)),
                passage.text,
                passage.title,
                metadata=passage.metadata,
            )
            for passage, words in zip(self._passages, self._words, strict=True)
            if wanted & words and (where is None or where.allows(passage.metadata))
        ]
        hits.sort(key=lambda hit: (-(hit.score or 0.0), hit.passage_id))
        return Ranking.from_hits(hits[:depth], ScoreKind.RATIO)

    async def aretrieve(
        self, query: str, *, depth: int = DEFAULT_DEPTH, where: Where | None = None
    ) -> Ranking:
        return self.retrieve(query, depth=depth, where=where)

    def fingerprint(self) -> dict[str, str]:
        return {"retriever": "fake"}
