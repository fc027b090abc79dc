"""The walks: how many of our functions each of six ways through the package calls.

A long walk is hard to follow, and each call costs a tenth of a microsecond. Run with ``-s`` to see
the calls in their order. Before the house was halved (f0796ea) the same walks took:

====================  ======================================
walk                  calls / functions
====================  ======================================
filter(hits)          78 / 31
hybrid, no signals    60 / 53
hybrid, text signals  157 / 102
/rerank               83 / 66
sample to /metrics    1,738 / 341 (without ``maintain()``, and so without a metric)
labels to profile     397 functions
====================  ======================================
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

import calibration
import ctxguard
from calibration.calibrate import calibrate
from calibration.data.dataset import Dataset, Query
from ctxguard.core.fusion import Fusion
from ctxguard.core.types import Hit, Passage
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from tests.doubles import LengthScores, WordHashEmbedder

ROOTS = [Path(str(package.__file__)).parent for package in (ctxguard, calibration)]
QUERY = "parsing number 107"
OF_THE_GUARD = ("guard/", "core/", "resilience/bounded_caller.py")
CORPUS = [Passage(f"p{i}", f"text number {i} on parsing of {i * 7}") for i in range(100, 300)]

Call = tuple[str, str]
"""A file below ``ctxguard/`` or ``calibration/``, and a function of it."""


class EncodedBefore(WordHashEmbedder):
    """Remembers each query's vector, since what a model calls is not the request's walk."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors: dict[str, np.ndarray] = {}

    def encode_query(self, text: str) -> np.ndarray:
        if text not in self.vectors:
            self.vectors[text] = super().encode_query(text)
        return self.vectors[text]


@cache
def _file_of_ours(filename: str) -> str:
    """Return a file's path in our packages; empty for another's."""
    roots = [root for root in ROOTS if Path(filename).is_relative_to(root)]
    return Path(filename).relative_to(roots[0]).as_posix() if roots else ""


@contextmanager
def noting(calls: list[Call] | set[Call]) -> Iterator[None]:
    """Note every call of our functions by this thread, a list in their order."""
    add = calls.append if isinstance(calls, list) else calls.add

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (file := _file_of_ours(frame.f_code.co_filename)):
            add((file, frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def walk(request: Callable[[], object]) -> list[Call]:
    """Return the calls of one request, after others that fill the caches."""
    for _ in range(3):
        request()
    calls: list[Call] = []
    with noting(calls):
        request()
    print(shown(calls))  # noqa: T201  with -s
    return calls


def shown(calls: list[Call]) -> str:
    lines = [f"{len(calls)} calls of {len(set(calls))} functions"]
    lines += [f"  {file:32} {function}" for file, function in calls]
    return "\n".join(lines)


@pytest.fixture(scope="module")
def retriever() -> HybridRetriever:
    return HybridRetriever.build(CORPUS, embedder=EncodedBefore())


@pytest.fixture(scope="module")
def hybrid(retriever: HybridRetriever) -> list[Call]:
    # Reciprocal ranks add up to ties, which take a longer way.
    guard = ContextGuard(retriever.with_fusion(Fusion("convex", 0.5)))
    return walk(lambda: guard.retrieve(QUERY))


def without_ids(calls: Iterable[Call]) -> "Counter[Call]":
    """Leave out the look at each passage's id, which a number becomes text by."""
    return Counter(
        call for call in calls if call[1] not in ("Hit.__post_init__", "Passage.__post_init__")
    )


def test_filtering_hits_calls_few_functions() -> None:
    hits = [Hit(f"p{i}", 1.0 - i / 100, f"text {i}") for i in range(20)]
    guard = ContextGuard(score_kind="cosine")
    calls = walk(lambda: guard.filter(QUERY, hits))
    assert without_ids(calls).total() <= 24, shown(calls)
    assert len(set(calls)) <= 22


def test_a_hybrid_search_calls_few_functions(hybrid: list[Call]) -> None:
    assert without_ids(hybrid).total() <= 59, shown(hybrid)
    assert len(set(hybrid)) <= 51


def test_hybrid_search_calls_few_functions(retriever: HybridRetriever) -> None:
    guard = ContextGuard(retriever)
    calls = walk(lambda: guard.retrieve(QUERY))
    assert len(calls) <= 93, shown(calls)
    assert len(set(calls)) <= 67


def test_guards_part_is_short(hybrid: list[Call]) -> None:
    own = [call for call in hybrid if call[0].startswith(OF_THE_GUARD)]
    assert without_ids(own).total() <= 23, shown(own)


def test_guard_calls_nothing_per_passage(hybrid: list[Call]) -> None:
    own = Counter(call for call in hybrid if call[0].startswith(OF_THE_GUARD))
    assert max(without_ids(own.elements()).values()) < 5


def test_a_rerank_request_calls_few_functions() -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("httpx2")
    from starlette.testclient import TestClient

    from ctxguard.server.app import create_app
    from ctxguard.server.settings import ServiceSettings

    app = create_app(ServiceSettings(), scorer=LengthScores(), registry=CollectorRegistry())
    calls: list[Call] = []

    async def noted(scope: Any, receive: Any, send: Any) -> None:
        calls.clear()
        with noting(calls) if scope["type"] == "http" else nullcontext():
            await app(scope, receive, send)

    body = {"query": QUERY, "documents": [each.text for each in CORPUS[:20]]}
    with TestClient(noted, base_url="http://127.0.0.1") as client:
        for _ in range(4):
            assert client.post("/rerank", json=body).status_code == 200
    print(shown(calls))  # noqa: T201  with -s
    assert without_ids(calls).total() <= 45, shown(calls)
    assert len(set(calls)) <= 42


def test_sample_to_metric_calls_few_functions() -> None:
    pytest.importorskip("sqlalchemy")
    from ctxguard.measure.estimate import DEFAULT_MIN_N
    from ctxguard.monitor.export.prometheus import MonitorCollector
    from ctxguard.monitor.judges import Judgment
    from ctxguard.monitor.sampling.sampler import Sampler
    from ctxguard.monitor.service import Monitor
    from ctxguard.monitor.store import SampleStore
    from ctxguard.monitor.store.writer import SampleWriter

    class Agreeing:
        name, version, max_grade, exact = "agreeing", "1", 3, False

        def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment | None]:
            return [Judgment(passage.passage_id, 1) for passage in passages]

    registry = CollectorRegistry()
    sampler = Sampler(1.0)
    guard = ContextGuard(score_kind="ratio", sampler=sampler)
    with SampleStore.open("sqlite://") as store:
        writer, monitor = SampleWriter(sampler, store), Monitor(store, Agreeing())
        registry.register(MonitorCollector(monitor))

        def sampled(requests: int = 1) -> str:
            for _ in range(requests):
                guard.filter(QUERY, [Hit("a", 2.0, "one"), Hit("b", 1.0, "two")])
            writer.flush()
            monitor.step()
            monitor.maintain()
            return generate_latest(registry).decode()

        sampled(DEFAULT_MIN_N)
        calls = walk(sampled)
        exported = [line.split("{")[0] for line in sampled().splitlines() if line[0] != "#"]
    assert "ctxguard_judge_estimate" in exported
    assert len({*exported}) >= 10
    # It differs by a few with the time that each step takes.
    assert without_ids(calls).total() <= 646, shown(calls)
    assert len({*calls}) <= 264
    assert len({file for file, _ in calls}) <= 28


def test_labels_to_profile_call_few_functions(retriever: HybridRetriever) -> None:
    queries = [Query(f"q{n}", CORPUS[n].text) for n in range(40)]
    qrels = {f"q{n}": {CORPUS[n].passage_id: 1} for n in range(40)}
    dataset = Dataset("passages", tuple(queries), qrels)
    calls: set[Call] = set()
    with noting(calls):
        calibrate(retriever, dataset)
    assert len(calls) <= 349
    assert len({file for file, _ in calls}) <= 39
