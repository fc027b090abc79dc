"""A local stand-in for a chat completions endpoint: the real protocol, and no model behind it.

It grades by shared words, and it is as gullible as a model can be: whatever follows a closing
delimiter it takes for its operator's words and obeys.
"""

import json
import re
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from tests.json_server import JsonServer, Reply
from tests.timing import PATIENCE_SECONDS

USAGE = {"prompt_tokens": 300, "completion_tokens": 8, "total_tokens": 308}
PATH = "/v1/chat/completions"


@dataclass(frozen=True)
class Answer(Reply):
    """One answer. ``content`` is wrapped in a completion unless ``body`` is given.

    ``packed`` is sent in place of the text.
    """

    content: object = '{"grade": 1}'
    body: str | None = None
    packed: bytes | None = None
    finish_reason: str | None = "stop"
    refusal: object = None
    usage: object = field(default_factory=lambda: USAGE)

    def sent(self) -> bytes:
        return self.text().encode() if self.packed is None else self.packed

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


class ChatEndpoint(JsonServer[Answer]):
    """Grades by words."""

    base = "/v1"

    def __init__(self) -> None:
        self.arrived_seconds: list[float] = []
        self.hanging_on: str | None = None
        """Requests whose text holds this get no answer."""
        self.together: threading.Barrier | None = None
        """Answers only once as many requests are there at once."""
        super().__init__()

    def wait(self, request: dict[str, Any]) -> None:
        self.arrived_seconds.append(time.monotonic())
        if self.hanging_on is not None and self.hanging_on in json.dumps(request):
            self.released.wait()
        if self.together is not None:
            self.together.wait(timeout=PATIENCE_SECONDS)

    def answer(self, path: str, request: dict[str, Any]) -> Answer:
        if path != PATH:
            return Answer(status=404, body='{"error": {"message": "no such path"}}')
        return Answer(json.dumps({"grade": grade_by_words(request["messages"])}))
