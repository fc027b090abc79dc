"""An index in PostgreSQL: vectors by pgvector's HNSW, and BM25 over postings, in one statement.

An index is a schema of its own: ``passages``, ``postings`` (how often each passage has each term),
``totals`` (passages and their terms) and ``about`` (what the index was built with). BM25 is exact,
in Lucene's form (see `ctxguard.retrieval.index.lexical`), over the terms of our own analyser: what
PostgreSQL's full-text ranking lacks is how rare a term is.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, Self

from ctxguard._support.extras import require
from ctxguard._support.fork_safety import reset_in_children
from ctxguard.core.scores import is_valid
from ctxguard.core.types import Passage, Ranking, ScoreKind
from ctxguard.errors import ConfigurationError, DataError, StageUnavailableError
from ctxguard.integrations.engines.address import EngineAddress, already_there, nothing_there
from ctxguard.integrations.engines.engine import (
    DENSE,
    LEXICAL,
    IndexedPassage,
    IndexSettings,
    LegQuery,
    checked_batch,
)
from ctxguard.integrations.engines.rows import Row, ranking_of_rows
from ctxguard.retrieval.index.lexical import K1, B
from ctxguard.retrieval.protocols import Float32Array

psycopg: Any = require("psycopg", "postgres")
psycopg_pool: Any = require("psycopg_pool", "postgres")

VERSION = 1
"""Of the tables; those of another version are refused."""

_ENGINE = "postgresql"
_WRITE_SECONDS = 300.0
_CONNECTIONS = 16
_EF_SEARCH = 200
_MOST_DIMENSIONS = 2_000
"""pgvector's HNSW holds vectors of single precision up to this many dimensions, and of half
precision up to twice as many."""
_MOST_INLINE = 1_000
_LOCK = 7_243_119
"""Any number: processes that create an index agree on it."""

_TABLES = """
CREATE TABLE about (version int NOT NULL, settings text NOT NULL);
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
WITH stored AS (
    INSERT INTO passages
    (id, title, text, metadata, filter_tokens, digest, revision, length, vector)
    SELECT id, title, text, metadata, ARRAY(SELECT json_array_elements_text(tokens::json)), digest,
        revision, length, vector::{vector}
    FROM unnest(
        %s::text[], %s::text[], %s::text[], %s::text[], %s::text[], %s::bigint[], %s::bigint[],
        %s::int[], %s::text[]
    ) AS given (id, title, text, metadata, tokens, digest, revision, length, vector)
    RETURNING number, id, length
)
INSERT INTO postings (term, passage, count, length)
SELECT term, number, count, length
FROM unnest(%s::text[], %s::text[], %s::int[]) AS found (id, term, count) JOIN stored USING (id)
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


def _filled(statement: str, dimension: int) -> str:
    """A statement of `_TABLES` for vectors of a dimension.

    Vectors stay in their rows where these fit a page of 8 kB with them: a scan that compares them
    all takes several times as long where each is read from another table (TOAST).
    """
    return statement.format(
        vector=_type(dimension),
        dimension=dimension,
        storage="PLAIN" if dimension <= _MOST_INLINE else "EXTERNAL",
    )


def _type(dimension: int) -> str:
    return "vector" if dimension <= _MOST_DIMENSIONS else "halfvec"


class PostgresEngine:
    """One index in a PostgreSQL database; see `ctxguard.integrations.engines.engine.Engine`.

    Candidates of either leg are scored in both. Searching needs no right to write.

    Args:
        address: Where the index is. The option ``timeout`` of the URL is the most seconds that a
            search waits for a connection, and then for the server, 10 if it is not given.
        settings: What it was built with.
    """

    def __init__(self, address: EngineAddress, settings: IndexSettings) -> None:
        self.settings = settings
        self._database = _Database(address)
        self._vector = _type(settings.dimension)

    @classmethod
    def open(cls, address: EngineAddress, /) -> Self:
        """Open an index."""
        database = _Database(address)
        try:
            settings = _about(database, address)
        finally:
            database.close()
        return cls(address, settings)

    @classmethod
    def create(cls, address: EngineAddress, settings: IndexSettings, /) -> Self:
        """Make the schema and its tables."""
        if settings.dimension > 2 * _MOST_DIMENSIONS:
            raise ConfigurationError(
                f"the vectors have {settings.dimension} dimensions, and pgvector indexes at most "
                f"{2 * _MOST_DIMENSIONS}: use a model with fewer"
            )
        database = _Database(address)
        try:
            with database.transaction(_WRITE_SECONDS) as run:
                run("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
                if run("SELECT 1 FROM pg_namespace WHERE nspname = %s", [address.name]):
                    raise already_there(address)
                if not run("SELECT 1 FROM pg_extension WHERE extname = 'vector'"):
                    # In public, where the search path of every index finds it.
                    run("CREATE EXTENSION vector SCHEMA public")
                # The name has lower-case letters, digits and underscores alone.
                run(f'CREATE SCHEMA "{address.name}"')
                for statement in _TABLES.split(";"):
                    if statement.strip():
                        run(_filled(statement, settings.dimension))
                run("INSERT INTO about VALUES (%s, %s)", [VERSION, settings.to_json()])
        finally:
            database.close()
        return cls(address, settings)

    def fingerprint(self) -> Mapping[str, str]:
        """The kinds of search and their parameters."""
        return {
            "engine": f"postgresql pgvector hnsw {self._vector} ef_search={_EF_SEARCH}",
            "lexical": f"postings lucene k1={K1} b={B}",
        }

    def search(self, query: LegQuery, /) -> Mapping[str, Ranking]:
        """Both legs, and the scores of the candidates of either in both, in one statement."""
        if query.vector is not None and query.vector.shape != (self.settings.dimension,):
            raise ConfigurationError(
                f"the query's vector has shape {query.vector.shape}, those of the index "
                f"({self.settings.dimension},): encode with the index's embedder"
            )
        rows = self._database.read(*_statement(query, self._vector))
        legs: dict[str, Ranking] = {}
        for leg, column, kind in (
            (LEXICAL, 0, ScoreKind.RATIO),
            (DENSE, 1, ScoreKind.COSINE),
        ):
            if (query.terms if leg == LEXICAL else query.vector) is None:
                continue
            # Without a BM25 a passage has no term of the query; a cosine they all have.
            scored = [row for row in rows if leg == DENSE or row[column] is not None]
            found = [Row(_passage(row[2:]), row[column]) for row in scored]
            found.sort(key=_worst_last)
            legs[leg] = ranking_of_rows(_ENGINE, found, kind, 2 * query.depth)
        return legs

    def read(self, passage_ids: Sequence[str], /) -> Mapping[str, Passage]:
        """The passages with these ids, as far as they are there."""
        rows = self._database.read(
            "SELECT id, title, text, metadata FROM passages WHERE id = ANY(%(ids)s)",
            {"ids": _storable(passage_ids)},
        )
        return {each.passage_id: each for each in map(_passage, rows) if each is not None}

    def count(self) -> int:
        """How many passages there are."""
        return int(self._database.read("SELECT passages FROM totals", {})[0][0])

    def revisions(self, passage_ids: Sequence[str] | None = None, /) -> Mapping[str, int]:
        """The revision of each of these passages that is there, or of all for None."""
        if passage_ids is None:
            rows = self._database.read("SELECT id, revision FROM passages", {}, _WRITE_SECONDS)
        else:
            rows = self._database.read(
                "SELECT id, revision FROM passages WHERE id = ANY(%(ids)s)",
                {"ids": _storable(passage_ids)},
            )
        return dict(rows)

    def smallest_digests(self, n: int, /) -> Sequence[int]:
        """The ``n`` smallest digests of passages, or all if there are fewer; signed."""
        rows = self._database.read(
            "SELECT digest FROM passages ORDER BY digest LIMIT %(n)s", {"n": n}
        )
        return [row[0] for row in rows]

    def write(self, passages: Sequence[IndexedPassage], /) -> None:
        """Insert passages, in place of those with the same ids, in one transaction.

        NUL characters of a title or a text, which PostgreSQL cannot hold, are replaced by U+FFFD.

        Raises:
            DataError: an id has a NUL character.
        """
        batch = checked_batch(passages, self.settings.dimension)
        for one in batch:
            if "\0" in one.passage.passage_id:
                raise DataError(
                    f"the id {one.passage.passage_id!r} has a NUL character, which PostgreSQL "
                    "cannot hold: give the passage another id"
                )
        with self._database.transaction(_WRITE_SECONDS) as run:
            # Two writers of the same passages wait for each other here, and none is counted twice.
            run("SELECT passages FROM totals FOR UPDATE")
            _delete(run, [one.passage.passage_id for one in batch])
            run(
                _INSERT.format(vector=self._vector),
                [*_columns(batch), *_postings(batch)],
            )
            run(
                "UPDATE totals SET passages = passages + %s, terms = terms + %s",
                [len(batch), sum(len(one.terms) for one in batch)],
            )

    def delete(self, passage_ids: Sequence[str], /) -> None:
        """Delete passages; an id that is not there is no error."""
        with self._database.transaction(_WRITE_SECONDS) as run:
            run("SELECT passages FROM totals FOR UPDATE")
            _delete(run, passage_ids)

    def finish(self) -> None:
        """Index the vectors if they are not, and tell the planner how large the tables are.

        The index of vectors is made once the first passages are written: one that grows with each
        of them takes several times as long. Until then they are searched one by one.
        """
        index = f'"{self._database.schema}".passages_vector'
        if self._database.read("SELECT to_regclass(%(index)s) IS NULL", {"index": index})[0][0]:
            self._database.maintain(
                "CREATE INDEX IF NOT EXISTS passages_vector ON passages "
                f"USING hnsw (vector {self._vector}_cosine_ops)"
            )
        self._database.maintain("VACUUM (ANALYZE) passages, postings, totals")

    def close(self) -> None:
        """Close the connections."""
        self._database.close()


_Run = Callable[..., list[tuple[Any, ...]]]


class _Database:
    """Connections whose search path is the schema of one index."""

    def __init__(self, address: EngineAddress) -> None:
        self._address = address
        self.schema = address.name
        self._url, self.seconds = address.url, address.timeout_seconds
        self._reset_after_fork()
        reset_in_children(self)

    def _reset_after_fork(self) -> None:
        """Forget the pool: its connections are the parent's. The child's opens when it is used."""
        self._pool: Any = None
        self._opening = Lock()

    def read(
        self, statement: str, values: Mapping[str, Any], seconds: float | None = None
    ) -> list[tuple[Any, ...]]:
        """The rows of a query, asked a second time if the connection turns out to be broken.

        Raises:
            ConfigurationError: the index is not there, or the credentials are refused.
            StageUnavailableError: the server cannot be reached or answers with an error, or the
                query takes too long.
        """
        for last in (False, True):
            try:
                with self._connection(seconds) as connection:
                    rows: list[tuple[Any, ...]] = connection.execute(statement, values).fetchall()
                    return rows
            except StageUnavailableError as error:
                # What waited in the pool when the server ended is of no use.
                if last or not _is_broken(error):
                    raise
                self._pool.check()
        raise AssertionError

    @contextmanager
    def transaction(self, seconds: float) -> Iterator[_Run]:
        """Statements that hold together; errors as of ``read``."""
        with self._connection(seconds) as connection, connection.transaction():

            def run(statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
                cursor = connection.execute(statement, values or None)
                return [] if cursor.description is None else cursor.fetchall()

            yield run

    def maintain(self, statement: str) -> None:
        """Run a statement that may take any time and be in no transaction."""
        with self._connection(0.0) as connection:
            connection.execute(statement)

    def close(self) -> None:
        """Close the pool, if there is one."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    @contextmanager
    def _connection(self, seconds: float | None) -> Iterator[Any]:
        seconds = self.seconds if seconds is None else seconds
        try:
            with self._opened().connection(timeout=self.seconds) as connection:
                if seconds == self.seconds:
                    yield connection
                    return
                _limit(connection, seconds)
                try:
                    yield connection
                finally:
                    if not connection.closed:
                        _limit(connection, self.seconds)
        except psycopg_pool.PoolTimeout:
            raise StageUnavailableError(
                _ENGINE, f"no connection to {self._address.shown} within {self.seconds:g} s"
            ) from None
        except psycopg.Error as error:
            raise self._typed(error) from error

    def _opened(self) -> Any:
        """The pool. The first connection is made here, so that its error is the server's own."""
        if self._pool is None:
            with self._opening:
                if self._pool is None:
                    # The pool's own attempts hide why they fail.
                    self._connected().close()
                    self._pool = psycopg_pool.ConnectionPool(
                        self._url,
                        kwargs=self._options(),
                        configure=self._configure,
                        min_size=1,
                        max_size=_CONNECTIONS,
                        # After it a request that waits begins anew: the pauses between the
                        # attempts grow.
                        reconnect_timeout=2.0,
                        open=True,
                    )
        return self._pool

    def _connected(self) -> Any:
        try:
            return psycopg.connect(self._url, **self._options())
        except psycopg.ProgrammingError as error:
            raise ConfigurationError(
                f"{self._address.shown}: the URL cannot be used ({type(error).__name__})"
            ) from None
        except psycopg.OperationalError as error:
            if "password" in str(error) or "authentication" in str(error):
                raise ConfigurationError(
                    f"{self._address.shown}: the server refuses the user or the password"
                ) from None
            raise StageUnavailableError(
                _ENGINE, f"{self._address.shown} cannot be reached ({type(error).__name__})"
            ) from None

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "autocommit": True,
            "connect_timeout": max(2, round(self.seconds)),
            # A host that vanishes is noticed while a query is sent, and while its rows are awaited.
            "tcp_user_timeout": round(1e3 * self.seconds),
            "keepalives_idle": max(1, round(self.seconds)),
            "keepalives_interval": 1,
            "keepalives_count": 3,
            "application_name": "ctxguard",
        }
        if self._address.key is not None:
            options["password"] = self._address.key
        return options

    def _configure(self, connection: Any) -> None:
        # How many passages a filter lets through differs by its values, so each search is planned
        # with its own; and compiling a statement takes longer than a search may.
        connection.execute(
            "SELECT set_config('plan_cache_mode', 'force_custom_plan', false), "
            "set_config('jit', 'off', false), "
            "set_config('search_path', concat_ws(', ', %s::text, (SELECT "
            "extnamespace::regnamespace FROM pg_extension WHERE extname = 'vector')), false), "
            "set_config('hnsw.ef_search', %s, false), "
            "set_config('hnsw.iterative_scan', 'strict_order', false)",
            [f'"{self.schema}", public', str(_EF_SEARCH)],
        )
        _limit(connection, self.seconds)

    def _typed(self, error: Exception) -> Exception:
        """The error of a statement, without what it quotes."""
        if isinstance(error, psycopg.errors.UndefinedTable | psycopg.errors.InvalidSchemaName):
            return nothing_there(self._address)
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            return ConfigurationError(
                f"{self._address.shown}: the role lacks a right that this needs; searching needs "
                "USAGE on the schema and SELECT on its tables"
            )
        if isinstance(error, psycopg.errors.FeatureNotSupported | psycopg.errors.UndefinedFile):
            return ConfigurationError(
                f"{self._address.shown}: the extension pgvector is not installed on the server"
            )
        state = getattr(error, "sqlstate", None)
        name = type(error).__name__
        return StageUnavailableError(_ENGINE, f"{name} {state}" if state else f"{name}, broken")


def _is_broken(error: StageUnavailableError) -> bool:
    """Whether a connection ended, which a server that was restarted leaves behind."""
    cause = error.__cause__
    state = getattr(cause, "sqlstate", None)
    return isinstance(cause, psycopg.OperationalError) and (
        state is None or state in {"57P01", "57P02", "57P03"}
    )


def _limit(connection: Any, seconds: float) -> None:
    connection.execute(
        "SELECT set_config('statement_timeout', %s, false)", [str(round(1e3 * seconds))]
    )


def _about(database: _Database, address: EngineAddress) -> IndexSettings:
    rows = database.read("SELECT version, settings FROM about", {})
    if len(rows) != 1:
        raise DataError(f"{address.shown}: the index is not whole; build it again")
    version, settings = rows[0]
    if version != VERSION:
        raise DataError(
            f"{address.shown}: another release made the tables (version {version}, and this one "
            f"reads {VERSION}): use that release, or index anew"
        )
    return IndexSettings.from_json(settings)


def _statement(query: LegQuery, vector: str) -> tuple[str, dict[str, Any]]:
    """The statement of a search, and its values."""
    values: dict[str, Any] = {"depth": query.depth}
    conditions = []
    for number, group in enumerate(query.any_of):
        values[f"any_{number}"] = list(group)
        conditions.append(f"filter_tokens && %(any_{number})s::text[]")
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


def _worst_last(row: Row) -> float:
    """Orders rows by score, best first, those without one at the end."""
    return -float(row.score) if is_valid(row.score) else math.inf  # type: ignore[arg-type]


def _passage(row: Sequence[Any]) -> Passage | None:
    """The passage of id, title, text and metadata; None where one of them cannot be read."""
    passage_id, title, text, metadata = row
    if not isinstance(passage_id, str) or not isinstance(text, str):
        return None
    try:
        return Passage(passage_id, text, title or "", json.loads(metadata))
    except (TypeError, ValueError):
        # Without its metadata no filter could be checked.
        return None


def _delete(run: _Run, passage_ids: Sequence[str]) -> None:
    run(
        "WITH gone AS (DELETE FROM passages WHERE id = ANY(%s) RETURNING length) "
        "UPDATE totals SET passages = passages - (SELECT count(*) FROM gone), "
        "terms = terms - (SELECT coalesce(sum(length), 0) FROM gone)",
        [_storable(passage_ids)],
    )


def _columns(batch: Sequence[IndexedPassage]) -> list[list[Any]]:
    """The values of passages by column, each shape (n,)."""
    passages = [one.passage for one in batch]
    return [
        [each.passage_id for each in passages],
        [_without_nul(each.title) for each in passages],
        [_without_nul(each.text) for each in passages],
        [json.dumps(each.metadata) for each in passages],
        [json.dumps(list(one.filter_tokens)) for one in batch],
        [one.digest for one in batch],
        [one.revision for one in batch],
        [len(one.terms) for one in batch],
        [_vector_text(one.vector) for one in batch],
    ]


def _postings(batch: Sequence[IndexedPassage]) -> list[list[Any]]:
    """How often each passage has each term: ids, terms and counts, shape (n_postings,) each."""
    rows = [
        (one.passage.passage_id, term, count)
        for one in batch
        for term, count in Counter(one.terms).items()
        if "\0" not in term
    ]
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[], [], []]


def _vector_text(vector: Float32Array) -> str:
    """A vector as pgvector reads it, with as many digits as single precision has."""
    return f"[{','.join(f'{number:.9g}' for number in vector.tolist())}]"


def _without_nul(text: str) -> str:
    return text.replace("\0", "\ufffd")


def _storable(passage_ids: Sequence[str]) -> list[str]:
    """Ids without those that PostgreSQL cannot hold, and so does not have."""
    return [each for each in passage_ids if "\0" not in each]
