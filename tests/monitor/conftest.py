"""Contexts as the guard would leave them, and the databases that samples are kept in."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from storing import Clock, OpenStore

from ctxguard.monitor.store import SampleStore

_schema_numbers = count(1)


@pytest.fixture
def postgresql_url(postgresql_server: str) -> Iterator[str]:
    """The URL of a schema of its own on that server."""
    import psycopg

    name = f"test_{next(_schema_numbers)}"
    with psycopg.connect(postgresql_server, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
        yield f"{postgresql_server}&options=-csearch_path%3D{name}"
        connection.execute(f"DROP SCHEMA {name} CASCADE")


@pytest.fixture
def open_store() -> Iterator[Callable[..., SampleStore]]:
    """``SampleStore.open``, and closed at the end."""
    opened: list[SampleStore] = []

    def open_one(url: str, **settings: Any) -> SampleStore:
        opened.append(SampleStore.open(url, **settings))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def any_store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new, empty store that several processes can open: a SQLite file, a PostgreSQL schema.

    One in memory, the parameter ``memory``, is what most tests of the monitor have. ``pooled`` is
    PostgreSQL behind PgBouncer.
    """
    if request.param == "memory":
        return "sqlite://"
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'samples.db'}"
    kind = "pgbouncer_url" if request.param == "pooled" else "postgresql_url"
    url: str = request.getfixturevalue(kind)
    return url


@pytest.fixture
def clock() -> Clock:
    """The clock of ``store``."""
    return Clock()


@pytest.fixture
def store(any_store_url: str, clock: Clock, open_store: OpenStore) -> SampleStore:
    """A new, empty store of each kind, on a clock that the test sets."""
    return open_store(any_store_url, clock=clock)
