"""The OpenAPI document, and whether every answer is one that it describes."""

import pytest
from http_service import NamedScores
from prometheus_client import CollectorRegistry

from ctxguard.core.metadata_filter import Where
from ctxguard.core.types import Hit
from ctxguard.server.app import create_app
from ctxguard.server.settings import Secrets, ServiceSettings

schemathesis = pytest.importorskip("schemathesis")
pytest.importorskip("schemathesis.checks")

from hypothesis import HealthCheck, given, settings  # noqa: E402

EXAMPLES = 40
CHECKS = [
    getattr(schemathesis.checks, name)
    for name in (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
        "allow_header_conformance",
    )
]
TOKEN = "a" * 16


def retrieve(query: str, *, depth: int, where: Where | None = None) -> list[Hit]:
    hits = [Hit("a", 0.9, "text"), Hit("b", 0.2, "other", metadata={"n": 1})]
    return [hit for hit in hits if where is None or where.allows(hit.metadata)]


class AnyScores(NamedScores):
    """Scores whatever text comes, by its length."""

    async def ascore(self, query, documents, **options):
        return [1.0 / (1.0 + len(text)) for text in documents]


def schema_of(retriever: object):
    app = create_app(
        ServiceSettings(secrets=Secrets(token=TOKEN)),
        scorer=None if retriever else AnyScores(),
        retriever=retriever,
        registry=CollectorRegistry(),
    )
    headers = {"authorization": f"Bearer {TOKEN}"}
    return schemathesis.openapi.from_asgi("/openapi.json", app, headers=headers)


@pytest.fixture(scope="module")
def reranking():
    return schema_of(None)


@pytest.fixture(scope="module")
def searching():
    return schema_of(retrieve)


bounded = settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)


@pytest.mark.slow
@pytest.mark.parametrize("service", ["reranking", "searching"])
def test_every_answer_is_one_that_the_document_describes(
    service: str, request: pytest.FixtureRequest
) -> None:
    for found in request.getfixturevalue(service).get_all_operations():
        operation = found.ok()

        @bounded
        @given(case=operation.as_strategy())
        def is_described(case) -> None:
            headers = {"authorization": f"Bearer {TOKEN}"}
            # Other checks of theirs expect that a schema says all that a request must be.
            case.call_and_validate(headers=headers, checks=CHECKS)

        is_described()


def test_the_document_says_what_is_served(reranking) -> None:
    document = reranking.raw_schema
    assert document["openapi"].startswith("3.1")
    assert set(document["paths"]) == {
        *("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/v1/filter"),
        *("/metrics", "/healthz", "/readyz", "/health", "/v1/models", "/info"),
    }
    answers = document["paths"]["/rerank"]["post"]["responses"]
    assert set(answers) == {*("200", "400", "401", "403", "405", "408", "413", "415", "422", "503")}


@pytest.mark.parametrize("service", ["reranking", "searching"])
def test_a_generator_finds_a_named_object_type_for_each_body(
    service: str, request: pytest.FixtureRequest
) -> None:
    """Generators type an alternative at the top of a body as ``Any``, and an unnamed object as a
    dictionary."""
    document = request.getfixturevalue(service).raw_schema
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
