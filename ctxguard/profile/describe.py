"""Describes policies, utilities and decisions (reasons, thresholds, flags) for people. Pure."""

import math

from ctxguard.core.policies import Policy
from ctxguard.core.types import DropReason, Flag, Threshold
from ctxguard.measure.worth import Utilities

REASONS = {
    DropReason.BELOW_RATIO: "scored too far below the best",
    DropReason.BELOW_PROBABILITY: "too unlikely to be relevant",
    DropReason.BEYOND_K: "beyond k",
    DropReason.INVALID_SCORE: "its score is not a number",
    DropReason.DUPLICATE_ID: "a duplicate by passage id",
    DropReason.DUPLICATE_TEXT: "a duplicate by text",
    DropReason.OVER_BUDGET: "over the token budget",
    DropReason.UNREADABLE: "its text could not be read",
    DropReason.INSUFFICIENT: "the context was called insufficient, so assembly abstained",
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
    Flag.INVALID_SCORES: "some scores are not numbers; those candidates are dropped, or, "
    "where none is a number, only k applies",
    Flag.SCORES_CONTRADICTED: "the retriever's order contradicts the scores, so it was kept, and "
    "only k applies",
    Flag.RANK_ONLY: "the scores carry rank only, so only k applies",
    Flag.MISSING_SIGNALS: "a signal that the policy requires is missing",
    Flag.DEGRADED: "a stage was left out",
    Flag.EMPTY_RETRIEVAL: "the retriever returned no candidate",
    Flag.TRUNCATED: "no passage fits the budget, so the best one is cut",
    Flag.OVER_BUDGET: "no passage fits the budget, so the context is empty",
    Flag.UNREADABLE: "no passage that was kept could be read, so the next one is served",
    Flag.INSUFFICIENT: "probably no passage that was kept is relevant",
}


def describe_policy(policy: Policy) -> str:
    """Describe a policy in words.

    >>> from ctxguard.core.policies import RatioPolicy
    >>> describe_policy(RatioPolicy(k=4, min_ratio=0.7))
    'at most 4 passages, each with at least 0.7 of the top score, and at least 1'
    >>> describe_policy(RatioPolicy(k=5))
    'the first 5 passages'
    >>> describe_policy(RatioPolicy(k=1, min_ratio=0.7, min_keep=0))
    'at most 1 passage, each with at least 0.7 of the top score'
    """
    passages = "passage" if policy.k == 1 else f"{policy.k} passages"
    if policy.kind == "expected_utility":
        threshold = policy.min_probability
        each = f"relevant with probability at least {threshold:.3g}"
        all_k = f"the {passages} most likely to be relevant"
    else:
        threshold = policy.min_ratio
        each = f"with at least {threshold:.3g} of the top score"
        if (at := policy.temperature) != 1.0:
            each = f"with a relative score of at least {threshold:.3g} (T = {at:.3g})"
        all_k = f"the first {passages}"
    if policy.min_keep == policy.k or threshold == 0.0:
        return all_k
    at_most = f"at most {policy.k} {'passage' if policy.k == 1 else 'passages'}, each {each}"
    return f"{at_most}, and at least {policy.min_keep}" if policy.min_keep else at_most


def describe_utilities(utilities: Utilities, source: str | None) -> str:
    """Describe the worth of passages, and its ``Provenance.utilities_source``.

    >>> describe_utilities(Utilities(), None)
    'unjudged -0.02, irrelevant -0.02, hard negative -0.1, distractor -0.2 (the preset)'
    """
    return (
        f"unjudged {utilities.unjudged:g}, irrelevant {utilities.irrelevant:g}, hard negative "
        f"{utilities.hard_negative:g}, distractor {utilities.distractor:g} "
        f"({'the preset' if source is None else source})"
    )


def threshold_in_words(threshold: Threshold) -> str:
    """Name the setting at which a passage would have been kept.

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
