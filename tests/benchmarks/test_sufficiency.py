"""The benchmark of sufficiency: passages taken away, pairs counted, certificates simulated."""

import numpy as np
import pytest

from benchmarks.sufficiency import (
    auroc,
    simulate_retriever,
    simulate_threshold,
    simulated_rankings,
    without_relevant,
)
from calibration.data.dataset import Dataset, Query
from ctxguard.core.fusion import Fusion


def test_taken_passages_leave_the_rest_fused_anew() -> None:
    pools, labels = simulated_rankings(6, seed=0)
    ids = pools.passage_ids[0]
    qrels = {
        query_id: {ids[column]: 1 for column in np.flatnonzero(row).tolist()}
        for query_id, row in zip(pools.query_ids, labels.relevant, strict=True)
    }
    answerable = [query_id for query_id, grades in qrels.items() if grades]
    dataset = Dataset("d", tuple(Query(name, name) for name in pools.query_ids), qrels)
    lost = frozenset(answerable[:1])
    stripped, again = without_relevant(pools, dataset, Fusion("convex", 0.5), lost)
    for row, query_id in enumerate(pools.query_ids):
        n = len(stripped.passage_ids[row])
        assert n == len(ids) - (len(qrels[query_id]) if query_id in lost else 0)
        assert again.relevant[row].any() == (query_id in answerable and query_id not in lost)
        assert (np.diff(stripped.scores[row, :n]) <= 0.0).all()
        assert np.isnan(stripped.scores[row, n:]).all()
        for name, scores in pools.legs.items():
            moved = [ids.index(name) for name in stripped.passage_ids[row]]
            assert stripped.legs[name][row, :n] == pytest.approx(
                scores[row, [pools.passage_ids[row].index(ids[at]) for at in moved]]
            )


def test_auroc_counts_pairs_and_ties_by_half() -> None:
    values, holds = np.array([0.9, 0.5, 0.5, 0.1]), np.array([True, True, False, False])
    assert auroc(values, holds).mean() == (1.0 + 1.0 + 0.5 + 1.0) / 4


def test_simulated_promises_are_broken_as_rarely_as_stated() -> None:
    for population in ("uniform", "tied"):
        assert simulate_threshold(population, 60, 300, seed=0).violations <= 0.16
    assert simulate_threshold("uniform", 44, 10, seed=0).certified == 0.0
    outcome = simulate_retriever(200, 20, seed=0)
    assert outcome.certified > 0.5
    assert outcome.violations <= 0.3
