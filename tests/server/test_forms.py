"""Each form in which rerankers are asked: its fields in, its fields out, one decision."""

from pathlib import Path

import pytest
from http_service import NamedScores, Serve

DOCUMENTS = ["0.1 none", "0.9 best", "0.88 fine"]


@pytest.mark.parametrize("extra", [{"top_k": 3}, {"top_k": None}, {"truncation": True}])
def test_voyage_is_answered_in_data(serve: Serve, profile: Path, extra: dict) -> None:
    body = {"query": "q", "documents": DOCUMENTS, "model": "rerank-2.5", **extra}
    answer = serve(profile=profile).post("/v1/rerank", json=body | {"return_documents": True})
    page = answer.json()
    assert page["object"] == "list"
    assert page["model"] == "rerank-2.5"
    assert page["usage"]["total_tokens"] == 0
    assert [each["index"] for each in page["data"]] == [1, 2, 0]
    assert [each["document"] for each in page["data"]] == ["0.9 best", "0.88 fine", "0.1 none"]
    assert page["data"][0]["relevance_score"] == 1.0
    assert page["data"][2]["relevance_score"] == 0.0


def test_top_k_bounds_the_results(serve: Serve, profile: Path) -> None:
    body = {"query": "q", "documents": DOCUMENTS, "top_k": 1}
    page = serve(profile=profile).post("/v1/rerank", json=body).json()
    assert [each["index"] for each in page["data"]] == [1]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("query", ["q", ["q"]])
def test_scores_stand_in_the_order_of_the_texts(
    serve: Serve, profile: Path, path: str, query: object
) -> None:
    body = {"model": "m", "text_1": query, "text_2": DOCUMENTS}
    page = serve(profile=profile).post(path, json=body).json()
    assert page["object"] == "list"
    assert [(each["index"], each["object"]) for each in page["data"]] == [
        (0, "score"),
        (1, "score"),
        (2, "score"),
    ]
    assert page["data"][0]["score"] == 0.0
    assert page["data"][1]["score"] == 1.0


def test_one_text_may_be_scored(serve: Serve) -> None:
    page = serve().post("/score", json={"text_1": "q", "text_2": "0.4 one"}).json()
    assert [each["score"] for each in page["data"]] == [0.4]


def test_models_can_be_listed(serve: Serve) -> None:
    page = serve(rerank_model="bge").get("/v1/models").json()
    assert page["object"] == "list"
    assert [each["id"] for each in page["data"]] == ["bge", "ctxguard:omit", "ctxguard:full"]
    assert {each["object"] for each in page["data"]} == {"model"}


def test_health_and_info_are_those_of_tei(serve: Serve) -> None:
    client = serve(max_documents=7)
    assert client.get("/health").status_code == 200
    info = client.get("/info").json()
    assert info["max_client_batch_size"] == 7
    assert "reranker" in info["model_type"]


@pytest.mark.parametrize("content_type", ["text/plain;charset=UTF-8", "text/plain"])
def test_json_may_be_sent_as_text_but_not_by_a_page_of_another_site(
    serve: Serve, scorer: NamedScores, content_type: str
) -> None:
    client, body = serve(), b'{"query": "q", "documents": ["0.5 a"]}'
    headers = {"content-type": content_type}
    assert client.post("/rerank", content=body, headers=headers).status_code == 200
    foreign = headers | {"origin": "https://a.example"}
    assert client.post("/rerank", content=body, headers=foreign).status_code == 415
    assert len(scorer.asked) == 1
