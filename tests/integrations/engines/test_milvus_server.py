"""Milvus 2.3.5, a real server that is too old for an index: what its users are told."""

import contextlib
import shutil
from collections.abc import Iterator

import pytest
from engine_contract import build

pymilvus = pytest.importorskip("pymilvus")
old = pytest.importorskip("milvus", reason="the package milvus 2.3.5 is a server for this test")

from ctxguard.errors import ConfigurationError, StageUnavailableError
from ctxguard.integrations.engines import milvus

# The package leaves sockets open with which it looks for free ports.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an index on a server that this module starts; it unpacks 450 MB."""
    folder = tmp_path_factory.mktemp("milvus_server")
    running = old.MilvusServer(old.MilvusServerConfig(data_dir=str(folder)))
    try:
        running.start()
        yield f"milvus://127.0.0.1:{running.listen_port}#index"
    finally:
        running.stop()
        shutil.rmtree(folder, ignore_errors=True)


def collections(url: str) -> list[str]:
    host = url.partition("://")[2].partition("#")[0]
    with contextlib.closing(pymilvus.MilvusClient(f"http://{host}", dedicated=True)) as client:
        return list(client.list_collections())


def test_old_server_names_version_needed(server: str) -> None:
    with pytest.raises(ConfigurationError, match=r"Milvus v2\.3\.5.* needs 2\.5 or later"):
        build(server)
    assert collections(server) == []


def test_build_refused_by_server_leaves_nothing(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server would whose version says less than it cannot do."""
    monkeypatch.setattr(milvus, "_LEAST_VERSION", (2, 0))
    for _ in range(2):
        with pytest.raises(StageUnavailableError, match=r"error 1100: create index on .* field"):
            build(server)
        assert collections(server) == []
