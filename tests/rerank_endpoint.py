"""A local stand-in for a rerank server: each form of the real protocol, and every misbehaviour.

It scores a document by the words that it shares with the query, or as a test says.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

_DRIP_SECONDS = 0.02

Score = Callable[[str, Sequence[str]], Sequence[object]]


@dataclass(frozen=True)
class Answer:
    """One HTTP answer.

    With ``drip`` the headers or the body come a byte at a time, with short pauses; with ``hang``
    nothing comes until the server is closed; with ``cut`` the connection ends halfway.
    """

    body: bytes = b"{}"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    drip: Literal["headers", "body"] | None = None
    hang: bool = False
    cut: bool = False


def share_of_words(query: str, documents: Sequence[str]) -> list[float]:
    """The share of the query's words that each document has."""
    asked = set(query.lower().split())
    return [len(asked & set(each.lower().split())) / max(len(asked), 1) for each in documents]


class RerankEndpoint:
    """Serves on 127.0.0.1 until closed: from ``script`` first, then by ``score``."""

    def __init__(self, score: Score = share_of_words) -> None:
        self.score = score
        self.script: deque[Answer] = deque()
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[Message] = []
        self.sends_documents = False
        self._released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, headers: Message, request: dict[str, Any]) -> Answer:
        self.paths.append(path)
        self.headers.append(headers)
        self.requests.append(request)
        if self.script:
            answer = self.script.popleft()
            if answer.hang:
                self._released.wait()
            return answer
        tei = "texts" in request
        if "text_1" in request:
            scores = self.score(request["text_1"], request["text_2"])
            data = [
                {"index": at, "object": "score", "score": each} for at, each in enumerate(scores)
            ]
            return Answer(json.dumps({"object": "list", "data": data}).encode())
        given = request["texts"] if tei else request["documents"]
        documents = [each if isinstance(each, str) else each["text"] for each in given]
        scores = self.score(request["query"], documents)
        name = "score" if tei else "relevance_score"
        results = [{"index": place, name: score} for place, score in enumerate(scores)]
        results.sort(key=lambda result: -float(result[name] or 0.0))  # type: ignore[arg-type]
        if self.sends_documents or request.get("return_documents"):
            for result in results:
                result["document"] = {"text": documents[result["index"]]}  # type: ignore[index]
        if "top_k" in request:
            return Answer(json.dumps({"object": "list", "data": results}).encode())
        if tei:
            return Answer(json.dumps(results).encode())
        content = {
            "id": "1",
            "model": request.get("model") or "stand-in",
            "results": results[: request.get("top_n")],
            "meta": {"api_version": {"version": "2"}},
            "usage": {"total_tokens": 0, "prompt_tokens": 0},
        }
        return Answer(json.dumps(content).encode())


def _handler(endpoint: RerankEndpoint) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle(self) -> None:
            with suppress(ConnectionError):  # a client that went away is no fault of this server
                super().handle()

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = endpoint.answer(self.path, self.headers, request)
            try:
                self._send(answer)
            except OSError:
                self.close_connection = True  # the client did not wait

        def _send(self, answer: Answer) -> None:
            self.send_response(answer.status)
            if answer.drip == "headers":
                self.flush_headers()
                self._drip(b"X-Padding: " + b"." * 100 + b"\r\n")
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if answer.drip == "body":
                self._drip(answer.body)
            elif answer.cut:
                self.wfile.write(answer.body[: len(answer.body) // 2])
                self.close_connection = True
            else:
                self.wfile.write(answer.body)

        def _drip(self, data: bytes) -> None:
            for place in range(len(data)):
                self.wfile.write(data[place : place + 1])
                time.sleep(_DRIP_SECONDS)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its own name
            pass

    return Handler
