"""The rerank protocol, and the service with its console."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote, urlencode

from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from ctxguard.core.types import Passage
from ctxguard.endpoints.rerank import read_scores
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.server.app import create_app
from ctxguard.server.settings import ServiceSettings
from tests.doubles import LengthScores, WordTokenEmbedder
from tests.fuzz.file_surfaces import filled_store
from tests.fuzz.inputs import body, text
from tests.fuzz.surface import Input, Make, Open, answered, called, stateless, surface

forms: Any = {
    "cohere": {"results": [{"index": 1, "relevance_score": 0.5}, {"index": 0}]},
    "tei": [{"index": 1, "score": 2.5}, {"index": 0, "score": -1.0}],
}


@stateless("rerank: answer of a server")
def _answers(random: Random) -> Input:
    form = random.choice(list(forms))
    read = partial(read_scores, n_documents=3, protocol=form)
    return called(answered, body(forms[form], random), read)


class Service:
    """An application of the service in this process, with an index, a scorer and a console."""

    def __init__(self, folder: Path, closing: ExitStack) -> None:
        passages = [
            Passage(f"p{n}", f"A red fox number {n}. It runs.", "", {"n": n, "kind": "ab"[n % 2]})
            for n in range(30)
        ]
        index = HybridRetriever.build(passages, embedder=WordTokenEmbedder())
        store = f"sqlite:///{folder / 'samples.db'}"
        filled_store(store)[0].close()
        settings = ServiceSettings(store=store, sample_rate=0.0)
        self._clients = [
            closing.enter_context(
                TestClient(create_app(settings, registry=CollectorRegistry(), **searching))
            )
            for searching in ({"scorer": LengthScores()}, {"retriever": index})
        ]

    def ask(self, method: str, path: str, query: bytes, headers: Any, content: bytes) -> None:
        """Send a request to each application; no answer may be 500."""
        for client in self._clients:
            scope = {"type": "http", "method": method, "path": path, "headers": headers}
            scope |= {"raw_path": quote(path, errors="replace").encode(), "query_string": query}
            scope["client"] = "127.0.0.1", 9
            status = client.portal.call(_status, client.app, scope, content)
            assert 200 <= status < 500 or status in (502, 503), f"status {status}"


async def _status(app: Any, scope: Any, content: bytes) -> int:
    received = iter([{"type": "http.request", "body": content, "more_body": False}])
    status: list[int] = []

    async def receive() -> Any:
        return next(received, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            status.append(message["status"])

    await app(scope, receive, send)
    return status[0]


_DOCUMENTS = ["a red fox", {"text": "it runs"}, "nothing"]

_CANDIDATES = [
    {"id": "a", "score": 0.9, "text": "x", "rank": 1, "signals": {"s": 0.5}, "legs": {"dense": 1}},
    {"id": "b", "score": 0.5, "title": "t", "metadata": {"n": 1}},
]

_KINDS = {"score_kind": "probability", "leg_kinds": {"dense": "cosine"}}

ENDPOINTS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "/rerank in Cohere's form": (
        "/v2/rerank",
        {"documents": _DOCUMENTS, "top_n": 2, "model": "m", "k": 1},
    ),
    "/rerank in TEI's form": ("/rerank", {"texts": ["a"], "raw_scores": True, "return_text": True}),
    "/rerank in Voyage's form": (
        "/v1/rerank",
        {"documents": ["a"], "top_k": 1, "truncation": True},
    ),
    "/v1/score": ("/v1/score", {"model": "m", "text_1": "red fox", "text_2": ["a", "b"]}),
    "/v1/filter": ("/v1/filter", {"candidates": _CANDIDATES, **_KINDS}),
    "/v1/context": ("/v1/context", {"where": {"n": [1, 2], "kind": "a"}, "session_id": "s"}),
}


def _headers(random: Random, content: bytes, kind: bytes = b"application/json") -> Any:
    headers = [
        (b"host", b"127.0.0.1:8765"),
        (b"content-length", str(len(content)).encode()),
        (b"content-type", kind),
    ]
    if random.random() < 0.3:
        name = random.choice([b"x-request-id", b"authorization", b"accept", b"cookie", b"origin"])
        headers.append((name, random.randbytes(random.randint(0, 200)).replace(b"\n", b"")))
    if random.random() < 0.05:
        headers[random.randrange(3)] = (b"content-type", b"text/plain; charset=odd")
    return headers


def _endpoint(name: str) -> Open:
    def opened(folder: Path, closing: ExitStack) -> Make:
        service = Service(folder, closing)
        path, content = ENDPOINTS[name]

        def make(random: Random) -> Input:
            new = body({"query": "red fox", **content}, random)
            headers = _headers(random, new)
            return Input(new, len(new), lambda: service.ask("POST", path, b"", headers, new))

        make(Random(0)).run()
        return make

    return opened


for _name in ENDPOINTS:
    surface(f"http: {_name}", is_slow=True)(_endpoint(_name))

_PAGES = ("", "decisions", "request", "label", "label/guide", "static/console.js")

_FORMS = ("sign-in", "sign-out", "label/pick", "label/grade", "absent")

_FIELDS = ("token", "next", "request", "request_id", "sample", "annotator", "grade", "passage", "n")


@surface("http: pages, forms and odd paths", is_slow=True)
def _pages(folder: Path, closing: ExitStack) -> Make:
    service = Service(folder, closing)

    def make(random: Random) -> Input:
        def fields() -> bytes:
            pairs = [
                (random.choice(_FIELDS), random.choice(["r0", "1", "ann", "a", text(random, 8)]))
                for _ in range(random.randint(0, 5))
            ]
            return urlencode(pairs, errors="replace").encode()

        if random.random() < 0.4:
            method, path = "POST", "/console/" + random.choice(_FORMS)
            content = fields() if random.random() < 0.8 else random.randbytes(300)
            headers = _headers(random, content, b"application/x-www-form-urlencoded")
            headers.append((b"sec-fetch-site", b"same-origin"))
        else:
            own = ["/console/" + page for page in _PAGES]
            other = ["/metrics", "/healthz", "/readyz", "/openapi.json", "/v1/models", "/info"]
            path = random.choice([*own, *other, "/" + text(random, 6), "/console/" + text(random)])
            method, content = random.choice(["GET", "GET", "HEAD", "PUT", "\u00e9"]), b""
            headers = _headers(random, content)
        query = fields()
        return Input(
            (method, path, query, headers, content),
            len(path) + len(query) + len(content),
            lambda: service.ask(method, path, query, headers, content),
        )

    make(Random(0)).run()
    return make
