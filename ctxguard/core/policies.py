"""Policies: the settings by which ``ctxguard.core.decision`` keeps and drops candidates.

Pure: no I/O, no clock, no logging.
"""

from dataclasses import dataclass
from typing import Literal

from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.types import DEFAULT_K
from ctxguard.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class RatioPolicy:
    """Keep at most ``k`` passages whose score is at least ``min_ratio`` times the best.

    Attributes:
        k: Maximum number of passages in a context, ≥ 1.
        min_ratio: Minimum relative score of a kept passage, in [0, 1]; 0 disables the relative
            filter.
        temperature: T of the relative score, > 0.
        min_keep: Minimum number of kept passages, given as many valid candidates, in [0, k].
    """

    k: int = DEFAULT_K
    min_ratio: float = 0.0
    temperature: float = 1.0
    min_keep: int = 1
    kind: Literal["ratio"] = "ratio"

    def __post_init__(self) -> None:
        _check_counts(self.k, self.min_keep)
        if not 0.0 <= self.min_ratio <= 1.0:
            raise ConfigurationError(
                f"min_ratio {self.min_ratio!r} must lie in [0, 1]: it is a share of the top score"
            )
        if not 0.0 < self.temperature < float("inf"):
            raise ConfigurationError(f"temperature {self.temperature!r} must be > 0 and finite")


@dataclass(frozen=True, slots=True)
class ExpectedUtilityPolicy:
    """Keep at most ``k`` passages whose expected utility is positive.

    A passage that is relevant with probability P is worth P·gain − (1 − P)·cost, so it is kept if P
    ≥ cost / (cost + gain). It uses the legs' scores, and only the order of the ranking's.

    Attributes:
        k: Maximum number of passages in a context, ≥ 1.
        cost: Cost to the reader of a passage that is not relevant, ≥ 0.
        gain: Utility of a relevant passage, > 0.
        min_keep: Minimum number of kept passages, given as many valid candidates, in [0, k].
        per_token: Weigh P by the passage's length (`weight_of`), so that tokens go to the passages
            with the most relevance per token (the greedy rule of the knapsack problem; Dantzig,
            Operations Research, 1957). Kept passages are still ordered by P. Rankings then need the
            signal ``tokens``, which the guard adds.
    """

    model: RelevanceModel
    k: int = DEFAULT_K
    cost: float = 0.5
    gain: float = 1.0
    min_keep: int = 1
    per_token: bool = False
    kind: Literal["expected_utility"] = "expected_utility"

    def __post_init__(self) -> None:
        _check_counts(self.k, self.min_keep)
        if not 0.0 <= self.cost < float("inf"):
            raise ConfigurationError(f"cost {self.cost!r} must be ≥ 0 and finite")
        if not 0.0 < self.gain < float("inf"):
            raise ConfigurationError(f"gain {self.gain!r} must be > 0 and finite")

    @property
    def min_probability(self) -> float:
        """The minimum P(relevant), weighted or not, at which a passage earns its place."""
        return self.cost / (self.cost + self.gain)


Policy = RatioPolicy | ExpectedUtilityPolicy


def _check_counts(k: int, min_keep: int) -> None:
    if k < 1:
        raise ConfigurationError(f"k {k!r} must be at least 1: it is the size of the context")
    if not 0 <= min_keep <= k:
        raise ConfigurationError(f"min_keep {min_keep!r} must lie in [0, k = {k}]")
