"""Bodies are read alike by the quick reader and by the one that names faults."""

import json
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ctxguard.server import filtering
from ctxguard.server.limits import MOST_NAME_CHARS, MOST_NAMES
from ctxguard.server.problems import Problem
from ctxguard.server.rerank import BODIES
from ctxguard.server.wire import Body

BODY = {"rerank": BODIES["/rerank", "/v1/rerank", "/v2/rerank"][0]}
BODY["score"] = BODIES["/score", "/v1/score"][0]
BODY["filter"] = filtering.REQUEST

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.just(2**70),
    st.floats(),
    st.sampled_from(["a", "1", "ratio", "é", "x" * (MOST_NAME_CHARS + 1)]),
    st.lists(st.sampled_from(["a", 1, {"text": "a", "b": 1}, {"a": 1}]), max_size=2),
    st.dictionaries(st.sampled_from(["a", "dense", "text"]), st.sampled_from([1, 0.5, "a", None])),
    st.just({str(name): 0.5 for name in range(MOST_NAMES + 1)}),
)
FIELDS = {
    "rerank": "query documents texts model top_n top_k truncation return_documents return_text "
    "max_tokens_per_doc other",
    "score": "text_1 text_2 model",
    "filter": "query candidates score_kind leg_kinds session_id",
}
CANDIDATE = "id score rank text title metadata signals legs"


@st.composite
def bodies(draw: st.DrawFn, form: str) -> dict[str, object]:
    body: dict[str, object] = {"query": "q", "text_1": "q", "text_2": ["a"], "candidates": []}
    body |= draw(st.dictionaries(st.sampled_from(FIELDS[form].split()), VALUES, max_size=3))
    if form == "filter" and draw(st.booleans()):
        fields = st.dictionaries(st.sampled_from(CANDIDATE.split()), VALUES, max_size=3)
        body["candidates"] = [{"id": "a"} | one for one in draw(st.lists(fields, max_size=2))]
    return body


@pytest.mark.parametrize("form", BODY)
@given(data=st.data())
def test_both_readers_read_the_same(form: str, data: st.DataObject) -> None:
    is_read_alike(BODY[form], json.dumps(data.draw(bodies(form))))


@pytest.mark.parametrize("form", BODY)
@example('{"query": "q", "query": "other", "documents": ["a"], "candidates": []}')
@example(
    '{"query": "q", "documents": ["\\ud83d\\ude00"], "candidates": [{"id": "a", "score": 1e400}]}'
)
@example('{"query": "q", "candidates": [{"id": "a", "rank": 1.0}], "documents": [], "top_n": 1.0}')
@given(st.text())
def test_so_are_bodies_of_odd_json(form: str, body: str) -> None:
    is_read_alike(BODY[form], body)


def is_read_alike(body: Body, text: str) -> None:
    content = text.encode(errors="replace")
    try:
        read = body.decode(content)
    except (ValueError, RecursionError):
        with suppress(Problem):  # the other one is asked then
            body.parse(content)
        return
    # As text, so that 1 is not 1.0 and NaN is NaN.
    assert json.dumps(read, sort_keys=True) == json.dumps(body.parse(content), sort_keys=True)
