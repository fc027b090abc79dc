"""An index in a real PostgreSQL server."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("psycopg_pool", reason="the driver of PostgreSQL is not installed")

from engine_contract import PASSAGES, EngineContract

from ctxguard import Passage
from ctxguard.integrations.engines.retriever import EngineRetriever
from ctxguard.testing import RetrieverContract, WordHashEmbedder

_server = ""
_names = iter(range(10_000))


@pytest.fixture(scope="module", autouse=True)
def _server_of_the_module(postgresql_server: str) -> Iterator[None]:
    """The server for the classes below; what they have made is gone afterwards."""
    global _server  # noqa: PLW0603  the suites that are inherited take no fixtures
    _server = postgresql_server
    yield
    import psycopg

    with psycopg.connect(postgresql_server, autocommit=True) as connection:
        for (name,) in connection.execute(
            "SELECT nspname FROM pg_namespace WHERE nspname ~ '^(index|contract)_'"
        ).fetchall():
            connection.execute(f'DROP SCHEMA "{name}" CASCADE')


@pytest.fixture
def opened() -> Iterator[list[EngineRetriever]]:
    retrievers: list[EngineRetriever] = []
    yield retrievers
    for each in retrievers:
        each.close()


def _built(passages: Sequence[Passage] = PASSAGES, **options: Any) -> EngineRetriever:
    url = f"{_server}#contract_{next(_names)}"
    options = {"embedder": WordHashEmbedder(), "signals": "none", **options}
    return EngineRetriever.build(passages, url, **options)


class TestEngine(EngineContract):
    def url(self, name: str) -> str:
        return f"{_server}#{name}"


class TestRetriever(RetrieverContract):
    def retriever(self, passages: Sequence[Passage]) -> EngineRetriever:
        return _built(passages)

    def unreachable_retriever(self) -> EngineRetriever:
        built = _built()
        built._engine._database._url = "postgresql://nobody@127.0.0.1:1/nothing?connect_timeout=2"
        built._engine._database.close()
        return built
