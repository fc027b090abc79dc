"""The ranker: orders candidates by weights learned on other collections.

r = Σ a_k · z_k + Σ d_l · ½ · ln(rank_l), where z_k is the z-score of an input in the list, clipped
to ±4, and rank_l the 1-based rank by an input, equal values sharing the better one. The weights are
those of the most likely order under a softmax over each list (ListNet; Cao et al., ICML 2007).
Those in ``ranker.json`` were trained by `benchmarks.ranker` on the collections that it names.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from ctxguard._support.atomic_write import SHARED, atomic_write
from ctxguard._support.regular_file import read_regular
from ctxguard.core.scores import is_valid
from ctxguard.core.types import FloatArray, Leg
from ctxguard.errors import DataError

RANKER_SIGNAL = "ranker"
"""The name of the ranker's score among the signals."""

FORMAT = 2
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

_MAX_BYTES = 2**20
_FIX = "take the one that comes with ctxguard, or train one with `python -m benchmarks.ranker`"


@dataclass(frozen=True, slots=True)
class Ranker:
    """The weights of the ranker, by input.

    Attributes:
        weights: One weight for each of ``INPUTS``.
        trained_on: The collections that the weights were trained on.
        in_order: The weights in the order of ``INPUTS``.

    Raises:
        DataError: at construction, if an input lacks a weight, is unknown, or has a weight that
            is not a finite number.
    """

    weights: Mapping[str, float]
    trained_on: tuple[str, ...] = ()
    in_order: FloatArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        missing = [name for name in INPUTS if name not in self.weights]
        unknown = [name for name in self.weights if name not in INPUTS]
        if missing or unknown:
            lists = [f"lacks {', '.join(missing)}"] if missing else []
            lists += [f"has the unknown {', '.join(map(repr, unknown))}"] if unknown else []
            raise DataError(f"the ranker {' and '.join(lists)}; {_FIX}")
        for name, weight in self.weights.items():
            if isinstance(weight, bool) or not is_valid(weight):
                raise DataError(
                    f"the ranker's weight of {name}, {weight!r}, is no finite number; {_FIX}"
                )
        object.__setattr__(self, "in_order", np.array([self.weights[name] for name in INPUTS]))

    @staticmethod
    def default() -> "Ranker":
        """Return the ranker that comes with the package; read once."""
        return _default()

    @staticmethod
    def load(file: Path | str) -> "Ranker":
        """Read a ranker that `save` wrote.

        Raises:
            DataError: it cannot be read, or is not a ranker, or has another format.
        """
        file = Path(file)
        try:
            text = read_regular(file, _MAX_BYTES).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot be read as a ranker ({error}); {_FIX}", path=file) from error
        return _parsed(text, file)

    def save(self, file: Path) -> None:
        """Write the ranker as JSON, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        data: dict[str, object] = {
            "format": FORMAT,
            "trained_on": list(self.trained_on),
            "weights": dict(self.weights),
        }
        with atomic_write(file, mode=SHARED) as stream:
            stream.write((json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode())

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
        signals: The signals that come before the ranker, shape (n,) each; one that is missing is
            unknown throughout.
        fused: The reciprocal ranks of the legs, shape (n,).
    """
    values = {**signals, "reciprocal_ranks": fused}
    if "dense" in legs:
        values["dense"] = legs["dense"].scores
    if "lexical" in legs:
        values["lexical"] = np.log1p(np.maximum(legs["lexical"].scores, 0.0))
    unknown = np.full(fused.size, np.nan)
    scored, ranked = ([values.get(name, unknown) for name in each] for each in (_SCORED, _RANKED))
    return np.array([*map(_z_scores, scored), *map(_log_ranks, ranked)])


def _z_scores(values: FloatArray) -> FloatArray:
    known = values[~np.isnan(values)]
    # Rounding alone would spread equal values.
    if not known.size or known.max() == known.min():
        return np.zeros(values.size)
    z: FloatArray = np.nan_to_num((values - known.mean()) / known.std())
    return z.clip(-CLIP, CLIP)


def _log_ranks(values: FloatArray) -> FloatArray:
    """Halve the logarithm of each 1-based rank, equals sharing the better, NaN behind all."""
    ascending = np.sort(values[~np.isnan(values)])
    better = np.where(
        np.isnan(values), ascending.size, ascending.size - ascending.searchsorted(values, "right")
    )
    logs: FloatArray = 0.5 * np.log(1.0 + better)
    return logs


@cache
def _default() -> Ranker:
    file = files(__package__).joinpath("ranker.json")
    return _parsed(file.read_text(encoding="utf-8"), Path("ranker.json"))


def _parsed(text: str, file: Path) -> Ranker:
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON ({error}); {_FIX}", path=file) from error
    if not isinstance(data, dict) or data.keys() != {"format", "trained_on", "weights"}:
        raise DataError(f"is no ranker; {_FIX}", path=file)
    if data["format"] != FORMAT:
        raise DataError(
            f"has format {data['format']!r}; this release reads {FORMAT}; {_FIX}", path=file
        )
    if not isinstance(data["trained_on"], list) or not isinstance(data["weights"], dict):
        raise DataError(f"is no ranker; {_FIX}", path=file)
    try:
        return Ranker(data["weights"], tuple(map(str, data["trained_on"])))
    except DataError as error:
        raise DataError(str(error), path=file) from error
