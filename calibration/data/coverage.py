"""Coverage of judgments: the share of a retriever's results that have a label.

An unlabelled passage may be relevant, so a metric over half-judged contexts measures the labels as
much as the retriever. Pure: no I/O, no clock, no logging.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibration.data.dataset import Dataset
from calibration.evaluate import bootstrap_interval
from calibration.replay import Pools
from ctxguard.core.interval import Interval
from ctxguard.errors import CalibrationError, ConfigurationError


@dataclass(frozen=True, slots=True)
class CoverageAt:
    """The judged share of the first k.

    Attributes:
        k: The cut-off; a shorter ranking is measured as a whole.
        judged: Mean over labelled queries of the share of the first k that has a label.
        fully_judged: Share of labelled queries whose first k all have a label.
        unjudged: Passages of the first k without a label, over all labelled queries.
    """

    k: int
    judged: Interval
    fully_judged: float
    unjudged: int


@dataclass(frozen=True, slots=True)
class Unjudged:
    """A retrieved passage without a label.

    Attributes:
        rank: Its 1-based rank in the retriever's order.
        weight: times_asked / log2(rank + 1): the weight of its label in DCG, times how often the
            question is asked.
    """

    query_id: str
    passage_id: str
    rank: int
    weight: float


def coverage(
    pools: Pools, dataset: Dataset, ks: Sequence[int], *, seed: int = 0
) -> tuple[CoverageAt, ...]:
    """Compute coverage at several cut-offs, over the queries that have a label.

    Args:
        dataset: The labels; a known distractor is judged.
        ks: Cut-offs, each ≥ 1.

    Returns:
        One value for each k, ascending.

    Raises:
        CalibrationError: no query with a label retrieved anything.
        ConfigurationError: no k is given, or one is below 1 or deeper than the replay.
    """
    cutoffs = sorted(set(ks))
    depth = pools.scores.shape[1]
    if not cutoffs or cutoffs[0] < 1 or cutoffs[-1] > depth:
        raise ConfigurationError(f"ks {list(ks)} must each be from 1 to the depth, {depth}")
    rows = [
        row
        for row, query_id in enumerate(pools.query_ids)
        if pools.passage_ids[row] and dataset.is_labelled(query_id)
    ]
    if not rows:
        raise CalibrationError(f"{dataset.name}: no query has a label and a candidate")
    judged = [_judged(pools, dataset, row) for row in rows]
    at_each_k = []
    for k in cutoffs:
        shares = np.array([mask[:k].mean() for mask in judged])
        at_each_k.append(
            CoverageAt(
                k=k,
                judged=bootstrap_interval(shares, seed=seed),
                fully_judged=float((shares == 1.0).mean()),
                unjudged=sum(int((~mask[:k]).sum()) for mask in judged),
            )
        )
    return tuple(at_each_k)


def unjudged(
    pools: Pools, dataset: Dataset, k: int, times_asked: Mapping[str, int] | None = None
) -> tuple[Unjudged, ...]:
    """List the passages without a label among the first k, by descending weight.

    Args:
        pools: The candidates of each query; queries without any label are included.
        k: The cut-off, ≥ 1.
        times_asked: How often each query was asked; 1 for an absent query.
    """
    times_asked = times_asked or {}
    passages = [
        Unjudged(
            query_id, ids[column], column + 1, times_asked.get(query_id, 1) / math.log2(column + 2)
        )
        for row, (query_id, ids) in enumerate(zip(pools.query_ids, pools.passage_ids, strict=True))
        for column in np.flatnonzero(~_judged(pools, dataset, row)[:k]).tolist()
    ]
    return tuple(sorted(passages, key=lambda passage: -passage.weight))


def _judged(pools: Pools, dataset: Dataset, row: int) -> NDArray[np.bool_]:
    query_id = pools.query_ids[row]
    named = dataset.qrels.get(query_id, {}).keys() | dataset.distractors.get(query_id, {}).keys()
    return np.array(dataset.judged(query_id, pools.labelled_ids(row, named)), dtype=bool)
