"""Defines the settings for choosing a policy, in `ctxguard calibrate` and `calibrate()`. Pure."""

from typing import Literal, Self, get_args

from pydantic import model_validator

from ctxguard._support.settings import SettingsModel, key, optional, optional_key, setting
from ctxguard.core.types import DEFAULT_DEPTH, DEFAULT_K
from ctxguard.errors import ConfigurationError
from ctxguard.measure.worth import READERS, Utilities

Family = Literal["auto", "ratio", "expected_utility"]
Context = Literal["leaner", "balanced", "richer"]

SIZES: tuple[Context, ...] = get_args(Context)
"""The costs that a context may have, the lowest first."""

Wanted = Context | Literal["utility"]
"""The aim of a choice: a context of such a cost, or the highest utility."""

TOLERANCE = 0.01
"""How much mean recall a choice may lose."""

MAX_LOSS = 0.05
"""How far below today's figures the lower bounds of a served policy may lie."""


class ChoiceSettings(SettingsModel):
    """How to choose and certify a policy."""

    serving_k: int = key(
        "Passages that you serve today; recall is compared with them.", ge=1, value=DEFAULT_K
    )
    context: Context = setting(
        "What a context may cost: the fewest tokens at no less value (leaner), the highest value "
        "at today's tokens (balanced), or at no more than twice (richer).",
        "SIZE",
        value="balanced",
    )
    tolerance: float = setting(
        "Most mean recall that a policy may lose against what you serve today, in [0, 1).",
        "LOSS",
        ge=0,
        lt=1,
        value=TOLERANCE,
    )
    max_loss: float = key(
        "How far below today's the lower bounds on mean recall and UDCG may lie for the verdict "
        "enforce.",
        gt=0,
        lt=1,
        value=MAX_LOSS,
    )
    policy: Family = key(
        "Keep a passage by its score relative to the best (ratio), or by its calibrated "
        "probability of relevance (expected_utility); auto chooses by the labels.",
        value="auto",
    )
    delta: float = key("Probability that the certificate is false.", gt=0, lt=1, value=0.1)
    false_alarms: float = key(
        "Largest share of contexts with a relevant passage that may be called insufficient; "
        "certified with probability 1 - delta.",
        gt=0,
        lt=1,
        value=0.05,
    )
    held_out: float | None = optional_key(
        "Share of the queries to hold out of every choice. It alone gives a certificate; otherwise "
        "each fifth of the queries is measured by what the others choose.",
        default="none; with --alpha half",
        ge=0,
        lt=1,
    )
    min_keep: int = key("Fewest passages to keep for each query.", ge=0, value=1)
    max_tokens: int | None = optional_key(
        "Token budget of a context; no size whose mean exceeds it is chosen.", default="none", ge=1
    )
    seed: int = key("Random seed; equal seeds give equal results.", ge=0, value=0)


class Settings(ChoiceSettings):
    """How to choose and certify, with settings that only a calibration in Python has."""

    context: Wanted = setting(  # type: ignore[assignment]  # one more than the command has
        "See ``ChoiceSettings``; ``utility`` takes the policy of highest UDCG, whatever its "
        "recall.",
        value="balanced",
    )
    alpha: float | None = optional(
        "The mean recall loss that the certificate must promise not to exceed. The policy of "
        "highest UDCG that keeps the promise is chosen, whatever the context. None for a "
        "certificate that says what the choice costs.",
        gt=0,
        lt=1,
    )
    depth: int = setting("Candidates per query.", ge=1, value=DEFAULT_DEPTH)
    utilities: Utilities = setting("The worth of a passage.", value=READERS)
    utilities_source: str | None = optional(
        "Where the utilities come from, in words; None for the preset."
    )
    signal_columns: tuple[str, ...] = setting(
        "Columns of the passages' metadata whose signals P(relevant) may use.", value=()
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.serving_k > self.depth:
            raise ConfigurationError(
                f"serving_k {self.serving_k!r} is more than the {self.depth!r} candidates that are "
                "retrieved: raise depth"
            )
        return self
