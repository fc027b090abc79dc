"""Coverage of judgments: how much of what a retriever returns has a label at all.

Unjudged is not irrelevant: a metric over half-judged contexts measures the labels as much as the
retriever. Pure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibration.evaluate import bootstrap_interval
from calibration.labelling.labels import Dataset
from calibration.replay import Pools
from ctxguard.errors import CalibrationError, ConfigurationError
from ctxguard.profile import Interval


@dataclass(frozen=True, slots=True)
class CoverageAt:
    """How much of the first k is judged.

    Attributes:
        k: The cut-off; a shorter ranking counts as far as it goes.
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
        rank: 1-based, as retrieved.
        weight: times_asked / log2(rank + 1): what its label can move in DCG, as often as the
            question is asked.
    """

    query_id: str
    passage_id: str
    rank: int
    weight: float


def coverage(
    pools: Pools, dataset: Dataset, ks: Sequence[int], *, seed: int = 0
) -> tuple[CoverageAt, ...]:
    """Coverage at several cut-offs, over the queries that have a label at all.

    Args:
        pools: The candidates of each query.
        dataset: The labels; a known distractor is judged.
        ks: Cut-offs, each ≥ 1.
        seed: Of the bootstrap.

    Returns:
        One for each k, ascending.

    Raises:
        CalibrationError: no query with a label retrieved anything.
        ConfigurationError: no k, one below 1, or one deeper than the replay.
    """
    cutoffs = sorted(set(ks))
    depth = pools.scores.shape[1]
    if not cutoffs or cutoffs[0] < 1 or cutoffs[-1] > depth:
        raise ConfigurationError(f"ks {list(ks)} must each be from 1 to the depth, {depth}")
    rows = [
        row
        for row, query_id in enumerate(pools.query_ids)
        if pools.passage_ids[row]
        and (dataset.qrels.get(query_id) or dataset.distractors.get(query_id))
    ]
    if not rows:
        raise CalibrationError(f"{dataset.name}: no query has a label and a candidate")
    judged = [_judged(pools, dataset, row) for row in rows]
    made = []
    for k in cutoffs:
        shares = np.array([mask[:k].mean() for mask in judged])
        made.append(
            CoverageAt(
                k=k,
                judged=bootstrap_interval(shares, seed=seed),
                fully_judged=float((shares == 1.0).mean()),
                unjudged=sum(int((~mask[:k]).sum()) for mask in judged),
            )
        )
    return tuple(made)


def unjudged(
    pools: Pools, dataset: Dataset, k: int, times_asked: Mapping[str, int] | None = None
) -> tuple[Unjudged, ...]:
    """The passages without a label among the first k, those that matter most first.

    Args:
        pools: The candidates of each query; queries without any label take part.
        dataset: The labels.
        k: How far down to look, ≥ 1.
        times_asked: How often each query was asked; 1 where absent.

    Returns:
        By weight, then in the order of queries and ranks.
    """
    times_asked = times_asked or {}
    found = [
        Unjudged(
            query_id, ids[column], column + 1, times_asked.get(query_id, 1) / math.log2(column + 2)
        )
        for row, (query_id, ids) in enumerate(zip(pools.query_ids, pools.passage_ids, strict=True))
        for column in np.flatnonzero(~_judged(pools, dataset, row)[:k]).tolist()
    ]
    return tuple(sorted(found, key=lambda passage: -passage.weight))


def _judged(pools: Pools, dataset: Dataset, row: int) -> NDArray[np.bool_]:
    query_id = pools.query_ids[row]
    known = dataset.qrels.get(query_id, {}).keys() | dataset.distractors.get(query_id, {}).keys()
    return np.array([passage_id in known for passage_id in pools.passage_ids[row]], dtype=bool)
