"""The decision: which candidates of a ranking are kept. This is where a passage is dropped.

Two policies, one form: a prefix of one order, at most k, at least min(min_keep, n). ``ratio``
orders by score and compares with the top (DESIGN.md §4); ``expected_utility`` orders by a
calibrated P(relevant) and compares with what a passage is worth (§5). Pure: no I/O, no clock,
no logging; called on every request, so verdicts are built only when they are read.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import gt, neg
from typing import Literal, cast

import numpy as np

from ctxguard.errors import ConfigurationError
from ctxguard.scores import (
    INVALID_MAGNITUDE,
    all_valid,
    is_relative,
    is_valid,
    relative_score,
    within_domain,
)
from ctxguard.signals import RelevanceModel
from ctxguard.types import (
    DEFAULT_K,
    DropReason,
    Flag,
    Leg,
    Ranking,
    ScoreKind,
    Threshold,
    Verdict,
)

_UNKNOWN_RANK = 2**62
_FAISS_PADDING_IDS = ("-1", -1)


@dataclass(frozen=True, slots=True)
class RatioPolicy:
    """Keep at most ``k`` passages whose score is at least ``min_ratio`` of the best one's.

    Attributes:
        k: The most passages that a context may hold, ≥ 1.
        min_ratio: The least relative score that is kept, in [0, 1]; 0 switches the relative
            filter off.
        temperature: T of the relative score, > 0.
        min_keep: The fewest passages kept where that many valid candidates exist, in [0, k].
    """

    k: int = DEFAULT_K
    min_ratio: float = 0.0
    temperature: float = 1.0
    min_keep: int = 1
    kind: Literal["ratio"] = "ratio"

    def __post_init__(self) -> None:
        _check_counts(self.k, self.min_keep)
        if not 0.0 <= self.min_ratio <= 1.0:
            raise ConfigurationError(
                f"min_ratio {self.min_ratio!r} must lie in [0, 1]: it is a share of the top score"
            )
        if not 0.0 < self.temperature < float("inf"):
            raise ConfigurationError(f"temperature {self.temperature!r} must be > 0 and finite")


@dataclass(frozen=True, slots=True)
class ExpectedUtilityPolicy:
    """Keep at most ``k`` passages whose expected utility is positive.

    A passage that is relevant with probability P is worth P·gain − (1 − P)·cost, so it is kept
    while P ≥ cost / (cost + gain).

    Attributes:
        model: P(relevant) from the legs' scores.
        k: The most passages that a context may hold, ≥ 1.
        cost: What a passage that is not relevant costs the reader, ≥ 0.
        gain: What a relevant passage is worth, > 0.
        min_keep: The fewest passages kept where that many valid candidates exist, in [0, k].
    """

    model: RelevanceModel
    k: int = DEFAULT_K
    cost: float = 0.5
    gain: float = 1.0
    min_keep: int = 1
    kind: Literal["expected_utility"] = "expected_utility"

    def __post_init__(self) -> None:
        _check_counts(self.k, self.min_keep)
        if not 0.0 <= self.cost < float("inf"):
            raise ConfigurationError(f"cost {self.cost!r} must be ≥ 0 and finite")
        if not 0.0 < self.gain < float("inf"):
            raise ConfigurationError(f"gain {self.gain!r} must be > 0 and finite")

    @property
    def min_probability(self) -> float:
        """The least P(relevant) at which a passage is worth its place."""
        return self.cost / (self.cost + self.gain)


Policy = RatioPolicy | ExpectedUtilityPolicy


def _check_counts(k: int, min_keep: int) -> None:
    if k < 1:
        raise ConfigurationError(f"k {k!r} must be at least 1: it is the size of the context")
    if not 0 <= min_keep <= k:
        raise ConfigurationError(f"min_keep {min_keep!r} must lie in [0, k = {k}]")


@dataclass(frozen=True)
class Decision:
    """What was kept, and on request the verdict on every candidate.

    Attributes:
        ranking: The ranking that was decided on.
        policy: The policy that decided.
        order: Positions in the ranking of the usable candidates, best first.
        n_kept: How many of ``order`` are kept: a prefix.
        flags: What was unusual.
        set_aside: Positions that were never candidates (garbage scores, repeated ids), with
            the reason.
        probabilities: P(relevant) in the order of ``order``; None where no model applied.
    """

    ranking: Ranking
    policy: Policy
    order: Sequence[int]
    n_kept: int
    flags: tuple[Flag, ...] = ()
    set_aside: tuple[tuple[int, DropReason], ...] = ()
    probabilities: Sequence[float] | None = None

    @property
    def kept(self) -> Sequence[int]:
        """Positions of the kept candidates, best first."""
        return self.order[: self.n_kept]

    @property
    def kept_ids(self) -> tuple[str, ...]:
        ids = self.ranking.passage_ids
        return tuple([ids[position] for position in self.kept])

    @cached_property
    def dropped_by_reason(self) -> dict[DropReason, int]:
        """How many candidates each reason dropped; with ``n_kept`` it adds up to all of them."""
        counts: dict[DropReason, int] = {}
        for _, reason in self.set_aside:
            counts[reason] = counts.get(reason, 0) + 1
        # A prefix ends for one reason only; past k every passage is beyond k as well.
        below = max(min(self.policy.k, len(self.order)) - self.n_kept, 0)
        beyond = len(self.order) - self.n_kept - below
        if below:
            counts[self._threshold_reason] = below
        if beyond:
            counts[DropReason.BEYOND_K] = beyond
        return counts

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """One verdict per candidate: the usable ones best first, then those set aside."""
        ids, scores, policy = self.ranking.passage_ids, self.ranking.scores, self.policy
        by_utility = isinstance(policy, ExpectedUtilityPolicy)
        setting, least = (
            ("min_probability", policy.min_probability)
            if isinstance(policy, ExpectedUtilityPolicy)
            else ("min_ratio", policy.min_ratio)
        )
        n = len(self.order)
        relative = self._relative_scores() or (None,) * n
        probabilities = self.probabilities or (None,) * n
        below, beyond = self._threshold_reason, DropReason.BEYOND_K
        verdicts = []
        for rank, position, r, p in zip(
            range(1, n + 1), self.order, relative, probabilities, strict=True
        ):
            reason: DropReason | None = None
            kept_if: tuple[Threshold, ...] = ()
            if rank > self.n_kept:
                reason, compared = below, p if by_utility else r
                if compared is not None and compared < least:
                    kept_if = (Threshold(setting, compared),)
                if rank > policy.k:
                    reason, kept_if = beyond, (Threshold("k", rank), *kept_if)
            verdicts.append(Verdict(ids[position], rank, scores[position], r, p, reason, kept_if))
        verdicts += [
            Verdict(ids[position], None, scores[position], None, None, reason)
            for position, reason in self.set_aside
        ]
        return tuple(verdicts)

    @property
    def _threshold_reason(self) -> DropReason:
        if isinstance(self.policy, ExpectedUtilityPolicy):
            return DropReason.BELOW_PROBABILITY
        return DropReason.BELOW_RATIO

    def _relative_scores(self) -> list[float] | None:
        """r of each candidate in ``order``; None where the scores cannot be compared."""
        kind = self.ranking.kind
        if not self.order or not is_relative(kind):
            return None
        scores = [cast(float, self.ranking.scores[position]) for position in self.order]
        if not all_valid(scores):  # mode ``off`` keeps the order as given, garbage and all
            return None
        top = max(scores)
        if not within_domain(kind, min(scores), top):
            return None
        temperature = self.policy.temperature if isinstance(self.policy, RatioPolicy) else 1.0
        return [relative_score(kind, top, score, temperature) for score in scores]


def decide(ranking: Ranking, policy: Policy) -> Decision:
    """Apply a policy to one ranking.

    Garbage scores are set aside and counted, never compared with. Candidates are sorted by
    (score, upstream rank, passage id), and under ``expected_utility`` by probability before
    that. Where a score lies outside what its kind allows, or a signal is missing, the threshold
    is skipped, the top k is kept, and the decision says so.

    Args:
        ranking: Candidates in any order.
        policy: The calibrated policy for the route that answered.

    Returns:
        The decision: a prefix of the sorted candidates.

    Raises:
        ConfigurationError: a relative filter asked of scores that carry rank only.

    >>> from ctxguard.types import Hit
    >>> hits = [Hit("a", 10.0), Hit("b", 7.0), Hit("c", 6.9)]
    >>> ranking = Ranking.from_hits(hits, ScoreKind.RATIO)
    >>> decide(ranking, RatioPolicy(k=5, min_ratio=0.7)).kept_ids
    ('a', 'b')
    """
    if isinstance(policy, ExpectedUtilityPolicy):
        return _decide_by_utility(ranking, policy)
    if policy.min_ratio > 0.0 and not is_relative(ranking.kind):
        relative_score(ranking.kind, 1.0, 0.0)  # raises, and says what to use instead
    order, set_aside = candidate_order(ranking)
    n = len(order)
    flags = _garbage_flags(set_aside)
    n_kept = min(policy.k, n)
    if n:
        scores = cast(Sequence[float], ranking.scores)
        if not within_domain(ranking.kind, scores[order[-1]], scores[order[0]]):
            flags += (Flag.DOMAIN_VIOLATION,)
        elif policy.min_ratio > 0.0:
            n_kept = _relative_prefix(ranking.kind, scores, order[:n_kept], policy)
    return Decision(ranking, policy, order, max(n_kept, min(policy.min_keep, n)), flags, set_aside)


def _garbage_flags(set_aside: tuple[tuple[int, DropReason], ...]) -> tuple[Flag, ...]:
    """A repeated id is set aside too, but its score is in order."""
    if set_aside and any(reason is DropReason.INVALID_SCORE for _, reason in set_aside):
        return (Flag.INVALID_SCORES,)
    return ()


def _decide_by_utility(ranking: Ranking, policy: ExpectedUtilityPolicy) -> Decision:
    order, set_aside = candidate_order(ranking)
    n = len(order)
    flags = _garbage_flags(set_aside)
    legs = ranking.legs
    if not isinstance(order, range):
        legs = {name: Leg(leg.scores[list(order)], leg.kind) for name, leg in legs.items()}
    probabilities = policy.model.probabilities(legs) if n else None
    if probabilities is None:
        missing = (*flags, Flag.MISSING_SIGNALS) if n else flags
        return Decision(ranking, policy, order, min(policy.k, n), missing, set_aside)
    # Stable, so that equal probabilities keep the order of the scores.
    by_probability = np.argsort(-probabilities, kind="stable")
    ranked = probabilities[by_probability].tolist()
    worthwhile = bisect_right(ranked, -policy.min_probability, key=neg)
    n_kept = max(min(worthwhile, policy.k), min(policy.min_keep, n))
    return Decision(
        ranking,
        policy,
        [order[index] for index in by_probability.tolist()],
        n_kept,
        flags,
        set_aside,
        ranked,
    )


def _relative_prefix(
    kind: ScoreKind, scores: Sequence[float], order: Sequence[int], policy: RatioPolicy
) -> int:
    """Length of the longest prefix of ``order`` whose relative scores reach min_ratio."""
    top, min_ratio, temperature = scores[order[0]], policy.min_ratio, policy.temperature
    for length, position in enumerate(order):
        if relative_score(kind, top, scores[position], temperature) < min_ratio:
            return length
    return len(order)


def candidate_order(
    ranking: Ranking,
) -> tuple[Sequence[int], tuple[tuple[int, DropReason], ...]]:
    """Positions of the usable candidates, best first, and those set aside with the reason.

    Sorted by (score, upstream rank, passage id), so that ties never depend on input order. Of
    candidates with one id the best is kept.

    Raises:
        ConfigurationError: there is not one score for each passage id.
    """
    scores, ids = ranking.scores, ranking.passage_ids
    n = len(ids)
    if len(scores) != n:
        raise ConfigurationError(
            f"a ranking of {n} passage ids has {len(scores)} scores; give one score for each"
        )
    if n == 0:
        return (), ()
    distinct = set(ids)
    if len(distinct) == n and distinct.isdisjoint(_FAISS_PADDING_IDS):
        # Nearly every ranking is strictly descending, as given or once sorted, and then it holds
        # neither garbage nor ties; a pass in C tells.
        try:
            if _strictly_descending(scores):
                return range(n), ()
            order = sorted(range(n), key=scores.__getitem__, reverse=True)  # type: ignore[arg-type]
            if _strictly_descending([scores[position] for position in order]):
                return order, ()
        except TypeError:
            pass
    return _sorted_candidates(ranking)


def _strictly_descending(scores: Sequence[float | None]) -> bool:
    """Whether each score is valid and below the one before it.

    Raises:
        TypeError: some are not numbers.
    """
    first, last = cast(float, scores[0]), cast(float, scores[-1])
    return (
        all(map(gt, scores, islice(scores, 1, None)))  # type: ignore[arg-type]
        and first < INVALID_MAGNITUDE
        and last > -INVALID_MAGNITUDE
    )


def _sorted_candidates(
    ranking: Ranking,
) -> tuple[Sequence[int], tuple[tuple[int, DropReason], ...]]:
    scores, ids, ranks = ranking.scores, ranking.passage_ids, ranking.ranks
    order = list(range(len(ids)))
    set_aside: list[tuple[int, DropReason]] = []
    distinct = set(ids)
    if not (all_valid(scores) and distinct.isdisjoint(_FAISS_PADDING_IDS)):
        usable = [
            is_valid(score) and passage_id not in _FAISS_PADDING_IDS
            for score, passage_id in zip(scores, ids, strict=True)
        ]
        set_aside = [(at, DropReason.INVALID_SCORE) for at in order if not usable[at]]
        order = [at for at in order if usable[at]]
    # Sorts are stable, so the least significant key goes first.
    order.sort(key=ids.__getitem__)
    if ranks is not None:
        order.sort(key=[_UNKNOWN_RANK if rank is None else rank for rank in ranks].__getitem__)
    order.sort(key=cast(Sequence[float], scores).__getitem__, reverse=True)
    if len(distinct) < len(ids):
        best: dict[str, int] = {}
        for at in order:
            if best.setdefault(ids[at], at) != at:
                set_aside.append((at, DropReason.DUPLICATE_ID))
        order = list(best.values())
    return order, tuple(set_aside)
