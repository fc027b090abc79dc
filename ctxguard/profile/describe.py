"""What a policy keeps and what passages are worth, in words for a person."""

from ctxguard.core.metrics import Utilities
from ctxguard.core.policies import Policy


def describe_policy(policy: Policy) -> str:
    """What a policy keeps of a ranking.

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
        each = f"with at least {threshold:g} of the top score"
        if policy.temperature != 1.0:
            each = f"with a relative score of at least {threshold:g} (T = {policy.temperature:g})"
        all_k = f"the first {passages}"
    if policy.min_keep == policy.k or threshold == 0.0:
        return all_k
    at_most = f"at most {policy.k} {'passage' if policy.k == 1 else 'passages'}, each {each}"
    return f"{at_most}, and at least {policy.min_keep}" if policy.min_keep else at_most


def describe_utilities(utilities: Utilities, source: str | None) -> str:
    """What passages are worth, and where that comes from.

    Args:
        utilities: The utilities.
        source: ``Provenance.utilities_source``; None for the preset.

    >>> describe_utilities(Utilities(), None)
    'unjudged -0.2, irrelevant -0.5, hard negative -0.5, distractor -1 (the preset)'
    """
    return (
        f"unjudged {utilities.unjudged:g}, irrelevant {utilities.irrelevant:g}, hard negative "
        f"{utilities.hard_negative:g}, distractor {utilities.distractor:g} "
        f"({'the preset' if source is None else source})"
    )
