"""How a policy is chosen: the settings that `ctxguard calibrate` and `calibrate()` share."""

from typing import Literal

from ctxguard._support.settings import SettingsModel, key, optional_key, setting
from ctxguard.core.types import DEFAULT_K

Family = Literal["auto", "ratio", "expected_utility"]
Objective = Literal["keep-recall", "utility"]

TOLERANCE = 0.01
"""How much mean recall the default objective may lose on the queries that choose."""

MAX_LOSS = 0.05
"""How far below today's mean recall the lower bound of a policy that is served may lie."""


class ChoiceSettings(SettingsModel):
    """How to choose and certify a policy."""

    serving_k: int = setting(
        "Passages that you serve today; recall is compared with them.", "N", ge=1, value=DEFAULT_K
    )
    objective: Objective = setting(
        "Choose the policy of least harm that keeps the recall of what you serve today "
        "(keep-recall), or the policy of highest strict UDCG (utility).",
        "OBJECTIVE",
        value="keep-recall",
    )
    tolerance: float = key(
        "Most mean recall that keep-recall may lose, in [0, 1), on the queries that choose, and a "
        "policy that is enforced on the held-out ones.",
        "LOSS",
        ge=0,
        lt=1,
        value=TOLERANCE,
    )
    max_loss: float = key(
        "How far below today's the lower bound on mean recall may lie for the verdict enforce.",
        "LOSS",
        gt=0,
        lt=1,
        value=MAX_LOSS,
    )
    ladder: bool = key(
        "From 100 labelled queries on, test the most careful choice first, then bolder ones, and "
        "take the last whose verdict is enforce.",
        "SWITCH",
        value=False,
    )
    policy: Family = key(
        "Keep a passage by its score relative to the best (ratio), or by its calibrated "
        "probability of relevance (expected_utility); auto chooses by the labels.",
        "KIND",
        value="auto",
    )
    delta: float = key("Probability that the certificate is false.", "P", gt=0, lt=1, value=0.1)
    false_alarms: float = key(
        "Largest share of contexts with a relevant passage that may be called insufficient; "
        "certified with probability 1 - delta.",
        "SHARE",
        gt=0,
        lt=1,
        value=0.05,
    )
    held_out: float | None = optional_key(
        "Share of the queries that takes no part in any choice, to measure the policy on.",
        "SHARE",
        default="half, or less of fewer than 60",
        ge=0,
        lt=1,
    )
    min_keep: int = key("Fewest passages to keep for each query.", "N", ge=0, value=1)
    max_tokens: int | None = optional_key(
        "Token budget of a context; no size whose mean exceeds it is chosen.",
        "N",
        default="none",
        ge=1,
    )
    seed: int = key("Random seed; equal seeds give equal results.", "N", ge=0, value=0)
