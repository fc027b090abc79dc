"""What each family of signals adds: P(relevant) refitted without it, on the same queries.

Pure: recorded pools and their labels in, paired differences out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from calibration.evaluate import bootstrap_interval
from calibration.fit import fit_relevance, out_of_fold, probabilities
from calibration.grid import utility_grid
from calibration.pool_labels import PoolLabels
from calibration.replay import Pools
from calibration.results import Difference, as_difference
from ctxguard.core.metrics import DEFAULT_UTILITIES, Utilities
from ctxguard.core.signals import OTHER_TRANSFORMS, TRANSFORMS
from ctxguard.core.types import FloatArray

LEGS, OWN = "legs", "own"

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "match": ("match", "vector_match"),
    "length": ("length",),
    "ranker": ("ranker",),
    "support": (
        "term_support_3",
        "term_support",
        "vector_support_3",
        "smoothed_by_vectors",
        "smoothed_by_terms",
        "vector_redundancy",
        "term_redundancy",
    ),
}
"""The families of `ctxguard.retrieval.signals`. Beside them, ``legs`` are the stages' own scores,
and ``own`` are all other signals, such as a wrapped retriever's."""

Labelled = tuple[Pools, PoolLabels]


@dataclass(frozen=True)
class FamilyGain:
    """What one family adds to P(relevant).

    Attributes:
        family: Its name.
        signals: Its signals or legs that the retriever gives.
        gain: Strict UDCG with all families less that without this one, paired by query.
        milliseconds: What it costs a query; None if that was not measured.
    """

    family: str
    signals: tuple[str, ...]
    gain: Difference
    milliseconds: float | None


def family_gains(
    fitted: Labelled,
    applied: Labelled | None = None,
    *,
    utilities: Utilities = DEFAULT_UTILITIES,
    min_keep: int = 1,
    milliseconds: Mapping[str, float] | None = None,
    seed: int = 0,
) -> tuple[FamilyGain, ...]:
    """Refit P(relevant) without each family, and compare what would be kept.

    Passages are kept while they are worth it by the utilities: P ≥ c / (c + 1), where c is what an
    irrelevant one costs. So no threshold is tuned, and no difference is that of a threshold. The
    pooled ranker keeps its inputs and the pools their candidates: what is taken away is taken from
    P alone.

    Args:
        fitted: The queries to fit on, with their labels.
        applied: Other queries to measure on; None measures those of ``fitted`` out of fold.
        min_keep: The fewest passages kept.
        milliseconds: What each family costs a query, where that was measured.

    Returns:
        One for each family that the retriever gives, legs first; none without named signals.

    Raises:
        CalibrationError: as ``fit_relevance``.
    """
    families = families_of(fitted[0])
    if set(families) <= {LEGS}:
        return ()
    costs = {} if milliseconds is None else milliseconds

    def utility(family: str | None) -> FloatArray:
        names = families.get(family or "", ())
        other = None if applied is None else _without(applied, names)
        return _utilities(_without(fitted, names), other, utilities, min_keep)

    whole = utility(None)
    return tuple(
        FamilyGain(
            family,
            signals,
            as_difference("udcg_strict", bootstrap_interval(whole - utility(family), seed=seed)),
            costs.get(family),
        )
        for family, signals in families.items()
    )


def families_of(pools: Pools) -> dict[str, tuple[str, ...]]:
    """The signals of each family that the pools have, legs first; those of the ranker alone not."""
    usable = [name for name in pools.signals if TRANSFORMS.get(name, OTHER_TRANSFORMS)]
    families = {LEGS: tuple(pools.legs)}
    for family, names in FAMILIES.items():
        families[family] = tuple(name for name in names if name in usable)
    families[OWN] = tuple(name for name in usable if name not in TRANSFORMS)
    return {family: names for family, names in families.items() if names}


def _without(part: Labelled, names: tuple[str, ...]) -> Labelled:
    """Take legs and signals of these names out of pools."""
    pools, labels = part
    return replace(
        pools,
        legs={name: values for name, values in pools.legs.items() if name not in names},
        signals={name: own for name, own in pools.signals.items() if name not in names},
    ), labels


def _utilities(
    fitted: Labelled, applied: Labelled | None, utilities: Utilities, min_keep: int
) -> FloatArray:
    """Strict UDCG of each measured query, shape (n_q,)."""
    model = fit_relevance(*fitted)
    if applied is None:
        applied, values = fitted, out_of_fold(*fitted)
    else:
        values = probabilities(model, applied[0])
    cost = max(-utilities.irrelevant, 0.0)
    grid = utility_grid(
        *applied,
        values,
        model,
        ks=(values.shape[1],),
        thresholds=np.array([cost / (cost + 1.0)]),
        min_keep=min_keep,
    )
    return grid.at([(0, 0)]).udcg_strict[:, 0]
