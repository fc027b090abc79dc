"""The reasons, flags and thresholds of the guard, in words for a person."""

import math

from ctxguard.core.types import DropReason, Flag, Threshold

REASONS = {
    DropReason.BELOW_RATIO: "scored too far below the best",
    DropReason.BELOW_PROBABILITY: "too unlikely to be relevant",
    DropReason.BEYOND_K: "beyond k",
    DropReason.INVALID_SCORE: "its score is not a number",
    DropReason.DUPLICATE_ID: "a duplicate by passage id",
    DropReason.DUPLICATE_TEXT: "a duplicate by text",
    DropReason.OVER_BUDGET: "over the token budget",
    DropReason.UNREADABLE: "its text could not be read",
    DropReason.INSUFFICIENT: "the context was called insufficient, and assembly abstains then",
}

FLAGS = {
    Flag.UNCALIBRATED: "no profile, so the retriever's first k passages are kept",
    Flag.PROFILE_MISMATCH: "the profile was calibrated on another system, so only its k applies",
    Flag.CORPUS_CHANGED: "much of the corpus has changed since calibration; the profile applies, "
    "but calibrate again",
    Flag.UNVERIFIED: "nothing shows whether the profile was calibrated on this system; it applies",
    Flag.ROUTE_UNCALIBRATED: "the profile has no policy for the stages that answered, so "
    "only k applies",
    Flag.DOMAIN_VIOLATION: "a score is outside the range of its kind, so only k applies",
    Flag.INVALID_SCORES: "some scores are not numbers; those candidates are dropped, or, where "
    "none is a number, only k applies",
    Flag.RANK_ONLY: "the scores carry rank only, so only k applies",
    Flag.MISSING_SIGNALS: "the policy needs a signal that is missing",
    Flag.DEGRADED: "a stage was left out",
    Flag.EMPTY_RETRIEVAL: "the retriever returned no candidate",
    Flag.TRUNCATED: "no passage fits the budget, so the best one is cut",
    Flag.OVER_BUDGET: "no passage fits the budget, so the context is empty",
    Flag.UNREADABLE: "no passage that was kept could be read, so the next one is served",
    Flag.INSUFFICIENT: "probably no passage that was kept is relevant",
}


def threshold_in_words(threshold: Threshold) -> str:
    """The setting at which a passage would have been kept.

    >>> threshold_in_words(Threshold("min_ratio", 0.41279))
    'min_ratio ≤ 0.412'
    """
    value = threshold.value
    match threshold.setting:
        case "k":
            return f"k ≥ {value:.0f}"
        case "min_ratio" | "min_probability":
            # Rounded down, so that the value shown would keep it.
            return f"{threshold.setting} ≤ {math.floor(value * 1000) / 1000:.3f}"
        case "max_tokens" | "max_passage_chars":
            return f"{threshold.setting} ≥ {value:.0f}"
        case "drop_duplicates":
            return "duplicates are kept"
        case "abstain":
            return "abstain is off"
        case setting:
            return f"{setting} = {value:g}"
