"""The worth of passages, as settings of the commands that choose or measure a policy."""

from dataclasses import replace
from typing import Any, Literal

from ctxguard._support.settings import SettingsModel, key, optional_key
from ctxguard.core.metrics import PRESETS, Gain, Utilities
from ctxguard.errors import ConfigurationError

_UTILITIES = (
    *("unjudged", "irrelevant", "hard_negative", "distractor", "partial"),
    *("score_ratio", "rank_limit"),
)


class PassageWorth(SettingsModel):
    """How much passages are worth, and how grades gain in nDCG."""

    preset: Literal["default", "strict", "relaxed"] | None = optional_key(
        "Utilities of passages: strict where a wrong one does real damage, relaxed where a stray "
        "one hardly matters.",
        "PRESET",
        default="the profile's, or default",
    )
    utility: dict[str, float] = key(
        "Table: utilities in place of the preset's, where a relevant passage is worth 1: unjudged, "
        "irrelevant, hard_negative, distractor or partial, such as unjudged = -0.2; and for udcg, "
        "which suspects unlabelled passages, the relative score above which it does (score_ratio) "
        "and the rank up to which it does (rank_limit).",
        "TABLE",
        default="those of the preset",
        factory=dict,
    )
    gain: Gain | None = optional_key(
        "Gain of a grade in nDCG: the grade (linear), or 2^grade - 1 (exponential).",
        "GAIN",
        default="the profile's, or linear",
    )

    def worth(self, base: Utilities) -> Utilities:
        """Utilities with those replaced that were set by hand.

        Raises:
            ConfigurationError: another name, or a value that the name cannot have.
        """
        for name, value in self.utility.items():
            if name not in _UTILITIES:
                raise ConfigurationError(
                    f"utility has no {name!r}: its keys are {', '.join(_UTILITIES)}; a relevant "
                    "passage is worth 1"
                )
            if name == "rank_limit" and not value.is_integer():
                raise ConfigurationError(f"rank_limit {value:g} must be a whole number")
        values: dict[str, Any] = {
            name: int(value) if name == "rank_limit" else value
            for name, value in self.utility.items()
        }
        base = base if self.preset is None else replace(PRESETS[self.preset], gain=base.gain)
        return replace(base, **values, gain=self.gain or base.gain)

    @property
    def by_hand(self) -> str:
        """What was set, in words; empty for nothing."""
        parts = [f"the preset {self.preset}"] if self.preset else []
        values = ", ".join(f"{name}={value:g}" for name, value in self.utility.items())
        parts += [f"set by hand: {values}"] if values else []
        parts += [f"{self.gain} gain in nDCG"] if self.gain else []
        return "; ".join(parts)
