"""The OpenAPI document, and whether every answer is one that it describes."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from ctxguard.core.metadata_filter import Where
from ctxguard.core.types import Hit
from ctxguard.server.app import create_app
from ctxguard.server.settings import ServiceSettings
from tests.doubles import LengthScores

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "allow_header_conformance",
)
TOKEN = "a" * 16
HEADERS = {"authorization": f"Bearer {TOKEN}"}


def retrieve(query: str, *, depth: int, where: Where | None = None) -> list[Hit]:
    hits = [Hit("a", 0.9, "text"), Hit("b", 0.2, "other", metadata={"n": 1})]
    return [hit for hit in hits if where is None or where.allows(hit.metadata)]


def application(name: str) -> Any:
    return create_app(
        ServiceSettings(token=TOKEN),
        scorer=LengthScores() if name == "reranking" else None,
        retriever=retrieve if name == "searching" else None,
        registry=CollectorRegistry(),
    )


def document_of(name: str) -> Any:
    client = TestClient(application(name), base_url="http://127.0.0.1", headers=HEADERS)
    return client.get("/openapi.json").json()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reranking", "searching"])
def test_answers_are_as_the_document_describes(name: str) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    known = pytest.importorskip("schemathesis.checks")
    checks = [getattr(known, each) for each in CHECKS]
    schema = schemathesis.openapi.from_asgi("/openapi.json", application(name), headers=HEADERS)
    for found in schema.get_all_operations():
        operation = found.ok()

        @settings(max_examples=40, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy())
        def is_described(case) -> None:
            # Other checks of theirs expect that a schema says all that a request must be.
            case.call_and_validate(headers=HEADERS, checks=checks)

        is_described()


def test_the_document_says_what_is_served() -> None:
    document = document_of("reranking")
    assert document["openapi"].startswith("3.1")
    assert set(document["paths"]) == {
        *("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/v1/filter"),
        *("/metrics", "/healthz", "/readyz", "/health", "/v1/models", "/info"),
    }
    answers = document["paths"]["/rerank"]["post"]["responses"]
    assert set(answers) == {"200", "default"}
    assert document["paths"]["/rerank"]["post"]["security"]
    assert not document["paths"]["/healthz"]["get"]["security"]


@pytest.mark.parametrize("name", ["reranking", "searching"])
def test_each_body_has_named_type(name: str) -> None:
    """Generators type an alternative at the top of a body as ``Any``, and an unnamed object as a
    dictionary."""
    document = document_of(name)
    bodies = [
        operation["requestBody"]["content"]["application/json"]["schema"]
        for path in document["paths"].values()
        for operation in path.values()
        if "requestBody" in operation
    ]
    assert len(bodies) >= 2
    for body in bodies:
        assert body.keys() == {"$ref"}
        named = document["components"]["schemas"][body["$ref"].rpartition("/")[2]]
        assert named["type"] == "object"
        assert named["properties"].keys() & {"query", "text_1"}
        assert not named.keys() & {"oneOf", "anyOf", "allOf", "not", "if"}
