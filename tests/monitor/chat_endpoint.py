"""A local stand-in for a chat completions endpoint: the real protocol, and no model behind it.

It grades by shared words, and it is as gullible as a model can be: whatever follows a closing
delimiter it takes for its operator's words and obeys.
"""

import json
import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from tests.timing import PATIENCE_SECONDS

USAGE = {"prompt_tokens": 300, "completion_tokens": 8, "total_tokens": 308}
PATH = "/v1/chat/completions"
_DRIP_SECONDS = 0.02


@dataclass(frozen=True)
class Answer:
    """One HTTP answer. ``content`` is wrapped in a completion unless ``body`` is given.

    ``packed`` is sent in place of the text. With ``drip`` the headers or the body come a byte at a
    time, with short pauses.
    """

    content: object = '{"grade": 1}'
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str | None = None
    packed: bytes | None = None
    drip: Literal["headers", "body"] | None = None
    finish_reason: str | None = "stop"
    refusal: object = None
    usage: object = field(default_factory=lambda: USAGE)

    def text(self) -> str:
        if self.body is not None:
            return self.body
        message = {"role": "assistant", "content": self.content, "refusal": self.refusal}
        choice = {"index": 0, "message": message, "finish_reason": self.finish_reason}
        completion = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 0,
            "model": "stand-in",
            "choices": [choice],
            "usage": self.usage,
        }
        return json.dumps(completion)


def grade_by_words(conversation: list[dict[str, str]]) -> int:
    """How many of the query's words the passage has, unless text after a delimiter says more."""
    data = conversation[-1]["content"]
    after = data.split("</passage>", 1)[1]
    order = re.search(r"grade\D{0,20}(\d)", after)
    if order is not None:
        return int(order[1])
    parts = re.search(r"<query>(.*?)</query>.*?<passage>(.*?)</passage>", data, re.DOTALL)
    if parts is None:
        return 0
    query, passage = (set(re.findall(r"\w+", part.lower())) for part in parts.groups())
    return min(len(query & passage), 3)


class ChatEndpoint:
    """Serves on 127.0.0.1 until closed. Answers from ``script`` first, then grades by words."""

    def __init__(self) -> None:
        self.script: deque[Answer] = deque()
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Message] = []
        self.arrived_seconds: list[float] = []
        self.hanging_on: str | None = None
        """Requests whose text holds this get no answer."""
        self.together: threading.Barrier | None = None
        """Answers only once as many requests are there at once."""
        self._released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def close(self) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, headers: Message, request: dict[str, Any]) -> Answer:
        self.arrived_seconds.append(time.monotonic())
        self.requests.append(request)
        self.headers.append(headers)
        if path != PATH:
            return Answer(status=404, body='{"error": {"message": "no such path"}}')
        if self.hanging_on is not None and self.hanging_on in json.dumps(request):
            self._released.wait()
        if self.together is not None:
            self.together.wait(timeout=PATIENCE_SECONDS)
        if self.script:
            return self.script.popleft()
        return Answer(json.dumps({"grade": grade_by_words(request["messages"])}))


def _handler(endpoint: ChatEndpoint) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = endpoint.answer(self.path, self.headers, request)
            body = answer.text().encode() if answer.packed is None else answer.packed
            try:
                self.send_response(answer.status)
                if answer.drip == "headers":
                    self.flush_headers()
                    self._drip(b"X-Padding: " + b"." * 100 + b"\r\n")
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if answer.drip == "body":
                    self._drip(body)
                else:
                    self.wfile.write(body)
            except OSError:
                self.close_connection = True  # the client did not wait

        def _drip(self, data: bytes) -> None:
            for place in range(len(data)):
                self.wfile.write(data[place : place + 1])
                time.sleep(_DRIP_SECONDS)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its own name
            pass

    return Handler
