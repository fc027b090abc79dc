"""Decisions on candidates that the caller has: every reason, and every threshold."""

import json
import math
from pathlib import Path

import pytest
from http_service import Serve

from ctxguard.core.types import ScoreKind
from ctxguard.server.limits import MOST_NAMES
from ctxguard.server.problems import answer

CANDIDATES = [
    {"id": "a", "score": 0.9, "text": "one", "metadata": {"tenant": "x"}},
    {"id": "b", "score": 0.5, "rank": 2},
    {"id": "c", "score": None},
    {"id": "a", "score": 0.1},
]


def test_candidates_have_reason_and_threshold(serve: Serve, profile: Path) -> None:
    """Every candidate has its reason and the threshold that would have kept it."""
    body = {"query": "q", "candidates": CANDIDATES}
    answer = serve(profile=profile).post("/v1/filter", json=body).json()
    assert answer["kept_ids"] == ["a"]
    assert answer["dropped"] == {"below_ratio": 1, "invalid_score": 1, "duplicate_id": 1}
    kept, below, *aside = answer["decisions"]
    assert kept["kept"]
    assert (kept["kept_if"], below["reason"]) == ([], "below_ratio")
    assert below["kept_if"] == [{"setting": "min_ratio", "value": below["relative_score"]}]
    assert [each["reason"] for each in aside] == ["invalid_score", "duplicate_id"]
    assert [each["rank"] for each in aside] == [None, None]


def test_request_says_what_scores_mean(serve: Serve) -> None:
    body = {
        "query": "q",
        "score_kind": "logit",
        "candidates": [{"id": "a", "score": 3.0}, {"id": "b", "score": 2.0}],
    }
    candidates = serve().post("/v1/filter", json=body).json()["decisions"]
    assert candidates[1]["relative_score"] == pytest.approx(0.3679, abs=1e-4)


def test_signals_and_legs_may_have_gaps(serve: Serve) -> None:
    body = {
        "query": "q",
        "leg_kinds": {"dense": "cosine"},
        "candidates": [
            {"id": "a", "score": 0.9, "legs": {"dense": 0.8}, "signals": {"fresh": 1}},
            {"id": "b", "score": 0.8, "legs": {"dense": None}, "signals": {}},
        ],
    }
    assert serve().post("/v1/filter", json=body).json()["kept_ids"] == ["a", "b"]


@pytest.mark.parametrize("field", ["signals", "legs"])
def test_names_of_signals_are_limited(serve: Serve, field: str) -> None:
    def candidates(n: int) -> list[dict]:
        return [{"id": str(at), "score": 0.5, field: {f"name {at}": 1.0}} for at in range(n)]

    client, kinds = serve(), {f"name {at}": "cosine" for at in range(MOST_NAMES)}
    body = {"query": "q", "leg_kinds": kinds, "candidates": candidates(MOST_NAMES)}
    assert client.post("/v1/filter", json=body).status_code == 200
    response = client.post("/v1/filter", json={**body, "candidates": candidates(MOST_NAMES + 1)})
    assert response.status_code == 422
    assert f"{MOST_NAMES} names of {field}" in response.json()["detail"]


def test_list_of_wrongs_is_one_error(serve: Serve) -> None:
    body = {"query": "q", "candidates": [1] * 1_000}
    assert len(serve().post("/v1/filter", json=body).json()["errors"]) == 1
    many = {f"name {at}": "x" for at in range(MOST_NAMES + 1)}
    body = {"query": "q", "candidates": [{"id": "a", "signals": many}]}
    assert len(serve().post("/v1/filter", json=body).json()["errors"]) == 1
    body = {"query": "q", "documents": [1] * 1_000}
    assert len(serve().post("/rerank", json=body).json()["errors"]) == 2  # a text, or an object


def test_number_json_lacks_is_no_score(serve: Serve) -> None:
    body = '{"query": "q", "candidates": [{"id": "a", "score": NaN}, {"id": "b", "score": 1e999}]}'
    headers = {"content-type": "application/json"}
    answer = serve().post("/v1/filter", content=body, headers=headers).json()
    assert [each["score"] for each in answer["decisions"]] == [None, None]
    assert "invalid_scores" in answer["flags"]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (math.nan, None),
        (-math.inf, None),
        (2**70, 2**70),
        ((ScoreKind.RATIO,), ["ratio"]),
        ({"größe": 1.5}, {"größe": 1.5}),
    ],
)
def test_answer_is_json_despite_metadata(value: object, written: object) -> None:
    body = bytes(answer({"field": value}).body)
    assert json.loads(body) == {"field": written}


def test_all_kept_where_nothing_enforced(serve: Serve, unenforced_settings: dict) -> None:
    """In their order; the decisions say what the policy would do."""
    scores = [0.9, 0.2, 0.8, 0.7, None, 0.6, 0.1, 0.5]
    candidates = [{"id": f"c{at}", "score": score} for at, score in enumerate(scores)]
    body = {"query": "q", "candidates": candidates}
    answer = serve(**unenforced_settings).post("/v1/filter", json=body).json()
    assert answer["kept_ids"] == [one["id"] for one in candidates]
    assert answer["dropped"] == {}
    if answer["mode"] == "shadow":
        would_keep = [one["id"] for one in answer["decisions"] if one["kept"]]
        assert answer["would_keep_ids"] == would_keep
        assert 0 < len(would_keep) < 8


@pytest.mark.parametrize("numbers", [[7, 8], [7, "8"]])
def test_ids_may_be_numbers(serve: Serve, numbers: list[object]) -> None:
    """A number counts as its text."""
    body = {
        "query": "q",
        "candidates": [{"id": one, "score": 2.0 - at} for at, one in enumerate(numbers)],
        "score_kind": "ratio",
    }
    client = serve()
    assert client.post("/v1/filter", json=body).json()["kept_ids"] == ["7", "8"]
    for wrong in (True, 7.5, None, 2**64):
        body["candidates"] = [{"id": wrong, "score": 1.0}]
        assert client.post("/v1/filter", json=body).status_code == 422
