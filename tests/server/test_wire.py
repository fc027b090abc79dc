"""Bodies are counted before they are read, and read by one reader."""

import json
import tracemalloc
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard._support.json_values import MOST_VALUES, has_more_values
from ctxguard.server.filtering import REQUEST
from ctxguard.server.problems import Problem
from ctxguard.server.rerank import BODIES
from ctxguard.server.wire import read_body

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
