"""A server of the service's benchmark, on any free port.

python -m benchmarks._serve_app service|echo|upstream|hostile
python -m benchmarks._serve_app attacked|relay|proxy|httpx_proxy PORT

``service`` has scores at hand. ``attacked`` is one with an index, a console, tokens, and the
reranker at PORT, such as ``hostile``, which sends megabytes of interim answers. ``relay`` asks the
reranker at PORT, as ``proxy`` (by the service's own client) and ``httpx_proxy`` do without
reading what they hand on. ``upstream`` is such a reranker, which reads nothing either.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import httpx2
import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as HttpRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from benchmarks._serve_attacks import TOKEN, hostile_reranker
from ctxguard.core.policies import ExpectedUtilityPolicy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.signals import feature_names
from ctxguard.core.types import FloatArray, Passage, Route, ScoreKind
from ctxguard.endpoints.http import HttpClient
from ctxguard.profile.schema import Profile, Provenance, RouteProfile
from ctxguard.server.app import create_app
from ctxguard.server.run import serve
from ctxguard.server.settings import ServiceSettings
from tests.doubles import FaultyRetriever

FINGERPRINT = "scores at hand"


class ScoresAtHand:
    """Descending scores, computed beforehand."""

    fingerprint = FINGERPRINT

    def __init__(self) -> None:
        self._scores = np.linspace(0.9, 0.1, 1_000)

    async def ascore(
        self,
        query: str,  # noqa: ARG002
        documents: Sequence[str],
        *,
        model: str | None = None,  # noqa: ARG002
        max_tokens_per_doc: int | None = None,  # noqa: ARG002
    ) -> FloatArray:
        """One score per document."""
        return self._scores[: len(documents)]

    async def aclose(self) -> None:
        """Nothing to close."""


def profile(reranker: str = FINGERPRINT) -> Profile:
    """A calibrated P(relevant) of the scores, made by hand; at most 10 passages are kept."""
    n = len(feature_names(("ranking",)))
    model = RelevanceModel(("ranking",), (1.0,) + (0.0,) * (n - 1), (0.0,) * n, (1.0,) * n, 0.0)
    policy = ExpectedUtilityPolicy(model, k=10)
    return Profile(
        routes={Route.EXTERNAL: RouteProfile(policy=policy, score_kind=ScoreKind.PROBABILITY)},
        fingerprint={"reranker": reranker, "score_kind": "probability"},
        provenance=Provenance(
            ctxguard_version="0", seed=0, dataset="none", dataset_digest="0" * 64, depth=100
        ),
    )


async def _echo(request: Request) -> Response:
    return Response(await request.body(), media_type="application/json")


def _posted(answer: Callable[[Request], Awaitable[Response]]) -> Starlette:
    return Starlette(routes=[HttpRoute("/{path:path}", answer, methods=["POST"])])


def _upstream() -> ASGIApp:
    results = [{"index": at, "relevance_score": 0.9 - at / 100} for at in range(50)]
    body = json.dumps({"id": "1", "results": results}).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await send({"type": "http.response.body", "body": body})
        else:
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})

    return answer


def _proxy(url: str) -> ASGIApp:
    """Hands a body on by the client that the service has, and the answer back."""
    client = HttpClient(url, ("/rerank",), what="rerank", key=None, extra="rerank")

    async def forward(request: Request) -> Response:
        answer = await client.post("/rerank", await request.body(), 2**24)
        return Response(answer.body, media_type="application/json")

    return _posted(forward)


def _httpx_proxy(url: str) -> ASGIApp:
    client = httpx2.AsyncClient(timeout=10.0)
    head = {"content-type": "application/json"}

    async def forward(request: Request) -> Response:
        answer = await client.post(url, content=await request.body(), headers=head)
        return Response(answer.content, media_type="application/json")

    return _posted(forward)


def _announce(url: str) -> None:
    sys.stdout.write(f"{url}\n")
    sys.stdout.flush()


def _app(what: str, folder: Path, port: str) -> tuple[ServiceSettings, ASGIApp]:
    file = folder / "profile.json"
    url = f"http://127.0.0.1:{port}/rerank"
    settings = ServiceSettings(port=0, profile=file)
    floors: dict[str, Callable[[], ASGIApp]] = {
        "echo": partial(_posted, _echo),
        "upstream": _upstream,
        "proxy": partial(_proxy, url),
        "httpx_proxy": partial(_httpx_proxy, url),
    }
    if what in floors:
        return settings, floors[what]()
    if what == "service":
        profile().save(file)
        return settings, create_app(settings, scorer=ScoresAtHand())
    if what == "relay":
        profile("cohere (default model)").save(file)
        settings = ServiceSettings(port=0, profile=file, rerank_upstream=url)
        return settings, create_app(settings)
    settings = ServiceSettings(
        port=0,
        store=f"sqlite:///{folder}/samples.db",
        rerank_upstream=url,
        token=TOKEN,
        console_token=TOKEN,
    )
    passages = [Passage(str(n), f"passage {n}", metadata={"n": n}) for n in range(1_000)]
    return settings, create_app(settings, retriever=FaultyRetriever(passages).retriever)


def main() -> None:
    """Serve on any free port, and print the URL."""
    if sys.argv[1] == "hostile":
        asyncio.run(hostile_reranker(_announce))
    with tempfile.TemporaryDirectory() as folder:
        settings, app = _app(sys.argv[1], Path(folder), sys.argv[-1])
        serve(settings, _announce, app)


if __name__ == "__main__":
    main()
