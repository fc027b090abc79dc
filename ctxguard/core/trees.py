"""Boosted trees with a few leaves, as plain numbers: their log-odds by numpy alone. Pure."""

import math
from dataclasses import dataclass

import numpy as np

from ctxguard.core.types import FloatArray
from ctxguard.errors import ConfigurationError

MAX_LEAVES = 6

_N_MASKS = 1 << MAX_LEAVES


@dataclass(frozen=True)
class Trees:
    """Gradient-boosted trees: log-odds are the intercept plus one leaf's value from each tree.

    Leaves are numbered from left to right, and an inner node sends a candidate to the right if
    its feature exceeds the threshold. Each node is stored as the mask of the leaves that this
    rules out, those of its left part; the candidate's leaf is the first that no node rules out
    (Lucchese et al., QuickScorer: A fast algorithm to rank documents with additive
    ensembles of regression trees, SIGIR 2015).

    Attributes:
        intercept: Log-odds before the first tree.
        features: The row of the feature that each inner node of each tree compares.
        thresholds: Shaped as ``features``.
        masks: Shaped as ``features``: bit i is set if the node rules out leaf i.
        values: The contribution of each leaf of each tree; at most ``MAX_LEAVES`` per tree.

    Raises:
        ConfigurationError: at construction, for a malformed tree.
    """

    intercept: float
    features: tuple[tuple[int, ...], ...]
    thresholds: tuple[tuple[float, ...], ...]
    masks: tuple[tuple[int, ...], ...]
    values: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        self._check()
        n_trees, n_nodes = len(self.values), MAX_LEAVES - 1
        features = np.zeros((n_nodes, n_trees), dtype=np.intp)
        thresholds = np.full((n_nodes, n_trees), np.inf)  # a node that is not there rules out none
        masks = np.zeros((n_nodes, n_trees), dtype=np.uint8)
        by_mask = np.zeros((n_trees, _N_MASKS))
        for tree, values in enumerate(self.values):
            nodes = len(values) - 1
            features[:nodes, tree] = self.features[tree]
            thresholds[:nodes, tree] = self.thresholds[tree]
            masks[:nodes, tree] = self.masks[tree]
            by_mask[tree] = [values[min(_first_left(mask), nodes)] for mask in range(_N_MASKS)]
        for name, array in (
            ("_features", features.ravel()),
            ("_thresholds", thresholds.reshape(-1, 1)),
            ("_masks", masks.reshape(-1, 1)),
            ("_by_mask", by_mask.ravel()),
            ("_first", np.arange(n_trees, dtype=np.intp)[:, None] * _N_MASKS),
        ):
            object.__setattr__(self, name, array)

    def _check(self) -> None:
        if not math.isfinite(self.intercept):
            raise ConfigurationError(f"intercept {self.intercept!r} must be a finite number")
        lengths = {len(self.features), len(self.thresholds), len(self.masks), len(self.values)}
        if lengths != {len(self.values)} or not self.values:
            raise ConfigurationError(
                "features, thresholds, masks and values must be of the same trees, at least one"
            )
        rows = zip(self.features, self.thresholds, self.masks, self.values, strict=True)
        for tree, (features, thresholds, masks, values) in enumerate(rows):
            n = len(values)
            if not 1 <= n <= MAX_LEAVES:
                raise ConfigurationError(f"tree {tree} has {n} leaves, not 1 to {MAX_LEAVES}")
            if not len(features) == len(thresholds) == len(masks) == n - 1:
                raise ConfigurationError(
                    f"tree {tree} has {n} leaves, so it needs {n - 1} features, thresholds and "
                    f"masks, not {len(features)}, {len(thresholds)} and {len(masks)}"
                )
            if not all(map(math.isfinite, (*thresholds, *values))):
                raise ConfigurationError(f"tree {tree} has a number that is not finite")
            if min(features, default=0) < 0:
                raise ConfigurationError(f"tree {tree} compares feature {min(features)}")
            # The last leaf is right of every node, so no node rules it out.
            if not all(0 < mask < 1 << (n - 1) for mask in masks):
                raise ConfigurationError(
                    f"tree {tree} has masks {masks}: each must rule out some of its first "
                    f"{n - 1} leaves and no other"
                )

    @property
    def n_features(self) -> int:
        """Minimum number of features."""
        return 1 + max((max(own, default=-1) for own in self.features), default=-1)

    def log_odds(self, features: FloatArray) -> FloatArray:
        """Compute candidates' log-odds, shape (n,), from features of shape (n_features, n)."""
        own: dict[str, np.ndarray] = self.__dict__
        n = features.shape[1]
        exceeds = features.take(own["_features"], axis=0) > own["_thresholds"]
        ruled_out = np.bitwise_or.reduce(
            (exceeds * own["_masks"]).reshape(MAX_LEAVES - 1, len(self.values), n), axis=0
        )
        values = own["_by_mask"].take(ruled_out + own["_first"])
        total: FloatArray = values.sum(axis=0)
        total += self.intercept
        return total


def _first_left(ruled_out: int) -> int:
    """Return the number of the lowest bit that is not set."""
    return (~ruled_out & (ruled_out + 1)).bit_length() - 1
