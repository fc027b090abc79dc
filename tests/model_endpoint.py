"""A local stand-in for endpoints of chat completions and of decisions, in both of their forms.

What it gets and what it sends are checked by the types of the openai package; the System One form
has none there, and is checked by what its servers document.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from openai.types import Decision
from openai.types.chat import ChatCompletion
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from openai.types.decision_create_params import DecisionCreateParams
from pydantic import TypeAdapter

from tests.monitor.chat_endpoint import Answer, ChatEndpoint

# Built once: each takes a tenth of a second.
_CHAT = TypeAdapter[Any](CompletionCreateParamsNonStreaming)
_DECISION = TypeAdapter[Any](DecisionCreateParams)
_QUERY = re.compile(r"<query>\n(.*?)\n</query>", re.DOTALL)
_PASSAGE = re.compile(r'<passage number="(\d+)">\n(.*?)\n</passage>', re.DOTALL)


class ModelEndpoint(ChatEndpoint):
    """Answers each question about each passage by ``opinion(text, name)``, in [0, 1] or None."""

    def __init__(self) -> None:
        super().__init__()
        self.query = ""
        """That of the last request."""
        self.opinion: Callable[[str, str], float | None] = lambda text, _: float("fox" in text)
        self.edit: Callable[[dict[str, Any]], object] = lambda document: document
        """Changes what is sent, to something that an endpoint should not send."""

    def answer(self, path: str, request: dict[str, Any]) -> Answer:
        found = _QUERY.search(json.dumps(request).replace("\\n", "\n"))
        self.query = "" if found is None else found[1]
        sent = {
            "/v1/chat/completions": self._chat,
            "/v1/decisions": self._decisions,
            "/v1/systemone": self._systemone,
        }[path](request)
        return Answer(body=json.dumps(sent))

    def _chat(self, request: dict[str, Any]) -> object:
        _CHAT.validate_python(request)
        schema = request["response_format"]["json_schema"]["schema"]
        item = schema["properties"]["answers"]["items"]
        names = [name for name in item["required"] if name != "passage"]
        rows = [
            {"passage": number}
            | {
                name: None if (value := self.opinion(text, name)) is None else round(100 * value)
                for name in names
            }
            for number, text in _passages(request["messages"][-1]["content"])
        ]
        content = json.dumps(self.edit({"answers": rows}))
        completion = json.loads(Answer(content=content).text())
        ChatCompletion.model_validate(completion, strict=True)
        return completion

    def _decisions(self, request: dict[str, Any]) -> object:
        _DECISION.validate_python(request)
        passages = dict(_passages(request["input"]))
        answers: list[dict[str, object]] = []
        for question in request["questions"]:
            number, name = _parts(question["name"])
            assert f"passage {number}" in question["instructions"]
            value = self.opinion(passages[number], name)
            kind: dict[str, object] = {"type": "refusal"}
            if value is not None:
                kind = {"type": "predicate", "probability": value}
            answers.append({"name": question["name"], **kind})
        usage = {
            "input_tokens": 300,
            "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 300,
        }
        decision = {"answers": answers, "model": request["model"], "usage": usage}
        Decision.model_validate(decision, strict=True)
        return self.edit(decision)

    def _systemone(self, request: dict[str, Any]) -> object:
        assert set(request) == {"model", "state", "questions"}
        passages = dict(_passages(request["state"]))
        answers: dict[str, object] = {}
        for key, question in request["questions"].items():
            assert question["type"] == "noul"
            number, name = _parts(key)
            value = self.opinion(passages[number], name)
            if value is not None:  # what it cannot answer is missing
                answers[key] = {"type": "noul", "noul": value}
        usage = {"input_tokens": 300, "output_tokens": 0}
        return self.edit({"model": request["model"], "answers": answers, "usage": usage})


def _passages(material: str) -> list[tuple[int, str]]:
    return [(int(number), text) for number, text in _PASSAGE.findall(material)]


def _parts(name: str) -> tuple[int, str]:
    number, _, question = name.removeprefix("p").partition("_")
    return int(number), question
