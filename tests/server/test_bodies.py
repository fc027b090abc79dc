"""Bodies are counted before they are read, and a bad one asks nothing of a reranker."""

import json
import tracemalloc
from itertools import product
from typing import Any

import pytest
from http_service import NamedScores, Serve
from hypothesis import given
from hypothesis import strategies as st

from ctxguard._support.json_values import MOST_VALUES, has_more_values
from ctxguard.core.types import Passage
from ctxguard.server.filtering import REQUEST
from ctxguard.server.problems import MEDIA_TYPE, Problem
from ctxguard.server.rerank import BODIES
from ctxguard.server.wire import read_body
from tests.doubles import FaultyRetriever

NEVER_READ: Any = None
RERANK = BODIES["/rerank", "/v1/rerank", "/v2/rerank"]
WITH_METADATA = b'{"query": "q", "candidates": [{"id": "a", "metadata": {"m": %s}}]}'
WITH_TEXTS = b'{"query": "q", "documents": [%s]}'
N = MOST_VALUES

MANY = {
    "numbers": b"[" + b",".join([b"1"] * N) + b"]",
    "empty lists": b"[" + b",".join([b"[]"] * N) + b"]",
    "lists in lists": b"[" * N + b"]" * N,
    "keys": b"{" + b",".join([b'"%d":1' % n for n in range(N)]) + b"}",
    "names alone": b"{" + b",".join([b'"":""'] * N) + b"}",
    "texts": b"[" + b",".join([b'""'] * N) + b"]",
}


@pytest.mark.parametrize("form", MANY)
@pytest.mark.parametrize("surrogate", [b"", b'{"id": "\\ud800"}'])
def test_too_many_values_are_refused_first(form: str, surrogate: bytes) -> None:
    body = WITH_METADATA % MANY[form] + surrogate
    tracemalloc.start()
    with pytest.raises(Problem, match=f"{N:,} values"):
        read_body(NEVER_READ, body)
    assert tracemalloc.get_traced_memory()[1] < 10 * len(body)
    tracemalloc.stop()


def test_punctuation_in_texts_is_no_value() -> None:
    text = 'a, [b], {c} \\ " ' * N
    body = WITH_TEXTS % b",".join([json.dumps(text).encode()] * 2)
    assert read_body(RERANK, body)["documents"] == [text, text]


def test_largest_number_of_values_is_read() -> None:
    body = WITH_METADATA % (b"[" + b",".join([b"1"] * (N - 10)) + b"]")
    assert len(read_body(REQUEST, body)["candidates"][0]["metadata"]["m"]) == N - 10


JSON = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('a"\\\\[]{},:\ud800'), max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.sampled_from('a"\\,'), max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


def values_in(content: object) -> int:
    members = content.values() if isinstance(content, dict) else content
    return 1 + sum(map(values_in, members)) if isinstance(content, dict | list) else 1


@given(JSON)
def test_no_value_escapes_the_count(content: object) -> None:
    body, n = json.dumps(content).encode(), values_in(content)
    for most, refused in ((n - 1, True), (3 * n, False)):
        assert has_more_values(body, most) == refused


def test_half_surrogate_reads_as_question_mark() -> None:
    halves = ("\\ud800", "\\udc00", "\\ud800\\ud83d\\ude00", "\\\\ud800", "\\uD83D\\uDE00")
    for one, other in product(halves, halves):
        read = read_body(RERANK, WITH_TEXTS % f'"{one} {other}"'.encode())["documents"][0]
        expected = json.loads(f'"{one} {other}"').encode(errors="replace").decode()
        assert read == expected


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
