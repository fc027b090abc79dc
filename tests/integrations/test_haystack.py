"""Haystack: the guard as a component of a pipeline that is saved, loaded and run."""

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import pytest
from fault_rows import FaultRows, PassesAll, Row

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")
pytest.importorskip("haystack")

from haystack import Document, Pipeline
from haystack.components.retrievers import InMemoryBM25Retriever
from haystack.core.errors import SerializationError
from haystack.core.serialization import DeserializationCallbacks
from haystack.dataclasses import ByteStream
from haystack.document_stores.in_memory import InMemoryDocumentStore

from ctxguard import ConfigurationError, ContextGuard, FilterViolationError, Passage, RatioPolicy
from ctxguard.testing import RetrieverContract
from haystack_integrations.components.rankers.ctxguard import ContextGuardRanker, ranking_of

DOCUMENTS = [
    Document(id=f"d{at}", content=f"Text {at}.", meta={"tenant": "a"}, score=score)
    for at, score in enumerate([0.9, 0.85, -0.9, 0.8])
]


def store_of(passages: Sequence[Passage]) -> InMemoryDocumentStore:
    store = InMemoryDocumentStore()
    store.write_documents(
        [
            Document(id=each.passage_id, content=each.text, meta=dict(each.metadata or {}))
            for each in passages
        ]
    )
    return store


class TestDocumentsOfAStore(RetrieverContract):
    """What ``calibrate`` is given for a Haystack retriever."""

    can_filter = False

    def retriever(self, passages: Sequence[Passage]) -> Any:
        component = InMemoryBM25Retriever(store_of(passages))
        return lambda query, *, depth: ranking_of(
            component.run(query or "?", top_k=depth)["documents"], "ratio"
        )


class TestFaultRows(FaultRows):
    def retriever(self, found: Sequence[Row], score_kind: str) -> Any:
        documents = [Document(id=row.id, content=row.text, score=row.score) for row in found]
        return lambda query, *, depth: ranking_of(documents[:depth], score_kind)  # type: ignore[arg-type]


def test_kept_is_copy_with_decision() -> None:
    guard = ContextGuard(policy=RatioPolicy(k=5, min_ratio=0.5), score_kind="cosine")
    ranker = ContextGuardRanker(guard=guard)
    answer = ranker.run("q", DOCUMENTS, request_id="r1")
    assert [each.id for each in answer["documents"]] == ["d0", "d1", "d3"]
    own = answer["documents"][2].meta["ctxguard"]
    assert (own["request_id"], own["rank"], own["score"], own["reason"]) == ("r1", 3, 0.8, None)
    assert answer["text"].startswith('<passage rank="1" id="d0">\nText 0.\n</passage>')
    assert answer["flags"] == ["uncalibrated"]
    assert all("ctxguard" not in each.meta for each in DOCUMENTS)
    assert asyncio.run(ranker.run_async("q", DOCUMENTS))["documents"][0].id == "d0"


def test_file_document_is_left_out() -> None:
    picture = Document(blob=ByteStream(b"\x89PNG"), score=0.95)
    kept = ContextGuardRanker(score_kind="cosine").run("q", [picture, *DOCUMENTS])["documents"]
    assert picture.id not in {each.id for each in kept}
    assert len(kept) == 4


def test_a_filter_is_checked() -> None:
    ranker = ContextGuardRanker(score_kind="cosine")
    assert len(ranker.run("q", DOCUMENTS, where={"tenant": ["a", "b"]})["documents"]) == 4
    with pytest.raises(FilterViolationError):
        ranker.run("q", DOCUMENTS, where={"tenant": "b"})
    with pytest.raises(ConfigurationError):
        ranker.run("q", DOCUMENTS, where={})


def test_pipeline_is_saved_loaded_and_run() -> None:
    """Starts at a store of texts and ends at the text for the model, through YAML."""
    pipeline = Pipeline()
    pipeline.add_component("search", InMemoryBM25Retriever(store_of(()), top_k=10))
    pipeline.add_component(
        "guard", ContextGuardRanker(score_kind="ratio", k=2, fingerprint={"index": "1"})
    )
    pipeline.connect("search.documents", "guard.documents")
    saved = pipeline.dumps()
    assert "haystack_integrations.components.rankers.ctxguard.ContextGuardRanker" in saved
    loaded = Pipeline.loads(saved)
    assert loaded.dumps() == saved
    loaded.get_component("search").document_store.write_documents(
        store_of(RetrieverContract.PASSAGES).filter_documents()
    )
    query = "a red fox in its den"
    question = {"search": {"query": query}, "guard": {"query": query}}
    for answer in (loaded.run(question), asyncio.run(loaded.run_async(question))):
        assert answer["guard"]["documents"][0].id == "fox"
        assert answer["guard"]["text"].startswith('<passage rank="1" id="fox">')
        assert len(answer["guard"]["documents"]) == 2


def test_own_guard_is_given_after_loading() -> None:
    """A guard of its own is not saved and is given to a loaded pipeline."""
    pipeline = Pipeline()
    pipeline.add_component("guard", ContextGuardRanker(guard=ContextGuard(k=1)))
    with pytest.raises(SerializationError, match="cannot be saved"):
        pipeline.dumps()
    plain = Pipeline()
    plain.add_component("guard", ContextGuardRanker())

    def give(name: str, component: type, parameters: dict[str, Any]) -> None:
        parameters.clear()
        parameters["guard"] = ContextGuard(k=1)

    loaded = Pipeline.loads(plain.dumps(), callbacks=DeserializationCallbacks(give))
    found = [Document(id="a", content="A."), Document(id="b", content="B.")]
    answer = loaded.run({"guard": {"query": "q", "documents": found}})
    assert [each.id for each in answer["guard"]["documents"]] == ["a"]


def test_unworkable_inputs_are_named() -> None:
    with pytest.raises(ConfigurationError, match="not both"):
        ContextGuardRanker(k=3, guard=ContextGuard())
    with pytest.raises(ConfigurationError, match="score_kind 'similar'"):
        ContextGuardRanker(score_kind="similar")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="score_kind"):
        ContextGuardRanker().run("q", DOCUMENTS)
    for wrong in (None, "text", ["text"]):
        with pytest.raises(ConfigurationError, match="Haystack documents"):
            ContextGuardRanker().run("q", wrong)  # type: ignore[arg-type]


class TestPassesAll(PassesAll):
    def passed(self, guard: ContextGuard, found: Sequence[Row]) -> list[tuple[str, float]]:
        documents = [Document(id=row.id, content=row.text, score=row.score) for row in found]
        answer = ContextGuardRanker(guard=guard).run("q", documents)
        return [(each.id, each.score) for each in answer["documents"]]
