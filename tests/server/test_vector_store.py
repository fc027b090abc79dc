"""OpenAI's vector store over an index: filters, several queries, and the store itself."""

import pytest
from http_service import Serve
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from ctxguard.core.metadata_filter import Where, tokens, values_of
from ctxguard.core.types import Hit, Passage
from ctxguard.server.attribute_filters import alternatives_of, holds
from ctxguard.server.problems import Problem
from tests.doubles import FaultyRetriever

SEARCH = "/v1/vector_stores/index/search"
PASSAGES = [
    Passage("a", "red fox one", metadata={"year": 2019, "kind": "report"}),
    Passage("b", "red fox two", metadata={"year": 2020, "kind": "memo"}),
    Passage("c", "red fox three", metadata={"year": 2021, "kind": "report"}),
    Passage("d", "red fox four", metadata={"year": 2021, "kind": ["memo", "secret"]}),
    Passage("e", "red fox five"),
]


def compare(kind: str, key: str, value: object) -> dict[str, object]:
    return {"type": kind, "key": key, "value": value}


def both(kind: str, *filters: object) -> dict[str, object]:
    return {"type": kind, "filters": list(filters)}


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (compare("eq", "year", 2020), "b"),
        (compare("ne", "year", 2021), "ab"),
        (compare("gt", "year", 2019), "bcd"),
        (compare("gte", "year", 2020.5), "cd"),
        (compare("lt", "year", 2020), "a"),
        (compare("lte", "year", 2020.0), "ab"),
        (compare("gt", "kind", "memo"), "acd"),
        (compare("in", "year", [2019, 2020]), "ab"),
        (compare("nin", "year", [2019, 2020]), "cd"),
        (compare("ne", "kind", "secret"), "abc"),
        (compare("gt", "year", 2030), ""),
        (compare("ne", "no such", 1), ""),
        (both("and", compare("gt", "year", 2019), compare("lt", "year", 2021)), "b"),
        (both("or", compare("eq", "year", 2019), compare("eq", "year", 2020)), "ab"),
        (both("or", compare("eq", "year", 2019), compare("eq", "kind", "memo")), "abd"),
        (
            both(
                "and",
                compare("gte", "year", 2020),
                both("or", compare("eq", "kind", "report"), compare("eq", "year", 2020)),
            ),
            "bc",
        ),
    ],
)
def test_every_comparison_and_compound_of_openai_is_applied(
    serve: Serve, index: FaultyRetriever, filters: object, expected: str
) -> None:
    body = {"query": "red fox", "filters": filters, "max_num_results": 50}
    page = serve(retriever=index.retriever, k=10).post(SEARCH, json=body).json()
    assert sorted(each["file_id"] for each in page["data"]) == sorted(expected)


COMPARISONS = st.builds(
    compare,
    st.sampled_from(["eq", "ne", "gt", "gte", "lt", "lte"]),
    st.sampled_from(["x", "y"]),
    st.integers(-2, 2) | st.sampled_from(["p", "q"]),
)
FILTERS = st.recursive(
    COMPARISONS,
    lambda inner: st.builds(
        lambda kind, filters: both(kind, *filters),
        st.sampled_from(["and", "or"]),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=5,
)
VALUES = st.integers(-2, 2) | st.sampled_from(["p", "q"])


@given(
    filters=FILTERS,
    attributes=st.lists(st.fixed_dictionaries({}, optional={"x": VALUES, "y": VALUES}), max_size=6),
)
def test_the_searches_of_a_filter_find_what_it_allows(
    filters: dict, attributes: list[dict[str, object]]
) -> None:
    def known(key: str) -> set:
        return {token for each in attributes for token in tokens(each.get(key))}

    try:
        alternatives = alternatives_of(filters, known)  # type: ignore[arg-type]
    except Problem:
        return
    wheres = [Where({key: values_of(of) for key, of in each.items()}) for each in alternatives]
    for each in attributes:
        assert any(where.allows(each) for where in wheres) is holds(filters, each)  # type: ignore[arg-type]


def test_results_of_several_queries_are_one_page(serve: Serve, index: FaultyRetriever) -> None:
    client = serve(retriever=index.retriever, k=2)
    queries = ["one", "five"]
    page = client.post(SEARCH, json={"query": queries}).json()
    assert page["search_query"] == queries
    found = [each["file_id"] for each in page["data"]]
    assert {"a", "e"} <= set(found)
    assert len(set(found)) == len(found)
    scores = [each["score"] for each in page["data"]]
    assert scores == sorted(scores, reverse=True)


def test_an_index_that_tells_no_values_compares_for_equality_alone(serve: Serve) -> None:
    def retrieve(_: str, *, depth: int, where: Where | None = None) -> list[Hit]:
        return [Hit("a", 1.0, "text", metadata={"year": 1})]

    client = serve(retriever=retrieve)
    for filters, status in ((compare("gt", "year", 0), 422), (compare("eq", "year", 1), 200)):
        assert client.post(SEARCH, json={"query": "q", "filters": filters}).status_code == status


def test_a_filter_that_needs_too_many_searches_is_refused(client: TestClient) -> None:
    pairs = [both("or", compare("eq", f"a{n}", 1), compare("eq", f"b{n}", 1)) for n in range(5)]
    response = client.post(SEARCH, json={"query": "q", "filters": both("and", *pairs)})
    assert response.status_code == 422
    many = both("or", *[both("and", *[compare("eq", "a", 1)] * 30)] * 30)
    response = client.post(SEARCH, json={"query": "q", "filters": many})
    assert response.status_code == 422


def test_the_store_can_be_listed_and_retrieved(client: TestClient) -> None:
    page = client.get("/v1/vector_stores").json()
    assert page["object"] == "list"
    (store,) = page["data"]
    assert store["id"] == page["first_id"] == page["last_id"] == "index"
    assert store["file_counts"]["total"] == 5
    assert client.get("/v1/vector_stores/index").json() == store
    assert client.get("/v1/vector_stores/other").status_code == 404


def test_openais_own_client_lists_retrieves_and_filters(client: TestClient) -> None:
    openai = pytest.importorskip("openai")
    store = openai.OpenAI(api_key="x", base_url="http://127.0.0.1/v1", http_client=client)
    assert [each.id for each in store.vector_stores.list()] == ["index"]
    assert store.vector_stores.retrieve("index").status == "completed"
    found = store.vector_stores.search(
        "index", query=["red fox", "three"], filters=compare("gt", "year", 2020)
    )
    assert {each.file_id for each in found} == {"c", "d"}
