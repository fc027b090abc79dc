"""A retriever for tests that need one without an engine."""

from collections.abc import Sequence

from ctxguard.core.metadata_filter import Where
from ctxguard.core.types import DEFAULT_DEPTH, Hit, Passage, Ranking, ScoreKind
from ctxguard.retrieval.analysers.english import ENGLISH


class FakeRetriever:
    """Finds passages in memory by the number of words that they share with the query.

    Args:
        passages: The passages to search.
        name: Its fingerprint; another name is another system.

    Attributes:
        queries: Every query so far, in order.
        error: The error that every call raises, as in an outage; None to answer.
    """

    def __init__(self, passages: Sequence[Passage], name: str = "fake") -> None:
        self.queries: list[str] = []
        self.error: Exception | None = None
        self._passages = tuple(passages)
        self._words = [
            set(ENGLISH.analyse(f"{passage.title} {passage.text}")) for passage in passages
        ]
        self._name = name

    def retrieve(
        self, query: str, *, depth: int = DEFAULT_DEPTH, where: Where | None = None
    ) -> Ranking:
        """Return up to ``depth`` passages that share most words, ties by id; none without a match.

        Raises:
            Exception: ``error``, if it is set.
        """
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
        """`retrieve`, awaited."""
        return self.retrieve(query, depth=depth, where=where)

    def fingerprint(self) -> dict[str, str]:
        """Return its name, which identifies it."""
        return {"retriever": self._name}
