"""The benchmark of engines: the whole loop on a small collection, and the bar."""

import numpy as np
import pytest

pytest.importorskip("faiss")

from benchmarks.engines import EMBEDDED, measure, missed, table
from calibration.data.dataset import Dataset, Query
from ctxguard import HybridRetriever, Passage
from ctxguard.integrations.engines.retriever import EngineRetriever
from ctxguard.measure.interval import Interval
from tests.doubles import WordHashEmbedder


def test_absent_engine_is_left_out() -> None:
    words = [f"word{n}" for n in range(60)]
    passages = [Passage(f"p{n}", f"About {word} and others.") for n, word in enumerate(words)]
    queries = tuple(Query(f"q{n}", f"about others: {word}") for n, word in enumerate(words))
    dataset = Dataset("small", queries, {f"q{n}": {f"p{n}": 1} for n in range(60)})
    embedded = HybridRetriever.build(passages, embedder=WordHashEmbedder())

    def absent(_url: str) -> EngineRetriever:
        raise ImportError("no server")

    said: list[str] = []
    found = measure(embedded, dataset, ["qdrant"], absent, rounds=1, tell=said.append)
    assert said == ["qdrant is left out: ImportError: no server"]
    assert found["left_out"] == {"qdrant": "ImportError: no server"}
    own = found["engines"][EMBEDDED]
    assert own["metrics"]["ndcg_at_10 hybrid"]["value"] == pytest.approx(1.0)
    assert own["metrics"]["ndcg_at_10 hybrid less embedded"]["value"] == 0.0
    assert own["milliseconds"]["p50"] > 0.0
    assert own["milliseconds_without_signals"] > 0.0
    assert (found["missed"], table(found, "small").row_count) == ([], 1)


def test_engine_outside_bar_is_named() -> None:
    def metrics(apart: float, udcg: float) -> dict[str, Interval]:
        return {
            "ndcg_at_10 hybrid less embedded": Interval(value=apart, lower=0, upper=0, n=9),
            "udcg": Interval(value=udcg, lower=0.4, upper=0.6, n=9),
        }

    results = {EMBEDDED: metrics(0.0, 0.5), "near": metrics(-0.0049, 0.59)}
    assert missed(results) == []
    assert len(missed(results | {"far": metrics(np.nextafter(0.005, 1), 0.61)})) == 2
    times = {"postgresql": 2.1, "postgresql without signals": 1.0}
    assert missed(results, times) == ["postgresql: signals make a search 2.10 times as long"]
