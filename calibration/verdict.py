"""Decides, on queries that had no part in a choice, whether to enforce, shadow or keep.

A policy is enforced if it is safe and gains something: tokens, recall or UDCG. Pure. A lower bound
is Student's t with half a lost query added, since losses are rare and large: on five collections it
held in 94 to 100% of held-out parts of 20 to 50 queries, where a bootstrap and the plain t held in
65 to 83%. It is approximate; a certificate is not.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import ceil, floor, inf, sqrt
from typing import Literal

import numpy as np

from calibration.choice import LOST_QUERIES
from calibration.fit import significant
from calibration.settings import MAX_LOSS, TOLERANCE
from ctxguard._support.words import count
from ctxguard.core.types import FloatArray
from ctxguard.measure.interval import Interval, t_quantile
from ctxguard.profile.schema import RouteVerdict

FEWEST_MEASURED = 20
"""With fewer queries that have a relevant passage, nothing can be shown."""

CONFIDENCE = 0.9

LEAST_SAVED = 0.05
"""The smallest saving that counts as a gain, as a share of today's tokens."""

RISK_PER_SAVED = 0.25
"""The recall that may be lost at the lower bound per share of tokens saved, if a lean context was
not asked for: a shorter first k pays about as much for its saving. With 20 draws of 50 labels of
each of four sets, today = first 10, the worst set lost .003 of recall so and .011 without; with 20
other draws .003 and .007."""

_MOST_NEEDED = 5_000
"""The most labels that are ever asked for."""


def verdict(
    recall: FloatArray,
    udcg: FloatArray,
    tokens: FloatArray,
    *,
    serving_k: int,
    tolerance: float,
    max_loss: float = MAX_LOSS,
    todays_udcg: float = 1.0,
    shown_by: Literal["folds", "held_out"] = "folds",
    refutable: bool = True,
    risk_per_saved: float = inf,
) -> RouteVerdict:
    """Judge a policy on queries that had no part in its choice.

    It is safe if mean recall is at most ``tolerance`` below today's and the lower bounds on recall
    and on UDCG are at most ``max_loss`` below. A gain is shown if the interval of recall or of UDCG
    lies above 0, or that of tokens below 0 with at least a twentieth saved, and enough for what
    recall may lose.

    Args:
        recall: Shape (n,): recall of the policy less that of the first ``serving_k``, of the
            queries that have a relevant passage.
        udcg: Shape (n_all,): UDCG less theirs, of all queries.
        tokens: Shape (n_all,): tokens less theirs, as a share of their mean; passages where tokens
            are unknown.
        max_loss: How far the lower bounds may lie below 0; that of UDCG as a share of today's.
        todays_udcg: Mean UDCG of the first ``serving_k``; below 1 it counts as 1, which is what
            one relevant passage gains.
        refutable: Whether a policy that is shown to lose recall or UDCG gives way to today's;
            otherwise it stays in shadow, since its loss was accepted.
        risk_per_saved: How far the lower bound on recall may lie below 0 where tokens are all that
            is gained, as a share of those saved.

    >>> none, leaner = np.zeros(40), np.full(40, -0.3)
    >>> verdict(none, none, leaner, serving_k=5, tolerance=0.01).decision
    'enforce'
    >>> verdict(none, none, none, serving_k=5, tolerance=0.01).statement[:45]
    'keep: safe, but no gain is shown: tokens diff'
    >>> few = verdict(none[:20], none[:20], leaner[:20], serving_k=5, tolerance=0.01)
    >>> few.decision, few.n_needed
    ('shadow', 28)
    >>> verdict(none - 0.2, none - 0.2, leaner, serving_k=5, tolerance=0.01).decision
    'keep'
    """
    n = recall.size
    unproven = RouteVerdict(
        decision="shadow",
        n=n,
        serving_k=serving_k,
        tolerance=tolerance,
        max_loss=max_loss,
        shown_by=shown_by,
    )
    if n < FEWEST_MEASURED:
        needed = fewest_to_enforce(tolerance, max_loss)
        return unproven.model_copy(update={"n_needed": needed})
    figures = {"recall": _bounded(recall), "udcg": _bounded(udcg), "tokens": mean_interval(tokens)}
    share = udcg / max(todays_udcg, 1.0)
    plain = {"recall": mean_interval(recall), "udcg": mean_interval(udcg)}
    lost = any((each.upper or 0.0) < -tolerance for each in plain.values())
    least = min(lower_bound(recall), lower_bound(share))
    gains = [(each.lower or 0.0) > 0.0 for each in plain.values()]
    most_lost = lost_for(figures["tokens"], risk_per_saved)
    gains.append(lower_bound(recall) >= -most_lost)
    for_the_saving = _needed(recall, tolerance, most_lost) if most_lost > 0.0 else None
    return conclude(
        unproven.model_copy(update=figures),
        safe=float(recall.mean()) >= -tolerance and least >= -max_loss,
        gained=any(gains),
        lost=refutable and lost,
        for_a_gain=[*map(needed_to_reach, plain.values()), for_the_saving],
        for_safety=[_needed(each, tolerance, max_loss) for each in (recall, share)],
    )


def lost_for(tokens: Interval, risk_per_saved: float) -> float:
    """Return how much recall a saving may cost at the lower bound; −∞ if no saving is shown.

    >>> lost_for(Interval(-0.2, -0.3, -0.1, 9), 0.25), lost_for(Interval(-0.02, -0.04, 0.0, 9), 1)
    (0.05, -inf)
    """
    saved = -(tokens.value or 0.0) if (tokens.upper or 0.0) < 0.0 else 0.0
    return risk_per_saved * saved if saved >= LEAST_SAVED else -inf


def conclude(
    found: RouteVerdict,
    *,
    safe: bool,
    gained: bool,
    lost: bool,
    for_a_gain: Iterable[int | None],
    for_safety: Sequence[int | None],
) -> RouteVerdict:
    """Decide from the figures whether to enforce the policy, shadow it or keep today's context.

    Args:
        for_a_gain: The queries like these that would show each gain; None if none would.
        for_safety: Likewise for each figure that has to be safe.
    """
    decision: Literal["enforce", "shadow", "keep"] = "keep"
    needed = None
    if safe and gained:
        decision = "enforce"
    elif safe:
        needed = min(filter(None, for_a_gain), default=None)
    elif not lost:
        decision = "shadow"
        needed = None if None in for_safety else max(filter(None, for_safety))
    return found.model_copy(update={"decision": decision, "n_needed": needed})


def _bounded(differences: FloatArray) -> Interval:
    """Return the mean with a cautious lower and a plain upper bound."""
    found = mean_interval(differences)
    if found.upper is None:
        return found
    lower, upper = lower_bound(differences), found.upper
    return Interval(found.value, floor(lower * 1e4) / 1e4, ceil(upper * 1e4) / 1e4, found.n)


def needed_to_reach(figure: Interval, least: float = 0.0) -> int | None:
    """Count how many queries like these would put a lower bound above ``least``.

    Its distance from the mean shrinks with the square root of their number. None if the mean is not
    above it, or they would be over 5,000.
    """
    if figure.value is None or figure.lower is None or figure.value <= least:
        return None
    needed = max(ceil(figure.n * ((figure.value - figure.lower) / (figure.value - least)) ** 2), 1)
    return needed if needed <= _MOST_NEEDED else None


def mean_interval(values: FloatArray) -> Interval:
    """Return the mean with its two bounds by Student's t, 90% each; no bounds below two values.

    >>> found = mean_interval(np.array([0.0, 1.0, 2.0]))
    >>> found.value, round(found.lower, 2), found.n
    (1.0, -0.09, 3)
    """
    n = values.size
    if n < 1:
        return Interval.undefined()
    mean = float(values.mean())
    if n < 2:
        return Interval(significant(mean), None, None, n)
    half = t_quantile(CONFIDENCE, n - 1.0) * float(values.std(ddof=1)) / sqrt(n)
    return Interval(significant(mean), significant(mean - half), significant(mean + half), n)


def fewest_to_enforce(tolerance: float, max_loss: float) -> int | None:
    """Count the queries needed to enforce a policy that loses nothing on any; None above 5,000.

    >>> fewest_to_enforce(0.01, 0.05)
    28
    """
    return _needed(np.zeros(1), tolerance, max_loss)


def in_reach(n: int) -> str:
    """Say which choices this many answerable questions can decide, and how many more others need.

    >>> in_reach(22)
    '22 questions with a relevant passage: enough to extend; 6 more to decide leaner'
    """
    leaner = fewest_to_enforce(TOLERANCE, MAX_LOSS) or _MOST_NEEDED
    steps = (("extend", FEWEST_MEASURED), ("decide leaner", leaner))
    enough = " and to ".join([name for name, needed in steps if needed <= n])
    more = ", ".join([f"{needed - n:,} more to {name}" for name, needed in steps if needed > n])
    words = filter(None, [enough and f"enough to {enough}", more])
    return f"{count(n, 'question')} with a relevant passage: {'; '.join(words)}"


def lower_bound(differences: FloatArray, n: int | None = None) -> float:
    """Return the lower bound on a mean difference, with half a lost query added.

    Where nothing was lost on any query, a plain standard error of 0 would say that nothing ever is.

    Args:
        n: The number of queries like these to assume, over 1; the actual number unless given.
    """
    n = differences.size if n is None else n
    total = n + LOST_QUERIES
    mean = (n * differences.mean() - LOST_QUERIES) / total
    squares = n * ((differences - mean) ** 2).mean() + LOST_QUERIES * (-1.0 - mean) ** 2
    return float(mean - t_quantile(CONFIDENCE, n - 1.0) * sqrt(squares) / total)


def _needed(differences: FloatArray, tolerance: float, max_loss: float) -> int | None:
    """Count how many queries like these would show the policy to be safe; None above 5,000."""
    if float(differences.mean()) < -tolerance:
        return None
    sizes = range(FEWEST_MEASURED, _MOST_NEEDED + 1)
    # The bound rises with the number of queries.
    place = bisect_left(sizes, True, key=lambda n: lower_bound(differences, n) >= -max_loss)
    return sizes[place] if place < len(sizes) else None
