"""The ranker: orders candidates by weights learned on other collections.

r = Σ a_k · z_k + Σ d_l · ½ · ln(rank_l), where z_k is the z-score of an input in the list, clipped
to ±4, and rank_l the 1-based rank by an input, equal values sharing the better one. The weights are
those of the most likely order under a softmax over each list (ListNet; Cao et al., ICML 2007).
Those in ``ranker.json`` were trained by `benchmarks.ranker` on the collections that it names. Pure,
but for reading that file.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

import numpy as np

from ctxguard.core.types import FloatArray, Leg

RANKER_SIGNAL = "ranker"
"""The ranker's score among the signals."""

CLIP = 4.0
"""z-scores are clipped to ±this: in a list of 100 one candidate can stand out by 10."""

_SCORED = (
    "dense",
    "lexical",
    "reciprocal_ranks",
    "match",
    "vector_match",
    "length",
    "redundancy",
    "similarity_3",
    "similarity_10",
    "term_similarity_3",
)
_RANKED = ("dense", "lexical", "match")

INPUTS = (*(f"{name}.z" for name in _SCORED), *(f"{name}.log_rank" for name in _RANKED))
"""The inputs, ``NAME.z`` or ``NAME.log_rank``."""


@dataclass(frozen=True, slots=True)
class Ranker:
    """The weights of the ranker, by input.

    Attributes:
        weights: One weight for each of ``INPUTS``.
        trained_on: Names of collections.
        in_order: The weights in the order of ``INPUTS``.
    """

    weights: Mapping[str, float]
    trained_on: tuple[str, ...] = ()
    in_order: FloatArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "in_order", np.array([self.weights[name] for name in INPUTS]))

    @staticmethod
    @cache
    def default() -> "Ranker":
        """Return the ranker that comes with the package; read once."""
        file = files(__package__).joinpath("ranker.json")
        return Ranker.of_json(file.read_text(encoding="utf-8"))

    @classmethod
    def of_json(cls, text: str) -> "Ranker":
        """Read a ranker as `benchmarks.ranker` writes it."""
        data = json.loads(text)
        return cls(data["weights"], tuple(data["trained_on"]))

    def digest(self) -> str:
        """Hash the weights to 16 hexadecimal digits."""
        weights = {name: float(weight) for name, weight in self.weights.items()}
        return hashlib.sha256(json.dumps(weights, sort_keys=True).encode()).hexdigest()[:16]


def ranker_inputs(
    legs: Mapping[str, Leg], signals: Mapping[str, FloatArray], fused: FloatArray
) -> FloatArray:
    """Compute the ranker's inputs, shape (number of inputs, n), rows in the order of ``INPUTS``.

    A z-score is 0 if all values are equal; an unknown value (NaN) also has z-score 0, and the
    rank after all others. A leg that did not answer is unknown throughout.

    Args:
        legs: ``lexical``, ``dense``, or both, shape (n,) each.
        signals: Those that come before the ranker, shape (n,) each; a missing one is unknown
            throughout.
        fused: The reciprocal ranks of the legs, shape (n,).
    """
    values = {**signals, "reciprocal_ranks": fused}
    if "dense" in legs:
        values["dense"] = legs["dense"].scores
    if "lexical" in legs:
        values["lexical"] = np.log1p(np.maximum(legs["lexical"].scores, 0.0))
    inputs = np.empty((len(INPUTS), fused.size))
    z, log_ranks = inputs[: len(_SCORED)], inputs[len(_SCORED) :]
    for row, name in zip(z, _SCORED, strict=True):
        row[:] = values.get(name, np.nan)
    for row, name in zip(log_ranks, _RANKED, strict=True):
        # Descending, with NaN behind all: how many are better is where a value would be put in.
        descending = -z[_SCORED.index(name)]
        row[:] = np.sort(descending).searchsorted(descending)
    log_ranks += 1.0
    np.log(log_ranks, out=log_ranks)
    log_ranks *= 0.5
    # From the highest, so that equal values are exactly 0: their mean may be rounded.
    z -= np.fmax.reduce(z, axis=1, keepdims=True)
    unknown = np.isnan(z)
    z[unknown] = 0.0
    n_known = np.maximum(fused.size - unknown.sum(axis=1, keepdims=True), 1)
    z -= z.sum(axis=1, keepdims=True) / n_known
    z[unknown] = 0.0
    spread = np.sqrt(np.einsum("ij,ij->i", z, z)[:, np.newaxis] / n_known)
    spread[spread == 0.0] = np.inf
    z /= spread
    np.clip(z, -CLIP, CLIP, out=z)
    return inputs
