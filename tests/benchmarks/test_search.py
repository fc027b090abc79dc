"""The search benchmark: its data, its exact answers, and one system after the other."""

import argparse
from pathlib import Path

import numpy as np
import pytest

from benchmarks._search_data import Corpus, prepare
from benchmarks._search_peers import PEERS, open_peer
from benchmarks._search_run import Limits, run
from benchmarks.search import bars, peers_of, row_of
from ctxguard.retrieval.analysers.english import ENGLISH
from tests.rankings import assert_best

LIMITS = Limits(seconds=0.2, total_seconds=120.0, gibibytes=8.0, build_threads=1, threads=1)
ALL = pytest.approx(1.0, abs=0.02)
"""Every passage but those whose scores are equal to the last bit or two on some processor."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare(300, tmp_path_factory.mktemp("data"), n_queries=20)


def test_same_size_gives_same_data(corpus: Corpus, tmp_path: Path) -> None:
    again = prepare(300, tmp_path, n_queries=20)
    assert (again.texts(), again.queries) == (corpus.texts(), corpus.queries)
    assert np.allclose(again.vectors, corpus.vectors, atol=1e-6)


def test_existing_data_is_not_remade(corpus: Corpus) -> None:
    before = (corpus.folder / "vectors.npy").stat().st_mtime_ns
    prepare(300, corpus.folder.parent, n_queries=20)
    assert (corpus.folder / "vectors.npy").stat().st_mtime_ns == before


def test_queries_differ_and_share_words(corpus: Corpus) -> None:
    assert len(set(corpus.queries)) == len(corpus.queries) == 20
    known = {word for text in corpus.texts() for word in ENGLISH.analyse(text)}
    assert all(len(known & set(ENGLISH.analyse(query))) >= 3 for query in corpus.queries)


def test_exact_dense_compares_everything(corpus: Corpus) -> None:
    assert corpus.exact.dense.shape == (20, 100)
    for rows, cosines in zip(
        corpus.exact.dense, corpus.query_vectors @ corpus.vectors.T, strict=True
    ):
        assert_best(rows, cosines)


def test_retriever_finds_timed_exact_ten(corpus: Corpus) -> None:
    ours = run("ctxguard-none", corpus, [1, 2], LIMITS)
    assert ours["ended"] == "done"
    assert ours["agreement"]["top_10"] == {"hybrid": ALL, "lexical": ALL, "dense": ALL}
    assert ours["clients_2"]["queries"] >= 6
    assert ours["clients_1"]["p99_ms"] >= ours["clients_1"]["p50_ms"] > 0.0
    assert ours["served"]["vectors_and_postings_mib"] >= 0
    assert "ctxguard-none " in row_of("ctxguard-none", ours)


def test_deviating_leg_agrees_less(corpus: Corpus) -> None:
    top = run("ctxguard-rank-bm25", corpus, [1], LIMITS)["agreement"]["top_10"]
    assert top["dense"] == ALL
    assert 0.5 < top["lexical"] <= 1.0


@pytest.mark.slow
def test_direct_engines_find_exact_legs(corpus: Corpus) -> None:
    direct = run("direct", corpus, [1], LIMITS)
    assert direct["agreement"]["top_10"] == {"hybrid": None, "lexical": ALL, "dense": ALL}


def test_slow_system_is_stopped(corpus: Corpus) -> None:
    limits = Limits(0.2, total_seconds=0.0, gibibytes=8.0, build_threads=1, threads=1)
    figures = run("ctxguard", corpus, [1], limits)
    assert figures["ended"] == "stopped after 0 s"
    assert row_of("ctxguard", figures).endswith("stopped after 0 s")


def test_memory_hungry_system_is_stopped(corpus: Corpus) -> None:
    limits = Limits(0.2, total_seconds=60.0, gibibytes=0.001, build_threads=1, threads=1)
    assert run("ctxguard-none", corpus, [1], limits)["ended"] == "stopped above 0.001 GiB"


def test_absent_system_is_shown(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "txtai.py").write_text("raise ModuleNotFoundError('No module named txtai')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run("txtai", corpus, [1], LIMITS)["ended"].startswith("absent: No module named")


def test_unknown_system_is_refused() -> None:
    assert (peers_of("none"), peers_of("all")) == ([], list(PEERS))
    with pytest.raises(argparse.ArgumentTypeError, match="unknown 'solr'"):
        peers_of("txtai,solr")
    with pytest.raises(ValueError, match="unknown system 'solr'"):
        open_peer("solr")


def test_bars_use_the_nearest_peer() -> None:

    def system(p50: float, rate: float) -> dict[str, object]:
        return {
            "clients_1": {"p50_ms": p50, "processor_ms": p50 / 2, "queries_per_second": rate},
            "clients_4": {"p50_ms": p50, "queries_per_second": 3.0 * rate},
            "agreement": {"top_10": {"hybrid": 0.99}},
            "served": {"memory_mib": 110, "vectors_and_postings_mib": 100},
        }

    figures = {"ctxguard": system(3.0, 300.0), "ctxguard-none": system(1.0, 900.0)}
    figures |= {"direct": system(0.9, 1000.0)}
    figures |= {"txtai": system(9.0, 100.0), "lost": {}}
    measured = bars(figures)
    assert (measured["nearest_embedded_peer"], measured["times_faster_at_p50"]) == ("txtai", 9.0)
    assert measured["times_less_processor_time"] == 9.0
    assert (measured["default_times_faster_at_p50"], measured["four_clients_to_one"]) == (3.0, 3.0)
    assert measured["memory_to_vectors_and_postings"] == 1.1
    assert bars({})["times_faster_at_p50"] is None
