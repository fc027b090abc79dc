"""Retrieves recorded lists of candidates, scored by the reranker being calibrated.

`read_candidates` reads a file; a retriever calls the reranker, and waits between attempts.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from calibration.data.text_files import Record, read_records, shown
from ctxguard.core.types import DEFAULT_DEPTH, FloatArray, Passage, Ranking, ScoreKind
from ctxguard.errors import OverloadedError, QueryError, StageError
from ctxguard.profile import reranker_probe
from ctxguard.retrieval.protocols import Reranker

PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Seconds before calling an endpoint again that refused because of its rate limit."""


def read_candidates(path: Path | str) -> dict[str, tuple[Passage, ...]]:
    """Read lists of candidates, one query per line: passages by the query's text.

    Fields: ``query``, ``documents`` (texts, or objects with ``text`` and ``id``) and optionally
    ``query_id``. A document without an id is called ``QUERY_ID/POSITION``, counted from 0; without
    a query id the number of the line stands for it. The file may hold labels too.

    Raises:
        DataError: broken JSON, a missing field, a field of another type, a query that an earlier
            line has, or an id twice in one list.
    """
    path = Path(path)
    candidates: dict[str, tuple[Passage, ...]] = {}
    first_line: dict[str, int | None] = {}
    for record in read_records(path, Counter()):
        query = record.text("query", "text")
        if query in first_line:
            raise record.error(f"line {first_line[query]} already has the query {shown(query)}")
        first_line[query] = record.line
        candidates[query] = _passages(record)
    return candidates


def _passages(record: Record) -> tuple[Passage, ...]:
    documents = record.fields.get("documents")
    if not isinstance(documents, list):
        raise record.error(f"documents is {shown(documents)}; write a list of strings or objects")
    named = any(name in record.fields for name in _QUERY_ID)
    prefix = record.identifier(*_QUERY_ID) if named else str(record.line)
    passages: dict[str, Passage] = {}
    for position, document in enumerate(documents):
        fields = {"text": document} if isinstance(document, str) else document
        if not isinstance(fields, dict):
            raise record.error(
                f"document {position} is {shown(document)}; write a string, or an object with text"
            )
        each = record._replace(fields=fields)
        name = each.identifier("id") if "id" in fields else f"{prefix}/{position}"
        if name in passages:
            raise record.error(f"two documents have the id {shown(name)}")
        passages[name] = Passage(name, each.text("text"))
    return tuple(passages.values())


_QUERY_ID = ("query_id", "_id", "id")


class RerankedCandidates:
    """Lists of candidates by query text that a reranker scores when they are retrieved.

    It waits where the reranker refuses for its rate limit. ``kind`` is the meaning of its scores.
    """

    def __init__(
        self,
        candidates: Mapping[str, Sequence[Passage]],
        reranker: Reranker,
        kind: ScoreKind,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._candidates = candidates
        self._reranker = reranker
        self._kind = kind
        self._sleep = sleep
        self._probed: str | None = None

    def fingerprint(self) -> dict[str, str]:
        """A fingerprint of the reranker, which the service compares with its own.

        Raises:
            StageError: the reranker failed, or is not the one that scored the first lists.
        """
        return {
            "reranker": self._reranker.fingerprint,
            "score_kind": self._kind.value,
            reranker_probe.FINGERPRINT_KEY: self._probe(),
        }

    def retrieve(self, query: str, *, depth: int = DEFAULT_DEPTH) -> Ranking:
        """Return all candidates of a query with their scores; of equal scores, the first is better.

        Raises:
            QueryError, StageError: there are none, or the reranker failed.
        """
        del depth  # Lists are as deep as they were recorded, and are served so.
        passages = self._candidates.get(query)
        if passages is None:
            raise QueryError("this query is not among the recorded candidates")
        if self._probed is None:
            self._probe()
        scores = self._scores(query, [passage.text for passage in passages])
        return Ranking(
            tuple([passage.passage_id for passage in passages]),
            scores.tolist(),
            self._kind,
            passages,
            ranks=range(1, len(passages) + 1),
            contradicted=False,  # another system's order, which the reranker is to change
        )

    def _probe(self) -> str:
        """Return the reranker's first scores of the probes; raise if it now scores them
        differently."""
        now = reranker_probe.probe_scores(self._scores)
        if self._probed is None:
            self._probed = now
        apart = reranker_probe.difference(self._probed, now)
        if apart is None or apart > reranker_probe.MOST_DIFFERENCE:
            raise StageError(
                "rerank",
                "the reranker changed while its scores were collected: it now scores the same "
                "texts differently; calibrate again once its scores no longer change",
            )
        return self._probed

    def _scores(self, query: str, texts: Sequence[str]) -> FloatArray:
        for pause_seconds in PAUSES_SECONDS:
            try:
                return self._reranker.score(query, texts)
            except OverloadedError:
                self._sleep(pause_seconds)
        return self._reranker.score(query, texts)
