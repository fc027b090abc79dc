"""What the guard's settings, reasons and flags mean, in words for a person."""

import math
from typing import TYPE_CHECKING

from ctxguard.types import DropReason, Flag, Threshold

if TYPE_CHECKING:
    from ctxguard.policy import Policy

REASONS = {
    DropReason.BELOW_RATIO: "scored too far below the best",
    DropReason.BELOW_PROBABILITY: "too unlikely to be relevant",
    DropReason.BEYOND_K: "beyond k",
    DropReason.INVALID_SCORE: "its score is no number",
    DropReason.DUPLICATE_ID: "the same passage again",
    DropReason.DUPLICATE_TEXT: "the same text again",
    DropReason.OVER_BUDGET: "over the token budget",
    DropReason.UNREADABLE: "its text could not be read",
}

FLAGS = {
    Flag.UNCALIBRATED: "no profile: the retriever's first k are kept, whatever they are worth",
    Flag.PROFILE_MISMATCH: "the profile was made on another system: only its k applies",
    Flag.ROUTE_UNCALIBRATED: "the profile has no policy for the stages that answered: only k "
    "applies",
    Flag.DOMAIN_VIOLATION: "a score is outside its scale: only k applies",
    Flag.INVALID_SCORES: "some scores are no numbers; those candidates are set aside",
    Flag.RANK_ONLY: "the scores carry rank only, so no candidate can be compared with the best",
    Flag.MISSING_SIGNALS: "a signal that the policy needs is missing",
    Flag.DEGRADED: "a stage did not answer",
    Flag.EMPTY_RETRIEVAL: "the retriever found nothing",
}


def policy_in_words(policy: "Policy") -> str:
    """What a policy keeps.

    >>> from ctxguard.policy import RatioPolicy
    >>> policy_in_words(RatioPolicy(k=4, min_ratio=0.7))
    'at most 4 passages, each with at least 0.7 of the top score, and at least 1'
    >>> policy_in_words(RatioPolicy(k=5))
    'the first 5 passages'
    """
    at_least = f", and at least {policy.min_keep}" if policy.min_keep else ""
    if policy.kind == "expected_utility" and policy.min_keep == policy.k:
        return "the most probable passage" + ("" if policy.k == 1 else f"s, {policy.k} of them")
    if policy.kind == "expected_utility":
        return (
            f"at most {policy.k} passages, each relevant with probability at least "
            f"{policy.min_probability:.3g} (a wrong one costs {policy.cost:.3g}, a right one "
            f"gains {policy.gain:.3g}){at_least}"
        )
    if policy.min_ratio == 0.0:
        return "the first passage" if policy.k == 1 else f"the first {policy.k} passages"
    if policy.temperature == 1.0:
        threshold = f"at least {policy.min_ratio:g} of the top score"
    else:
        threshold = f"a relative score of at least {policy.min_ratio:g} (T = {policy.temperature})"
    return f"at most {policy.k} passages, each with {threshold}{at_least}"


def threshold_in_words(threshold: Threshold) -> str:
    """The setting that would have kept a passage.

    >>> threshold_in_words(Threshold("min_ratio", 0.41279))
    'min_ratio ≤ 0.412'
    """
    value = threshold.value
    match threshold.setting:
        case "k":
            return f"k ≥ {value:.0f}"
        case "min_ratio" | "min_probability":
            # Rounded down, so that the value shown would indeed keep it.
            return f"{threshold.setting} ≤ {math.floor(value * 1000) / 1000:.3f}"
        case "max_tokens":
            return f"max_tokens ≥ {value:.0f}"
        case "drop_duplicates":
            return "duplicates are kept"
        case setting:
            return f"{setting} = {value:g}"
