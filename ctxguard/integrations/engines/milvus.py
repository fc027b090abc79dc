"""Searches an index in Milvus: vectors, and BM25 as a function of the terms, in one collection.

Touches the network, or a file of this machine; runs threads; imports pymilvus (extra ``milvus``),
and silences its loggers, when an engine is made.
"""

import json
import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from ctxguard._support.extras import require
from ctxguard._support.fork_safety import OfProcess
from ctxguard.core.render import sanitise
from ctxguard.core.types import Ranking, ScoreKind
from ctxguard.errors import (
    ConfigurationError,
    CtxguardError,
    DataError,
    StageError,
    StageUnavailableError,
)
from ctxguard.integrations.engines.address import KEY_VARIABLE, EngineAddress, nothing_there
from ctxguard.integrations.engines.engine import (
    Engine,
    EngineDownError,
    LazyClient,
    LegQuery,
    Legs,
    number,
)
from ctxguard.integrations.engines.stored import PASSAGE, IndexedPassage
from ctxguard.resilience.stage import Stage
from ctxguard.retrieval.hybrid.search import DENSE, LEXICAL
from ctxguard.retrieval.index.lexical import K1, B

MAX_BYTES = 65_535
"""Maximum size of a text field of Milvus, in UTF-8."""

_MAX_TOKENS = 4_096
"""Maximum number of elements of an array of Milvus."""

_WRITE_SECONDS = 120.0
_LONGEST_REASON = 300
"""The most characters of a server's message to quote."""
_PAGE = 1_000
_SPACE_OF_DIGESTS = 2**64
_SETTINGS = "ctxguard.settings"
"""The property of a collection that holds the settings."""
_BM25 = {"bm25_k1": K1, "bm25_b": B}
_EVERYWHERE = {LEXICAL: "SPARSE_INVERTED_INDEX", "digest": "INVERTED"}
_INDEXES = {**_EVERYWHERE, DENSE: "AUTOINDEX", "filter_tokens": "INVERTED"}
_INDEXES_OF_FILE = {**_EVERYWHERE, DENSE: "FLAT"}
"""Milvus Lite indexes no arrays, and its AUTOINDEX is an HNSW that misses some of the nearest."""
_LEAST_VERSION = (2, 5)
"""The first release of the server that computes BM25 itself, over a sparse vector."""
_STRONG = "Strong"
"""The consistency level of reads about the corpus: they see every write so far."""
_METRICS = {LEXICAL: "BM25", DENSE: "COSINE"}
_NO_COLLECTION, _RATE_LIMIT = 100, 8
_REFUSED = ("UNAUTHENTICATED", "PERMISSION_DENIED")
_LOUD = (
    "pymilvus.client.connection_manager",
    "pymilvus.client.iterator.query_iterator",
    "pymilvus.decorators",
    "milvus_lite",
)
"""Loggers that print tracebacks of errors that are raised anyway, or that nobody can fix."""
_LOUD_OF_FILE = "grpc._server"
"""The logger in which Milvus Lite's server reports each request that it does not know."""
_MAKING = ("create_collection", "create_index", "load_collection")
"""The calls that make an index: they send no text, and may take long."""
_KEPT_TERM = re.compile(r"[a-z0-9]{1,40}")

_Rows = list[tuple[Any, object]]


class MilvusEngine(Engine):
    """One collection of a Milvus server, or of a file of Milvus Lite in this process.

    Milvus computes BM25 from a field with the passage's terms, which it splits at spaces, so that
    the analyser is ours and the document frequencies are the engine's. The primary key is a digest
    of the passage's id, which may have any characters and length.

    Raises:
        ConfigurationError: the URL names a file that is missing or does not end in ``.db``.
        MissingExtraError: pymilvus is not installed.
    """

    name = "milvus"
    # Milvus takes messages of 64 MB; a row is at most 5 texts of `MAX_BYTES` and a vector.
    rows_per_write = 128
    first_file = "."
    _writing = OfProcess(threading.Lock)

    def __init__(self, address: EngineAddress) -> None:
        super().__init__(address)
        self._is_file = address.path is not None
        if address.path is not None and not address.path.endswith(".db"):
            raise ConfigurationError(
                f"{address.shown}: a file of Milvus Lite must end in .db, as in "
                "milvus:///path/file.db#name"
            )
        self._library: Any = require("pymilvus", "milvus")
        for name in (*_LOUD, *([_LOUD_OF_FILE] if self._is_file else [])):
            logger = logging.getLogger(name)
            if logger.level == logging.NOTSET:
                logger.setLevel(logging.CRITICAL)
        self._client, self._process = LazyClient(self._connected), os.getpid()
        self._lexical_leg = Stage(f"{self.name} {LEXICAL}", breaks=False)

    def stored_settings(self) -> str:
        # Not `describe_collection`, whose client logs an error with a traceback if there is none.
        if not self._call("has_collection"):
            raise nothing_there(self.address)
        stored = self._call("describe_collection").get("properties", {}).get(_SETTINGS)
        if stored is None:
            raise self._foreign()
        return str(stored)

    def opened(self) -> None:
        """Create the indexes that an interrupted build did not create, and load the collection."""
        self._index_and_load()
        self._warm_up()

    def make(self) -> bool:
        if self.address.path is not None:
            Path(self.address.path).parent.mkdir(parents=True, exist_ok=True)
        if self._call("has_collection"):
            return False
        self._check_version()
        self._create()
        try:
            self._index_and_load()
        except CtxguardError:
            # Empty as it is, it would only be in the way of the next attempt. If it cannot be
            # removed either, `open` finishes it.
            with suppress(CtxguardError):
                self._call("drop_collection")
            raise
        return True

    def _check_version(self) -> None:
        """Refuse a server that is too old for an index; accept unknown version formats."""
        seconds = self.address.timeout_seconds
        version = str(self.ask(lambda client: client.get_server_version(timeout=seconds)))
        numbers = re.match(r"v?(\d+)\.(\d+)", version)
        if numbers is not None and tuple(map(int, numbers.groups())) < _LEAST_VERSION:
            raise ConfigurationError(
                f"{self.address.shown}: the server is Milvus {version[:40]}, but an index requires "
                f"{'.'.join(map(str, _LEAST_VERSION))} or later, which computes BM25: update the "
                "server, or use a file of Milvus Lite"
            )

    def _create(self) -> None:
        library, types = self._library, self._library.DataType
        text = {"datatype": types.VARCHAR, "max_length": MAX_BYTES}
        tokens = {"element_type": types.VARCHAR, "max_length": 32, "max_capacity": _MAX_TOKENS}
        analysed = {"enable_analyzer": True, "analyzer_params": {"tokenizer": "standard"}}
        schema = library.MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("key", types.VARCHAR, is_primary=True, max_length=32)
        for field in PASSAGE:
            schema.add_field(field, **text)
        schema.add_field("terms", **text, **analysed)
        schema.add_field("filter_tokens", types.ARRAY, **tokens)
        schema.add_field("digest", types.INT64)
        schema.add_field("revision", types.INT64)
        schema.add_field(DENSE, types.FLOAT_VECTOR, dim=self.settings.dimension)
        schema.add_field(LEXICAL, types.SPARSE_FLOAT_VECTOR)
        bm25 = library.Function("bm25", library.FunctionType.BM25, ["terms"], [LEXICAL])
        schema.add_function(bm25)
        self._call(
            "create_collection",
            schema=schema,
            consistency_level=_STRONG,
            properties={_SETTINGS: self.settings.to_json()},
        )

    def _index_and_load(self) -> None:
        """Create the collection's missing indexes, and load it for searches."""
        indexes = self._library.MilvusClient.prepare_index_params()
        for field, index_type in self._index_types.items():
            if not self._call("list_indexes", field):
                metric = {"metric_type": _METRICS[field]} if field in _METRICS else {}
                params = {"params": _BM25} if field == LEXICAL else {}
                indexes.add_index(field, index_type=index_type, **metric, **params)
        if indexes:
            # In step with the server it would wait half a second for each.
            self._call("create_index", indexes, sync=False)
        self._call("load_collection")

    @property
    def _index_types(self) -> Mapping[str, str]:
        return _INDEXES_OF_FILE if self._is_file else _INDEXES

    def fingerprint(self) -> Mapping[str, str]:
        own_idf = "; a file's own idf" if self._is_file else ""
        return {
            "engine": self.name,
            "lexical": f"bm25 k1={K1} b={B}{own_idf}",
            "dense": self._index_types[DENSE].lower(),
        }

    def find(self, query: LegQuery) -> Legs:
        """Search both legs at the same time, each in its own call."""
        found: Legs = {}
        lexical = None
        if query.terms:
            asked = " ".join(map(_term, query.terms))
            lexical = self._lexical_leg.submit(partial(self._leg, LEXICAL, asked, query))
        elif query.terms is not None:
            found[LEXICAL] = self.leg(LEXICAL, (), query)
        if query.vector is not None:
            found[DENSE] = self._leg(DENSE, query.vector, query)
        if lexical is not None:
            found[LEXICAL] = lexical.result()
        return found

    def _leg(
        self, leg: str, asked: object, query: LegQuery, seconds: float = 0.0
    ) -> Ranking | CtxguardError:
        """Search one leg; return the error if it fails."""
        try:
            answers = self._call(
                "search",
                seconds=seconds,
                data=[asked],
                anns_field=leg,
                filter=" and ".join(map(_any_of, query.any_of)),
                limit=query.depth,
                search_params={"metric_type": _METRICS[leg]},
                output_fields=list(PASSAGE),
                # Sees this client's own writes; "Strong" would make every search wait for the
                # cluster's next time tick.
                consistency_level="Session",
            )
        except StageError as error:
            return error
        try:
            (hits,) = answers
            rows: _Rows = [(hit.get("entity"), hit.get("distance")) for hit in hits[: query.depth]]
        except (TypeError, ValueError, KeyError, AttributeError):
            return StageError(self.name, f"its answer for the {leg} leg is not a list of results")
        rows, kind = _bm25(rows) if leg == LEXICAL else (rows, None)
        return self.leg(leg, rows, query, kind)

    def rows(
        self, fields: Sequence[str], passage_ids: Sequence[str] | None = None
    ) -> Iterator[Mapping[str, Any]]:
        names = [DENSE if each == "vector" else each for each in fields]
        # For a search, whatever was deleted meanwhile is only left out: it waits for no writes.
        level = "Session" if "vector" in fields else _STRONG
        found: Iterable[Mapping[str, Any]] = self._where("", names)
        if passage_ids is not None:
            found = self._rows(_in(passage_ids), names, level)
        for row in found:
            yield {**row, "vector": np.array(row[DENSE], np.float32)} if DENSE in row else row

    def count(self) -> int:
        return int(self._rows("", ["count(*)"])[0]["count(*)"])

    def smallest_digests(self, n: int) -> Sequence[int]:
        """See `Engine`.

        Milvus cannot sort a query. Digests are evenly spread, so those below a threshold are read,
        and the threshold is raised until there are enough.
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

    def _rows(
        self, condition: str, fields: Sequence[str], level: str = _STRONG
    ) -> list[Mapping[str, Any]]:
        asked: dict[str, Any] = {"output_fields": list(fields), "consistency_level": level}
        return list(self._call("query", filter=condition, **asked))

    def _where(self, condition: str, fields: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        """Read rows page by page."""
        pages = self._call(
            "query_iterator",
            batch_size=_PAGE,
            filter=condition,
            output_fields=list(fields),
            consistency_level=_STRONG,
        )
        try:
            while page := self.ask(lambda _: pages.next()):
                yield from page
        finally:
            pages.close()

    def insert(self, passages: Sequence[IndexedPassage]) -> None:
        self._change("upsert", data=list(map(_stored, passages)))

    def delete(self, passage_ids: Sequence[str]) -> None:
        if passage_ids:
            self._change("delete", filter=_in(passage_ids))

    def finish(self) -> None:
        """Build the indexes of a file, which searches would otherwise build each time.

        A cluster does so itself, and limits how often it may be asked.
        """
        if self._is_file:
            self._change("flush")
            self._warm_up()

    def _warm_up(self) -> None:
        """Make Milvus Lite count a file's terms now, instead of in the first search."""
        if self._is_file:
            answer = self._leg(LEXICAL, "a", LegQuery(["a"], None, 1), _WRITE_SECONDS)
            if isinstance(answer, CtxguardError):
                raise answer

    def _call(self, method: str, *given: Any, seconds: float = 0.0, **arguments: Any) -> Any:
        """Call a method of the client for this collection, within ``seconds`` or the URL's timeout.

        ``given`` are its arguments after the collection's name.
        """
        is_making = method in _MAKING
        seconds = max(self.address.timeout_seconds, _WRITE_SECONDS if is_making else seconds)
        name = self.address.name
        return self.ask(
            lambda client: getattr(client, method)(name, *given, timeout=seconds, **arguments),
            says_why=is_making,
        )

    def _connected(self) -> Any:
        if self._is_file and os.getpid() != self._process:
            raise EngineDownError(
                self.name, "the file is open in the process that this one was forked from"
            )
        return self._library.MilvusClient(
            **_connection_arguments(self.address),
            timeout=self.address.timeout_seconds,
            dedicated=True,
        )

    def typed(self, error: Exception, *, says_why: bool = False) -> CtxguardError:
        code = getattr(error, "code", None)
        code = code() if callable(code) else code
        status = getattr(code, "name", "")  # of gRPC, where the code is not Milvus's own number
        message, shown = str(error).lower(), self.address.shown
        if code == _NO_COLLECTION:
            return nothing_there(self.address)
        if code == _RATE_LIMIT or status == "RESOURCE_EXHAUSTED":
            return self._rate_limited()
        cause = f"it cannot be reached ({status or type(error).__name__})"
        down: type[StageUnavailableError] = EngineDownError
        if status in _REFUSED or "auth check failure" in message:
            return ConfigurationError(
                f"{shown}: Milvus does not accept the user and password of the URL or the token of "
                f"the environment variable {KEY_VARIABLE}"
            )
        if status == "DEADLINE_EXCEEDED" or "timeout" in message:
            return self._late()
        if "open local milvus failed" in message:
            cause = (
                f"{shown} cannot be opened: it is not a file of Milvus Lite, or another process "
                "has it open, and only one can at a time: use a Milvus server for several"
            )
        elif isinstance(code, int) and code > 0 and "fail connecting" not in message:
            cause, down = f"it answered with error {code}", StageUnavailableError
            if says_why:
                said = sanitise(str(getattr(error, "message", "")))
                cause += f": {' '.join(said.split())[:_LONGEST_REASON]}"
        return down(self.name, cause)

    def _change(self, method: str, **arguments: Any) -> None:
        # Milvus Lite takes one change of a collection at a time.
        with self._writing:
            self._call(method, seconds=_WRITE_SECONDS, **arguments)


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


def key_of(text: str) -> str:
    """Hash a passage's id or a filter token to 32 hexadecimal digits.

    Filters of Milvus quote texts, and Milvus Lite knows no parameters; these need no quoting.

    >>> key_of("größe/東京 #1")
    'd98419d69e3a747e889c237cd392cd38'
    """
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _in(passage_ids: Iterable[str]) -> str:
    return f"key in {json.dumps(list(map(key_of, passage_ids)))}"


def _any_of(tokens: Iterable[str]) -> str:
    return f"ARRAY_CONTAINS_ANY(filter_tokens, {json.dumps(list(map(key_of, tokens)))})"


def _term(term: str) -> str:
    """Return the term if Milvus's standard tokeniser is sure to keep it whole, or else its digest.

    >>> _term("timeout"), _term("wait_for")
    ('timeout', 'xc6a20169e55f')
    """
    if _KEPT_TERM.fullmatch(term):
        return term
    return "x" + blake2b(term.encode(), digest_size=6).hexdigest()


def _stored(indexed: IndexedPassage) -> dict[str, Any]:
    """Build the row of a passage; refuse one that exceeds Milvus's limits."""
    row = indexed.stored()
    row["terms"] = " ".join(map(_term, indexed.terms))
    passage_id = indexed.passage.passage_id
    for name in (*PASSAGE, "terms"):
        if (size := len(row[name].encode())) > MAX_BYTES:
            raise DataError(
                f"passage {passage_id[:80]!r}: its {name.removeprefix('passage_')} takes "
                f"{size:,} bytes, but a Milvus field holds at most {MAX_BYTES:,}: split the passage"
            )
    tokens = list(map(key_of, row["filter_tokens"]))
    if len(tokens) > _MAX_TOKENS:
        raise DataError(
            f"passage {passage_id!r}: its metadata has {len(tokens):,} filterable values, but "
            f"Milvus holds at most {_MAX_TOKENS:,}"
        )
    return {**row, "filter_tokens": tokens, "key": key_of(passage_id), DENSE: indexed.vector}


def _bm25(rows: _Rows) -> tuple[_Rows, ScoreKind]:
    """Return the rows of the lexical leg, and the kind of their scores.

    Clusters give BM25 as it is, and Milvus Lite minus BM25. So the magnitude is taken if it falls
    from row to row; else only the order.
    """
    sizes = [None if (score := number(row[1])) is None else abs(score) for row in rows]
    falls = all(a >= b for a, b in pairwise([size for size in sizes if size is not None]))
    if not falls:
        return [(fields, None) for fields, _ in rows], ScoreKind.RANK
    return [(row[0], size) for row, size in zip(rows, sizes, strict=True)], ScoreKind.RATIO
