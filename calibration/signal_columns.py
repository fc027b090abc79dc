"""Turns columns of passages' metadata into signals: finds their kinds, and which leak the labels.

Pure, except that `read_columns` calls the retriever. `without_leaks` needs the extra `calibrate`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from calibration.data.dataset import Query
from calibration.fit import REGULARISATION, folds, standardised
from calibration.pools import LabelledPools
from calibration.retrievers import RankingSource
from ctxguard._support.extras import require
from ctxguard.core.columns import MOST_COLUMNS, SignalColumn, metadata_of, read_column
from ctxguard.core.policies import ExpectedUtilityPolicy
from ctxguard.core.types import Route
from ctxguard.errors import CalibrationError, ConfigurationError, CtxguardError
from ctxguard.measure.metrics import pair_share
from ctxguard.profile.schema import RouteProfile

LEAKS_FROM = 0.99
"""A column whose own AUROC within queries reaches this was surely made from the labels."""

FEWEST_FOR_LEAK = 10
"""The fewest queries with candidates of both kinds for that judgment."""

_QUERIES_READ = 50


def read_columns(
    source: RankingSource,
    queries: Sequence[Query],
    names: Sequence[str],
    depth: int,
    vectors: Mapping[str, Any] | None = None,
) -> tuple[SignalColumn, ...]:
    """Infer the kind of each column from the candidates of some queries.

    Args:
        source: On the route of all stages.
        vectors: Query vectors by query id, for a retriever that takes them.

    Raises:
        ConfigurationError: too many columns, one twice, or one that gives no signal.
        CalibrationError: no query could be answered.
    """
    if len(names) > MOST_COLUMNS or len(set(names)) < len(names):
        raise ConfigurationError(
            f"signal columns {', '.join(names)}: give at most {MOST_COLUMNS}, each once"
        )
    metadata: list[Mapping[str, Any]] = []
    for query in queries[:_QUERIES_READ]:
        vector = None if vectors is None else vectors.get(query.query_id)
        try:
            ranking = source.retrieve(query.text, depth=depth, query_vector=vector)
            metadata += metadata_of(ranking)
        except ConfigurationError:
            raise
        except CtxguardError:
            continue  # the replay will fail the same way and record why
        except Exception as error:  # anyone's code may be behind a passage
            kind = type(error).__name__
            raise CalibrationError(f"a candidate's metadata cannot be read ({kind})") from error
    if not metadata:
        raise CalibrationError("no query has a candidate whose metadata could be read")
    return tuple([read_column(name, [one.get(name) for one in metadata]) for name in names])


def without(pools: LabelledPools, columns: Iterable[SignalColumn]) -> LabelledPools:
    """Return the pools without the signals of some columns."""
    out = {name for column in columns for name in of_column(pools.signals, column)}
    return replace(pools, signals={k: v for k, v in pools.signals.items() if k not in out})


def needed(
    columns: Sequence[SignalColumn], routes: Mapping[Route, RouteProfile]
) -> tuple[SignalColumn, ...]:
    """Return the columns whose signals a model of the profile uses."""
    policies = [route.policy for route in routes.values()]
    models = [
        *[each.model for each in policies if isinstance(each, ExpectedUtilityPolicy)],
        *[one.assessor.policy.model for one in routes.values() if one.assessor is not None],
        *[one.sufficiency.model for one in routes.values() if one.sufficiency is not None],
    ]
    taken = {name for model in models if model is not None for name in model.signals}
    return tuple([column for column in columns if of_column(taken, column)])


def of_column(signals: Iterable[str], column: SignalColumn) -> list[str]:
    """Return the names of a column's signals, sorted."""
    prefix = f"{column.name}:".replace(".", "_")
    return sorted(name for name in signals if name.startswith(prefix))


def without_leaks(
    several: Sequence[LabelledPools], columns: Sequence[SignalColumn]
) -> tuple[list[LabelledPools], tuple[SignalColumn, ...], list[str]]:
    """Leave out columns that by themselves give the labels away, with a note on each.

    Such a column has a high AUROC: the share of every query's pairs of a relevant and another
    candidate that a regression on its signals alone puts in the right order, fitted to the queries
    of other folds. The first pools tell.
    """
    found = {column: _auroc(several[0], column) for column in columns}
    leaking = {column: auroc for column, auroc in found.items() if auroc >= LEAKS_FROM}
    notes = [
        f"signal column {column.name!r} is left out: alone it puts {auroc:.0%} of the relevant "
        "candidates above the others, as a column made from the labels does"
        for column, auroc in leaking.items()
    ]
    pools = [without(each, leaking) for each in several]
    return pools, tuple([each for each in columns if each not in leaking]), notes


def _auroc(pools: LabelledPools, column: SignalColumn) -> float:
    """Return a column's AUROC within queries; 0.5 if too few queries could show it."""
    names, inside, relevant = of_column(pools.signals, column), pools.retrieved, pools.relevant
    mixed = np.flatnonzero(relevant.any(axis=1) & (inside & ~relevant).any(axis=1))
    if not names or mixed.size < FEWEST_FOR_LEAK:
        return 0.5
    table = np.stack([pools.signals[name] for name in names], axis=-1)
    linear_model = require("sklearn.linear_model", "calibrate")
    found = []
    for fold, others in folds(pools.groups):
        rows = np.intersect1d(others, mixed)
        if not rows.size:
            continue
        x, means, scales = standardised(table[rows][inside[rows]])
        model = linear_model.LogisticRegression(C=REGULARISATION, class_weight="balanced")
        model.fit(x, relevant[rows][inside[rows]])
        for row in np.intersect1d(fold, mixed):
            own = inside[row]
            scores = model.decision_function((table[row, own] - means) / scales).round(9)
            right = relevant[row, own]
            found.append(pair_share(scores[right], scores[~right]))
    return float(np.mean(found)) if found else 0.5
