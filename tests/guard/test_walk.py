"""The walk of a request: how many of our functions a hybrid search through the guard calls.

A long walk is hard to follow, and each call costs a tenth of a microsecond. Run with ``-s`` to see
the calls in their order.
"""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

import ctxguard
from ctxguard.core.fusion import Fusion
from ctxguard.core.types import Passage
from ctxguard.guard import ContextGuard
from ctxguard.request.telemetry import Telemetry
from ctxguard.retrieval import HybridRetriever
from ctxguard.testing import WordHashEmbedder

ROOT = Path(ctxguard.__file__).parent
QUERY = "parsing number 107"
OF_THE_GUARD = ("guard/", "request/", "core/", "resilience/bounded_caller.py")

Call = tuple[str, str]
"""A file below ``ctxguard/``, and a function of it."""


class EncodedBefore(WordHashEmbedder):
    """Remembers each query's vector, since what a model calls is not the request's walk."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors: dict[str, np.ndarray] = {}

    def encode_query(self, text: str) -> np.ndarray:
        if text not in self.vectors:
            self.vectors[text] = super().encode_query(text)
        return self.vectors[text]


@pytest.fixture(scope="module")
def walk() -> list[Call]:
    """Every call of our functions by one hybrid search, in their order."""
    corpus = [Passage(f"p{i}", f"text number {i} on parsing of {i * 7}") for i in range(100, 300)]
    retriever = HybridRetriever.build(corpus, embedder=EncodedBefore())
    # Reciprocal ranks add up to ties, which take a longer way.
    retriever = retriever.with_fusion(Fusion("convex", 0.5))
    guard = ContextGuard(retriever, telemetry=Telemetry(CollectorRegistry()))
    for _ in range(3):
        guard.retrieve(QUERY)
    calls: list[Call] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(ROOT):
            calls.append((file.relative_to(ROOT).as_posix(), frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        guard.retrieve(QUERY)
    finally:
        sys.setprofile(None)
    print(shown(calls))  # noqa: T201  with -s
    return calls


def shown(calls: list[Call]) -> str:
    lines = [f"{len(calls)} calls of {len(set(calls))} functions"]
    lines += [f"  {file:32} {function}" for file, function in calls]
    return "\n".join(lines)


def test_a_hybrid_search_calls_few_functions(walk: list[Call]) -> None:
    assert len(walk) <= 62
    assert len(set(walk)) <= 55


def test_the_guards_part_of_it_is_short(walk: list[Call]) -> None:
    own = [call for call in walk if call[0].startswith(OF_THE_GUARD)]
    assert len(own) <= 30, shown(own)
    assert len(set(own)) <= 28, shown(own)


def test_nothing_of_the_guards_part_is_called_for_every_passage(walk: list[Call]) -> None:
    own = Counter(call for call in walk if call[0].startswith(OF_THE_GUARD))
    assert max(own.values()) < 5
