"""What the tests of the service share: a scorer whose scores the documents name, and counts."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import uvicorn
from httpx2 import ASGITransport, AsyncClient, Response
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient
from starlette.types import ASGIApp

from ctxguard.core.types import FloatArray
from tests.doubles import Fault

Serve = Callable[..., TestClient]
"""Starts a service with settings, and returns a client of it."""
ENDS = "ok", "degraded", "rejected", "shed", "failed", "cancelled"


class NamedScores:
    """A scorer of documents such as ``0.7 some text``, each of which begins with its score.

    Attributes:
        fault: What happens instead of scoring.
        asked: The options of each call.
    """

    fingerprint = "named scores"

    def __init__(self) -> None:
        self.fault = Fault()
        self.asked: list[dict[str, object]] = []

    async def ascore(self, query: str, documents: Sequence[str], **options: object) -> FloatArray:
        self.asked.append({"query": query, "documents": len(documents), **options})
        returned = self.fault.run(lambda: np.array([float(text.split()[0]) for text in documents]))
        return await returned if hasattr(returned, "__await__") else returned

    async def aclose(self) -> None:
        pass


def counted(registry: CollectorRegistry, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    return sum(
        sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def at_once(client: TestClient, *requests: tuple[str, str, object]) -> list[Response]:
    """The answers to requests (method, path, JSON) that are under way together."""

    async def all_of_them() -> list[Response]:
        transport = ASGITransport(app=client.app)
        async with AsyncClient(transport=transport, base_url="http://127.0.0.1") as own:
            calls = [own.request(method, path, json=body) for method, path, body in requests]
            return await asyncio.gather(*calls)

    return asyncio.run(all_of_them())


@contextmanager
def listening(app: ASGIApp | uvicorn.Config, **options: Any) -> Iterator[str]:
    """The address of an application, while a server answers there."""
    config = app if isinstance(app, uvicorn.Config) else uvicorn.Config(app, **options)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as place:
        thread = threading.Thread(target=server.run, args=([place],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{place.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
