"""Defines the base of every engine's adapter. An adapter stores passages, searches legs and reads.

The base validates rows, tells a failing leg from a failing engine, and opens clients, which threads
share and each process owns. It asks the engine over its client, imports the engine's adapter when
it is opened, and looks for the files of a local one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Self, TypeVar

from ctxguard._support.fork_safety import OfProcess
from ctxguard.core.scores import is_valid
from ctxguard.core.types import FailureKind, Hit, Ranking, ScoreKind
from ctxguard.errors import (
    ConfigurationError,
    CtxguardError,
    DataError,
    OverloadedError,
    StageError,
    StageUnavailableError,
)
from ctxguard.integrations.engines.address import ENGINES, EngineAddress, nothing_there
from ctxguard.integrations.engines.stored import IndexedPassage, IndexSettings, passage_of
from ctxguard.resilience.stage import UnansweredError
from ctxguard.retrieval.hybrid.search import DENSE, LEG_KINDS, LEXICAL
from ctxguard.retrieval.protocols import Float32Array

_Answer = TypeVar("_Answer")

Legs = dict[str, Ranking | CtxguardError]
"""The result of each leg, or the error with which it failed."""


@dataclass(frozen=True, slots=True)
class LegQuery:
    """One request to an engine.

    Attributes:
        terms: The query's terms, each as often as it occurs; None if the lexical leg is not asked.
        vector: The query's unit vector, shape (dimension,); None if the dense leg is not asked.
        depth: Maximum number of candidates of each leg, ≥ 1.
        any_of: Non-empty sets of filter tokens: a passage must have a token of each set.
    """

    terms: Sequence[str] | None
    vector: Float32Array | None
    depth: int
    any_of: tuple[tuple[str, ...], ...] = ()

    @property
    def legs(self) -> tuple[str, ...]:
        """The legs to search."""
        asked = {LEXICAL: self.terms, DENSE: self.vector}
        return tuple(leg for leg, given in asked.items() if given is not None)

    def only(self, leg: str) -> "LegQuery":
        """Return the request for one of the legs."""
        return replace(self, **{"vector" if leg == LEXICAL else "terms": None})  # type: ignore[arg-type]


class EngineDownError(StageUnavailableError):
    """The engine failed as a whole, so asking it for a single leg is useless."""


class Engine(ABC):
    """One index in an engine. Safe to use from several threads at once.

    Attributes:
        name: The engine's name in errors.
        rows_per_write: Maximum number of passages in one `insert`.
        scores_both: Whether each leg's rows include the other leg's candidates.
        first_file: The file that every index on this machine has in its path, ``.`` if the path is
            itself a file; None for an engine on a server.
        settings: The settings that the index was built with.
    """

    name: ClassVar[str]
    rows_per_write: ClassVar[int] = 512
    scores_both: ClassVar[bool] = False
    first_file: ClassVar[str | None] = None
    settings: IndexSettings
    _client: "LazyClient"

    def __init__(self, address: EngineAddress) -> None:
        self.address = address

    @classmethod
    def open(cls, address: EngineAddress, settings: IndexSettings | None = None) -> Self:
        """Open an index, or create an empty one if settings are given.

        Raises:
            ConfigurationError: no index has that name, one to be created already exists, or the
                credentials are refused.
            DataError: this release cannot read it.
            StageUnavailableError: the engine cannot be reached.
        """
        # Connecting would make the file or folder.
        path, first = address.path, cls.first_file
        is_there = path is None or first is None or Path(path, first).exists()
        if settings is None and not is_there:
            raise nothing_there(address)
        engine = cls(address)
        try:
            if settings is None:
                engine.settings = IndexSettings.from_json(engine.stored_settings())
                engine.opened()
            else:
                engine.settings = settings
                if not engine.make():
                    raise ConfigurationError(
                        f"{address.shown}: an index with that name exists; bring it up to date "
                        "with --update, or put a different name after # in the URL"
                    )
        except BaseException:
            engine.close()
            raise
        return engine

    @abstractmethod
    def stored_settings(self) -> str | bytes:
        """Read the settings of an existing index, as JSON."""

    @abstractmethod
    def make(self) -> bool:
        """Create an empty index with ``settings``; return False if one with that name exists."""

    def opened(self) -> None:  # noqa: B027
        """Prepare an opened index for searches."""

    @abstractmethod
    def fingerprint(self) -> Mapping[str, str]:
        """Return the engine's settings that affect which candidates it finds."""

    @abstractmethod
    def find(self, query: LegQuery) -> Legs:
        """Search the requested legs, and return each one's rows as converted by `leg`.

        Scores of ``dense`` are cosines. Those of ``lexical`` are BM25 if the engine computes it,
        and exclude passages without a term of the query.
        """

    @abstractmethod
    def rows(
        self, fields: Sequence[str], passage_ids: Sequence[str] | None = None
    ) -> Iterable[Mapping[str, Any]]:
        """Read stored fields of the passages with these ids that exist; None for all passages.

        The fields are those of `IndexedPassage.stored` and ``vector``, the unit vector, shape
        (dimension,).
        """

    @abstractmethod
    def count(self) -> int:
        """Count the passages."""

    @abstractmethod
    def smallest_digests(self, n: int) -> Sequence[int]:
        """Return the ``n`` smallest digests of passages (signed), or all if there are fewer."""

    @abstractmethod
    def insert(self, passages: Sequence[IndexedPassage]) -> None:
        """Insert at most ``rows_per_write`` passages, replacing those with the same ids."""

    @abstractmethod
    def delete(self, passage_ids: Sequence[str]) -> None:
        """Delete passages; an unknown id is not an error. At most 512 at a time."""

    def finish(self) -> None:  # noqa: B027
        """Make a change visible to searches; called after its last write or deletion."""

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def search(self, query: LegQuery) -> Legs:
        """Search the requested legs; return the error of a leg that fails.

        If one call for both legs failed, each is searched separately.

        Raises:
            CtxguardError: the engine failed as a whole, or the request is refused.
        """
        try:
            return self.find(query)
        except (EngineDownError, OverloadedError, UnansweredError):
            raise
        except StageError:
            if len(query.legs) < 2:
                raise
        found: Legs = {}
        for leg in query.legs:
            try:
                found[leg] = self.find(query.only(leg))[leg]
            except StageError as error:
                found[leg] = error
        return found

    def leg(
        self,
        leg: str,
        rows: Iterable[tuple[Any, object]],
        query: LegQuery,
        kind: ScoreKind | None = None,
    ) -> Ranking | CtxguardError:
        """Build a leg's ranking from its untrusted rows.

        At most as many rows are read as the leg may have. Rows without a complete passage, or with
        a BM25 score of 0, are left out. A score that is not a number becomes None, which a decision
        sets aside.

        Args:
            leg: ``lexical`` or ``dense``.
            rows: The stored fields of each, and its score, higher is better; best first.
            query: The request.
            kind: The kind of the scores; None for the leg's of `LEG_KINDS`.
        """
        kind = LEG_KINDS[leg] if kind is None else kind
        most = (2 if self.scores_both else 1) * query.depth
        read = [(passage_of(row), number(score)) for row, score in islice(rows, most)]
        if read and not any(passage for passage, _ in read):
            return StageUnavailableError(
                self.name, f"none of its {len(read)} results has a passage's id and text"
            )
        return Ranking.from_hits(
            [
                Hit(one.passage_id, score, one.text, one.title, metadata=one.metadata)
                for one, score in read
                if one is not None and not (kind is ScoreKind.RATIO and score == 0.0)
            ],
            kind,
        )

    def ask(self, work: Callable[[Any], _Answer], *, says_why: bool = False) -> _Answer:
        """Run ``work`` on the client and return its result; errors become those of `typed`."""
        try:
            return self._client.run(work)
        except CtxguardError:
            raise
        except Exception as error:
            raise self.typed(error, says_why=says_why) from error

    @abstractmethod
    def typed(self, error: Exception, *, says_why: bool = False) -> CtxguardError:
        """Convert one of the client's errors to one of ours.

        It has the server's reason only if ``says_why``: no query or passage was sent that the
        reason could quote.
        """

    def _foreign(self) -> DataError:
        return DataError(
            f"{self.address.shown}: this collection was not made by ctxguard; give a different "
            "name after #, or read it with a retriever of your own "
            f"(docs/integrations/{self.name}.md)"
        )

    def _rate_limited(self) -> OverloadedError:
        return OverloadedError(self.name, "its rate limit is reached; send fewer requests")

    def _late(self, detail: str = "") -> UnansweredError:
        return UnansweredError(self.name, FailureKind.TIMEOUT, f"no answer in time{detail}")


_inherited: list[Any] = []


def leave_to_parent(client: Any) -> None:
    """Keep the parent process's client from being closed here, by us or by its ``__del__``."""
    if client is not None:
        client.close = lambda: None
        _inherited.append(client)


class LazyClient:
    """An engine's client, opened at the first call and shared by threads.

    A forked child opens its own, and never closes its parent's.
    """

    _lock = OfProcess(Lock)
    client = OfProcess[Any](lambda: None, leave_to_parent)

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect

    def get(self) -> Any:
        """Return the client; errors of opening it are raised."""
        with self._lock:
            if self.client is None:
                self.client = self._connect()
            return self.client

    def run(self, work: Callable[[Any], _Answer]) -> _Answer:
        """Run ``work`` on the client and return its result."""
        return work(self.get())

    def close(self) -> None:
        """Close the client; the next `get` opens another."""
        with self._lock:
            client, self.client = self.client, None
        if client is not None:
            client.close()


def number(score: object) -> float | None:
    """Return a score as a number; None if it is not a number."""
    return float(score) if is_valid(score) else None  # type: ignore[arg-type]


def engine_class(address: EngineAddress) -> type[Engine]:
    """Return the adapter of the engine that an address names.

    Raises:
        MissingExtraError: the engine's client is not installed.
    """
    module, _, name = ENGINES[address.scheme].partition(":")
    found: type[Engine] = getattr(import_module(module), name)
    return found
