"""The rerank protocol: which document has which score, and what is dropped."""

import asyncio
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_service import NamedScores, Serve, at_once, counted
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from ctxguard.core.context import Context
from ctxguard.errors import StageError
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.monitor.sampling.record import record_of
from ctxguard.profile.schema import Profile
from ctxguard.server import service
from ctxguard.server.app import create_app
from ctxguard.server.settings import ServiceSettings
from tests.timing import until

DOCUMENTS = ["0.1 none", "0.9 best", "0.85 good", "0.2 poor", "0.88 fine", "0.84 fourth"]


def scores_of(answer: dict) -> dict[int, float]:
    return {each["index"]: each["relevance_score"] for each in answer["results"]}


def post(client, documents, path="/rerank", **fields):
    return client.post(path, json={"query": "q", "documents": documents, **fields})


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_kept_score_above_zero_dropped_zero(serve: Serve, profile: Path, path: str) -> None:
    answer = post(serve(profile=profile), DOCUMENTS, path).json()
    assert [*scores_of(answer)] == [1, 4, 2, 5, 3, 0]
    best, *others = scores_of(answer).values()
    assert best == 1.0 >= others[0] >= others[1] > 0.0
    assert others[2:] == [0.0] * 3
    assert isinstance(answer["id"], str)
    meta = answer["meta"]["ctxguard"]
    assert (meta["kept"], meta["dropped"], meta["flags"]) == (3, {"beyond_k": 3}, [])
    assert meta["degraded"] is None


@pytest.mark.parametrize(
    ("top_n", "model", "expected"),
    [
        (None, None, 6),
        (0, None, 6),
        (6, None, 6),
        (9, None, 6),
        (5, None, 3),
        (2, None, 2),
        (None, "ctxguard:omit", 3),
        (5, "ctxguard:full", 5),
        (None, "ctxguard:full", 6),
    ],
)
def test_fewer_results_leave_out_dropped(
    serve: Serve, profile: Path, top_n: int | None, model: str | None, expected: int
) -> None:
    answer = post(serve(profile=profile), DOCUMENTS, top_n=top_n, model=model).json()
    assert len(answer["results"]) == expected


@pytest.mark.parametrize(
    ("is_calibrated", "flag"), [(False, "uncalibrated"), (True, "profile_mismatch")]
)
def test_plain_reranking_without_calibrated_policy(
    serve: Serve, scorer: NamedScores, profile: Path, *, is_calibrated: bool, flag: str
) -> None:
    scorer.fingerprint = "another"
    answer = post(serve(profile=profile if is_calibrated else None), DOCUMENTS).json()
    own = [float(text.partition(" ")[0]) for text in DOCUMENTS]
    assert [*scores_of(answer).items()] == sorted(enumerate(own), key=lambda pair: -pair[1])
    meta = answer["meta"]["ctxguard"]
    assert (flag in meta["flags"], meta["dropped"]) == (True, {})


@pytest.mark.parametrize(
    ("path", "fields", "query"),
    [
        ("/rerank", {"texts": DOCUMENTS, "return_text": True, "raw_scores": False}, {}),
        *[
            ("/v1/rerank", {"documents": DOCUMENTS, "return_documents": True, **extra}, {})
            for extra in ({"top_k": 6}, {"top_k": None}, {"truncation": True})
        ],
        *[
            (path, {"text_2": DOCUMENTS}, {"text_1": query})
            for path in ("/score", "/v1/score")
            for query in ("q", ["q"])
        ],
    ],
)
def test_each_form_has_same_decision(
    serve: Serve, profile: Path, path: str, fields: dict, query: dict
) -> None:
    body = {**(query or {"query": "q"}), "model": "m", **fields}
    page = serve(profile=profile).post(path, json=body).json()
    results = page if "texts" in fields else page["data"]
    order = [1, 4, 2, 5, 3, 0]
    assert [each["index"] for each in results] == (sorted(order) if query else order)
    name = "relevance_score" if "documents" in fields else "score"
    scores = {each["index"]: each[name] for each in results}
    assert (scores[1], [at for at in order if scores[at] == 0.0]) == (1.0, [5, 3, 0])
    for each in results:
        echo = each.get("text" if "texts" in fields else "document")
        assert echo == (None if query else DOCUMENTS[each["index"]])
        assert each.get("object") == ("score" if query else None)
    if "texts" not in fields:
        assert (page["object"], page["model"], page["usage"]["total_tokens"]) == ("list", "m", 0)


def test_top_k_bounds_even_one_text(serve: Serve) -> None:
    client, body = serve(), {"query": "q", "documents": DOCUMENTS, "top_k": 1}
    page = client.post("/v1/rerank", json=body).json()
    assert [each["index"] for each in page["data"]] == [1]
    page = client.post("/score", json={"text_1": "q", "text_2": "0.4 one"}).json()
    assert [each["score"] for each in page["data"]] == [0.4]


def test_models_and_limits_are_listed(serve: Serve) -> None:
    client = serve(rerank_model="bge", max_documents=7)
    page = client.get("/v1/models").json()
    assert page["object"] == "list"
    assert [each["id"] for each in page["data"]] == ["bge", "ctxguard:omit", "ctxguard:full"]
    assert {each["object"] for each in page["data"]} == {"model"}
    assert client.get("/health").status_code == 200
    info = client.get("/info").json()
    assert info["max_client_batch_size"] == 7
    assert "reranker" in info["model_type"]


def test_documents_return_beside_own_scores(serve: Serve) -> None:
    documents = [{"text": text, "title": "t"} for text in DOCUMENTS]
    answer = post(serve(), documents, return_documents=True).json()
    for each in answer["results"]:
        assert each["document"] == {"text": DOCUMENTS[each["index"]]}


def test_model_is_passed_unless_fixed(serve: Serve, profile: Path, scorer: NamedScores) -> None:
    """The model is passed on unless a profile or a setting fixes it."""
    post(serve(), ["0.5"], model="some-reranker", max_tokens_per_doc=7)
    post(serve(rerank_model="fixed"), ["0.5"], model="some-reranker")
    post(serve(profile=profile), ["0.5"], model="some-reranker")
    post(serve(), ["0.5"], model="ctxguard:full")
    assert [asked["model"] for asked in scorer.asked] == ["some-reranker", None, None, None]
    assert scorer.asked[0]["max_tokens_per_doc"] == 7


def test_scoreless_document_is_last(serve: Serve, profile: Path) -> None:
    documents = ["nan", "0.5 a", "inf", "0.9 b"]
    assert [*scores_of(post(serve(), documents).json())][:2] == [3, 1]
    scores = scores_of(post(serve(profile=profile), documents).json())
    assert scores[0] == scores[2] == 0.0


def test_equal_scores_keep_request_order(serve: Serve) -> None:
    assert [*scores_of(post(serve(), ["0.5"] * 12).json())] == list(range(12))


@settings(max_examples=20)
@given(
    scores=st.lists(st.floats(0.0, 1.0) | st.just(float("nan")), max_size=30),
    top_n=st.none() | st.integers(0, 35),
    model=st.sampled_from([None, "m", "ctxguard:omit", "ctxguard:full"]),
    is_calibrated=st.booleans(),
)
def test_scores_never_pair_with_others(
    profile: Path, scores: list[float], top_n: int | None, model: str | None, is_calibrated: bool
) -> None:
    app = create_app(
        ServiceSettings(profile=profile if is_calibrated else None),
        scorer=NamedScores(),
        registry=CollectorRegistry(),
    )
    client = TestClient(app, base_url="http://127.0.0.1")
    response = post(client, [f"{score!r} text" for score in scores], top_n=top_n, model=model)
    assert response.status_code == 200
    results = response.json()["results"]
    shown = [each["index"] for each in results]
    assert len(set(shown)) == len(shown) <= len(scores)
    answered = [each["relevance_score"] for each in results]
    assert answered == sorted(answered, reverse=True)
    degraded = response.json()["meta"]["ctxguard"]["degraded"]
    assert (degraded is not None) is (bool(scores) and all(np.isnan(scores)))
    if degraded is None and not is_calibrated:
        for index, score in zip(shown, answered, strict=True):
            assert np.isnan(scores[index]) or score == scores[index]
    if degraded is None and is_calibrated:
        above = [scores[index] for index, score in zip(shown, answered, strict=True) if score > 0]
        assert above == sorted(above, reverse=True)


def late(_work) -> object:
    return asyncio.sleep(30)


def down(_work) -> object:
    raise ConnectionError("refused")


def garbage(_work) -> object:
    raise StageError("rerank", "not JSON")


FAULTS = {
    "timeout": late,
    "error": down,
    "garbage": garbage,
    "nan": lambda work: work() * np.nan,
    "shape": lambda work: work()[1:],
    "text": lambda work: ["a", "b"],
    "none": lambda work: None,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("is_calibrated", [False, True])
def test_any_reranker_leaves_documents_in_order(
    serve: Serve,
    scorer: NamedScores,
    registry: CollectorRegistry,
    *,
    profile: Path,
    fault: str,
    is_calibrated: bool,
) -> None:
    client = serve(profile=profile if is_calibrated else None, deadline_seconds=0.1)
    with scorer.fault.injected(FAULTS[fault]):
        response = post(client, DOCUMENTS)
    assert response.status_code == 200
    kind = fault if fault in ("timeout", "error") else "garbage"
    assert response.headers["x-ctxguard-degraded"] == kind
    answer = response.json()
    assert [*scores_of(answer)] == list(range(6))
    scores = scores_of(answer).values()
    assert all(1.0 > better > worse > 0.0 for better, worse in pairwise(scores))
    assert answer["meta"]["ctxguard"]["degraded"] == {"stage": "rerank", "kind": kind}
    assert counted(registry, "ctxguard_stage_failures_total", stage="rerank", cause=kind) == 1
    ended = {"endpoint": "rerank", "outcome": "degraded"}
    assert counted(registry, "ctxguard_http_requests_total", **ended) == 1


def test_failing_reranker_is_left_out(serve: Serve, scorer: NamedScores) -> None:
    client = serve()
    with scorer.fault.injected(down):
        kinds = [post(client, ["0.5"]).headers["x-ctxguard-degraded"] for _ in range(5)]
    assert kinds == ["error"] * 3 + ["circuit_open"] * 2
    assert client.get("/readyz").json()["reranker"].startswith("left out")


def test_unknown_model_leaves_reranker_in_use(serve: Serve, scorer: NamedScores) -> None:
    """A model that the reranker does not know leaves it in use for others."""
    client = serve()
    with scorer.fault.injected(down):
        for _ in range(5):
            answer = post(client, ["0.5"], model="no-such-model")
            assert answer.headers["x-ctxguard-degraded"] == "error"
    assert "x-ctxguard-degraded" not in post(client, ["0.5"]).headers


def test_excess_requests_skip_the_reranker(
    serve: Serve, scorer: NamedScores, registry: CollectorRegistry
) -> None:
    client = serve(max_scoring=1, deadline_seconds=5.0)
    body = {"query": "q", "documents": DOCUMENTS}

    async def slowly(work) -> object:
        await asyncio.sleep(0.05)
        return work()

    with scorer.fault.injected(slowly):
        answers = at_once(client, *[("POST", "/rerank", body)] * 3)
    kinds = [answer.headers.get("x-ctxguard-degraded") for answer in answers]
    assert sorted(map(str, kinds)) == ["None", "saturated", "saturated"]
    received = counted(registry, "ctxguard_received_requests_total")
    assert received == 3 == counted(registry, "ctxguard_requests_total")


def test_no_documents_are_an_empty_answer(serve: Serve, scorer: NamedScores) -> None:
    client = serve()
    assert post(client, []).json()["results"] == []
    assert client.post("/rerank", json={"query": "q", "texts": []}).json() == []
    assert not scorer.asked


def test_one_many_and_large_are_answered(serve: Serve, profile: Path) -> None:
    client = serve(profile=profile)
    assert len(post(client, ["0.4 alone"]).json()["results"]) == 1
    assert len(post(client, ["0.4"] * 10_000).json()["results"]) == 10_000
    assert len(post(client, ["0.4 " + "a" * 2**20, "0.3"]).json()["results"]) == 2
    assert post(client, ["0.4"] * 10_001).status_code == 422


def test_a_profile_is_replaced_while_serving(
    serve: Serve, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = partial(service.ProfileWatcher, interval_seconds=0.05)
    monkeypatch.setattr(service, "ProfileWatcher", often)
    file = tmp_path / "profile.json"
    first = Profile.load(profile)
    first.save(file)
    client = serve(profile=file)
    assert post(client, DOCUMENTS).json()["meta"]["ctxguard"]["kept"] == 3
    route = next(iter(first.routes))
    policy = first.routes[route].policy.__class__(k=1)
    changed = first.routes[route].model_copy(update={"policy": policy})
    first.model_copy(update={"routes": {route: changed}}).save(file)
    until(lambda: post(client, DOCUMENTS).json()["meta"]["ctxguard"]["kept"] == 1)


COPIES = ["0.9 best", "0.9  BEST", "0.9 best ", "0.9 best", "0.87 second", "0.1 third"]


def test_copies_yield_their_place(serve: Serve, profile: Path, scorer: NamedScores) -> None:
    """Of at most three that are kept, four are one text."""
    answer = post(serve(profile=profile), [*COPIES, "0.88 another"]).json()
    assert [*scores_of(answer)] == [0, 1, 2, 3, 6, 4, 5]
    scores = [*scores_of(answer).values()]
    assert (scores[:4], scores[6]) == ([1.0] * 4, 0.0)
    assert scores[4] > scores[5] > 0.0
    meta = answer["meta"]["ctxguard"]
    assert (meta["kept"], meta["dropped"]) == (3, {"duplicate_text": 3, "beyond_k": 1})
    assert scorer.asked[0]["documents"] == 4  # each text once


@pytest.mark.parametrize("is_calibrated", [True, False])
def test_fewer_results_are_different_texts(
    serve: Serve, profile: Path, *, is_calibrated: bool
) -> None:
    client = serve(profile=profile if is_calibrated else None)
    assert [*scores_of(post(client, COPIES, top_n=2).json())] == [0, 4]


FOURTEEN = [f"{at / 100:.2f} text {at}" for at in (4, 1, 19, 7, 2, 3, 11, 5, 13, 17, 8, 6, 12, 9)]


@pytest.mark.parametrize("top_n", [None, 1, 3, 10, 14, 50])
@pytest.mark.parametrize("model", [None, "ctxguard:omit", "ctxguard:full"])
def test_answer_passes_where_nothing_enforced(
    serve: Serve, unenforced_settings: dict, top_n: int | None, model: str | None
) -> None:
    """All documents or ``top_n``, by the reranker's order, with its own scores."""
    answer = post(serve(**unenforced_settings), FOURTEEN, top_n=top_n, model=model).json()
    own = [float(text.partition(" ")[0]) for text in FOURTEEN]
    expected = sorted(enumerate(own), key=lambda pair: -pair[1])[: top_n or len(FOURTEEN)]
    assert list(scores_of(answer).items()) == expected
    meta = answer["meta"]["ctxguard"]
    assert (meta["kept"], meta["dropped"]) == (len(FOURTEEN), {})
    assert meta["mode"] != "shadow" or 0 < meta["would_keep"] < len(FOURTEEN)


@pytest.mark.parametrize(("top_n", "served"), [(None, 14), (10, 10), (3, 3)])
@pytest.mark.parametrize("is_degraded", [False, True])
def test_a_sample_says_what_was_served(
    serve: Serve,
    scorer: NamedScores,
    monkeypatch: pytest.MonkeyPatch,
    unenforced_settings: dict,
    *,
    top_n: int | None,
    served: int,
    is_degraded: bool,
) -> None:
    contexts: list[Context] = []
    afilter = ContextGuard.afilter

    async def noted(*arguments: Any, **given: Any) -> Context:
        contexts.append(await afilter(*arguments, **given))
        return contexts[-1]

    monkeypatch.setattr(ContextGuard, "afilter", noted)
    client = serve(**unenforced_settings)
    with scorer.fault.injected(down) if is_degraded else nullcontext():
        answer = post(client, FOURTEEN, top_n=top_n).json()
    record = record_of(contexts[-1], 1.0, 0.0)
    names = [record.passage_ids[place] for place in record.served]
    assert (names, len(names)) == ([str(each["index"]) for each in answer["results"]], served)
