"""Labelled pools written as rows of certain grades have the figures that `evaluate` gives."""

import numpy as np
import pytest
from hypothesis import given, settings
from simulated_pools import cases

from calibration.evaluate import contexts, per_query
from calibration.judged_requests import decided
from calibration.pools import LabelledPools
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import ScoreKind
from ctxguard.measure.metrics import Metric, terms
from ctxguard.measure.rows import NO, PASSAGE, REQUEST, YES, IntArray, Rows
from ctxguard.measure.worth import READERS, STRICT

METRICS = {
    Metric.UDCG: "udcg",
    Metric.HARM: "harm",
    Metric.PRECISION: "precision",
    Metric.SERVED_MRR: "served_mrr",
    Metric.POOLED_RECALL: "pooled_recall",
    Metric.RECALL: "pooled_recall",
    Metric.RECALL_LOSS: "recall_loss",
}
"""Of one query, recall among its candidates and pooled recall are the same."""


def rows_of(pools: LabelledPools, order: IntArray, kept: np.ndarray) -> Rows:
    """Write each candidate as judged with certainty, those of the context first."""
    request, place = np.nonzero(pools.retrieved)
    passages, requests = np.zeros(request.size, PASSAGE), np.zeros(len(pools), REQUEST)
    at, own = (request, place), (request, order[request, place])
    passages["position"] = order[at]
    passages["rank"] = np.where(kept[at], place + 1, 0)
    passages["in_baseline"] = pools.in_baseline[own]
    passages["judge_grade"] = np.where(pools.relevant[own], YES, NO)
    passages["worth"], passages["size"] = pools.utilities[own], 1.0
    requests["n_passages"], requests["n_served"] = pools.retrieved.sum(axis=1), kept.sum(axis=1)
    for name in (
        "probability",
        "dropped_probability",
        "pool_probability",
        "has_recall",
        "has_baseline",
    ):
        requests[name] = 1
    return Rows.of(requests, passages)


@pytest.mark.parametrize("policy", [RatioPolicy(k=2), RatioPolicy(k=5, min_ratio=0.5)], ids=str)
@settings(max_examples=60, deadline=None)
@given(pools=cases(rules=(READERS, STRICT)))
def test_labels_as_rows_give_the_same_figures(pools: LabelledPools, policy: RatioPolicy) -> None:
    """On every query, and undefined alike, whether the context was served or another one was."""
    if pools.kind is ScoreKind.RANK:
        policy = RatioPolicy(k=policy.k)
    expected = per_query(pools, policy)
    served = rows_of(pools, *contexts(pools, policy))
    first = rows_of(pools, *contexts(pools, RatioPolicy(k=1)))
    for rows in (served, first.served(decided(pools, policy))):
        found = terms(rows)
        for metric, name in METRICS.items():
            numerator, denominator, _ = found[metric]
            own = np.divide(
                numerator, denominator, out=np.full(len(numerator), np.nan), where=denominator > 0.0
            )
            np.testing.assert_allclose(own, expected[name], rtol=0.0, atol=1e-12, err_msg=name)
