"""The guarded index over HTTP."""

import pytest
from http_service import Serve, counted
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from ctxguard.core.types import Hit, Passage
from ctxguard.errors import ConfigurationError, IndexFolderError, StageUnavailableError
from ctxguard.server.limits import (
    MOST_CONDITIONS,
    MOST_NAME_CHARS,
    MOST_QUERY_BODY_BYTES,
    MOST_VALUES,
)
from tests.doubles import FaultyRetriever

PASSAGES = [
    Passage("fox", "a red fox in the snow", "Foxes", {"tenant": "a", "year": 2020}),
    Passage("hound", "a red hound", "", {"tenant": "b", "groups": ["x"]}),
    Passage("sea", "the wide sea"),
]


def test_query_is_answered_with_context(client: TestClient) -> None:
    response = client.post("/v1/context", json={"query": "red fox"})
    answer = response.json()
    assert "a red fox in the snow" in answer["text"]
    assert answer["request_id"] == response.headers["x-request-id"]
    assert len(answer["kept_ids"]) + sum(answer["dropped"].values()) == answer["candidates"]


def test_a_filter_on_metadata_holds(client: TestClient) -> None:
    body = {"query": "red fox", "where": {"tenant": ["b", "c"]}}
    answer = client.post("/v1/context", json=body).json()
    assert [each["passage_id"] for each in answer["passages"]] == ["hound"]


def test_failing_stage_degrades_the_answer(
    serve: Serve, index: FaultyRetriever, registry: CollectorRegistry
) -> None:
    def down(_work) -> None:
        raise ConnectionError

    client = serve(retriever=index.retriever)
    with index.faults["dense"].injected(down):
        response = client.post("/v1/context", json={"query": "red fox"})
    assert response.headers["x-ctxguard-degraded"] == "error"
    assert response.json()["failures"][0]["stage"] == "dense"
    assert counted(registry, "ctxguard_http_requests_total", outcome="degraded") == 1


def test_filter_ignorer_is_not_served(serve: Serve) -> None:
    def retrieve(_query: str, *, depth: int, where: object = None) -> list[Hit]:
        return [Hit("a", 1.0, "text", metadata={"tenant": "b"})]

    body = {"query": "q", "where": {"tenant": "a"}}
    assert serve(retriever=retrieve).post("/v1/context", json=body).status_code == 502


@pytest.mark.parametrize(
    "where",
    [
        {"n": list(range(MOST_VALUES + 1))},
        {"n": list(range(MOST_VALUES)), "m": 1},
        {f"field {n}": 1 for n in range(MOST_CONDITIONS + 1)},
    ],
)
def test_filter_size_is_limited(client: TestClient, where: dict[str, object]) -> None:
    """A filter has as many conditions and values as the limits allow."""
    body = {"query": "q", "where": where}
    response = client.post("/v1/context", json=body)
    assert response.status_code == 422
    cap = f"{MOST_CONDITIONS} and {MOST_VALUES:,}" if len(where) < 3 else f"is {MOST_CONDITIONS}"
    assert cap in response.json()["detail"]


def test_largest_filter_is_applied(client: TestClient) -> None:
    """A filter of as many values as the limit allows is applied."""
    where = {"tenant": ["a", *map(str, range(MOST_VALUES - 1))]}
    answer = client.post("/v1/context", json={"query": "red fox", "where": where})
    assert [each["passage_id"] for each in answer.json()["passages"]] == ["fox"]


def test_search_body_is_smaller(client: TestClient) -> None:
    body = {"query": "q", "where": {"n": "a" * MOST_QUERY_BODY_BYTES}}
    assert client.post("/v1/context", json=body).status_code == 413
    assert client.post("/v1/filter", json={**body, "candidates": []}).status_code == 200


def test_stored_name_has_a_length(client: TestClient) -> None:
    for length, status in ((MOST_NAME_CHARS, 200), (MOST_NAME_CHARS + 1, 422)):
        body = {"query": "red fox", "session_id": "a" * length}
        assert client.post("/v1/context", json=body).status_code == status
        body |= {"candidates": []}
        assert client.post("/v1/filter", json=body).status_code == status


@pytest.mark.parametrize(
    "error",
    [
        IndexFolderError("/home/a secret: damaged"),
        ConfigurationError("a secret"),
        StageUnavailableError("retriever", "http://secret.example is down"),
    ],
)
def test_outage_is_discreet_service_failure(
    serve: Serve, registry: CollectorRegistry, error: Exception
) -> None:
    """A damaged index is a failure of the service and tells nothing."""

    def retrieve(_query: str, *, depth: int) -> list[Hit]:
        raise error

    response = serve(retriever=retrieve).post("/v1/context", json={"query": "q"})
    assert response.status_code == 503
    assert response.json()["type"].endswith(":unavailable")
    assert "secret" not in response.text
    assert counted(registry, "ctxguard_http_requests_total", outcome="failed") == 1


def test_index_has_no_reranker_beside(client: TestClient) -> None:
    assert client.post("/rerank", json={"query": "q", "documents": []}).status_code == 404
    assert "/rerank" not in client.get("/openapi.json").json()["paths"]
