"""An index in Qdrant: vectors, and BM25 as a sparse vector, in one collection."""

import atexit
import math
import threading
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import UUID

import numpy as np

from ctxguard._support.error_text import describe_error
from ctxguard._support.extras import require
from ctxguard._support.fork_safety import reset_in_children
from ctxguard.errors import (
    ConfigurationError,
    CtxguardError,
    DataError,
    StageError,
    StageUnavailableError,
)
from ctxguard.integrations.engines.address import KEY_VARIABLE, EngineAddress, nothing_there
from ctxguard.integrations.engines.engine import (
    DENSE,
    KINDS,
    LEXICAL,
    Engine,
    EngineDownError,
    LazyClient,
    LegQuery,
    LegRows,
    Row,
    Statistics,
    StoredRecord,
    leave_to_parent,
    version_of,
)
from ctxguard.integrations.engines.stored import PASSAGE, IndexedPassage, passage_of
from ctxguard.retrieval.index.lexical import K1, B

_NAME = "qdrant"
_WRITE_SECONDS = 120
_PAGE = 1_000
_HNSW_M, _HNSW_EF_CONSTRUCT, _HNSW_EF = 16, 200, 200
_REFUSED = (401, 403)
_NOT_FOUND, _TOO_MANY_REQUESTS = 404, 429
_METADATA_KEY = "ctxguard"
"""The key of the settings in the collection's metadata."""
_EVIDENCE, _STATISTICS = "evidence", "statistics"
_POINT_OF_STATISTICS = str(UUID(int=0))
"""A point without vectors, which no search finds."""

_Answer = TypeVar("_Answer")


class QdrantEngine(Engine):
    """One collection of a Qdrant server, or of a folder in the client's local mode.

    BM25 is the product of a passage's sparse vector, which holds the part that depends on the
    passage, and the query's, whose counts Qdrant multiplies by the inverse document frequency. A
    term's place in them is a 32-bit hash. Terms that share one count as one.
    """

    name = _NAME
    # Qdrant refuses requests over 32 MB by default; 128 vectors of 4,096 numbers are 11 MB of JSON.
    rows_per_write = 128

    def __init__(self, address: EngineAddress, *, make: bool = False) -> None:
        super().__init__(address)
        self._models: Any = require("qdrant_client.models", "qdrant")
        self._is_closed = False
        self._connection: _Server | _Folder = (
            _Server(address) if address.path is None else _folders.open(address, make=make)
        )

    def stored_settings(self) -> str:
        content = self._ask(lambda client: client.get_collection(self.address.name))
        stored = (content.config.metadata or {}).get(_METADATA_KEY)
        if not isinstance(stored, str):
            raise self._foreign()
        return stored

    def make(self) -> bool:
        if self._ask(lambda client: client.collection_exists(self.address.name)):
            return False
        models = self._models
        dense = models.VectorParams(
            size=self.settings.dimension,
            distance=models.Distance.COSINE,
            hnsw_config=models.HnswConfigDiff(m=_HNSW_M, ef_construct=_HNSW_EF_CONSTRUCT),
        )
        self._ask(
            lambda client: client.create_collection(
                self.address.name,
                vectors_config={DENSE: dense},
                sparse_vectors_config={
                    LEXICAL: models.SparseVectorParams(modifier=models.Modifier.IDF)
                },
                metadata={_METADATA_KEY: self.settings.to_json()},
                timeout=_WRITE_SECONDS,
            )
        )
        self.finish()
        return True

    def finish(self) -> None:
        """Make the payload's indexes, should their creation have been interrupted."""
        if self._connection.is_local:  # the local mode has none
            return
        models = self._models
        digests = models.IntegerIndexParams(
            type=models.IntegerIndexType.INTEGER, lookup=False, range=True
        )
        for field, schema in (
            ("filter_tokens", models.PayloadSchemaType.KEYWORD),
            ("digest", digests),
        ):
            self._ask(
                partial(
                    _call,
                    "create_payload_index",
                    self.address.name,
                    field,
                    field_schema=schema,
                    timeout=_WRITE_SECONDS,
                )
            )

    def fingerprint(self) -> Mapping[str, str]:
        hnsw = f"hnsw m={_HNSW_M} ef_construct={_HNSW_EF_CONSTRUCT} ef={_HNSW_EF}"
        return {
            "engine": _NAME,
            "lexical": f"lucene k1={K1} b={B}",
            "dense": "exact" if self._connection.is_local else hnsw,
        }

    def find(self, query: LegQuery) -> dict[str, LegRows | CtxguardError]:
        """Ask for both legs in one call."""
        requests = self._requests(query)
        answers: Sequence[Any] = ()
        if requests:
            answers = self._ask(
                lambda client: client.query_batch_points(
                    self.address.name, list(requests.values()), timeout=self._connection.seconds
                )
            )
        if len(answers) != len(requests):
            raise StageError(
                _NAME, f"it answered {len(answers)} of {len(requests)} queries of one call"
            )
        found: dict[str, LegRows | CtxguardError] = {
            leg: _rows(leg, answer) for leg, answer in zip(requests, answers, strict=True)
        }
        if query.terms is not None:
            found.setdefault(LEXICAL, LegRows((), KINDS[LEXICAL]))
        return found

    def _requests(self, query: LegQuery) -> dict[str, Any]:
        """Build the request of each leg; none for a lexical leg without terms."""
        models = self._models
        vectors: dict[str, Any] = {}
        if query.terms:
            vectors[LEXICAL] = self._sparse(Counter(map(term_index, query.terms)))
        if query.vector is not None:
            vectors[DENSE] = query.vector.tolist()
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
                with_payload=list(PASSAGE),
                with_vector=False,
            )
            for leg, vector in vectors.items()
        }

    def _sparse(self, values: Mapping[int, float]) -> Any:
        return self._models.SparseVector(indices=list(values), values=list(values.values()))

    def rows(
        self, fields: Sequence[str], passage_ids: Sequence[str] | None = None
    ) -> Iterable[Mapping[str, Any]]:
        if passage_ids is not None:
            return self._payloads(list(map(point_id, passage_ids)), fields)
        return [row for page in self._pages(fields, _PAGE) for row in page]

    def _payloads(self, points: list[str], fields: Sequence[str]) -> list[Mapping[str, Any]]:
        """Read fields of some points that are there."""
        if not points:
            return []
        wanted = {"with_payload": list(fields)}
        found = self._ask(partial(_call, "retrieve", self.address.name, points, **wanted))
        return [record.payload or {} for record in found]

    def _pages(self, fields: Sequence[str], size: int) -> Iterator[list[Mapping[str, Any]]]:
        """Read fields of all passages, page by page."""
        options: dict[str, Any] = {"limit": size, "with_payload": list(fields)}
        while True:
            found, offset = self._ask(partial(_call, "scroll", self.address.name, **options))
            yield [each.payload for each in found if str(each.id) != _POINT_OF_STATISTICS]
            if offset is None:
                return
            options["offset"] = offset

    def evidence(self, passage_ids: Sequence[str]) -> dict[str, StoredRecord]:
        rows = self.rows(("passage_id", _EVIDENCE), passage_ids)
        n = 4 * self.settings.dimension
        found = {str(row.get("passage_id")): _decoded(row, _EVIDENCE) for row in rows}
        return {
            name: StoredRecord(np.frombuffer(both[:n], np.float32), both[n:])
            for name, both in found.items()
            if len(both) >= n
        }

    def records(self, size: int) -> Iterator[list[bytes]]:
        n = 4 * self.settings.dimension
        for page in self._pages([_EVIDENCE], size):
            yield [_decoded(row, _EVIDENCE)[n:] for row in page]

    def statistics(self, known: str | None) -> Statistics | None:
        for row in self._payloads([_POINT_OF_STATISTICS], ["version"]):
            version = str(row.get("version"))
            if version != known:
                for found in self._payloads([_POINT_OF_STATISTICS], [_STATISTICS]):
                    return Statistics(version, _decoded(found, _STATISTICS))
        return None

    def keep_statistics(self, content: bytes) -> None:
        payload = {"version": version_of(content), _STATISTICS: b64encode(content).decode()}
        point = self._models.PointStruct(id=_POINT_OF_STATISTICS, vector={}, payload=payload)
        self._ask(lambda client: client.upsert(self.address.name, [point], timeout=_WRITE_SECONDS))

    def count(self) -> int:
        models = self._models
        others = models.Filter(must_not=[models.HasIdCondition(has_id=[_POINT_OF_STATISTICS])])
        counted = self._ask(partial(_call, "count", self.address.name, others, exact=True))
        return int(counted.count)

    def smallest_digests(self, n: int) -> Sequence[int]:
        order = self._models.OrderBy(key="digest")
        records, _ = self._ask(
            lambda client: client.scroll(
                self.address.name, order_by=order, limit=n, with_payload=["digest"]
            )
        )
        return [record.payload["digest"] for record in records]

    def insert(self, passages: Sequence[IndexedPassage]) -> None:
        points = list(map(self._point, passages))
        self._ask(lambda client: client.upsert(self.address.name, points, timeout=_WRITE_SECONDS))

    def _point(self, indexed: IndexedPassage) -> Any:
        vectors = {DENSE: indexed.vector.tolist()}
        if indexed.terms:
            vectors[LEXICAL] = self._sparse(bm25_weights(indexed.terms, self.settings.mean_length))
        identity = point_id(indexed.passage.passage_id)
        payload = indexed.stored()
        if self.settings.signals != "none":
            # A list of numbers would take far longer to read.
            both = indexed.vector.tobytes() + indexed.record
            payload[_EVIDENCE] = b64encode(both).decode()
        return self._models.PointStruct(id=identity, vector=vectors, payload=payload)

    def delete(self, passage_ids: Sequence[str]) -> None:
        points = self._models.PointIdsList(points=list(map(point_id, passage_ids)))
        self._ask(lambda client: client.delete(self.address.name, points, timeout=_WRITE_SECONDS))

    def close(self) -> None:
        """Close the connections; a folder's with the last of its open indexes."""
        if not self._is_closed:
            self._is_closed = True
            self._connection.close()

    def _ask(self, work: Callable[[Any], _Answer]) -> _Answer:
        try:
            return self._connection.call(work)
        except CtxguardError:
            raise
        except Exception as error:
            raise self._typed(error) from error

    def _typed(self, error: Exception) -> CtxguardError:
        """Return the typed error, without the client's message, which may quote passages."""
        status = getattr(error, "status_code", None)
        # The local mode raises a plain ValueError with this text.
        if status == _NOT_FOUND or str(error) == f"Collection {self.address.name} not found":
            return nothing_there(self.address)
        if status == _TOO_MANY_REQUESTS or type(error).__name__ == "ResourceExhaustedResponse":
            return self._rate_limited()
        if status is not None:
            refused = status in _REFUSED
            cause = f": it does not accept the key; set {KEY_VARIABLE}" if refused else ""
            down = EngineDownError if refused else StageUnavailableError
            return down(_NAME, f"it answered {status}{cause}")
        source = getattr(error, "source", error)  # of the client's error about the exchange itself
        kind = type(source).__name__
        if "Timeout" in kind:
            return self._late(f" ({kind})")
        if kind == "ValidationError":
            return StageError(_NAME, "its answer is not of the form that the client knows")
        return self._unreachable(describe_error(source))


def point_id(passage_id: str) -> str:
    """Return the id of a passage's point: Qdrant takes UUIDs and whole numbers.

    >>> point_id("a")
    '27c35e6e-9373-877f-29e5-62464e46497e'
    """
    return str(UUID(bytes=blake2b(passage_id.encode(), digest_size=16).digest()))


def term_index(term: str) -> int:
    """Return the place of a term in sparse vectors, 0 to 2³² − 1."""
    return int.from_bytes(blake2b(term.encode(), digest_size=4).digest())


def bm25_weights(terms: Sequence[str], mean_length: float) -> dict[int, float]:
    """Compute the part of Lucene's BM25 that depends on the passage, by the place of the term.

    count / (count + k1 (1 − b + b · length / mean length)); see `Bm25sIndex`.

    Args:
        terms: The passage's terms, each as often as it occurs.
        mean_length: Mean number of terms of a passage, > 0.
    """
    norm = K1 * (1.0 - B + B * len(terms) / mean_length)
    return {at: count / (count + norm) for at, count in Counter(map(term_index, terms)).items()}


def _call(method: str, *args: Any, **options: Any) -> Any:
    *given, client = args
    return getattr(client, method)(*given, **options)


def _decoded(row: Mapping[str, Any], field: str) -> bytes:
    """Read bytes from a payload; none if they are not there."""
    try:
        return b64decode(row.get(field, ""))
    except (TypeError, ValueError):
        return b""


def _rows(leg: str, answer: Any) -> LegRows | StageError:
    points = getattr(answer, "points", None)
    if not isinstance(points, list):
        return StageError(_NAME, "its answer holds no list of points")
    rows = (
        Row(passage_of(getattr(point, "payload", None)), getattr(point, "score", None))
        for point in points
    )
    return LegRows(rows, KINDS[leg])


class _Server:
    """A server, asked over HTTP."""

    is_local = False

    def __init__(self, address: EngineAddress) -> None:
        library: Any = require("qdrant_client", "qdrant")
        parts = urlsplit(address.url)
        if parts.username or parts.password:
            raise ConfigurationError(
                f"{address.shown}: Qdrant takes no user and password: put its API key into the "
                f"environment variable {KEY_VARIABLE}"
            )
        # Qdrant wants whole seconds.
        self.seconds = math.ceil(address.timeout_seconds)
        self._client = LazyClient(
            lambda: library.QdrantClient(
                url=address.http_url,
                api_key=address.key,
                timeout=self.seconds,
                check_compatibility=False,
            )
        )
        self.close = self._client.close

    def call(self, work: Callable[[Any], _Answer]) -> _Answer:
        return work(self._client.get())


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
                raise EngineDownError(
                    _NAME, "the folder is closed, or open in the process that this one came from"
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
            leave_to_parent(folder.client)
        self.opened = {}
        self.lock = threading.RLock()

    def open(self, address: EngineAddress, *, make: bool) -> _Folder:
        """Open the folder of an address.

        Raises:
            ConfigurationError: it does not exist and ``make`` is False, or another process has it
                open.
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
