"""Reads comparisons saved as JSON, and checks new comparisons against them.

`SavedComparison.load` reads the file; all else is pure.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, model_validator

from calibration.compare.comparison import Comparison
from calibration.data.text_files import read_model
from calibration.evaluate import Measured
from calibration.results import COMPARED, NEITHER_IS_BETTER, Difference, differences
from ctxguard.errors import ConfigurationError
from ctxguard.measure.worth import Utilities

_MAX_BYTES = 256 * 2**20

DEFAULT_METRICS = ("udcg", "recall")
"""The metrics that must not get worse, unless others are named."""


class SavedCandidate(BaseModel):
    """One candidate of a saved comparison, with one value per query for each metric.

    A value is None where the metric is undefined.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    per_query: dict[str, tuple[float | None, ...]]


class SavedComparison(BaseModel):
    """The part of a comparison's JSON (`ctxguard evaluate`) that a later comparison reads."""

    model_config = ConfigDict(frozen=True)

    data: str
    dataset_digest: str
    utilities: Utilities
    query_ids: tuple[str, ...]
    candidates: tuple[SavedCandidate, ...]

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a saved comparison.

        Raises:
            DataError: the file cannot be read, or is not the JSON of a comparison.
        """
        return read_model(cls, path, _MAX_BYTES, "the JSON of a comparison of `ctxguard evaluate`")

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        for candidate in self.candidates:
            for metric, values in candidate.per_query.items():
                if len(values) != len(self.query_ids):
                    raise ValueError(
                        f"{candidate.name} has {len(values)} values of {metric} for "
                        f"{len(self.query_ids)} queries"
                    )
        return self


def values_as_json(metrics: Measured) -> dict[str, list[float | None]]:
    """Return the values of every metric, query by query; None where undefined."""
    return {
        name: [None if math.isnan(value) else value for value in values.tolist()]
        for name, values in metrics.items()
    }


class RegressionCheck(NamedTuple):
    """A candidate compared with a saved one.

    Attributes:
        saved: Name of the saved candidate; None if there is none to compare with.
        differences: New minus saved by metric, paired by query; empty without a saved candidate.
        regressed: Whether a metric is worse beyond noise and tolerance.
    """

    candidate: str
    saved: str | None
    differences: Mapping[str, Difference]
    regressed: bool


def check_metrics(names: Sequence[str]) -> tuple[str, ...]:
    """Return the distinct metrics to check; ``DEFAULT_METRICS`` if none are named.

    Raises:
        ConfigurationError: a name is not a metric, or neither direction of it is better.
    """
    allowed = [name for name in COMPARED if name not in NEITHER_IS_BETTER]
    for name in names:
        if name not in allowed:
            raise ConfigurationError(
                f"{name!r} is not a metric that can get worse; choose from {', '.join(allowed)}"
            )
    return tuple(dict.fromkeys(names)) or DEFAULT_METRICS


def check_regressions(
    comparison: Comparison,
    saved: SavedComparison,
    dataset_digest: str,
    *,
    metrics: Sequence[str] = DEFAULT_METRICS,
    tolerance: float = 0.0,
) -> tuple[RegressionCheck, ...]:
    """Compare each candidate with the saved one of the same name, or with the only saved one.

    Args:
        dataset_digest: Of the new one's queries and labels.
        metrics: Those that must not get worse.
        tolerance: Accepted loss, in the unit of the metric; ≥ 0.

    Raises:
        ConfigurationError: the saved comparison has other labels, other utilities, or no
            candidate to compare with; or the tolerance is negative or not finite.
    """
    if not 0.0 <= tolerance < math.inf:
        raise ConfigurationError(f"tolerance {tolerance!r} must be ≥ 0 and finite")
    if saved.dataset_digest != dataset_digest:
        raise ConfigurationError(
            f"the saved comparison is of {saved.data} with digest {saved.dataset_digest[:12]}, but "
            f"this one has digest {dataset_digest[:12]}; only comparisons made on the same queries "
            "and labels can be paired"
        )
    if saved.utilities != comparison.utilities:
        raise ConfigurationError(
            "the saved comparison uses different utilities, so its figures have a different unit; "
            "run both with the same utilities"
        )
    by_name = {candidate.name: candidate for candidate in saved.candidates}
    only = saved.candidates[0] if len(saved.candidates) == 1 else None
    place = {query_id: row for row, query_id in enumerate(saved.query_ids)}
    own = [row for row, query_id in enumerate(comparison.query_ids) if query_id in place]
    old = [place[comparison.query_ids[row]] for row in own]
    checks = []
    for compared in comparison.candidates:
        name = compared.candidate.name
        earlier = by_name.get(name, only)
        if earlier is None:
            checks.append(RegressionCheck(name, None, {}, False))
            continue
        if missing := [metric for metric in metrics if metric not in earlier.per_query]:
            raise ConfigurationError(
                f"the saved candidate {earlier.name} has no values of {missing[0]}; save it again"
            )
        these = {metric: compared.per_query[metric][own] for metric in metrics}
        those = {metric: np.array(earlier.per_query[metric], float)[old] for metric in metrics}
        by_metric = differences(these, those, metrics)
        regressed = any(each.is_regression(tolerance) for each in by_metric.values())
        checks.append(RegressionCheck(name, earlier.name, by_metric, regressed))
    if all(check.saved is None for check in checks):
        raise ConfigurationError(
            f"the saved comparison has none of these candidates; it has {', '.join(by_name)}"
        )
    return tuple(checks)
