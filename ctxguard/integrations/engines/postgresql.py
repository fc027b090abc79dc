"""Searches an index in PostgreSQL: by pgvector's HNSW and BM25 over postings, in one statement.

An index is a schema of its own: ``passages``, ``postings`` (how often each passage has each term),
``totals`` (passages and their terms) and ``about`` (what the index was built with). BM25 is exact,
in Lucene's form (see `ctxguard.retrieval.index.lexical`), over the terms of our own analyser: what
PostgreSQL's full-text ranking lacks is how rare a term is. Touches the network, over a pool with
threads; imports psycopg (extra ``postgres``).
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ctxguard._support.extras import require
from ctxguard.errors import ConfigurationError, CtxguardError, DataError, StageUnavailableError
from ctxguard.integrations.engines.address import EngineAddress, nothing_there
from ctxguard.integrations.engines.engine import (
    Engine,
    EngineDownError,
    LazyClient,
    LegQuery,
    Legs,
    number,
)
from ctxguard.integrations.engines.stored import PASSAGE, IndexedPassage
from ctxguard.retrieval.hybrid.search import DENSE, LEXICAL
from ctxguard.retrieval.index.lexical import K1, B
from ctxguard.retrieval.protocols import Float32Array

psycopg: Any = require("psycopg", "postgres")
psycopg_pool: Any = require("psycopg_pool", "postgres")

_WRITE_SECONDS = 300.0
_PAGE = 2_000
_CONNECTIONS = 16
_EF_SEARCH = 200
_MOST_DIMENSIONS = 2_000
"""pgvector's HNSW holds vectors of single precision up to this many dimensions, and of half
precision up to twice as many."""
_MOST_INLINE = 1_000
"""Vectors stay in their rows if a page of 8 kB holds both: a scan of all vectors takes several
times as long if each is read from another table (TOAST)."""
_ENDED = ("57P01", "57P02", "57P03")
_WHOLE = (None, "57014", *_ENDED)
"""Errors after which no single leg is searched: time is up, or the server is unreachable."""
_LOCK = 7_243_119
"""An arbitrary number on which all processes that create an index agree."""

_TABLES = """
CREATE TABLE about (settings text NOT NULL);
CREATE TABLE totals (passages bigint NOT NULL, terms bigint NOT NULL);
INSERT INTO totals VALUES (0, 0);
CREATE TABLE passages (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id text NOT NULL UNIQUE,
    title text NOT NULL,
    text text NOT NULL,
    metadata text NOT NULL,
    filter_tokens text[] NOT NULL,
    digest bigint NOT NULL,
    revision bigint NOT NULL,
    length int NOT NULL,
    vector {vector}({dimension}) NOT NULL
);
ALTER TABLE passages ALTER COLUMN vector SET STORAGE {storage};
CREATE INDEX ON passages (digest);
CREATE INDEX ON passages USING gin (filter_tokens);
CREATE TABLE postings (
    term text NOT NULL,
    passage bigint NOT NULL REFERENCES passages ON DELETE CASCADE,
    count int NOT NULL,
    length int NOT NULL,
    PRIMARY KEY (term, passage) INCLUDE (count, length)
);
CREATE INDEX ON postings (passage);
"""

_INSERT = """
WITH given AS MATERIALIZED (
    SELECT * FROM json_to_recordset(%s::json) AS one (
        passage_id text, title text, text text, metadata text, filter_tokens text[], digest bigint,
        revision bigint, length int, vector text, counts json
    )
), stored AS (
    INSERT INTO passages
    (id, title, text, metadata, filter_tokens, digest, revision, length, vector)
    SELECT passage_id, title, text, metadata, filter_tokens, digest, revision, length,
        vector::{vector}
    FROM given
    RETURNING number, id AS passage_id, length
)
INSERT INTO postings (term, passage, count, length)
SELECT counted.key, number, counted.value::int, stored.length
FROM given JOIN stored USING (passage_id), json_each_text(counts) AS counted
"""
# Where a passage has the term, its count and the passage's length are in the index itself. Without
# MATERIALIZED a term would be counted anew for each of its passages, and without the casts the sums
# would be of PostgreSQL's decimals, which take ten times as long.
_BM25 = f"""
counted AS MATERIALIZED (
    SELECT term, times, (SELECT count(*) FROM postings WHERE postings.term = given.term) AS df
    FROM unnest(%(terms)s::text[], %(times)s::int[]) AS given (term, times)
),
asked AS MATERIALIZED (
    SELECT term, times * ln(1 + (n - df + 0.5::float8) / (df + 0.5::float8)) AS weight,
        {K1 * (1 - B)}::float8 AS least, {K1 * B}::float8 / mean AS each
    FROM counted, (
        SELECT passages::float8 AS n, greatest(terms, 1)::float8 / greatest(passages, 1) AS mean
        FROM totals
    ) AS corpus
),
bm25 AS MATERIALIZED (
    SELECT postings.passage AS number, sum(weight * count / (count + least + each * length))
        AS score
    FROM asked JOIN postings USING (term)
    GROUP BY postings.passage
)"""  # noqa: S608  two constants of ours
_LEXICAL = """
lexical AS (
    SELECT number FROM bm25 {filtered}
    ORDER BY score DESC, number LIMIT %(depth)s
)"""
_WITHIN = "WHERE number IN (SELECT number FROM passages WHERE {})"
_DENSE = """
dense AS (
    SELECT number FROM passages {filtered}
    ORDER BY vector <=> %(vector)s::{vector} LIMIT %(depth)s
)"""


_Run = Callable[..., list[tuple[Any, ...]]]


class PostgresEngine(Engine):
    """One index in a PostgreSQL database. Searching requires no write permission.

    Candidates of either leg are scored in both. The URL's option ``timeout`` bounds the seconds
    that a search waits for a connection, and then for the server.
    """

    name = "postgresql"
    scores_both = True

    def __init__(self, address: EngineAddress) -> None:
        super().__init__(address)
        self._client = LazyClient(self._pool)
        self._is_pooled = False

    @property
    def _vector(self) -> str:
        return "vector" if self.settings.dimension <= _MOST_DIMENSIONS else "halfvec"

    def stored_settings(self) -> str:
        rows = self._query("SELECT settings FROM about", {})
        return str(rows[0][0]) if rows else ""

    def make(self) -> bool:
        """Make the schema and its tables."""
        name, dimension = self.address.name, self.settings.dimension
        if dimension > 2 * _MOST_DIMENSIONS:
            raise ConfigurationError(
                f"the vectors have {dimension} dimensions, but pgvector indexes at most "
                f"{2 * _MOST_DIMENSIONS}: use a model with fewer"
            )
        with self._transaction() as run:
            run("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
            if run("SELECT 1 FROM pg_namespace WHERE nspname = %s", [name]):
                return False
            if not run("SELECT 1 FROM pg_extension WHERE extname = 'vector'"):
                # In public, where the search path of every index finds it.
                run("CREATE EXTENSION vector SCHEMA public")
            # The name has lower-case letters, digits and underscores alone.
            run(f'CREATE SCHEMA "{name}"')
            storage = "PLAIN" if dimension <= _MOST_INLINE else "EXTERNAL"
            run(_TABLES.format(vector=self._vector, dimension=dimension, storage=storage))
            run("INSERT INTO about VALUES (%s)", [self.settings.to_json()])
        return True

    def fingerprint(self) -> Mapping[str, str]:
        return {
            "engine": f"postgresql pgvector hnsw {self._vector} ef_search={_EF_SEARCH}",
            "lexical": f"postings lucene k1={K1} b={B}",
        }

    def find(self, query: LegQuery) -> Legs:
        """Search both legs, and score each leg's candidates in both, in one statement."""
        found = self._query(*_statement(query, self._vector))
        legs: Legs = {}
        for leg in query.legs:
            column = (LEXICAL, DENSE).index(leg)
            # A passage without a BM25 score has no term of the query; all have a cosine.
            rows = [
                (dict(zip(PASSAGE, row[2:], strict=True)), row[column])
                for row in found
                if leg == DENSE or row[column] is not None
            ]
            legs[leg] = self.leg(leg, sorted(rows, key=_worst_last), query)
        return legs

    def rows(
        self, fields: Sequence[str], passage_ids: Sequence[str] | None = None
    ) -> Iterator[Mapping[str, Any]]:
        # The bytes as pgvector sends them: its text takes ten times as long to read.
        named = {"passage_id": "id", "vector": f"{self._vector}_send(vector)"}
        columns = ", ".join([named.get(each, each) for each in fields])
        statement = f"SELECT id, {columns} FROM passages WHERE id"  # noqa: S608  fields of ours
        if passage_ids is None:
            statement += f" > %(after)s ORDER BY id LIMIT {_PAGE}"
        else:
            statement += " = ANY(%(ids)s)"
        form, after = ">f4" if self._vector == "vector" else ">f2", ""
        values = {} if passage_ids is None else {"ids": _storable(passage_ids)}
        while found := self._query(
            statement, {**values, "after": after}, None if values else _WRITE_SECONDS
        ):
            for own_id, *row in found:
                fetched = dict(zip(fields, row, strict=True))
                if "vector" in fetched:
                    vector = np.frombuffer(fetched["vector"], form, offset=4)
                    fetched["vector"] = vector.astype(np.float32)
                yield fetched
                after = own_id
            if values:
                return

    def count(self) -> int:
        return int(self._query("SELECT passages FROM totals", {})[0][0])

    def smallest_digests(self, n: int) -> Sequence[int]:
        rows = self._query("SELECT digest FROM passages ORDER BY digest LIMIT %(n)s", {"n": n})
        return [row[0] for row in rows]

    def insert(self, passages: Sequence[IndexedPassage]) -> None:
        """Insert passages in one transaction.

        NUL characters of a title or a text, which PostgreSQL cannot hold, are replaced by U+FFFD;
        an id with one is refused.
        """
        for one in passages:
            if "\0" in one.passage.passage_id:
                raise DataError(
                    f"the id {one.passage.passage_id!r} has a NUL character, which PostgreSQL "
                    "cannot store: give the passage another id"
                )
        with self._transaction() as run:
            # Two writers of the same passages wait for each other here, and none is counted twice.
            run("SELECT passages FROM totals FOR UPDATE")
            _delete(run, [one.passage.passage_id for one in passages])
            rows = json.dumps(list(map(_stored, passages)))
            run(_INSERT.format(vector=self._vector), [rows])
            run(
                "UPDATE totals SET passages = passages + %s, terms = terms + %s",
                [len(passages), sum(len(one.terms) for one in passages)],
            )

    def delete(self, passage_ids: Sequence[str]) -> None:
        with self._transaction() as run:
            run("SELECT passages FROM totals FOR UPDATE")
            _delete(run, passage_ids)

    def finish(self) -> None:
        """Index the vectors if they are not indexed, and tell the planner how large the tables are.

        Vectors are indexed once the first passages are written: an index that grows with each of
        them takes several times as long. Until then they are searched one by one.
        """
        schema = f'"{self.address.name}"'
        index = {"index": f"{schema}.passages_vector"}
        if self._query("SELECT to_regclass(%(index)s) IS NULL", index)[0][0]:
            with self._transaction(seconds=0.0) as run:
                run(
                    "CREATE INDEX IF NOT EXISTS passages_vector ON passages "
                    f"USING hnsw (vector {self._vector}_cosine_ops)"
                )
        tables = ", ".join([f"{schema}.{each}" for each in ("passages", "postings", "totals")])
        # Outside of a transaction, and of the pool, whose connections have a time limit.
        with self._typed_errors(), self._connected() as connection:
            if not self._is_pooled:
                connection.execute("SET statement_timeout = 0")
            connection.execute(f"VACUUM (ANALYZE) {tables}")

    def _query(
        self, statement: str, values: Mapping[str, Any], seconds: float | None = None
    ) -> list[tuple[Any, ...]]:
        """Return the rows of a query, retrying once if the connection is broken."""
        for last in (False, True):
            try:
                with self._connection(seconds) as connection:
                    rows: list[tuple[Any, ...]] = connection.execute(
                        statement, values, binary=True
                    ).fetchall()
                    return rows
            except StageUnavailableError as error:
                # Connections that waited in the pool when the server ended are of no use.
                if last or not _is_broken(error):
                    raise
                self._client.get().check()
        raise AssertionError

    @contextmanager
    def _transaction(self, seconds: float = _WRITE_SECONDS) -> Iterator[_Run]:
        """Run statements in one transaction; 0 seconds for no time limit."""
        with self._connection(seconds) as connection:

            def run(statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
                cursor = connection.execute(statement, values or None)
                return [] if cursor.description is None else cursor.fetchall()

            yield run

    @contextmanager
    def _connection(self, seconds: float | None = None) -> Iterator[Any]:
        """Lend a connection with the time limit of searches, or in a transaction with another."""
        own = self.address.timeout_seconds
        with self._typed_errors(), self._client.get().connection(timeout=own) as connection:
            if seconds is None and not self._is_pooled:
                yield connection
            else:
                # What is set lasts as long as the server's connection is ours.
                with connection.transaction():
                    self._set(connection, own if seconds is None else seconds, local=True)
                    yield connection

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except psycopg_pool.PoolTimeout:
            raise EngineDownError(
                self.name,
                f"no connection to {self.address.shown} within {self.address.timeout_seconds:g} s",
            ) from None
        except psycopg.Error as error:
            raise self.typed(error) from error

    def _pool(self) -> Any:
        """Open the pool, and make its first connection so that the server's own error is seen."""
        # The pool's own attempts hide why they fail.
        with self._connected() as first:
            # A pooler, such as PgBouncer, names processes of its own.
            [own] = first.execute("SELECT pg_backend_pid()").fetchone()
            self._is_pooled = own != first.info.backend_pid
        return psycopg_pool.ConnectionPool(
            self.address.url,
            kwargs=self._options(),
            configure=self._configure,
            min_size=1,
            max_size=_CONNECTIONS,
            # After it a request that waits begins anew: the pauses between the attempts grow.
            reconnect_timeout=2.0,
            open=True,
        )

    def _connected(self) -> Any:
        try:
            return psycopg.connect(self.address.url, **self._options())
        except psycopg.ProgrammingError as error:
            raise ConfigurationError(
                f"{self.address.shown}: the URL cannot be used ({type(error).__name__})"
            ) from None
        except psycopg.OperationalError as error:
            if "password" in str(error) or "authentication" in str(error):
                raise ConfigurationError(
                    f"{self.address.shown}: the server refuses the user or the password"
                ) from None
            raise EngineDownError(
                self.name, f"{self.address.shown} cannot be reached ({type(error).__name__})"
            ) from None

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "autocommit": True,
            # A pooler lends connections of the server to others, with what is prepared on them.
            "prepare_threshold": None,
            "connect_timeout": max(2, round(self.address.timeout_seconds)),
            # A host that vanishes is noticed while a query is sent, and while its rows are awaited.
            "tcp_user_timeout": round(1e3 * self.address.timeout_seconds),
            "keepalives_idle": max(1, round(self.address.timeout_seconds)),
            "keepalives_interval": 1,
            "keepalives_count": 3,
            "application_name": "ctxguard",
        }
        if self.address.key is not None:
            options["password"] = self.address.key
        return options

    def _configure(self, connection: Any) -> None:
        if not self._is_pooled:
            self._set(connection, self.address.timeout_seconds, local=False)

    def _set(self, connection: Any, seconds: float, *, local: bool) -> None:
        """Set the parameters of searches, for a transaction or for the whole connection."""
        # How many passages a filter lets through differs by its values, so each search is planned
        # with its own; and compiling a statement takes longer than a search may.
        connection.execute(
            "SELECT set_config('plan_cache_mode', 'force_custom_plan', %(local)s), "
            "set_config('jit', 'off', %(local)s), "
            "set_config('search_path', concat_ws(', ', %(path)s::text, (SELECT "
            "extnamespace::regnamespace FROM pg_extension WHERE extname = 'vector')), %(local)s), "
            "set_config('hnsw.ef_search', %(ef_search)s, %(local)s), "
            "set_config('hnsw.iterative_scan', 'strict_order', %(local)s), "
            "set_config('statement_timeout', %(milliseconds)s, %(local)s)",
            {
                "local": local,
                "path": f'"{self.address.name}", public',
                "ef_search": str(_EF_SEARCH),
                "milliseconds": str(round(1e3 * seconds)),
            },
        )

    def typed(self, error: Exception, *, says_why: bool = False) -> CtxguardError:  # noqa: ARG002
        if isinstance(error, psycopg.errors.UndefinedTable | psycopg.errors.InvalidSchemaName):
            return nothing_there(self.address)
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            return ConfigurationError(
                f"{self.address.shown}: the role lacks a right that this requires; searching "
                "requires USAGE on the schema and SELECT on its tables"
            )
        if isinstance(error, psycopg.errors.FeatureNotSupported | psycopg.errors.UndefinedFile):
            return ConfigurationError(
                f"{self.address.shown}: the extension pgvector is not installed on the server"
            )
        state = getattr(error, "sqlstate", None)
        name = type(error).__name__
        failed = EngineDownError if state in _WHOLE else StageUnavailableError
        return failed(self.name, f"{name} {state}" if state else f"{name}, broken")


def _is_broken(error: StageUnavailableError) -> bool:
    """Return whether a connection has ended, for instance because the server restarted."""
    cause = error.__cause__
    state = getattr(cause, "sqlstate", None)
    return isinstance(cause, psycopg.OperationalError) and (state is None or state in _ENDED)


def _statement(query: LegQuery, vector: str) -> tuple[str, dict[str, Any]]:
    """Build the statement of a search, and its values."""
    values: dict[str, Any] = {"depth": query.depth}
    conditions = []
    for at, group in enumerate(query.any_of):
        values[f"any_{at}"] = list(group)
        conditions.append(f"filter_tokens && %(any_{at})s::text[]")
    allowed = " AND ".join(conditions)
    parts, found = [], []
    if query.terms is not None:
        times = Counter(term for term in query.terms if "\0" not in term)
        values |= {"terms": list(times), "times": list(times.values())}
        parts += [_BM25, _LEXICAL.format(filtered=_WITHIN.format(allowed) if allowed else "")]
        found.append("SELECT number FROM lexical")
    if query.vector is not None:
        values["vector"] = _vector_text(query.vector)
        within = f"WHERE {allowed}" if allowed else ""
        parts.append(_DENSE.format(filtered=within, vector=vector))
        found.append("SELECT number FROM dense")
    bm25 = "NULL" if query.terms is None else "bm25.score"
    cosine = "NULL" if query.vector is None else f"1 - (vector <=> %(vector)s::{vector})"
    scored = "" if query.terms is None else " LEFT JOIN bm25 USING (number)"
    statement = (
        f"WITH {','.join(parts)}, found AS ({' UNION '.join(found)}) "  # noqa: S608  parts of ours
        f"SELECT {bm25}, {cosine}, id, title, text, metadata "
        f"FROM found JOIN passages USING (number){scored}"
    )
    return statement, values


def _worst_last(row: tuple[object, object]) -> tuple[bool, float]:
    """Sort key: best first, rows without a score at the end."""
    score = number(row[1])
    return score is None, -(score or 0.0)


def _delete(run: _Run, passage_ids: Sequence[str]) -> None:
    run(
        "WITH gone AS (DELETE FROM passages WHERE id = ANY(%s) RETURNING length) "
        "UPDATE totals SET passages = passages - (SELECT count(*) FROM gone), "
        "terms = terms - (SELECT coalesce(sum(length), 0) FROM gone)",
        [_storable(passage_ids)],
    )


def _stored(one: IndexedPassage) -> dict[str, Any]:
    """Return a passage's values in the form that `_INSERT` takes."""
    stored = one.stored()
    return {
        **stored,
        "title": _without_nul(stored["title"]),
        "text": _without_nul(stored["text"]),
        "length": len(one.terms),
        "vector": _vector_text(one.vector),
        "counts": {each: n for each, n in Counter(one.terms).items() if "\0" not in each},
    }


def _vector_text(vector: Float32Array) -> str:
    """Write a vector in pgvector's form, with as many digits as single precision has."""
    return f"[{','.join(f'{number:.9g}' for number in vector.tolist())}]"


def _without_nul(text: str) -> str:
    return text.replace("\0", "\ufffd")


def _storable(passage_ids: Sequence[str]) -> list[str]:
    """Leave out ids with a NUL character, which PostgreSQL cannot store."""
    return [each for each in passage_ids if "\0" not in each]
