"""An index in Qdrant: the client's local mode, and answers faked at the client's border."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("qdrant_client")

import httpx
from engine_contract import (
    PASSAGES,
    EngineContract,
    build,
    open_index,
    raised_in_a_child,
    run_at_once,
)
from fault_rows import FaultRows, Row
from qdrant_client import QdrantClient, models
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from ctxguard import Passage, Route
from ctxguard.errors import (
    ConfigurationError,
    DataError,
    OverloadedError,
    StageError,
    StageUnavailableError,
)
from ctxguard.integrations.engines.engine import LegQuery
from ctxguard.integrations.engines.qdrant import term_index
from ctxguard.integrations.engines.retriever import EngineRetriever
from ctxguard.resilience.stage import UnansweredError
from tests.rerank_endpoint import Answer, RerankEndpoint

_folder = ""
_names = iter(range(10_000))


@pytest.fixture(scope="module", autouse=True)
def _folder_of_the_module(tmp_path_factory: pytest.TempPathFactory) -> None:
    global _folder  # noqa: PLW0603  the suites that are inherited take no fixtures
    _folder = str(tmp_path_factory.mktemp("qdrant"))


def url(name: str = "") -> str:
    return f"qdrant://{_folder}#{name or f'own_{next(_names)}'}"


def built(passages: Sequence[Passage] = PASSAGES) -> EngineRetriever:
    return build(url(), passages)


class TestEngine(EngineContract):
    def url(self, name: str) -> str:
        return url(name)

    def unreachable_retriever(self) -> EngineRetriever:
        retriever = built()
        _fake(retriever, _raising(ConnectionError()))
        return retriever


def _fake(retriever: EngineRetriever, answer: Callable[..., Any], **methods: Any) -> Any:
    """Put a server's client, of which the search is faked, in the place of the folder."""
    engine: Any = retriever._engine
    client = SimpleNamespace(query_batch_points=answer, **methods)
    engine._is_folder = False
    engine._client = SimpleNamespace(run=lambda work: work(client), close=lambda: None)
    return engine


def _raising(error: Exception) -> Callable[..., Any]:
    def answer(*_: Any, **__: Any) -> Any:
        raise error

    return answer


def test_both_legs_are_one_call() -> None:
    asked: list[Any] = []

    def answer(name: str, requests: list[Any], timeout: int) -> list[Any]:
        asked.append((name, requests, timeout))
        return [SimpleNamespace(points=[]) for _ in requests]

    with built() as retriever:
        _fake(retriever, answer).search(
            LegQuery(["fox", "fox"], np.ones(64, np.float32), 7, (("t", "u"), ("v",)))
        )
    ((name, requests, timeout),) = asked
    assert name.startswith("own_")
    assert timeout == 10
    bodies = [json.loads(each.model_dump_json(exclude_none=True)) for each in requests]
    shared = {
        "filter": {
            "must": [
                {"key": "filter_tokens", "match": {"any": ["t", "u"]}},
                {"key": "filter_tokens", "match": {"any": ["v"]}},
            ]
        },
        "limit": 7,
        "with_vector": False,
        "with_payload": ["passage_id", "title", "text", "metadata"],
    }
    assert bodies == [
        {"query": {"indices": [term_index("fox")], "values": [2.0]}, "using": "lexical", **shared},
        {
            "query": [1.0] * 64,
            "using": "dense",
            "params": {"hnsw_ef": 200, "exact": False, "indexed_only": False},
            **shared,
        },
    ]


def test_collection_has_vectors_and_payload_indexes() -> None:
    """A collection is made with both vectors and indexes of the payload."""
    made: dict[str, Any] = {}
    indexes: dict[str, Any] = {}

    def create_collection(name: str, **options: Any) -> None:
        made.update(options, name=name)

    def create_payload_index(name: str, field: str, **options: Any) -> None:
        indexes[field] = options["field_schema"]

    with built() as retriever:
        _fake(
            retriever,
            lambda: None,
            collection_exists=lambda name: False,
            create_collection=create_collection,
            create_payload_index=create_payload_index,
        ).make()
    assert made["vectors_config"]["dense"].distance is models.Distance.COSINE
    assert made["sparse_vectors_config"]["lexical"].modifier is models.Modifier.IDF
    assert json.loads(made["metadata"]["ctxguard"])["dimension"] == 64
    assert indexes["filter_tokens"] is models.PayloadSchemaType.KEYWORD
    assert (indexes["digest"].range, indexes["digest"].lookup) == (True, False)


def point(n: int, score: Any, **payload: Any) -> Any:
    content = {"passage_id": f"d{n}", "title": "", "text": f"Text {n}.", "metadata": "null"}
    return SimpleNamespace(score=score, payload={**content, **payload})


def answering(points: Sequence[Any]) -> EngineRetriever:
    """A retriever whose dense leg answers these points."""
    retriever = built(PASSAGES[:2])
    _fake(retriever, lambda *_, **__: [SimpleNamespace(points=list(points))])
    return retriever.on_route(Route.DENSE)


class TestFaultRows(FaultRows):
    """Points that the client may return for the dense leg."""

    has_distances = False

    def retriever(self, found: Sequence[Row], score_kind: str) -> Any:
        points = [
            point(at, row.score, passage_id=row.id, text=row.text) for at, row in enumerate(found)
        ]
        return answering(points)


@pytest.mark.parametrize(
    "payload", [{"text": None}, {"passage_id": 7}, {"metadata": "{"}, {"metadata": {"tenant": "a"}}]
)
def test_point_without_passage_is_left_out(payload: dict[str, Any]) -> None:
    odd = point(0, 0.9, **payload)
    assert answering([odd, point(1, 0.8)]).retrieve("foxes").passage_ids == ("d1",)
    with pytest.raises(StageError):
        answering([odd]).retrieve("foxes")


@pytest.mark.parametrize("answer", [[], [None], ["points"], [SimpleNamespace(points=None)]])
def test_malformed_answer_is_an_outage(answer: Any) -> None:
    with built(PASSAGES[:2]) as retriever:
        _fake(retriever, lambda *_, **__: answer)
        with pytest.raises(StageError, match="qdrant"):
            retriever.on_route(Route.DENSE).retrieve("foxes")


def _status(status: int) -> UnexpectedResponse:
    return UnexpectedResponse(status, "", b'{"status": {"error": "secret"}}', httpx.Headers())


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (_status(401), StageUnavailableError, "CTXGUARD_ENGINE_KEY"),
        (_status(403), StageUnavailableError, "CTXGUARD_ENGINE_KEY"),
        (_status(404), ConfigurationError, "no index with that name"),
        (_status(429), OverloadedError, "rate limit"),
        (_status(500), StageUnavailableError, "500"),
        (ResponseHandlingException(httpx.ReadTimeout("secret")), UnansweredError, "in time"),
        (ResponseHandlingException(httpx.ConnectError("secret")), StageUnavailableError, "reached"),
    ],
)
def test_client_errors_are_typed_unquoted(
    error: Exception, expected: type[Exception], message: str
) -> None:
    with built(PASSAGES[:2]) as retriever:
        _fake(retriever, _raising(error))
        with pytest.raises(expected, match=message) as caught:
            retriever.retrieve("foxes")
    assert "secret" not in str(caught.value)


@pytest.fixture
def server() -> Iterator[RerankEndpoint]:
    """A server that speaks HTTP, and answers what a test says."""
    started = RerankEndpoint()
    yield started
    started.close()


def test_server_stopping_midway_is_an_outage(server: RerankEndpoint) -> None:
    """A server that stops in the middle of an answer is an outage in time."""
    server.script.extend([Answer(hang=True)] * 9)
    with pytest.raises(UnansweredError):
        open_index(f"{server.url}?timeout=1#any".replace("http", "qdrant"))


def test_key_is_in_a_header_only(server: RerankEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTXGUARD_ENGINE_KEY", "a-secret-key")
    server.script.extend([Answer(status=401, body=b"a-secret-key")] * 9)
    with (
        pytest.warns(UserWarning, match="insecure"),
        pytest.raises(StageUnavailableError, match="does not accept the key") as caught,
    ):
        open_index(f"{server.url}#any".replace("http", "qdrant"))
    assert server.headers[0]["api-key"] == "a-secret-key"
    assert "a-secret-key" not in str(caught.value)


def test_address_with_password_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="CTXGUARD_ENGINE_KEY") as caught:
        open_index("qdrant://user:secret@localhost#x")
    assert "secret" not in str(caught.value)


def test_opening_absent_folder_makes_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no index with that name"):
        open_index(f"qdrant://{tmp_path}/absent#x")
    assert not (tmp_path / "absent").exists()


# The client leaves its lock file to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_folder_open_elsewhere_is_refused(tmp_path: Path) -> None:
    other = QdrantClient(path=str(tmp_path))
    try:
        with pytest.raises(ConfigurationError, match="another process"):
            build(f"qdrant://{tmp_path}#x")
    finally:
        other.close()


def test_foreign_collection_is_left_alone(tmp_path: Path) -> None:
    other = QdrantClient(path=str(tmp_path))
    other.create_collection("mine", models.VectorParams(size=2, distance=models.Distance.DOT))
    other.close()
    with pytest.raises(DataError, match="not made by ctxguard"):
        open_index(f"qdrant://{tmp_path}#mine")


def test_indexes_share_a_folder(tmp_path: Path) -> None:
    first = build(f"qdrant://{tmp_path}#one", signals="none")
    second = build(f"qdrant://{tmp_path}#two", PASSAGES[:3])
    first.close()
    first.close()
    assert len(second) == 3
    second.close()
    other = QdrantClient(path=str(tmp_path))
    assert other.count("one").count == len(PASSAGES)
    other.close()


def test_threads_may_search_while_another_writes() -> None:
    with built() as retriever:

        def search() -> None:
            for _ in range(10):
                assert len(retriever.retrieve("kettles and ladders", depth=5)) == 5

        def write() -> None:
            for n in range(30):
                retriever.upsert([Passage(f"new{n}", "An umbrella.")])

        run_at_once(write, *[search] * 4)
        assert len(retriever) == len(PASSAGES) + 30


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_forked_child_leaves_parents_folder() -> None:
    with built() as retriever:
        said = raised_in_a_child(lambda: retriever.retrieve("foxes"))
        assert said.startswith("ConfigurationError")
        assert len(retriever.retrieve("foxes", depth=3)) == 3
