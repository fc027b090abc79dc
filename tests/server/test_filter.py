"""Decisions on candidates that the caller has: every reason, and every threshold."""

from pathlib import Path

import pytest
from http_service import Serve

CANDIDATES = [
    {"id": "a", "score": 0.9, "text": "one", "metadata": {"tenant": "x"}},
    {"id": "b", "score": 0.5, "rank": 2},
    {"id": "c", "score": None},
    {"id": "a", "score": 0.1},
]


def test_every_candidate_has_its_reason_and_the_threshold_that_would_have_kept_it(
    serve: Serve, profile: Path
) -> None:
    body = {"query": "q", "candidates": CANDIDATES}
    answer = serve(profile=profile).post("/v1/filter", json=body).json()
    assert answer["kept"] == ["a"]
    assert answer["dropped"] == {"below_ratio": 1, "invalid_score": 1, "duplicate_id": 1}
    kept, below, *aside = answer["verdicts"]
    assert kept["kept"]
    assert kept["kept_if"] == []
    assert below["reason"] == "below_ratio"
    assert below["kept_if"] == [{"setting": "min_ratio", "value": below["relative_score"]}]
    assert [each["reason"] for each in aside] == ["invalid_score", "duplicate_id"]
    assert [each["rank"] for each in aside] == [None, None]


def test_a_request_says_what_its_scores_mean(serve: Serve) -> None:
    body = {
        "query": "q",
        "score_kind": "logit",
        "candidates": [{"id": "a", "score": 3.0}, {"id": "b", "score": 2.0}],
    }
    verdicts = serve().post("/v1/filter", json=body).json()["verdicts"]
    assert verdicts[1]["relative_score"] == pytest.approx(0.3679, abs=1e-4)


def test_signals_and_legs_are_columns_with_gaps(serve: Serve) -> None:
    body = {
        "query": "q",
        "leg_kinds": {"dense": "cosine"},
        "candidates": [
            {"id": "a", "score": 0.9, "legs": {"dense": 0.8}, "signals": {"fresh": 1}},
            {"id": "b", "score": 0.8, "legs": {"dense": None}, "signals": {}},
        ],
    }
    assert serve().post("/v1/filter", json=body).json()["kept"] == ["a", "b"]


@pytest.mark.parametrize(
    "body",
    [
        {"query": "q"},
        {"query": "q", "candidates": [{"score": 1.0}]},
        {"query": "q", "candidates": [{"id": 1, "score": 1.0}]},
        {"query": "q", "candidates": [{"id": "a", "score": "1.0"}]},
        {"query": "q", "candidates": [{"id": "a", "score": 1.0, "rank": 0}]},
        {"query": "q", "candidates": [], "score_kind": "points"},
        {"query": "q", "candidates": [{"id": "a", "legs": {"dense": 1.0}}]},
        {"query": "q" * 10_001, "candidates": []},
        {"query": "q", "candidates": [{"id": "a"}] * 10_001},
        [],
    ],
)
def test_bad_input_is_a_problem_document(serve: Serve, body: object) -> None:
    response = serve().post("/v1/filter", json=body)
    assert response.status_code == 422
    assert response.json()["detail"]


def test_a_number_that_json_lacks_is_no_score(serve: Serve) -> None:
    body = '{"query": "q", "candidates": [{"id": "a", "score": NaN}, {"id": "b", "score": 1e999}]}'
    headers = {"content-type": "application/json"}
    answer = serve().post("/v1/filter", content=body, headers=headers).json()
    assert [each["score"] for each in answer["verdicts"]] == [None, None]
    assert "invalid_scores" in answer["flags"]
