"""Searches an index in Qdrant: vectors, and BM25 as a sparse vector, in one collection.

Touches the network, or a folder of this machine, whose client the engines of a process share;
imports qdrant-client (extra ``qdrant``) when an engine is made.
"""

import atexit
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit
from uuid import UUID
from weakref import WeakSet

import numpy as np

from ctxguard._support.error_text import describe_error
from ctxguard._support.extras import require
from ctxguard._support.fork_safety import OfProcess
from ctxguard.core.types import Ranking
from ctxguard.errors import (
    ConfigurationError,
    CtxguardError,
    DataError,
    StageError,
    StageUnavailableError,
)
from ctxguard.integrations.engines.address import KEY_VARIABLE, EngineAddress, nothing_there
from ctxguard.integrations.engines.engine import Engine, EngineDownError, LazyClient, LegQuery, Legs
from ctxguard.integrations.engines.stored import PASSAGE, IndexedPassage
from ctxguard.retrieval.hybrid.search import DENSE, LEXICAL
from ctxguard.retrieval.index.lexical import K1, B

_WRITE_SECONDS = 120
_PAGE = 1_000
_HNSW_M, _HNSW_EF_CONSTRUCT, _HNSW_EF = 16, 200, 200
_REFUSED = (401, 403)
_NOT_FOUND, _TOO_MANY_REQUESTS = 404, 429
_METADATA_KEY = "ctxguard"
"""The key of the settings in the collection's metadata."""


class QdrantEngine(Engine):
    """One collection of a Qdrant server, or of a folder in the client's local mode.

    BM25 is the product of a passage's sparse vector, which holds the part that depends on the
    passage, and the query's, whose counts Qdrant multiplies by the inverse document frequency. A
    term's index in them is a 32-bit hash; terms with the same hash count as one.

    A folder belongs to one process, and one thread at a time. Its indexes share one client, which
    closes with the last index.
    """

    name = "qdrant"
    # Qdrant refuses requests over 32 MB by default; 128 vectors of 4,096 numbers are 11 MB of JSON.
    rows_per_write = 128
    first_file = "meta.json"

    def __init__(self, address: EngineAddress) -> None:
        super().__init__(address)
        self._library: Any = require("qdrant_client", "qdrant")
        self._models: Any = self._library.models
        # Qdrant wants whole seconds.
        self._seconds = math.ceil(address.timeout_seconds)
        self._is_folder = address.path is not None
        if address.path is not None:
            path = Path(address.path).resolve()
            folder = _Folder(partial(_opened, path, address.shown))
            self._client = _Folder.opened.setdefault(path, folder)
            self._client.engines.add(self)
            return
        parts = urlsplit(address.url)
        if parts.username or parts.password:
            raise ConfigurationError(
                f"{address.shown}: Qdrant accepts no user or password: put its API key into the "
                f"environment variable {KEY_VARIABLE}"
            )
        self._client = LazyClient(
            lambda: self._library.QdrantClient(
                url=address.http_url,
                api_key=address.key,
                timeout=self._seconds,
                check_compatibility=False,
            )
        )

    def stored_settings(self) -> str:
        stored = (self._call("get_collection").config.metadata or {}).get(_METADATA_KEY)
        if not isinstance(stored, str):
            raise self._foreign()
        return stored

    def make(self) -> bool:
        if self._call("collection_exists"):
            return False
        models = self._models
        dense = models.VectorParams(
            size=self.settings.dimension,
            distance=models.Distance.COSINE,
            hnsw_config=models.HnswConfigDiff(m=_HNSW_M, ef_construct=_HNSW_EF_CONSTRUCT),
        )
        lexical = models.SparseVectorParams(modifier=models.Modifier.IDF)
        self._write(
            "create_collection",
            vectors_config={DENSE: dense},
            sparse_vectors_config={LEXICAL: lexical},
            metadata={_METADATA_KEY: self.settings.to_json()},
        )
        self.finish()
        return True

    def finish(self) -> None:
        """Create the payload's indexes if an earlier attempt was interrupted."""
        if self._is_folder:  # the local mode has none
            return
        kinds = self._models.PayloadSchemaType, self._models.IntegerIndexType
        digest = self._models.IntegerIndexParams(type=kinds[1].INTEGER, lookup=False, range=True)
        for field, schema in (("filter_tokens", kinds[0].KEYWORD), ("digest", digest)):
            self._write("create_payload_index", field, field_schema=schema)

    def fingerprint(self) -> Mapping[str, str]:
        hnsw = f"hnsw m={_HNSW_M} ef_construct={_HNSW_EF_CONSTRUCT} ef={_HNSW_EF}"
        return {
            "engine": self.name,
            "lexical": f"lucene k1={K1} b={B}",
            "dense": "exact" if self._is_folder else hnsw,
        }

    def find(self, query: LegQuery) -> Legs:
        """Search both legs in one call."""
        requests = self._requests(query)
        answers: Sequence[Any] = ()
        if requests:
            asked = list(requests.values())
            answers = self._call("query_batch_points", asked, timeout=self._seconds)
        if len(answers) != len(requests):
            raise StageError(
                self.name, f"it answered {len(answers)} of {len(requests)} queries of one call"
            )
        found = {
            leg: self._ranking(leg, answer, query)
            for leg, answer in zip(requests, answers, strict=True)
        }
        if query.terms is not None:
            found.setdefault(LEXICAL, self.leg(LEXICAL, (), query))
        return found

    def _requests(self, query: LegQuery) -> dict[str, Any]:
        """Build the request for each leg; none for a lexical leg without terms."""
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
        params = {} if self._is_folder else {DENSE: models.SearchParams(hnsw_ef=_HNSW_EF)}
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

    def _ranking(self, leg: str, answer: Any, query: LegQuery) -> Ranking | CtxguardError:
        points = getattr(answer, "points", None)
        if not isinstance(points, list):
            return StageError(self.name, "its answer has no list of points")
        rows = ((getattr(each, "payload", None), getattr(each, "score", None)) for each in points)
        return self.leg(leg, rows, query)

    def _sparse(self, values: Mapping[int, float]) -> Any:
        return self._models.SparseVector(indices=list(values), values=list(values.values()))

    def rows(
        self, fields: Sequence[str], passage_ids: Sequence[str] | None = None
    ) -> Iterator[Mapping[str, Any]]:
        stored = [each for each in fields if each != "vector"]
        asked = {"with_payload": stored, "with_vectors": [DENSE] if "vector" in fields else False}
        points = list(map(point_id, passage_ids or ()))
        found: Iterable[Any] = self._call("retrieve", points, **asked) if points else ()
        for record in self._all(asked) if passage_ids is None else found:
            row = record.payload or {}
            vector = (record.vector or {}).get(DENSE) if "vector" in fields else None
            yield row if vector is None else {**row, "vector": np.array(vector, np.float32)}

    def _all(self, asked: Mapping[str, Any]) -> Iterator[Any]:
        """Read all points, page by page."""
        found, offset = self._call("scroll", limit=_PAGE, **asked)
        yield from found
        while offset is not None:
            found, offset = self._call("scroll", limit=_PAGE, offset=offset, **asked)
            yield from found

    def count(self) -> int:
        return int(self._call("count", exact=True).count)

    def smallest_digests(self, n: int) -> Sequence[int]:
        order = self._models.OrderBy(key="digest")
        records, _ = self._call("scroll", order_by=order, limit=n, with_payload=["digest"])
        return [record.payload["digest"] for record in records]

    def insert(self, passages: Sequence[IndexedPassage]) -> None:
        self._write("upsert", list(map(self._point, passages)))

    def _point(self, indexed: IndexedPassage) -> Any:
        vectors = {DENSE: indexed.vector.tolist()}
        if indexed.terms:
            vectors[LEXICAL] = self._sparse(bm25_weights(indexed.terms, self.settings.mean_length))
        payload = indexed.stored()
        identity = point_id(indexed.passage.passage_id)
        return self._models.PointStruct(id=identity, vector=vectors, payload=payload)

    def delete(self, passage_ids: Sequence[str]) -> None:
        points = list(map(point_id, passage_ids))
        self._write("delete", self._models.PointIdsList(points=points))

    def close(self) -> None:
        """Close the connections; those of a folder close with its last open index."""
        if isinstance(self._client, _Folder):
            self._client.leave(self)
        else:
            super().close()

    def _write(self, method: str, *args: Any, **options: Any) -> None:
        self._call(method, *args, timeout=_WRITE_SECONDS, **options)

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the client for this collection."""
        return self.ask(lambda client: getattr(client, method)(self.address.name, *args, **options))

    def typed(self, error: Exception, *, says_why: bool = False) -> CtxguardError:  # noqa: ARG002
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
            return down(self.name, f"it answered {status}{cause}")
        source = getattr(error, "source", error)  # of the client's error about the exchange itself
        kind = type(source).__name__
        if "Timeout" in kind:
            return self._late(f" ({kind})")
        if kind == "ValidationError":
            return StageError(
                self.name, "its answer does not have the form that the client expects"
            )
        return EngineDownError(self.name, f"it cannot be reached ({describe_error(source)})")


def point_id(passage_id: str) -> str:
    """Return the id of a passage's point: Qdrant takes UUIDs and whole numbers.

    >>> point_id("a")
    '27c35e6e-9373-877f-29e5-62464e46497e'
    """
    return str(UUID(bytes=blake2b(passage_id.encode(), digest_size=16).digest()))


def term_index(term: str) -> int:
    """Return a term's index in sparse vectors, 0 to 2³² − 1."""
    return int.from_bytes(blake2b(term.encode(), digest_size=4).digest())


def bm25_weights(terms: Sequence[str], mean_length: float) -> dict[int, float]:
    """Compute the part of Lucene's BM25 that depends on the passage, by the index of the term.

    count / (count + k1 (1 − b + b · length / mean length)); see `Bm25sIndex`.
    """
    norm = K1 * (1.0 - B + B * len(terms) / mean_length)
    return {at: count / (count + norm) for at, count in Counter(map(term_index, terms)).items()}


def _opened(path: Path, shown: str) -> Any:
    library: Any = require("qdrant_client", "qdrant")
    try:
        # Calls take turns, so threads may share its connections to SQLite.
        return library.QdrantClient(path=str(path), force_disable_check_same_thread=True)
    except RuntimeError:
        raise ConfigurationError(
            f"{shown}: another process has the folder open, and only one can at a time: "
            "use a Qdrant server for several"
        ) from None
    except Exception as error:
        raise DataError(
            f"{shown}: the folder cannot be opened ({describe_error(error)})"
        ) from error


class _Folder(LazyClient):
    """The client of a folder, shared by all engines of this process that have it open.

    It is closed with the last of them, or when the program ends: the client cannot do it later.
    """

    opened: ClassVar[dict[Path, Self]] = {}
    _turn = OfProcess(threading.RLock)

    def __init__(self, connect: Callable[[], Any]) -> None:
        super().__init__(connect)
        self.engines = WeakSet[QdrantEngine]()

    def run(self, work: Callable[[Any], Any]) -> Any:
        """Run ``work`` on the client and return its result; calls take turns."""
        with self._turn:
            return super().run(work)

    def leave(self, engine: QdrantEngine) -> None:
        """Close the folder if no other engine uses it."""
        with self._turn:
            self.engines.discard(engine)
            if not self.engines:
                self.close()

    @classmethod
    def close_all(cls) -> None:
        """Close all open clients."""
        for each in cls.opened.values():
            each.close()


atexit.register(_Folder.close_all)
