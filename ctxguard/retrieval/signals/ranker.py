"""The pooled ranker: orders candidates by weights learned on other collections.

r = Σ a_k · z_k + Σ d_l · ½ · ln(rank_l), where z_k is the z-score of an input in the list, clipped
to ±4, and rank_l the 1-based rank by an input, equal values sharing the better one. The weights are
those of the most likely order under a softmax over each list (ListNet; Cao et al., ICML 2007),
fitted by `calibration.ranker`. Those in ``ranker.json`` were trained by `benchmarks.ranker` on the
collections that the file names.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ctxguard._support.atomic_write import SHARED, atomic_write
from ctxguard._support.regular_file import read_regular
from ctxguard.core.scores import is_valid
from ctxguard.core.types import FloatArray
from ctxguard.errors import DataError

RankerLevel = Literal["full", "text"]

RANKER_SIGNAL = "ranker"
"""The name of the ranker's score among the signals."""

FORMAT = 1
CLIP = 4.0
"""z-scores are clipped to ±this: in a list of 100 one candidate can stand out by 10."""

_TEXT_SCORES = (
    "dense",
    "lexical",
    "reciprocal_ranks",
    "stem_bm25",
    "stem_coverage",
    "coverage",
    "sentence_coverage",
    "lead_coverage",
    "length",
    "bigram_coverage",
    "redundancy",
    "similarity_3",
    "similarity_10",
    "term_similarity_3",
)
_SENTENCE_SCORES = ("sentence_match", "token_match", "sentence_similarity")

INPUTS: Mapping[RankerLevel, tuple[str, ...]] = {
    "full": (
        *(f"{name}.z" for name in (*_TEXT_SCORES, *_SENTENCE_SCORES)),
        "dense.log_rank",
        "lexical.log_rank",
        "sentence_match.log_rank",
    ),
    "text": (*(f"{name}.z" for name in _TEXT_SCORES), "dense.log_rank", "lexical.log_rank"),
}
"""The inputs of each level, ``NAME.z`` or ``NAME.log_rank``."""

_MAX_BYTES = 2**20
_FIX = "write one with `Ranker.save`"


@dataclass(frozen=True, slots=True)
class Ranker:
    """The weights of the pooled ranker, by input.

    Attributes:
        full: One weight for each of ``INPUTS["full"]``.
        text: One weight for each of ``INPUTS["text"]``: for candidates without sentence signals.
        trained_on: The collections that the weights were trained on.
        in_order: The weights of each level in the order of ``INPUTS``.

    Raises:
        DataError: at construction, if an input lacks a weight, is unknown, or has a weight that
            is not a finite number.
    """

    full: Mapping[str, float]
    text: Mapping[str, float]
    trained_on: tuple[str, ...] = ()
    in_order: Mapping[RankerLevel, FloatArray] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for level in INPUTS:
            _check(level, self.weights(level))
        in_order = {
            level: np.array([self.weights(level)[name] for name in names])
            for level, names in INPUTS.items()
        }
        object.__setattr__(self, "in_order", in_order)

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
            **{level: dict(self.weights(level)) for level in INPUTS},
        }
        with atomic_write(file, mode=SHARED) as stream:
            stream.write((json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode())

    def weights(self, level: RankerLevel) -> Mapping[str, float]:
        """Return the weights of one level, by input."""
        return self.full if level == "full" else self.text

    def digest(self) -> str:
        """Hash the weights to 16 hexadecimal digits."""
        weights = {
            level: {name: float(weight) for name, weight in self.weights(level).items()}
            for level in INPUTS
        }
        return hashlib.sha256(json.dumps(weights, sort_keys=True).encode()).hexdigest()[:16]


@cache
def _default() -> Ranker:
    file = files(__package__).joinpath("ranker.json")
    return _parsed(file.read_text(encoding="utf-8"), Path("ranker.json"))


def _check(level: RankerLevel, weights: Mapping[str, float]) -> None:
    missing = [name for name in INPUTS[level] if name not in weights]
    unknown = [name for name in weights if name not in INPUTS[level]]
    if missing or unknown:
        lists = [f"lacks {', '.join(missing)}"] if missing else []
        lists += [f"has the unknown {', '.join(map(repr, unknown))}"] if unknown else []
        raise DataError(f"the ranker's level {level!r} {' and '.join(lists)}; {_FIX}")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not is_valid(weight):
            raise DataError(
                f"the ranker's weight of {name}, {weight!r}, is no finite number; {_FIX}"
            )


def _parsed(text: str, file: Path) -> Ranker:
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON ({error}); {_FIX}", path=file) from error
    if not isinstance(data, dict) or data.keys() != {"format", "trained_on", *INPUTS}:
        raise DataError(f"is no ranker; {_FIX}", path=file)
    if data["format"] != FORMAT:
        raise DataError(
            f"has format {data['format']!r}; this release reads {FORMAT}; {_FIX}", path=file
        )
    if not isinstance(data["trained_on"], list) or not all(
        isinstance(data[level], dict) for level in INPUTS
    ):
        raise DataError(f"is no ranker; {_FIX}", path=file)
    try:
        return Ranker(data["full"], data["text"], tuple(map(str, data["trained_on"])))
    except DataError as error:
        raise DataError(str(error), path=file) from error
