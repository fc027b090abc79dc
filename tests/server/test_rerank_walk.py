"""The walk of a rerank request: how many of our functions answer it without a profile.

Run with ``-s`` to see the calls in their order.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from http_service import NamedScores
from prometheus_client import CollectorRegistry

from ctxguard.core.types import FloatArray
from ctxguard.server.app import create_app
from ctxguard.server.settings import ServiceSettings
from tests.guard.test_walk import ROOT, Call, shown

DOCUMENTS = [f"{score} a document whose own score is {score}" for score in (0.1, 0.9, 0.85, 0.2)]
BODY = json.dumps({"query": "q", "documents": DOCUMENTS}).encode()
SCOPE = {
    "type": "http",
    "http_version": "1.1",
    "scheme": "http",
    "method": "POST",
    "path": "/rerank",
    "root_path": "",
    "query_string": b"",
    "headers": [
        (b"host", b"127.0.0.1"),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(BODY)).encode()),
    ],
}


class ScoresAtOnce(NamedScores):
    """Scores without waiting, as little as a scorer can do."""

    async def ascore(self, query: str, documents: Sequence[str], **options: object) -> FloatArray:
        return np.array([float(text.split()[0]) for text in documents])


def walk() -> list[Call]:
    """Every call of our functions by one request, also where a coroutine goes on."""
    app = create_app(ServiceSettings(), scorer=ScoresAtOnce(), registry=CollectorRegistry())
    calls: list[Call] = []
    answers: list[Any] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": BODY, "more_body": False}

    async def send(message: Any) -> None:
        answers.append(message)

    def note(frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(ROOT):
            calls.append((file.relative_to(ROOT).as_posix(), frame.f_code.co_qualname))

    async def ask() -> None:
        for _ in range(3):
            await app(dict(SCOPE), receive, send)
        sys.setprofile(note)
        try:
            await app(dict(SCOPE), receive, send)
        finally:
            sys.setprofile(None)

    asyncio.run(ask())
    assert answers[-2]["status"] == 200
    print(shown(calls))  # noqa: T201  with -s
    return calls


def test_a_rerank_request_calls_few_functions() -> None:
    calls = walk()
    assert len(calls) <= 70, shown(calls)
    assert len(set(calls)) <= 56, shown(calls)
