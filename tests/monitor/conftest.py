"""Contexts as the guard would leave them, and the databases that samples are kept in."""

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from storing import Clock, OpenStore

from ctxguard.core.context import Context
from ctxguard.core.decision import decide
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Hit, Mode, Ranking, Route, ScoreKind
from ctxguard.monitor.store import SampleStore


@pytest.fixture(scope="session")
def make_context() -> Callable[..., Context]:
    """Builds a context whose first ``n_kept`` candidates were kept."""
    return _context


def _context(
    passage_ids: Sequence[str],
    n_kept: int,
    *,
    request_id: str = "r",
    query: str = "q",
    mode: Mode = Mode.ENFORCE,
) -> Context:
    hits = [Hit(name, 100.0 - rank, text=name) for rank, name in enumerate(passage_ids)]
    ranking = Ranking.from_hits(hits, ScoreKind.RATIO)
    decision = decide(ranking, RatioPolicy(k=max(n_kept, 1), min_keep=min(n_kept, 1)))
    kept = decision.order[:n_kept]
    return Context(
        request_id=request_id,
        query=query,
        route=Route.EXTERNAL,
        mode=mode,
        passages=tuple([ranking.passages[position] for position in kept]),
        decision=decision,
    )


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


@pytest.fixture(params=["sqlite", "memory", "postgresql"])
def any_store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new, empty store: a SQLite file, SQLite in memory, a PostgreSQL schema."""
    if request.param == "memory":
        return "sqlite://"
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'samples.db'}"
    url: str = request.getfixturevalue("postgresql_url")
    return url


@pytest.fixture
def clock() -> Clock:
    """The clock of ``store``."""
    return Clock()


@pytest.fixture
def store(any_store_url: str, clock: Clock, open_store: OpenStore) -> SampleStore:
    """A new, empty store of each kind, on a clock that the test sets."""
    return open_store(any_store_url, clock=clock)


@pytest.fixture(params=["sqlite", "postgresql"])
def shared_store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new, empty store that several processes can open."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'samples.db'}"
    url: str = request.getfixturevalue("postgresql_url")
    return url
