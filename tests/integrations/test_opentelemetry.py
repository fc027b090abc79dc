"""Spans of requests, through OpenTelemetry's own SDK."""

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from time import time
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Hit, Passage, Ranking, ScoreKind, StageTiming
from ctxguard.errors import QueryError, StageUnavailableError
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.guard.telemetry import Telemetry, default_telemetry
from ctxguard.monitor.store import SampleStore
from ctxguard.monitor.store.writer import sample_to
from tests.doubles import LengthScores, WordHashEmbedder

trace_export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
pytest.importorskip("opentelemetry.util.genai")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from ctxguard.integrations.opentelemetry import OpenTelemetryTracing

HITS = [
    Hit("a", 10.0, text="the key is in the drawer"),
    Hit("b", 9.0, text="write to ann@example.com"),
    Hit("c", 1.0, text="weather"),
]
CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


def retrieve(query: str, *, depth: int) -> list[Hit]:
    if query == "down":
        raise ConnectionError(f"no answer to {query}")
    return HITS


def failures(registry: CollectorRegistry) -> float | None:
    labels = {"observer": "tracing"}
    return registry.get_sample_value("ctxguard_observer_failures_total", labels)


def is_below(inner: ReadableSpan, outer: ReadableSpan) -> bool:
    return inner.parent is not None and inner.parent.span_id == outer.context.span_id


class Traced:
    """A guard with tracing, and the spans that it has ended."""

    def __init__(self, sampler: Any = None, provider: Any = None, **options: Any) -> None:
        self.exporter = trace_export.InMemorySpanExporter()
        provider = TracerProvider() if provider is None else provider
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.registry = CollectorRegistry()
        self.tracing = OpenTelemetryTracing("handbook", tracer_provider=provider, **options)
        self.guard = ContextGuard(
            retrieve,
            policy=RatioPolicy(k=5, min_ratio=0.5),
            score_kind=ScoreKind.RATIO,
            telemetry=default_telemetry(self.registry, all_metrics=True),
            sampler=sampler,
            tracing=self.tracing,
        )

    def spans(self) -> dict[str, ReadableSpan]:
        """Ended spans by name."""
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def attributes(self, name: str) -> Mapping[str, Any]:
        return dict(self.spans()[name].attributes or {})

    def failures(self) -> float | None:
        return failures(self.registry)


def test_request_span_has_decision_below() -> None:
    traced = Traced()
    context = traced.guard.retrieve("where is the key")
    spans = traced.spans()
    outer, inner = spans["retrieval handbook"], spans["decide"]
    assert is_below(inner, outer)
    attributes = traced.attributes("retrieval handbook")
    assert attributes["gen_ai.operation.name"] == "retrieval"
    assert attributes["gen_ai.data_source.id"] == "handbook"
    assert attributes["gen_ai.retrieval.top_k"] == 100
    assert attributes["ctxguard.request_id"] == context.request_id
    decision = traced.attributes("decide")
    assert (decision["ctxguard.candidates"], decision["ctxguard.kept"]) == (3, 2)
    assert (decision["ctxguard.dropped.below_ratio"], traced.failures()) == (1, 0)


def test_texts_enter_spans_only_when_asked() -> None:
    traced = Traced()
    traced.guard.retrieve("where is the key")
    written = repr([dict(span.attributes or {}) for span in traced.exporter.get_finished_spans()])
    assert "drawer" not in written
    assert "where is" not in written


def test_captured_texts_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CAPTURE, "SPAN_ONLY")
    traced = Traced()
    traced.guard.retrieve("mail of bob@example.com")
    attributes = traced.attributes("retrieval handbook")
    assert attributes["gen_ai.retrieval.query.text"] == "mail of [e-mail]"
    documents = json.loads(attributes["gen_ai.retrieval.documents"])
    assert [(each["id"], each["score"]) for each in documents] == [("a", 10.0), ("b", 9.0)]


def test_failing_redactor_keeps_text_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CAPTURE, "SPAN_ONLY")
    traced = Traced(redactor=lambda text: 1 / 0)  # type: ignore[arg-type]
    traced.guard.retrieve("where is the key")
    attributes = traced.attributes("retrieval handbook")
    assert "gen_ai.retrieval.query.text" not in attributes


@pytest.mark.parametrize(
    ("query", "error"), [("down", StageUnavailableError), ("x" * 20_000, QueryError)]
)
def test_failed_request_ends_span_without_message(query: str, error: type[Exception]) -> None:
    traced = Traced()
    with pytest.raises(error):
        traced.guard.retrieve(query, request_id="r1")
    span = traced.spans()["retrieval handbook"]
    assert not span.status.is_ok
    assert "no answer" not in repr((span.status, span.events, span.attributes))
    assert traced.attributes("retrieval handbook")["ctxguard.request_id"] == "r1"


def test_retrievers_spans_lie_below_request() -> None:
    traced = Traced()
    tracer = traced.tracing.tracer

    def searching(query: str, *, depth: int) -> list[Hit]:
        with tracer.start_as_current_span("search"):
            return HITS

    guard = ContextGuard(searching, score_kind="ratio", tracing=traced.tracing)
    with tracer.start_as_current_span("answer"):
        guard.retrieve("where is the key")
    guard.retrieve("again")
    spans = traced.exporter.get_finished_spans()
    search, outer = spans[0], spans[2]
    assert is_below(search, outer)
    assert outer.parent is not None
    # The second request is a trace of its own: the first one's span is not current any more.
    assert spans[-1].parent is None


class WordsInCommon:
    """Reranks by how many words of the query a passage has; fails where the query says so."""

    fingerprint = "words in common"

    def score(self, query: str, passages: list[str]) -> Any:
        if "broken" in query:
            raise ConnectionError(f"no answer to {query}")
        return np.array([float(len({*query.split()} & {*text.split()})) for text in passages])


def _reranked(query: str) -> tuple[Traced, float, float]:
    """A traced request of the embedded retriever with a reranker, and when it began and ended."""
    hybrid = pytest.importorskip("ctxguard.retrieval.hybrid.retriever")
    passages = [Passage(hit.passage_id, hit.text) for hit in HITS]
    retriever = hybrid.HybridRetriever.build(passages, embedder=WordHashEmbedder())
    traced = Traced()
    guard = ContextGuard(
        retriever.with_reranker(WordsInCommon()),
        telemetry=default_telemetry(traced.registry, all_metrics=True),
        tracing=traced.tracing,
    )
    began = time()
    assert len(guard.retrieve(query)) == 3
    return traced, began, time()


def test_embedded_stages_are_timed_spans() -> None:
    """The stages of the embedded retriever are spans with their own times."""
    traced, began, ended = _reranked("where is the key")
    spans = traced.spans()
    outer = spans["retrieval handbook"]
    stages = [spans[name] for name in ("search", "signals", "rerank", "decide")]
    for before, after in pairwise(stages):
        assert before.start_time <= before.end_time <= after.start_time + 10**6
    for span in stages:
        assert is_below(span, outer)
        assert span.status.is_ok or span.status.status_code.name == "UNSET"
        assert (began - 1) * 1e9 <= span.start_time <= span.end_time <= (ended + 1) * 1e9
    assert (traced.attributes("rerank"), traced.failures()) == ({"ctxguard.stage": "rerank"}, 0)


def test_failing_reranker_has_its_span() -> None:
    traced, _, _ = _reranked("broken key")
    span = traced.spans()["rerank"]
    assert span.status.status_code.name == "ERROR"
    assert traced.attributes("rerank")["error.type"] == "error"
    assert "no answer" not in repr((span.status, span.events, span.attributes))


def test_missing_timings_fail_no_request() -> None:
    traced = Traced()
    ranking = Ranking.from_hits(HITS, "ratio")
    for garbage in ((StageTiming("rerank", float("nan"), 1.0),), (None,), 7):
        broken = replace(ranking, timings=garbage)  # type: ignore[arg-type]
        assert len(traced.guard.filter("where is the key", broken)) == 2
    assert (traced.failures(), len(traced.exporter.get_finished_spans())) == (3, 6)


def _answer(path: str, body: dict[str, object], **options: Any) -> dict[str, Any]:
    """What the service answers; ``options`` are those of ``create_app``."""
    pytest.importorskip("starlette")
    pytest.importorskip("httpx2")
    from starlette.testclient import TestClient

    from ctxguard.server.app import create_app
    from ctxguard.server.settings import ServiceSettings

    settings = ServiceSettings(opentelemetry="tracing" not in options, all_metrics=True)
    with TestClient(create_app(settings, **options), base_url="http://127.0.0.1") as client:
        answer: dict[str, Any] = client.post(path, json=body).json()
    return answer


def test_the_service_traces_its_reranker() -> None:
    traced = Traced()
    answer = _answer(
        "/rerank",
        {"query": "q", "documents": ["two and three", "one"]},
        scorer=LengthScores(),
        registry=traced.registry,
        tracing=traced.tracing,
    )
    assert [each["index"] for each in answer["results"]] == [1, 0]
    spans = traced.spans()
    outer, inner = spans["retrieval handbook"], spans["rerank"]
    assert is_below(inner, outer)
    assert inner.start_time <= inner.end_time <= spans["decide"].start_time + 10**6
    assert traced.attributes("retrieval handbook")["ctxguard.request_id"] == answer["id"]


def test_service_uses_its_process_providers() -> None:
    registry = CollectorRegistry()
    body = {"query": "q", "candidates": [{"id": "a", "score": 0.5}]}
    assert _answer("/v1/filter", body, registry=registry)["kept_ids"] == ["a"]
    assert failures(registry) == 0


def test_tracing_that_raises_fails_no_request() -> None:
    class Broken:
        def begin(self, query: str, depth: int, request_id: str | None) -> Any:
            raise RuntimeError("no exporter")

    registry = CollectorRegistry()
    guard = ContextGuard(
        retrieve,
        score_kind="ratio",
        telemetry=Telemetry(registry, all_metrics=True),
        tracing=Broken(),
    )
    assert len(guard.retrieve("where is the key")) == 3
    assert failures(registry) == 1


def test_unsampled_trace_costs_no_attributes() -> None:
    traced = Traced(provider=TracerProvider(sampler=ALWAYS_OFF))
    context = traced.guard.retrieve("where is the key")
    assert (traced.exporter.get_finished_spans(), len(context)) == ((), 2)


def test_sample_leads_to_its_trace(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'samples.db'}"
    samples = sample_to(url, rate=1.0)
    traced = Traced(samples.sampler)
    traced.guard.retrieve("where is the key")
    traced.guard.retrieve("where is the key", request_id="mine")
    samples.stop()
    spans = traced.exporter.get_finished_spans()
    first = next(span.context for span in spans if span.name == "retrieval handbook")
    traced_id = f"{first.trace_id:032x}-{first.span_id:016x}"
    with SampleStore.open(url) as store:
        assert {one.request_id for one in store.newest_samples(10)} == {traced_id, "mine"}
