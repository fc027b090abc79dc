"""The benchmark of sufficiency: passages taken away, pairs counted, certificates simulated."""

import numpy as np

from benchmarks.sufficiency import (
    auroc,
    simulate_retriever,
    simulate_threshold,
    simulated_rankings,
    without_relevant,
)
from calibration.data.dataset import Dataset, Query
from calibration.replay import Pools
from ctxguard.core.types import FloatArray


def test_passages_that_are_taken_away_leave_the_rest_in_their_order() -> None:
    pools, labels = simulated_rankings(6, seed=0)
    ids = pools.passage_ids[0]
    qrels = {
        query_id: {ids[column]: 1 for column in np.flatnonzero(row).tolist()}
        for query_id, row in zip(pools.query_ids, labels.relevant, strict=True)
    }
    lost = next(query_id for query_id, grades in qrels.items() if grades)
    dataset = Dataset("d", tuple(Query(name, name) for name in pools.query_ids), qrels)

    stripped, again = without_relevant(pools, dataset, frozenset([lost]))

    for row, query_id in enumerate(pools.query_ids):
        left = [n for n, name in enumerate(ids) if query_id != lost or name not in qrels[lost]]
        assert stripped.passage_ids[row] == tuple(ids[column] for column in left)
        assert again.relevant[row].any() == (bool(qrels[query_id]) and query_id != lost)
        for ours, theirs in ((stripped.scores, pools.scores), *zip_values(stripped, pools)):
            assert ours[row, : len(left)].tolist() == theirs[row, left].tolist()
            assert np.isnan(ours[row, len(left) :]).all()


def zip_values(stripped: Pools, pools: Pools) -> list[tuple[FloatArray, FloatArray]]:
    return [(stripped.legs[name], pools.legs[name]) for name in pools.legs]


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
