"""An index in Qdrant: vectors, and BM25 as a sparse vector, in one collection."""

import atexit
import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar
from urllib.parse import urlsplit
from uuid import UUID

from ctxguard._support.error_text import describe_error
from ctxguard._support.extras import require
from ctxguard._support.fork_safety import reset_in_children
from ctxguard.core.types import FailureKind, Passage, Ranking, ScoreKind
from ctxguard.errors import (
    ConfigurationError,
    CtxguardError,
    DataError,
    OverloadedError,
    StageError,
    StageUnavailableError,
)
from ctxguard.integrations.engines.address import (
    KEY_VARIABLE,
    EngineAddress,
    already_there,
    nothing_there,
)
from ctxguard.integrations.engines.engine import (
    DENSE,
    LEXICAL,
    IndexedPassage,
    IndexSettings,
    LegQuery,
    checked_batch,
)
from ctxguard.integrations.engines.rows import Row, ranking_of_rows
from ctxguard.resilience import UnansweredError
from ctxguard.retrieval.index.lexical import K1, B

STAGE = "qdrant"
"""What errors name."""

_WRITE_SECONDS = 120
_POINTS_PER_REQUEST = 128
"""Qdrant refuses requests over 32 MB by default; 128 vectors of 4,096 numbers are 11 MB of JSON."""
_PAGE = 1_000
_HNSW_M, _HNSW_EF_CONSTRUCT, _HNSW_EF = 16, 200, 200
_KINDS = {LEXICAL: ScoreKind.RATIO, DENSE: ScoreKind.COSINE}
_REFUSED = (401, 403)
_NOT_FOUND, _TOO_MANY_REQUESTS = 404, 429
_METADATA_KEY = "ctxguard"
"""Of the settings in the collection's metadata."""
_PASSAGE = ["passage_id", "title", "text", "metadata"]

_Answer = TypeVar("_Answer")


class QdrantEngine:
    """One collection of a Qdrant server, or of a folder in the client's local mode.

    BM25 is the product of a passage's sparse vector, which holds the part that depends on the
    passage, and the query's, whose counts Qdrant multiplies by the inverse document frequency. A
    term's place in them is a hash of 32 bits. Terms that share one count as one.

    Args:
        address: Where the collection is.
        settings: What it was built with.
        connection: Calls the client.
    """

    def __init__(
        self, address: EngineAddress, settings: IndexSettings, connection: "_QdrantCalls"
    ) -> None:
        self._address = address
        self._settings = settings
        self._connection = connection
        self._is_closed = False
        self._models: Any = require("qdrant_client.models", "qdrant")

    @classmethod
    def open(cls, address: EngineAddress) -> Self:
        """See `EngineClass.open`."""
        with _connected(address, make=False) as connection:
            content = _ask(connection, address, lambda client: client.get_collection(address.name))
            stored = (content.config.metadata or {}).get(_METADATA_KEY)
            if not isinstance(stored, str):
                raise DataError(
                    f"{address.shown}: this collection was not made by ctxguard; give another name "
                    "after #, or read it with a retriever of your own (docs/integrations/qdrant.md)"
                )
            return cls(address, IndexSettings.from_json(stored), connection)

    @classmethod
    def create(cls, address: EngineAddress, settings: IndexSettings) -> Self:
        """See `EngineClass.create`."""
        with _connected(address, make=True) as connection:
            engine = cls(address, settings, connection)
            if engine._ask(lambda client: client.collection_exists(address.name)):
                raise already_there(address)
            engine._ask(engine._create_collection)
            engine.finish()
            return engine

    def _create_collection(self, client: Any) -> None:
        models = self._models
        client.create_collection(
            self._address.name,
            vectors_config={
                DENSE: models.VectorParams(
                    size=self._settings.dimension,
                    distance=models.Distance.COSINE,
                    hnsw_config=models.HnswConfigDiff(m=_HNSW_M, ef_construct=_HNSW_EF_CONSTRUCT),
                )
            },
            sparse_vectors_config={
                LEXICAL: models.SparseVectorParams(modifier=models.Modifier.IDF)
            },
            metadata={_METADATA_KEY: self._settings.to_json()},
            timeout=_WRITE_SECONDS,
        )

    def _create_payload_indexes(self, client: Any) -> None:
        """Does nothing where they are there; the local mode has none."""
        if self._connection.is_local:
            return
        models = self._models
        digests = models.IntegerIndexParams(
            type=models.IntegerIndexType.INTEGER, lookup=False, range=True
        )
        for name, schema in {
            "filter_tokens": models.PayloadSchemaType.KEYWORD,
            "digest": digests,
        }.items():
            client.create_payload_index(
                self._address.name, name, field_schema=schema, timeout=_WRITE_SECONDS
            )

    @property
    def settings(self) -> IndexSettings:
        """What the index was built with."""
        return self._settings

    def fingerprint(self) -> Mapping[str, str]:
        """How BM25 is computed, and how vectors are searched."""
        return {
            "engine": "qdrant",
            "lexical": f"lucene k1={K1} b={B}",
            "dense": "exact"
            if self._connection.is_local
            else f"hnsw m={_HNSW_M} ef_construct={_HNSW_EF_CONSTRUCT} ef={_HNSW_EF}",
        }

    def search(self, query: LegQuery) -> Mapping[str, Ranking]:
        """Ask for both legs in one call."""
        requests = self._requests(query)
        answers: Sequence[Any] = (
            self._ask(
                lambda client: client.query_batch_points(
                    self._address.name,
                    list(requests.values()),
                    timeout=self._connection.seconds,
                )
            )
            if requests
            else []
        )
        if len(answers) != len(requests):
            raise StageError(
                STAGE, f"it answered {len(answers)} of {len(requests)} queries of one call"
            )
        found = {
            leg: ranking_of_rows(STAGE, map(_row, _points(answer)), _KINDS[leg], query.depth)
            for leg, answer in zip(requests, answers, strict=True)
        }
        if query.terms is not None and LEXICAL not in found:
            found[LEXICAL] = ranking_of_rows(STAGE, [], ScoreKind.RATIO, query.depth)
        return found

    def _requests(self, query: LegQuery) -> dict[str, Any]:
        """The request of each leg; none of a lexical leg without terms, which finds nothing."""
        vectors: dict[str, Any] = {}
        if query.terms:
            vectors[LEXICAL] = self._sparse(Counter(map(term_index, query.terms)))
        if query.vector is not None:
            if query.vector.shape != (self._settings.dimension,):
                raise ConfigurationError(
                    f"the query's vector has shape {query.vector.shape}, those of the index "
                    f"({self._settings.dimension},): encode with the index's embedder"
                )
            vectors[DENSE] = query.vector.tolist()
        models = self._models
        conditions = [
            models.FieldCondition(key="filter_tokens", match=models.MatchAny(any=list(group)))
            for group in query.any_of
        ]
        params = {} if self._connection.is_local else {DENSE: models.SearchParams(hnsw_ef=_HNSW_EF)}
        return {
            leg: models.QueryRequest(
                query=vector,
                using=leg,
                filter=models.Filter(must=conditions) if conditions else None,
                params=params.get(leg),
                limit=query.depth,
                with_payload=_PASSAGE,
                with_vector=False,
            )
            for leg, vector in vectors.items()
        }

    def _sparse(self, values: Mapping[int, float]) -> Any:
        return self._models.SparseVector(indices=list(values), values=list(values.values()))

    def read(self, passage_ids: Sequence[str]) -> Mapping[str, Passage]:
        """The passages with these ids, as far as they are there."""
        passages = map(_passage, self._payloads(passage_ids, _PASSAGE))
        return {each.passage_id: each for each in passages if each is not None}

    def count(self) -> int:
        """How many passages there are."""
        return int(self._ask(lambda client: client.count(self._address.name, exact=True)).count)

    def revisions(self, passage_ids: Sequence[str] | None = None) -> Mapping[str, int]:
        """The revision of each of these passages that is there, or of all for None."""
        fields = ["passage_id", "revision"]
        payloads = (
            self._all_payloads(fields)
            if passage_ids is None
            else self._payloads(passage_ids, fields)
        )
        return {each["passage_id"]: each["revision"] for each in payloads}

    def smallest_digests(self, n: int) -> Sequence[int]:
        """The ``n`` smallest digests of passages, or all if there are fewer; signed."""
        order = self._models.OrderBy(key="digest")
        records, _ = self._ask(
            lambda client: client.scroll(
                self._address.name, order_by=order, limit=n, with_payload=["digest"]
            )
        )
        return [record.payload["digest"] for record in records]

    def _payloads(self, passage_ids: Sequence[str], fields: list[str]) -> Iterable[dict[str, Any]]:
        if not passage_ids:
            return []
        ids = list(map(point_id, passage_ids))
        records = self._ask(
            lambda client: client.retrieve(self._address.name, ids, with_payload=fields)
        )
        return (record.payload for record in records)

    def _all_payloads(self, fields: list[str]) -> Iterator[dict[str, Any]]:
        offset = None
        while True:
            page = partial(_scrolled, self._address.name, fields, offset)
            records, offset = self._ask(page)
            yield from (record.payload for record in records)
            if offset is None:
                return

    def write(self, passages: Sequence[IndexedPassage]) -> None:
        """Insert passages, in place of those with the same ids."""
        batch = checked_batch(passages, self._settings.dimension)
        for start in range(0, len(batch), _POINTS_PER_REQUEST):
            points = list(map(self._point, batch[start : start + _POINTS_PER_REQUEST]))
            self._ask(partial(_upserted, self._address.name, points))

    def _point(self, indexed: IndexedPassage) -> Any:
        passage = indexed.passage
        vectors = {DENSE: indexed.vector.tolist()}
        if indexed.terms:
            vectors[LEXICAL] = self._sparse(bm25_weights(indexed.terms, self._settings.mean_length))
        return self._models.PointStruct(
            id=point_id(passage.passage_id),
            vector=vectors,
            payload={
                "passage_id": passage.passage_id,
                "title": passage.title,
                "text": passage.text,
                # As a text, because Qdrant's numbers end at 64 bits and Python's do not.
                "metadata": json.dumps(passage.metadata),
                "filter_tokens": list(indexed.filter_tokens),
                "digest": indexed.digest,
                "revision": indexed.revision,
            },
        )

    def delete(self, passage_ids: Sequence[str]) -> None:
        """Delete passages; an id that is not there is no error."""
        points = self._models.PointIdsList(points=list(map(point_id, passage_ids)))
        self._ask(lambda client: client.delete(self._address.name, points, timeout=_WRITE_SECONDS))

    def finish(self) -> None:
        """Make the indexes of the payload, should their creation have been interrupted."""
        self._ask(self._create_payload_indexes)

    def close(self) -> None:
        """Close its connections; a folder's when the last of its open indexes is closed."""
        if not self._is_closed:
            self._is_closed = True
            self._connection.close()

    def _ask(self, work: Callable[[Any], _Answer]) -> _Answer:
        return _ask(self._connection, self._address, work)


def point_id(passage_id: str) -> str:
    """The id of a passage's point: Qdrant takes UUIDs and whole numbers.

    >>> point_id("a")
    '27c35e6e-9373-877f-29e5-62464e46497e'
    """
    return str(UUID(bytes=blake2b(passage_id.encode(), digest_size=16).digest()))


def term_index(term: str) -> int:
    """The place of a term in sparse vectors, 0 to 2³² − 1."""
    return int.from_bytes(blake2b(term.encode(), digest_size=4).digest())


def bm25_weights(terms: Sequence[str], mean_length: float) -> dict[int, float]:
    """The part of BM25 in Lucene's form that depends on the passage, by the place of the term.

    count / (count + k1 (1 − b + b · length / mean length)); see `Bm25sIndex`.

    Args:
        terms: The passage's terms, each as often as it occurs.
        mean_length: Terms of a passage on the mean, > 0.
    """
    norm = K1 * (1.0 - B + B * len(terms) / mean_length)
    return {at: count / (count + norm) for at, count in Counter(map(term_index, terms)).items()}


def _scrolled(name: str, fields: list[str], offset: Any, client: Any) -> Any:
    return client.scroll(name, limit=_PAGE, offset=offset, with_payload=fields)


def _upserted(name: str, points: list[Any], client: Any) -> None:
    client.upsert(name, points, timeout=_WRITE_SECONDS)


def _points(answer: Any) -> list[Any]:
    points = getattr(answer, "points", None)
    if not isinstance(points, list):
        raise StageError(STAGE, "its answer holds no list of points")
    return points


def _row(point: Any) -> Row:
    return Row(_passage(getattr(point, "payload", None)), getattr(point, "score", None))


def _passage(payload: Any) -> Passage | None:
    """The passage of a point's payload; None if it holds none that can be read whole."""
    try:
        passage_id, title, text, metadata = [payload[name] for name in _PASSAGE]
        found = json.loads(metadata)
    except (KeyError, TypeError, ValueError):
        return None
    if not all(isinstance(each, str) for each in (passage_id, title, text)):
        return None
    return Passage(passage_id, text, title, found)


class _QdrantCalls(Protocol):
    """Calls a client."""

    is_local: bool
    seconds: int

    def call(self, work: Callable[[Any], _Answer], /) -> _Answer: ...

    def close(self) -> None: ...


def _ask(
    connection: _QdrantCalls, address: EngineAddress, work: Callable[[Any], _Answer]
) -> _Answer:
    try:
        return connection.call(work)
    except CtxguardError:
        raise
    except Exception as error:
        raise _typed(error, address) from error


@contextmanager
def _connected(address: EngineAddress, *, make: bool) -> Iterator[_QdrantCalls]:
    """A connection that is closed again if what follows fails."""
    connection = _Server(address) if address.path is None else _folders.open(address, make=make)
    try:
        yield connection
    except BaseException:
        connection.close()
        raise


_inherited: list[Any] = []
"""Clients of the parent process, kept so that they are not closed here, which unlocks folders."""


def _leave_to_parent(client: Any) -> None:
    if client is not None:
        client.close = lambda: None  # its __del__ calls that
        _inherited.append(client)


class _Server:
    """A server, asked over HTTP. Threads share it; a forked child connects anew."""

    is_local = False

    def __init__(self, address: EngineAddress) -> None:
        self._library: Any = require("qdrant_client", "qdrant")
        self._address = address
        parts = urlsplit(address.url)
        if parts.username or parts.password:
            raise ConfigurationError(
                f"{address.shown}: Qdrant takes no user and password: put its API key into the "
                f"environment variable {KEY_VARIABLE}"
            )
        # Qdrant wants whole seconds.
        self.seconds = math.ceil(address.timeout_seconds)
        self._client: Any = None
        self._lock = threading.Lock()
        reset_in_children(self)

    def _reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        _leave_to_parent(self._client)
        self._client = None

    def call(self, work: Callable[[Any], _Answer]) -> _Answer:
        with self._lock:
            if self._client is None:
                self._client = self._library.QdrantClient(
                    url=self._address.http_url,
                    api_key=self._address.key,
                    timeout=self.seconds,
                    check_compatibility=False,
                )
            client = self._client
        return work(client)

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()


def _typed(error: Exception, address: EngineAddress) -> CtxguardError:
    """An error of the client as one of ours, without its message, which may quote passages."""
    status = getattr(error, "status_code", None)
    # The local mode raises a plain ValueError with this text.
    if status == _NOT_FOUND or str(error) == f"Collection {address.name} not found":
        return nothing_there(address)
    if status == _TOO_MANY_REQUESTS or type(error).__name__ == "ResourceExhaustedResponse":
        return OverloadedError(STAGE, "its rate limit is reached; ask it less often")
    if status is not None:
        cause = f": it does not accept the key; set {KEY_VARIABLE}" if status in _REFUSED else ""
        return StageUnavailableError(STAGE, f"it answered {status}{cause}")
    source = getattr(error, "source", error)  # of the client's error about the exchange itself
    kind = type(source).__name__
    if "Timeout" in kind:
        return UnansweredError(STAGE, FailureKind.TIMEOUT, f"no answer in time ({kind})")
    if kind == "ValidationError":
        return StageError(STAGE, "its answer is not of the form that the client knows")
    return StageUnavailableError(STAGE, f"it cannot be reached ({describe_error(source)})")


class _Folder:
    """A folder in the client's local mode: of one process, and of one thread at a time.

    All indexes of a folder share one client, which is closed with the last of them.
    """

    is_local = True
    seconds = _WRITE_SECONDS

    def __init__(self, address: EngineAddress, path: Path) -> None:
        library: Any = require("qdrant_client", "qdrant")
        try:
            # Calls take turns, so threads may share its connections to SQLite.
            self.client = library.QdrantClient(path=str(path), force_disable_check_same_thread=True)
        except RuntimeError:
            raise ConfigurationError(
                f"{address.shown}: another process has the folder open; a folder is for one "
                "process at a time, and a Qdrant server for several"
            ) from None
        except Exception as error:
            raise DataError(
                f"{address.shown}: the folder cannot be opened ({describe_error(error)})"
            ) from error
        self._path = path
        self.users = 0

    def call(self, work: Callable[[Any], _Answer]) -> _Answer:
        with _folders.lock:
            if self.users < 1:
                raise StageUnavailableError(
                    STAGE, "the folder is closed, or open in the process that this one came from"
                )
            return work(self.client)

    def close(self) -> None:
        with _folders.lock:
            self.users = max(self.users - 1, 0)
            if self.users == 0 and _folders.opened.get(self._path) is self:
                del _folders.opened[self._path]
                self.client.close()


class _Folders:
    """The folders that this process has open."""

    def __init__(self) -> None:
        self.opened: dict[Path, _Folder] = {}
        self.lock = threading.RLock()
        reset_in_children(self)
        atexit.register(self.close)

    def _reset_after_fork(self) -> None:
        for folder in self.opened.values():
            folder.users = 0
            _leave_to_parent(folder.client)
        self.opened = {}
        self.lock = threading.RLock()

    def open(self, address: EngineAddress, *, make: bool) -> _Folder:
        """The folder of an address, made if ``make`` says so.

        Raises:
            ConfigurationError: there is none, or another process has it open.
        """
        path = Path(address.path or "").resolve()
        if not make and not (path / "meta.json").is_file():
            raise nothing_there(address)
        with self.lock:
            folder = self.opened.get(path)
            if folder is None:
                folder = self.opened[path] = _Folder(address, path)
            folder.users += 1
            return folder

    def close(self) -> None:
        """Close what is open when the program ends: the client cannot do it later."""
        with self.lock:
            for folder in self.opened.values():
                folder.client.close()


_folders = _Folders()
