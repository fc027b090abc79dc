"""Whether a new run is worse than an earlier one of the same candidate, beyond noise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from calibration.comparing.differences import BETTER_WHEN, Difference
from calibration.comparing.runstore import Run, RunStore, diff_runs
from ctxguard.errors import ConfigurationError

WATCHED = ("udcg_strict", "recall")
"""The metrics that may not get worse, unless others are named."""


@dataclass(frozen=True)
class Check:
    """A new run against an earlier one.

    Attributes:
        earlier: None where there is none.
        watched: The metrics that may not get worse.
        tolerance: A loss up to this is accepted, in the metric's own unit, ≥ 0.
        seed: Of the bootstrap.
    """

    run: Run
    earlier: Run | None
    watched: tuple[str, ...] = WATCHED
    tolerance: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.tolerance < math.inf:
            raise ConfigurationError(f"tolerance {self.tolerance!r} must be ≥ 0 and finite")

    @cached_property
    def differences(self) -> dict[str, Difference]:
        """The watched metrics of the new run less those of the earlier one; empty without it."""
        if self.earlier is None:
            return {}
        found = diff_runs(self.run, self.earlier, seed=self.seed)
        return {metric: found[metric] for metric in self.watched}

    @property
    def regressed(self) -> bool:
        """Whether a watched metric is worse beyond noise and tolerance."""
        return any(each.is_regression(self.tolerance) for each in self.differences.values())


def watched_metrics(names: Sequence[str]) -> tuple[str, ...]:
    """The names, each once; the usual ones where there are none.

    Raises:
        ConfigurationError: a name that is no metric, or one that cannot get worse.

    >>> watched_metrics([]), watched_metrics(["harm", "harm"])
    (('udcg_strict', 'recall'), ('harm',))
    """
    known = [name for name, better in BETTER_WHEN.items() if better is not None]
    for name in names:
        if name not in known:
            raise ConfigurationError(
                f"{name!r} is no metric that can get worse; they are {', '.join(known)}"
            )
    return tuple(dict.fromkeys(names)) or WATCHED


def earlier_run(run: Run, store: RunStore, references: Sequence[Run] | None = None) -> Run | None:
    """What a new run is measured against; None where there is nothing.

    Args:
        run: Not yet kept.
        store: Whose last run of the candidate serves where no references are given.
        references: Runs asked for, the last kept first: the one of the candidate's name, or
            the only one whatever its name; those on the same labels before others.
    """
    if references is None:
        return store.last(run)
    same = [other for other in references if other.data_digest == run.data_digest]
    references = same or references
    named = [other for other in references if other.candidate == run.candidate]
    if named:
        return named[0]
    return references[0] if len(references) == 1 else None
