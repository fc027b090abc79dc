"""An assessor through the commands: calibrated on labels, kept in the profile, asked by a query."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from household import read_rows, write_collection, write_jsonl
from running import Result, Run, ok, refused

from ctxguard.profile.schema import Profile

pytest.importorskip("openai")

from tests.model_endpoint import ModelEndpoint


def is_relevant(query: str, title: str) -> bool:
    """What no signal tells: a passage on the task or the subject, by a digest of both texts."""
    words = {title.split()[2], title.split()[4]} & set(query.rstrip("?").split())
    return bool(words) and crc32(f"{query} {title}".encode()) % 4 == 0


Calibrated = Callable[..., tuple[Result, Path]]


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelEndpoint]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with closing(ModelEndpoint()) as served:
        served.opinion = lambda text, _: 0.7 * is_relevant(served.query, text.splitlines()[0])
        yield served


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions of which only the assessor knows the truth."""
    folder = write_collection(tmp_path_factory.mktemp("many") / "household", copies=2)
    passages, queries = (read_rows(folder / f"{name}.jsonl") for name in ("corpus", "queries"))
    for query in queries:
        # Without the words that all have in common, which make them nearly equal questions.
        query["text"] = query["text"].removeprefix("what is the right way to ").replace(" my", "")
    write_jsonl(folder / "queries.jsonl", queries)
    pairs = [
        f"{query['_id']}\t{passage['_id']}\t1"
        for query in queries
        for passage in passages
        if is_relevant(query["text"], passage["title"])
    ]
    text = "\n".join(["query-id\tcorpus-id\tscore", *pairs, ""])
    (folder / "qrels" / "train.tsv").write_text(text)
    return folder


@pytest.fixture
def system(endpoint: ModelEndpoint) -> dict[str, Any]:
    return {
        "assessor": "chat",
        "assessor-model": "m-2026",
        "assessor-url": endpoint.url,
        "assessor-prices": [1.0, 1.0],
        "calibrate": {"policy": "expected_utility"},
    }


@pytest.fixture
def calibrated(run: Run, index: Path, many: Path, tmp_path: Path) -> Calibrated:
    """Calibrates the index on the labels, under a system; the command's arguments and its file."""
    out = tmp_path / "p.json"
    asked = ("calibrate", "--index", index, "--data", many, "--out", out)

    def calibrate(system: dict[str, Any] | None, *others: object) -> tuple[Result, Path]:
        if "--report" in others:
            others = (*others, out.with_suffix(".html"))
        return run(*asked, *others, system=system), out

    return calibrate


def test_assessors_worth_is_said_and_used(
    run: Run, index: Path, calibrated: Calibrated, endpoint: ModelEndpoint, system: dict[str, Any]
) -> None:
    result, out = calibrated(system, "--price", "0.0001", "--report")
    words = " ".join(ok(result).stdout.split())
    for part in ("what the assessor adds", "beside P", "net of the price 0.0001", "which cost"):
        assert part in words
    assert "What the assessor adds" in out.with_suffix(".html").read_text()
    found = next(iter(Profile.load(out).routes.values())).assessor
    assert found.fingerprint.startswith("chat m-2026 ")
    assert found.price == 0.0001
    assert found.model.effect > 0.0
    assert found.cost > 0.0
    n_requests = len(endpoint.requests)
    queries = len({request["messages"][-1]["content"] for request in endpoint.requests})
    assert n_requests >= queries > 50
    question = "which way to clean a piano"
    enforced = system | {"query": {"mode": "enforce"}}
    run.ok("query", question, "--index", index, "--profile", out, system=enforced)
    asked_now = endpoint.requests[n_requests:]
    assert len(asked_now) <= 1
    assert all(question in request["messages"][-1]["content"] for request in asked_now)


def test_silent_assessor_is_not_dropped(
    calibrated: Calibrated, endpoint: ModelEndpoint, system: dict[str, Any]
) -> None:
    endpoint.opinion = lambda _text, _name: 0.5
    result, out = calibrated(system, "--json", "--report")
    why = "the assessor is not asked: nothing can be fitted to its answers"
    assert why in out.with_suffix(".html").read_text()
    (own,) = {route.asking for route in Profile.load(out).routes.values()}
    assert own.startswith(why)
    routes = json.loads(ok(result).stdout)["routes"].values()
    assert {route["asking"] for route in routes} == {own}


@pytest.mark.parametrize(
    ("missing", "says"),
    [("assessor", "--price needs a model to ask"), ("assessor-model", "needs assessor-model")],
)
def test_price_needs_assessor_and_model(
    calibrated: Calibrated, system: dict[str, Any], missing: str, says: str
) -> None:
    del system[missing]
    refused(calibrated(system, "--price", "0.1")[0], says)
