"""An index in Milvus: vectors, and BM25 as a function of the terms, in one collection."""

import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, TypeVar, cast
from urllib.parse import unquote, urlsplit

from ctxguard._support.extras import require
from ctxguard._support.fork_safety import reset_in_children
from ctxguard.core.render import sanitise
from ctxguard.core.scores import is_valid
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
from ctxguard.resilience import Stage, UnansweredError
from ctxguard.retrieval.index.lexical import K1, B

STAGE = "milvus"
"""What errors name."""

MAX_BYTES = 65_535
"""Of a text in UTF-8 that a field of Milvus holds."""

_MAX_TOKENS = 4_096
"""Elements that an array of Milvus holds."""

_WRITE_SECONDS = 120.0
_ROWS_PER_REQUEST = 128
"""Milvus takes messages of 64 MB; a row is at most 5 texts of `MAX_BYTES` and a vector."""
_KEYS_PER_REQUEST = 512
_LONGEST_REASON = 300
"""Characters of a server's message."""
_PAGE = 1_000
_SPACE_OF_DIGESTS = 2**64
_SETTINGS = "ctxguard.settings"
"""The property of a collection that holds the settings."""
_PASSAGE = ["passage_id", "title", "text", "metadata"]
_BM25 = {"bm25_k1": K1, "bm25_b": B}
_EVERYWHERE = {LEXICAL: "SPARSE_INVERTED_INDEX", "digest": "INVERTED"}
_INDEXES = {**_EVERYWHERE, DENSE: "AUTOINDEX", "filter_tokens": "INVERTED"}
_INDEXES_OF_FILE = {**_EVERYWHERE, DENSE: "FLAT"}
"""Milvus Lite indexes no arrays, and its AUTOINDEX is an HNSW that misses some of the nearest."""
_LEAST_VERSION = (2, 5)
"""The first release of the server that computes BM25 itself, over a sparse vector."""
_STRONG = "Strong"
"""The consistency level of what is read about the corpus: it holds every write so far."""
_METRICS = {LEXICAL: "BM25", DENSE: "COSINE"}
_NO_COLLECTION, _RATE_LIMIT = 100, 8
_REFUSED = ("UNAUTHENTICATED", "PERMISSION_DENIED")
_LOUD = (
    "pymilvus.client.connection_manager",
    "pymilvus.client.iterator.query_iterator",
    "pymilvus.decorators",
    "milvus_lite",
)
"""Loggers that print a traceback of each error that is raised too, or what nobody can mend."""
_KEPT_TERM = re.compile(r"[a-z0-9]{1,40}")

_Answer = TypeVar("_Answer")


class MilvusEngine:
    """One collection of a Milvus server, or of a file of Milvus Lite in this process.

    Milvus computes BM25 from a field with the passage's terms, which it splits at spaces, so that
    the analyser is ours and the document frequencies are the engine's. The primary key is a digest
    of the passage's id, which may have any characters and length.

    Args:
        connection: Calls the client.
        settings: What the collection was built with.
    """

    def __init__(self, connection: "_Connection", settings: IndexSettings) -> None:
        self._connection = connection
        self._name = connection.address.name
        self._settings = settings
        self._lexical_leg = Stage(f"{STAGE} {LEXICAL}", breaks=False)
        self._reset_after_fork()
        reset_in_children(self)

    def _reset_after_fork(self) -> None:
        self._writing = threading.Lock()

    @classmethod
    def open(cls, address: EngineAddress) -> Self:
        """See `EngineClass.open`."""
        if address.path is not None and not Path(address.path).exists():
            raise nothing_there(address)
        connection = _Connection(address)
        try:
            engine = cls(connection, _settings_of(connection))
            engine._warm_up()
            return engine
        except BaseException:
            connection.close()
            raise

    @classmethod
    def create(cls, address: EngineAddress, settings: IndexSettings) -> Self:
        """See `EngineClass.create`."""
        if address.path is not None:
            Path(address.path).parent.mkdir(parents=True, exist_ok=True)
        connection = _Connection(address)
        try:
            if connection.call(lambda client, limit: client.has_collection(address.name, **limit)):
                raise already_there(address)
            _check_version(connection)
            make = partial(_create_collection, address.name, settings)
            connection.call(make, _WRITE_SECONDS, sends_text=False)
            try:
                _index_and_load(connection)
            except CtxguardError:
                # Empty as it is, it would only be in the way of the next attempt. Where it cannot
                # be removed either, `open` finishes it.
                with suppress(CtxguardError):
                    connection.call(
                        lambda client, limit: client.drop_collection(address.name, **limit)
                    )
                raise
            return cls(connection, settings)
        except BaseException:
            connection.close()
            raise

    @property
    def settings(self) -> IndexSettings:
        """What the index was built with."""
        return self._settings

    def fingerprint(self) -> Mapping[str, str]:
        """How BM25 is computed, and how vectors are searched."""
        is_file = self._connection.is_file
        return {
            "engine": "milvus",
            "lexical": f"bm25 k1={K1} b={B}" + ("; a file's own idf" if is_file else ""),
            "dense": (_INDEXES_OF_FILE if is_file else _INDEXES)[DENSE].lower(),
        }

    def search(self, query: LegQuery) -> Mapping[str, Ranking]:
        """Ask for both legs at once."""
        condition = " and ".join(map(_any_of, query.any_of))
        lexical = None
        if query.terms:
            terms = " ".join(map(_term, query.terms))
            lexical = self._lexical_leg.submit(
                partial(self._rows, LEXICAL, terms, condition, query.depth)
            )
        found: dict[str, Ranking] = {}
        if query.vector is not None:
            self._check_vector(query.vector.shape)
            rows = self._rows(DENSE, query.vector, condition, query.depth)
            found[DENSE] = ranking_of_rows(STAGE, rows, ScoreKind.COSINE, query.depth)
        if query.terms is not None:
            found[LEXICAL] = _bm25(lexical.result() if lexical else [], query.depth)
        return found

    def _check_vector(self, shape: tuple[int, ...]) -> None:
        if shape != (self._settings.dimension,):
            raise ConfigurationError(
                f"the query's vector has shape {shape}, those of the index "
                f"({self._settings.dimension},): encode with the index's embedder"
            )

    def _rows(
        self, leg: str, asked: object, condition: str, depth: int, seconds: float = 0.0
    ) -> list[Row]:
        """The best of one leg, with the distances that Milvus gives as scores."""
        answers = self._connection.call(
            lambda client, limit: client.search(
                self._name,
                data=[asked],
                anns_field=leg,
                filter=condition,
                limit=depth,
                search_params={"metric_type": _METRICS[leg]},
                output_fields=_PASSAGE,
                # Sees this client's own writes; "Strong" would make every search wait for the
                # cluster's next time tick.
                consistency_level="Session",
                **limit,
            ),
            seconds,
        )
        try:
            (rows,) = answers
            return [_row(row) for row in rows[:depth]]
        except (TypeError, ValueError, KeyError, AttributeError):
            raise StageError(STAGE, f"its answer for the {leg} leg is no list of results") from None

    def read(self, passage_ids: Sequence[str]) -> Mapping[str, Passage]:
        """The passages with these ids, as far as they are there."""
        passages = map(_passage, self._by_id(passage_ids, _PASSAGE))
        return {each.passage_id: each for each in passages if each is not None}

    def count(self) -> int:
        """How many passages there are."""
        rows = self._connection.call(partial(_queried, self._name, "", ["count(*)"]))
        return int(rows[0]["count(*)"])

    def revisions(self, passage_ids: Sequence[str] | None = None) -> Mapping[str, int]:
        """The revision of each of these passages that is there, or of all for None."""
        fields = ["passage_id", "revision"]
        rows = self._where("", fields) if passage_ids is None else self._by_id(passage_ids, fields)
        return {row["passage_id"]: row["revision"] for row in rows}

    def smallest_digests(self, n: int) -> Sequence[int]:
        """The ``n`` smallest digests of passages, or all if there are fewer; signed.

        Milvus orders no query. Digests are evenly spread, so those below a threshold are read,
        which is raised until there are enough.
        """
        share = 1.2 * n / max(self.count(), 1)
        while share < 1.0:
            threshold = int(share * _SPACE_OF_DIGESTS) - _SPACE_OF_DIGESTS // 2
            found = self._digests(f"digest < {threshold}")
            if len(found) >= n:
                return found[:n]
            share *= 2.0
        return self._digests("")[:n]

    def _digests(self, condition: str) -> list[int]:
        return sorted([row["digest"] for row in self._where(condition, ["digest"])])

    def _by_id(self, passage_ids: Sequence[str], fields: list[str]) -> Iterator[Mapping[str, Any]]:
        for start in range(0, len(passage_ids), _KEYS_PER_REQUEST):
            condition = _in(map(key_of, passage_ids[start : start + _KEYS_PER_REQUEST]))
            yield from self._connection.call(partial(_queried, self._name, condition, fields))

    def _where(self, condition: str, fields: list[str]) -> Iterator[Mapping[str, Any]]:
        """Rows page by page."""
        pages = self._connection.call(
            lambda client, limit: client.query_iterator(
                self._name,
                batch_size=_PAGE,
                filter=condition,
                output_fields=fields,
                consistency_level=_STRONG,
                **limit,
            )
        )
        try:
            while page := self._connection.call(lambda _, __: pages.next()):
                yield from page
        finally:
            pages.close()

    def write(self, passages: Sequence[IndexedPassage]) -> None:
        """Insert passages, in place of those with the same ids."""
        rows = list(map(_stored, checked_batch(passages, self._settings.dimension)))
        for start in range(0, len(rows), _ROWS_PER_REQUEST):
            self._change("upsert", data=rows[start : start + _ROWS_PER_REQUEST])

    def delete(self, passage_ids: Sequence[str]) -> None:
        """Delete passages; an id that is not there is no error."""
        if passage_ids:
            self._change("delete", filter=_in(map(key_of, passage_ids)))

    def finish(self) -> None:
        """Build the indexes of a file, which searches would otherwise build each time.

        A cluster does so itself, and limits how often it may be asked.
        """
        if self._connection.is_file:
            self._change("flush")
            self._warm_up()

    def _warm_up(self) -> None:
        """Have Milvus Lite count the terms of a file, as it does at the first search of them."""
        if self._connection.is_file:
            self._rows(LEXICAL, "a", "", 1, _WRITE_SECONDS)

    def _change(self, method: str, **arguments: Any) -> None:
        # Milvus Lite takes one change of a collection at a time.
        with self._writing:
            self._connection.call(
                lambda client, limit: getattr(client, method)(self._name, **arguments, **limit),
                _WRITE_SECONDS,
            )

    def close(self) -> None:
        """Close its connection."""
        self._connection.close()


class _Connection:
    """Calls a client of Milvus. Threads share it; a forked child connects anew.

    Args:
        address: Where the collection is.

    Attributes:
        address: The same.
        is_file: Whether it is a file of Milvus Lite.

    Raises:
        ConfigurationError: the URL names a file that does not end in ``.db``.
        MissingExtraError: pymilvus is not installed.
    """

    def __init__(self, address: EngineAddress) -> None:
        self.address = address
        self.is_file = address.path is not None
        if self.is_file and not str(address.path).endswith(".db"):
            raise ConfigurationError(
                f"{address.shown}: a file of Milvus Lite must end in .db, as in "
                "milvus:///path/file.db#name"
            )
        self._seconds = address.timeout_seconds
        self._library: Any = require("pymilvus", "milvus")
        for name in _LOUD:
            logger = logging.getLogger(name)
            if logger.level == logging.NOTSET:
                logger.setLevel(logging.CRITICAL)
        self._client: Any = None
        self._is_inherited = False
        self._reset_after_fork()
        reset_in_children(self)

    def _reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        if self._client is not None:
            self._is_inherited = self.is_file
            _inherited.append(self._client)
            self._client = None

    def call(
        self,
        work: Callable[[Any, dict[str, float]], _Answer],
        seconds: float = 0.0,
        *,
        sends_text: bool = True,
    ) -> _Answer:
        """What ``work`` returns for the client and the keywords of a time limit.

        Args:
            work: Calls the client.
            seconds: Its time limit, if that is longer than the URL's.
            sends_text: Whether a query or a passage is sent, which the server's message could
                quote. If not, the error says the server's reason.

        Raises:
            ConfigurationError: there is no such collection, or the credentials are refused.
            StageError: anything else that Milvus or its client raises.
        """
        try:
            return work(self._connected(), {"timeout": max(self._seconds, seconds)})
        except CtxguardError:
            raise
        except Exception as error:
            raise _typed(error, self.address, sends_text=sends_text) from error

    def _connected(self) -> Any:
        with self._lock:
            if self._is_inherited:
                raise StageUnavailableError(
                    STAGE, "the file is open in the process that this one was forked from"
                )
            if self._client is None:
                self._client = self._library.MilvusClient(
                    **_connection_arguments(self.address), timeout=self._seconds, dedicated=True
                )
            return self._client

    def close(self) -> None:
        """Close the client; a file stays open until the process ends."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()


_inherited: list[Any] = []
"""Clients of the parent process, kept so that they are not closed here."""


def _connection_arguments(address: EngineAddress) -> dict[str, Any]:
    if address.path is not None:
        # The client's pings of every 10 seconds make Milvus Lite end the connection.
        return {"uri": address.path, "grpc_options": {"grpc.keepalive_time_ms": 2**31 - 1}}
    parts = urlsplit(address.url)
    scheme = "https" if address.scheme.endswith("+https") else "http"
    token = address.key or ""
    if not token and parts.username:
        token = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {
        "uri": f"{scheme}://{parts.netloc.rpartition('@')[2]}",
        "token": token,
        "db_name": unquote(parts.path.strip("/")),
    }


def _typed(error: Exception, address: EngineAddress, *, sends_text: bool) -> CtxguardError:
    """An error of the client as one of ours, with its message only where that can quote no text."""
    code = getattr(error, "code", None)
    code = code() if callable(code) else code
    status = getattr(code, "name", "")  # of gRPC, where the code is not Milvus's own number
    message = str(error).lower()
    if code == _NO_COLLECTION:
        return nothing_there(address)
    if status in _REFUSED or "auth check failure" in message:
        return ConfigurationError(
            f"{address.shown}: Milvus does not accept the user and password of the URL or the "
            f"token of the environment variable {KEY_VARIABLE}"
        )
    if code == _RATE_LIMIT or status == "RESOURCE_EXHAUSTED":
        return OverloadedError(STAGE, "its rate limit is reached; ask it less often")
    if status == "DEADLINE_EXCEEDED" or "timeout" in message:
        return UnansweredError(STAGE, FailureKind.TIMEOUT, "no answer in time")
    if "open local milvus failed" in message:
        cause = (
            f"{address.shown} cannot be opened: it is no file of Milvus Lite, or another process "
            "has it open; a file is for one process at a time, and a Milvus server for several"
        )
    elif isinstance(code, int) and code > 0 and "fail connecting" not in message:
        cause = f"it answered with its error {code}"
        if not sends_text:
            said = sanitise(str(getattr(error, "message", "")))
            cause += f": {' '.join(said.split())[:_LONGEST_REASON]}"
    else:
        cause = f"it cannot be reached ({status or type(error).__name__})"
    return StageUnavailableError(STAGE, cause)


def _settings_of(connection: _Connection) -> IndexSettings:
    """The settings of a collection, which is loaded for searches."""
    address = connection.address
    # Not `describe_collection`, whose client logs an error with a traceback where there is none.
    if not connection.call(lambda client, limit: client.has_collection(address.name, **limit)):
        raise nothing_there(address)
    content = connection.call(
        lambda client, limit: client.describe_collection(address.name, **limit)
    )
    stored = content.get("properties", {}).get(_SETTINGS)
    if stored is None:
        raise DataError(
            f"{address.shown}: this collection was not made by ctxguard; give another name after "
            "#, or read it with a retriever of your own (docs/integrations/milvus.md)"
        )
    _index_and_load(connection)
    return IndexSettings.from_json(stored)


def _check_version(connection: _Connection) -> None:
    """Refuse a server that is too old for an index; one with a version of its own is taken.

    Raises:
        ConfigurationError: it is too old.
    """
    version = connection.call(lambda client, limit: client.get_server_version(**limit))
    numbers = re.match(r"v?(\d+)\.(\d+)", str(version))
    if numbers is not None and tuple(map(int, numbers.groups())) < _LEAST_VERSION:
        raise ConfigurationError(
            f"{connection.address.shown}: the server is Milvus {str(version)[:40]}, and an index "
            f"needs {'.'.join(map(str, _LEAST_VERSION))} or later, which computes BM25: update the "
            "server, or use a file of Milvus Lite"
        )


def _create_collection(
    name: str, settings: IndexSettings, client: Any, limit: dict[str, float]
) -> None:
    library: Any = require("pymilvus", "milvus")
    types = library.DataType
    schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field("key", types.VARCHAR, is_primary=True, max_length=32)
    for field in _PASSAGE:
        schema.add_field(field, types.VARCHAR, max_length=MAX_BYTES)
    schema.add_field(
        "terms",
        types.VARCHAR,
        max_length=MAX_BYTES,
        enable_analyzer=True,
        analyzer_params={"tokenizer": "standard"},
    )
    schema.add_field(
        "filter_tokens",
        types.ARRAY,
        element_type=types.VARCHAR,
        max_length=32,
        max_capacity=_MAX_TOKENS,
    )
    schema.add_field("digest", types.INT64)
    schema.add_field("revision", types.INT64)
    schema.add_field(DENSE, types.FLOAT_VECTOR, dim=settings.dimension)
    schema.add_field(LEXICAL, types.SPARSE_FLOAT_VECTOR)
    schema.add_function(library.Function("bm25", library.FunctionType.BM25, ["terms"], [LEXICAL]))
    client.create_collection(
        name,
        schema=schema,
        consistency_level=_STRONG,
        properties={_SETTINGS: settings.to_json()},
        **limit,
    )


def _index_and_load(connection: _Connection) -> None:
    """Make the indexes that a collection lacks, and load it for searches."""
    name = connection.address.name
    types = _INDEXES_OF_FILE if connection.is_file else _INDEXES

    def work(client: Any, limit: dict[str, float]) -> None:
        indexes = client.prepare_index_params()
        for field, index_type in types.items():
            if not client.list_indexes(name, field, **limit):
                metric = {"metric_type": _METRICS[field]} if field in _METRICS else {}
                params = {"params": _BM25} if field == LEXICAL else {}
                indexes.add_index(field, index_type=index_type, **metric, **params)
        if indexes:
            # In step with the server it would wait half a second for each.
            client.create_index(name, indexes, sync=False, **limit)
        client.load_collection(name, **limit)

    connection.call(work, _WRITE_SECONDS, sends_text=False)


def _queried(
    name: str, condition: str, fields: list[str], client: Any, limit: dict[str, float]
) -> list[Mapping[str, Any]]:
    rows = client.query(
        name, filter=condition, output_fields=fields, consistency_level=_STRONG, **limit
    )
    return list(rows)


def key_of(text: str) -> str:
    """What identifies a passage's id or a filter token in Milvus: 32 hexadecimal digits.

    Filters of Milvus quote texts, and Milvus Lite knows no parameters; these need no quoting.

    >>> key_of("größe/東京 #1")
    'd98419d69e3a747e889c237cd392cd38'
    """
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _in(keys: Iterable[str]) -> str:
    return f"key in {json.dumps(list(keys))}"


def _any_of(tokens: Iterable[str]) -> str:
    return f"ARRAY_CONTAINS_ANY(filter_tokens, {json.dumps(list(map(key_of, tokens)))})"


def _term(term: str) -> str:
    """A term as Milvus's standard tokeniser keeps it whole; a digest of one that it would split.

    >>> _term("timeout"), _term("wait_for")
    ('timeout', 'xc6a20169e55f')
    """
    if _KEPT_TERM.fullmatch(term):
        return term
    return "x" + blake2b(term.encode(), digest_size=6).hexdigest()


def _stored(indexed: IndexedPassage) -> dict[str, Any]:
    """The row of a passage.

    Raises:
        DataError: a text is too long for a field, or it has too many filter tokens.
    """
    passage = indexed.passage
    texts = {
        "passage_id": passage.passage_id,
        "title": passage.title,
        "text": passage.text,
        # As a text, because Milvus's numbers end at 64 bits and Python's do not.
        "metadata": json.dumps(passage.metadata, ensure_ascii=False),
        "terms": " ".join(map(_term, indexed.terms)),
    }
    for name, text in texts.items():
        if (size := len(text.encode())) > MAX_BYTES:
            raise DataError(
                f"passage {passage.passage_id[:80]!r}: its {name.removeprefix('passage_')} takes "
                f"{size:,} bytes, and a field of Milvus holds {MAX_BYTES:,}: split the passage"
            )
    if len(indexed.filter_tokens) > _MAX_TOKENS:
        raise DataError(
            f"passage {passage.passage_id!r}: its metadata has {len(indexed.filter_tokens):,} "
            f"values that a filter can name, and Milvus holds {_MAX_TOKENS:,}"
        )
    return {
        **texts,
        "key": key_of(passage.passage_id),
        "filter_tokens": list(map(key_of, indexed.filter_tokens)),
        "digest": indexed.digest,
        "revision": indexed.revision,
        DENSE: indexed.vector,
    }


def _row(hit: Any) -> Row:
    return Row(_passage(hit.get("entity")), hit.get("distance"))


def _passage(entity: Any) -> Passage | None:
    """The passage of a row; None if it holds none that can be read whole."""
    try:
        passage_id, title, text, metadata = [entity[name] for name in _PASSAGE]
        found = json.loads(metadata)
    except (KeyError, TypeError, ValueError):
        return None
    if not all(isinstance(each, str) for each in (passage_id, title, text)):
        return None
    return Passage(passage_id, text, title, found)


def _bm25(rows: Sequence[Row], depth: int) -> Ranking:
    """The lexical leg. Clusters give BM25 as it is, and Milvus Lite minus BM25.

    So their size is taken if it falls from row to row; else only the order.
    """
    sizes = [abs(cast(float, row.score)) if is_valid(row.score) else None for row in rows]
    if all(a >= b for a, b in pairwise([size for size in sizes if size is not None])):
        kind = ScoreKind.RATIO
    else:
        kind, sizes = ScoreKind.RANK, [None] * len(rows)
    read = [Row(row.passage, size) for row, size in zip(rows, sizes, strict=True)]
    return ranking_of_rows(STAGE, read, kind, depth)
