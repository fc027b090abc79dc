"""Labelled pools written as rows of certain grades have the figures that `evaluate` gives."""

import numpy as np
import pytest
from hypothesis import given, settings
from simulated_pools import Case, cases

from calibration.evaluate import contexts, per_query
from calibration.judged_candidates import decided
from calibration.pool_labels import PoolLabels
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import ScoreKind
from ctxguard.measure.metrics import NO, PASSAGE, REQUEST, YES, IntArray, Metric, Rows, terms
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


def rows_of(labels: PoolLabels, order: IntArray, kept: np.ndarray) -> Rows:
    """Write each candidate as judged with certainty, those of the context first."""
    own = labels.reordered(order)
    request, place = np.nonzero(own.retrieved)
    passages, requests = np.zeros(request.size, PASSAGE), np.zeros(len(labels), REQUEST)
    at = request, place
    passages["position"] = order[at]
    passages["rank"] = np.where(kept[at], place + 1, 0)
    passages["in_baseline"] = own.in_baseline[at]
    passages["verdict"] = np.where(own.relevant[at], YES, NO)
    passages["worth"], passages["size"] = own.utilities[at], 1.0
    requests["n_passages"], requests["n_served"] = own.retrieved.sum(axis=1), kept.sum(axis=1)
    for name in ("probability", "dropped_chance", "pool_chance", "has_recall", "has_baseline"):
        requests[name] = 1
    return Rows.of(requests, passages)


@pytest.mark.parametrize("policy", [RatioPolicy(k=2), RatioPolicy(k=5, min_ratio=0.5)], ids=str)
@settings(max_examples=60, deadline=None)
@given(case=cases(rules=(READERS, STRICT)))
def test_labels_as_rows_give_the_same_figures(case: Case, policy: RatioPolicy) -> None:
    """On every query, and undefined alike, whether the context was served or another one was."""
    if case.pools.kind is ScoreKind.RANK:
        policy = RatioPolicy(k=policy.k)
    expected = per_query(case.pools, case.labels, policy)
    served = rows_of(case.labels, *contexts(case.pools, policy))
    first = rows_of(case.labels, *contexts(case.pools, RatioPolicy(k=1)))
    for rows in (served, first.served(decided(case.pools, policy))):
        found = terms(rows)
        for metric, name in METRICS.items():
            numerator, denominator, _ = found[metric]
            own = np.divide(
                numerator, denominator, out=np.full(len(numerator), np.nan), where=denominator > 0.0
            )
            np.testing.assert_allclose(own, expected[name], rtol=0.0, atol=1e-12, err_msg=name)
