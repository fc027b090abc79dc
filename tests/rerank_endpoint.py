"""A local stand-in for a rerank server: each form of the real protocol, and every misbehaviour.

It scores a document by the words that it shares with the query, or as a test says.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.json_server import JsonServer, Reply

Score = Callable[[str, Sequence[str]], Sequence[object]]


@dataclass(frozen=True)
class Answer(Reply):
    """One answer."""

    body: bytes = b"{}"

    def sent(self) -> bytes:
        return self.body


def share_of_words(query: str, documents: Sequence[str]) -> list[float]:
    """The share of the query's words that each document has."""
    asked = set(query.lower().split())
    return [len(asked & set(each.lower().split())) / max(len(asked), 1) for each in documents]


class RerankEndpoint(JsonServer[Answer]):
    """Answers by ``score``."""

    def __init__(self, score: Score = share_of_words) -> None:
        self.score = score
        self.sends_documents = False
        super().__init__()

    def answer(self, path: str, request: dict[str, Any]) -> Answer:
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
