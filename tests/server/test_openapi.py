"""The OpenAPI document, and whether every answer is one that it describes."""

import pytest
from http_service import NamedScores
from prometheus_client import CollectorRegistry

from ctxguard.core.types import Hit
from ctxguard.server.app import create_app
from ctxguard.server.settings import Settings

schemathesis = pytest.importorskip("schemathesis")

from hypothesis import HealthCheck, settings  # noqa: E402

EXAMPLES = 40


def retrieve(query: str, *, depth: int, where: object = None) -> list[Hit]:
    return [Hit("a", 0.9, "text"), Hit("b", 0.2, "other", metadata={"n": 1})]


class AnyScores(NamedScores):
    """Scores whatever text comes, by its length."""

    async def ascore(self, query, documents, **options):
        return [1.0 / (1.0 + len(text)) for text in documents]


def schema_of(retriever: object):
    app = create_app(
        Settings(),
        scorer=None if retriever else AnyScores(),
        retriever=retriever,
        registry=CollectorRegistry(),
    )
    return schemathesis.openapi.from_asgi("/openapi.json", app, base_url="http://127.0.0.1")


reranking, searching = schema_of(None), schema_of(retrieve)
bounded = settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)


@pytest.mark.slow
@reranking.parametrize()
@bounded
def test_every_answer_of_a_reranker_is_described(case) -> None:
    case.call_and_validate()


@pytest.mark.slow
@searching.include(path_regex="/v1/(context|vector)").parametrize()
@bounded
def test_every_answer_of_an_index_is_described(case) -> None:
    case.call_and_validate()


def test_the_document_says_what_is_served() -> None:
    document = reranking.raw_schema
    assert document["openapi"].startswith("3.1")
    assert set(document["paths"]) == {
        *("/rerank", "/v1/rerank", "/v2/rerank", "/v1/filter"),
        *("/metrics", "/healthz", "/readyz"),
    }
    answers = document["paths"]["/rerank"]["post"]["responses"]
    assert set(answers) == {*("200", "400", "401", "403", "405", "408", "413", "415", "422", "503")}
