"""The base of every engine's adapter. An adapter stores passages, searches legs and reads.

Rows are validated here, a leg that fails is told from an engine that fails, and clients are opened,
shared by threads and left to their process.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from threading import Lock
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from ctxguard._support.fork_safety import reset_in_children
from ctxguard.core.scores import is_valid
from ctxguard.core.types import FailureKind, Hit, Passage, Ranking, ScoreKind
from ctxguard.errors import (
    ConfigurationError,
    CtxguardError,
    DataError,
    OverloadedError,
    StageError,
    StageUnavailableError,
)
from ctxguard.integrations.engines.address import EngineAddress, already_there
from ctxguard.integrations.engines.stored import PASSAGE, IndexedPassage, IndexSettings, passage_of
from ctxguard.resilience import UnansweredError
from ctxguard.retrieval.hybrid.candidates import DENSE, LEXICAL
from ctxguard.retrieval.protocols import Float32Array

__all__ = ["DENSE", "KINDS", "LEXICAL", "Engine", "EngineDownError", "LazyClient", "StoredRecord"]
__all__ += ["LegQuery", "LegRows", "Row", "Statistics", "leave_to_parent", "ranking_of_rows"]
__all__ += ["version_of"]

KINDS = {LEXICAL: ScoreKind.RATIO, DENSE: ScoreKind.COSINE}

_Answer = TypeVar("_Answer")


class Row(NamedTuple):
    """One result of an engine.

    Attributes:
        passage: The passage; None if the row holds none that can be read.
        score: The engine's score, higher is better, which may be anything.
    """

    passage: Passage | None
    score: object


class LegRows(NamedTuple):
    """The results of one leg, best first; ``kind`` is the kind of their scores."""

    rows: Iterable[Row]
    kind: ScoreKind


@dataclass(frozen=True, slots=True)
class LegQuery:
    """One request to an engine.

    Attributes:
        terms: The query's terms, each as often as it occurs; None if the lexical leg is not asked.
        vector: The query's unit vector, shape (dimension,); None if the dense leg is not asked.
        depth: Maximum number of candidates of each leg, ≥ 1.
        any_of: A passage must have one or more filter tokens of each of these sets, none of which
            is empty; no set without a filter.
    """

    terms: Sequence[str] | None
    vector: Float32Array | None
    depth: int
    any_of: tuple[tuple[str, ...], ...] = ()

    @property
    def legs(self) -> tuple[str, ...]:
        """The legs that are asked."""
        asked = {LEXICAL: self.terms, DENSE: self.vector}
        return tuple(leg for leg, given in asked.items() if given is not None)

    def only(self, leg: str) -> "LegQuery":
        """Return the request for one of the legs."""
        return replace(self, **{"vector" if leg == LEXICAL else "terms": None})  # type: ignore[arg-type]


class StoredRecord(NamedTuple):
    """The data from which a passage's signals are computed.

    Attributes:
        vector: The unit vector, shape (dimension,).
        record: See `ctxguard.retrieval.index.records`.
    """

    vector: Float32Array
    record: bytes


class Statistics(NamedTuple):
    """Counts of the corpus: their version, and the bytes of `CorpusCounts.to_bytes`."""

    version: str
    content: bytes


class EngineDownError(StageUnavailableError):
    """The engine failed as a whole: asking it for one leg is no use."""


class Engine(ABC):
    """One index in an engine. Safe to use from several threads at once.

    Args:
        address: The place of the index.
        make: Whether the index is being made, so that a missing folder is no error.

    Attributes:
        name: The engine's name in errors.
        rows_per_write: Maximum number of passages in one `insert`.
        scores_both: Whether each leg's rows also hold the other leg's candidates.
        settings: The settings that the index was built with.
    """

    name: ClassVar[str]
    rows_per_write: ClassVar[int] = 512
    scores_both: ClassVar[bool] = False
    settings: IndexSettings
    _client: "LazyClient"

    def __init__(self, address: EngineAddress, *, make: bool = False) -> None:
        del make
        self.address = address

    @classmethod
    def open(cls, address: EngineAddress) -> Self:
        """Open an index.

        Raises:
            ConfigurationError: there is none of that name, or the credentials are refused.
            DataError: this release cannot read it.
            StageUnavailableError: the engine cannot be reached.
        """
        engine = cls(address)
        try:
            engine.settings = IndexSettings.from_json(engine.stored_settings())
            engine.opened()
        except BaseException:
            engine.close()
            raise
        return engine

    @classmethod
    def create(cls, address: EngineAddress, settings: IndexSettings) -> Self:
        """Make an empty index.

        Raises:
            ConfigurationError: the name is taken, or the credentials are refused.
            StageUnavailableError: the engine cannot be reached.
        """
        engine = cls(address, make=True)
        engine.settings = settings
        try:
            if not engine.make():
                raise already_there(address)
        except BaseException:
            engine.close()
            raise
        return engine

    @abstractmethod
    def stored_settings(self) -> str | bytes:
        """Read the settings of an index that is there, as JSON."""

    @abstractmethod
    def make(self) -> bool:
        """Make an empty index with ``settings``; False if one of that name is there."""

    def opened(self) -> None:  # noqa: B027
        """Prepare an index that was opened for searches."""

    @abstractmethod
    def fingerprint(self) -> Mapping[str, str]:
        """Return the engine's own settings that decide which candidates it finds.

        Without the corpus: its sketch tells how much of that has changed.
        """

    @abstractmethod
    def find(self, query: LegQuery) -> "Mapping[str, LegRows | CtxguardError]":
        """Search the legs that are asked, and return each one's rows or error.

        Scores of ``dense`` are cosines. Those of ``lexical`` are BM25 if the engine gives it, and a
        passage without a term of the query is not among them.
        """

    @abstractmethod
    def rows(
        self, fields: Sequence[str], passage_ids: Sequence[str] | None = None
    ) -> Iterable[Mapping[str, Any]]:
        """Read stored fields of the passages with these ids that are there; None for all."""

    @abstractmethod
    def count(self) -> int:
        """Count the passages."""

    @abstractmethod
    def smallest_digests(self, n: int) -> Sequence[int]:
        """Return the ``n`` smallest digests of passages, or all if there are fewer; signed."""

    @abstractmethod
    def evidence(self, passage_ids: Sequence[str]) -> Mapping[str, StoredRecord]:
        """Read the vectors and records of the passages with these ids that are there."""

    @abstractmethod
    def records(self, size: int) -> Iterable[list[bytes]]:
        """Read the records of all passages, at most ``size`` at a time."""

    @abstractmethod
    def statistics(self, known: str | None) -> Statistics | None:
        """Read the counts of the corpus; None if there are none, or their version is ``known``."""

    @abstractmethod
    def keep_statistics(self, content: bytes) -> None:
        """Keep counts of the corpus, in place of any others."""

    @abstractmethod
    def insert(self, passages: Sequence[IndexedPassage]) -> None:
        """Insert at most ``rows_per_write`` passages, replacing those with the same ids."""

    @abstractmethod
    def delete(self, passage_ids: Sequence[str]) -> None:
        """Delete passages; an unknown id is no error. At most 512 at a time."""

    def finish(self) -> None:  # noqa: B027
        """Make a change visible to searches; called after its last write or deletion."""

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def search(self, query: LegQuery) -> dict[str, Ranking | CtxguardError]:
        """Search the legs that are asked; one that fails is returned as its error.

        If both were asked in one call and that failed, each is asked by itself.

        Raises:
            CtxguardError: the engine failed as a whole, or the request is refused.
        """
        if query.vector is not None:
            self._check_vector("the query", query.vector)
        found: Mapping[str, LegRows | CtxguardError]
        try:
            found = self.find(query)
        except (EngineDownError, OverloadedError, UnansweredError):
            raise
        except StageError:
            if len(query.legs) < 2:
                raise
            found = {leg: self._alone(query, leg) for leg in query.legs}
        depth = (2 if self.scores_both else 1) * query.depth
        return {leg: ranking_of_rows(self.name, rows, depth) for leg, rows in found.items()}

    def _alone(self, query: LegQuery, leg: str) -> LegRows | CtxguardError:
        try:
            return self.find(query.only(leg))[leg]
        except StageError as error:
            return error

    def write(self, passages: Sequence[IndexedPassage]) -> None:
        """Insert passages, replacing those with the same ids.

        Raises:
            ConfigurationError: a vector has another length than the index's.
        """
        for one in passages:
            self._check_vector(f"passage {one.passage.passage_id!r}", one.vector)
        for start in range(0, len(passages), self.rows_per_write):
            self.insert(passages[start : start + self.rows_per_write])

    def read(self, passage_ids: Sequence[str]) -> dict[str, Passage]:
        """Read the passages with these ids that are there."""
        passages = map(passage_of, self.rows(PASSAGE, passage_ids))
        return {each.passage_id: each for each in passages if each is not None}

    def _check_vector(self, whose: str, vector: Float32Array) -> None:
        if vector.shape != (self.settings.dimension,):
            raise ConfigurationError(
                f"the vector of {whose} has shape {vector.shape}, those of the index "
                f"({self.settings.dimension},): encode with the index's embedder"
            )

    def _foreign(self) -> DataError:
        return DataError(
            f"{self.address.shown}: this collection was not made by ctxguard; give another name "
            "after #, or read it with a retriever of your own "
            f"(docs/integrations/{self.name}.md)"
        )

    def _rate_limited(self) -> OverloadedError:
        return OverloadedError(self.name, "its rate limit is reached; ask it less often")

    def _late(self, detail: str = "") -> UnansweredError:
        return UnansweredError(self.name, FailureKind.TIMEOUT, f"no answer in time{detail}")

    def _unreachable(self, detail: str) -> EngineDownError:
        return EngineDownError(self.name, f"it cannot be reached ({detail})")


class LazyClient:
    """An engine's client, opened at the first call and shared by threads.

    A forked child opens its own, and never closes its parent's.

    Args:
        connect: Opens a client.

    Attributes:
        is_inherited: Whether a parent process has one open.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self.client: Any = None
        self.is_inherited = False
        self._reset_after_fork()
        reset_in_children(self)

    def _reset_after_fork(self) -> None:
        self._lock = Lock()
        if self.client is not None:
            leave_to_parent(self.client)
            self.client, self.is_inherited = None, True

    def get(self) -> Any:
        """Return the client; raises whatever opening it raises."""
        with self._lock:
            if self.client is None:
                self.client = self._connect()
            return self.client

    def close(self) -> None:
        """Close the client; the next `get` opens another."""
        with self._lock:
            client, self.client = self.client, None
        if client is not None:
            client.close()


_inherited: list[Any] = []


def leave_to_parent(client: Any) -> None:
    """Keep a parent process's client from being closed here, by hand or by its ``__del__``."""
    client.close = lambda: None
    _inherited.append(client)


def version_of(content: bytes) -> str:
    """Identify counts of a corpus by a digest."""
    return blake2b(content, digest_size=8).hexdigest()


def ranking_of_rows(
    engine: str, found: LegRows | CtxguardError, depth: int
) -> Ranking | CtxguardError:
    """Build the ranking of a leg's rows, of which nothing is trusted; an error stays as it is.

    At most ``depth`` rows are read. A row without a passage is left out, and so is a BM25 score of
    0. A score that is no number becomes None, which a decision sets aside.

    Returns:
        The ranking; an error also if there are rows and none holds a passage.

    >>> rows = [Row(Passage("a", "text"), 2.5), Row(None, 2.0), Row(Passage("b", "text"), "1.5")]
    >>> ranking_of_rows("engine", LegRows(rows, ScoreKind.RATIO), 10).scores
    (2.5, None)
    """
    if isinstance(found, CtxguardError):
        return found
    read = list(islice(found.rows, depth))
    if read and not any(row.passage for row in read):
        return StageUnavailableError(
            engine, f"none of its {len(read)} results holds a passage's id and text"
        )
    return Ranking.from_hits(
        [
            Hit(passage.passage_id, score, passage.text, passage.title, metadata=passage.metadata)
            for passage, score in ((row.passage, _number(row.score)) for row in read)
            if passage is not None and not (found.kind is ScoreKind.RATIO and score == 0.0)
        ],
        found.kind,
    )


def _number(score: object) -> float | None:
    return float(score) if is_valid(score) else None  # type: ignore[arg-type]
