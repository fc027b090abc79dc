"""Bodies that cannot be answered: each is a problem document, and asks nothing of a reranker."""

import json

import pytest
from http_service import NamedScores, Serve

from ctxguard.core.types import Passage
from ctxguard.server.problems import MEDIA_TYPE
from tests.doubles import FaultyRetriever

LONG = "q" * 10_001
INDEX = FaultyRetriever([Passage("a", "q")])


def reranked(**fields: object) -> tuple[str, object]:
    return "/rerank", {"query": "q", **fields}


def filtered(*candidates: object, **fields: object) -> tuple[str, object]:
    return "/v1/filter", {"query": "q", "candidates": candidates, **fields}


def context(**fields: object) -> tuple[str, object]:
    return "/v1/context", {"query": "q", **fields}


INVALID = [
    reranked(),
    reranked(documents=["a"], texts=["a"]),
    ("/rerank", {"documents": ["a"]}),
    *[reranked(documents=each) for each in ([1, 2], [{"title": "t"}], [None], "a")],
    reranked(documents=["a"], top_n=-1),
    reranked(documents=["0.5"], query=LONG),
    ("/v1/score", {"text_1": ["q", "r"], "text_2": ["a", "b"]}),
    ("/v1/score", {"text_2": ["a"]}),
    ("/v1/score", {"text_1": "q"}),
    ("/v1/score", {"query": "q", "documents": ["a"]}),
    ("/v1/filter", {"query": "q"}),
    ("/v1/filter", []),
    filtered({"score": 1.0}),
    filtered({"id": 1.5, "score": 1.0}),
    filtered({"id": "a", "score": "1.0"}),
    filtered({"id": "a", "score": 1.0, "rank": 0}),
    filtered({"id": "a", "legs": {"dense": 1.0}}),
    filtered(score_kind="points"),
    filtered(query=LONG),
    filtered(*[{"id": "a"}] * 10_001),
    context(query=""),
    context(query=LONG),
    *[context(where=where) for where in ({}, {"a": None}, {"a": 0.5})],
]


NO_JSON = [b"", b"{", b"\xff", b"[" * 5_000, b'{"query": "\\ud800']


@pytest.mark.parametrize(
    ("asked", "status", "slug"),
    [
        *[(each, 422, "invalid-request") for each in INVALID],
        (reranked(documents=["a"], model="ctxguard:all"), 400, "unknown-alias"),
        *[(("/rerank", each), 400, "invalid-json") for each in NO_JSON],
    ],
)
def test_bad_body_is_problem_document(
    serve: Serve, scorer: NamedScores, asked: tuple[str, object], status: int, slug: str
) -> None:
    path, body = asked
    client = serve(retriever=INDEX.retriever if path == "/v1/context" else None)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = client.post(path, content=content, headers={"content-type": "application/json"})
    assert (response.status_code, response.headers["content-type"]) == (status, MEDIA_TYPE)
    problem = response.json()
    assert problem["type"].endswith(f":{slug}")
    assert problem["status"] == status
    assert problem["detail"]
    assert problem["request_id"] == response.headers["x-request-id"]
    assert not scorer.asked
