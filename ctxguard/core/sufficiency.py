"""Sufficiency: whether at least one kept passage is probably relevant.

P(relevant) of the best kept passage predicts it as well as models of the whole list (DESIGN.md §5).
Pure: no I/O, no clock, no logging.
"""

from ctxguard.core.decision import Decision, probabilities_of
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.types import Flag

_NOT_AS_CALIBRATED = frozenset(
    {Flag.DOMAIN_VIOLATION, Flag.MISSING_SIGNALS, Flag.SCORES_CONTRADICTED}
)


def p_sufficient(decision: Decision, model: RelevanceModel | None = None) -> float | None:
    """Return the highest P(relevant) of the kept passages.

    It is at most the probability that the kept passages hold a relevant one.

    Args:
        decision: The decision.
        model: The model of P(relevant) for a policy without its own.

    Returns:
        0.0 if nothing is kept. None if there is no model, or the policy or the model was not
        applied as calibrated (a score outside its domain, a missing signal).
    """
    if decision.n_kept == 0:
        return 0.0
    if decision.flags and not _NOT_AS_CALIBRATED.isdisjoint(decision.flags):
        return None
    if decision.probabilities is not None:
        return float(decision.probabilities[0])
    if model is None:
        return None
    found = probabilities_of(decision.ranking, decision.order, model)
    return None if found is None else float(found[: decision.n_kept].max())


def suffices(probability: float | None, threshold: float | None) -> bool | None:
    """Return whether a probability reaches the threshold; None if either is missing.

    Returns False if nothing is kept, whatever the threshold.

    >>> suffices(0.4, 0.3), suffices(0.2, 0.3), suffices(0.0, 0.0), suffices(0.4, None)
    (True, False, False, None)
    """
    if probability is None or threshold is None:
        return None
    return probability > 0.0 and probability >= threshold
