"""What the tests of endpoints' clients share: a stand-in, and no proxy of the environment."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("truststore")


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def endpoint(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A stand-in for a server, of the module's class `STAND_IN`."""
    with closing(request.module.STAND_IN()) as served:
        yield served
