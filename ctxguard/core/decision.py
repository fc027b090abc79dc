"""The decision: chooses which candidates of a ranking are kept. Passages are dropped here.

Both policies keep a prefix of one order, of at most k and at least min(min_keep, n) candidates
(DESIGN.md §4 and §5). It runs on every request, so the record of each candidate is built only when
read. Pure: no I/O, no clock, no logging.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from operator import gt
from typing import cast

import numpy as np

from ctxguard.core.passages import TOKENS, weight_of
from ctxguard.core.policies import ExpectedUtilityPolicy, Policy, RatioPolicy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.scores import (
    DOMAIN,
    INVALID_MAGNITUDE,
    all_valid,
    is_valid,
    relative_scores,
    within_domain,
)
from ctxguard.core.signals import legs_of
from ctxguard.core.types import (
    CandidateDecision,
    DropReason,
    Flag,
    FloatArray,
    Ranking,
    ScoreKind,
    Threshold,
    listed,
)
from ctxguard.core.value_of_information import ANSWER, AnswerModel
from ctxguard.errors import ConfigurationError

_UNKNOWN_RANK = 2**62
_THRESHOLD_REASON = {
    "ratio": DropReason.BELOW_RATIO,
    "expected_utility": DropReason.BELOW_PROBABILITY,
}
_FAISS_PADDING_ID = "-1"
_K_ALONE = frozenset({Flag.DOMAIN_VIOLATION, Flag.MISSING_SIGNALS, Flag.SCORES_CONTRADICTED})


@dataclass(frozen=True, eq=False, repr=False)
class Decision:
    """The candidates that a policy keeps, with a decision on every candidate of the ranking.

    Attributes:
        order: Positions in the ranking of the usable candidates, best first; the first ``n_kept``
            are kept.
        set_aside: Positions of candidates without a usable score, or with the id or the text of a
            better one, with the reason.
        probabilities: P(relevant) of each candidate, aligned with ``order``; None without a model.
        weighed: The values compared with the threshold, aligned likewise: P, or P weighed by
            length.
        in_order: Whether the ranking was found to be in the order of its scores.
    """

    ranking: Ranking
    policy: Policy
    order: Sequence[int]
    n_kept: int
    flags: tuple[Flag, ...] = ()
    set_aside: tuple[tuple[int, DropReason], ...] = ()
    probabilities: Sequence[float] | None = None
    weighed: Sequence[float] | None = None
    in_order: bool = False

    @property
    def kept(self) -> Sequence[int]:
        """Positions of the kept candidates, best first."""
        return self.order[: self.n_kept]

    @property
    def kept_ids(self) -> tuple[str, ...]:
        ids = self.ranking.passage_ids
        return tuple([ids[position] for position in self.kept])

    @property
    def is_as_asked(self) -> bool:
        """Whether the whole policy was applied; False if only its k was used."""
        if not _K_ALONE.isdisjoint(self.flags):
            return False
        # If no score was usable, none of them is set aside.
        return Flag.INVALID_SCORES not in self.flags or any(
            reason is DropReason.INVALID_SCORE for _, reason in self.set_aside
        )

    def __repr__(self) -> str:
        dropped = {str(reason): count for reason, count in self.dropped_by_reason.items()}
        return (
            f"Decision(kept={listed(self.kept_ids)}, candidates={len(self.ranking)}, "
            f"dropped={dropped}, policy={self.policy.kind!r}, "
            f"flags=[{', '.join(self.flags)}])"
        )

    @cached_property
    def dropped_by_reason(self) -> dict[DropReason, int]:
        """The number of candidates that each reason dropped; with ``n_kept`` it adds up to all."""
        counts: dict[DropReason, int] = {}
        for _, reason in self.set_aside:
            counts[reason] = counts.get(reason, 0) + 1
        # A prefix ends for one reason only; past k every passage is beyond k as well.
        n = len(self.order)
        if below := max(min(self.policy.k, n) - self.n_kept, 0):
            counts[_THRESHOLD_REASON[self.policy.kind]] = below
        if beyond := n - self.n_kept - below:
            counts[DropReason.BEYOND_K] = beyond
        return counts

    @cached_property
    def decisions(self) -> tuple[CandidateDecision, ...]:
        """One decision per candidate: the usable ones best first, then those set aside."""
        ids, scores, policy = self.ranking.passage_ids, self.ranking.scores, self.policy
        order, n = self.order, len(self.order)
        unknown: Sequence[None] = [None] * n
        relative, probabilities = self._relative_scores() or unknown, self.probabilities or unknown
        setting, least, values = (
            ("min_probability", policy.min_probability, self.weighed or unknown)
            if isinstance(policy, ExpectedUtilityPolicy)
            else ("min_ratio", policy.min_ratio, relative)
        )
        candidates: list[CandidateDecision] = []
        # A prefix is kept, the rest up to k is below the threshold, and the others are beyond k.
        for index, at in enumerate(order):
            reason, kept_if, value = None, list[Threshold](), values[index]
            if index >= self.n_kept:
                reason = _THRESHOLD_REASON[policy.kind]
                if index >= policy.k:
                    reason = DropReason.BEYOND_K
                    kept_if.append(Threshold("k", index + 1))
                if value is not None and value < least:
                    kept_if.append(Threshold(setting, value))
            own = (ids[at], index + 1, scores[at], relative[index], probabilities[index])
            candidates.append(CandidateDecision(*own, reason, tuple(kept_if)))
        copies = self.ranking.copies
        first_of = {copies.get(at, at): index for index, at in enumerate(order)} if copies else {}
        for position, reason in self.set_aside:
            candidate = CandidateDecision(ids[position], None, scores[position], None, None, reason)
            if reason is DropReason.DUPLICATE_TEXT:
                first = candidates[first_of[copies.get(position, position)]]
                candidate = candidate._replace(
                    relative_score=first.relative_score,
                    probability=first.probability,
                    kept_if=(Threshold("drop_duplicates", 0.0),) if first.kept else first.kept_if,
                )
            candidates.append(candidate)
        return tuple(candidates)

    def _relative_scores(self) -> list[float] | None:
        """Compute relative scores, aligned with ``order``; None if they cannot be compared."""
        kind = self.ranking.kind
        if not self.order or kind is ScoreKind.RANK or self.ranking.contradicted:
            return None
        scores = [*map(cast(Sequence[float], self.ranking.scores).__getitem__, self.order)]
        if not all_valid(scores):  # mode ``off`` sets nothing aside
            return None
        top = max(scores)
        if not within_domain(kind, min(scores), top):
            return None
        temperature = self.policy.temperature if isinstance(self.policy, RatioPolicy) else 1.0
        return relative_scores(kind, scores, temperature)


def decide(ranking: Ranking, policy: Policy) -> Decision:
    """Apply a policy to one ranking.

    Sets aside candidates without a usable score, and all but the best of those with the same text
    (``Ranking.copies``). Sorts the others by P(relevant) under ``expected_utility``, else as
    `candidate_order` does. If a score is impossible for its kind, no score is usable, or a signal
    is missing, the threshold is skipped, the top k is kept, and a flag says so. Never abstains
    while a stage is missing, which might have found something relevant.

    Raises:
        ConfigurationError: the policy compares scores but these carry rank only, or the ranking
            lacks a score.

    >>> from ctxguard.core.types import Hit
    >>> hits = [Hit("a", 10.0), Hit("b", 7.0), Hit("c", 6.9)]
    >>> ranking = Ranking.from_hits(hits, ScoreKind.RATIO)
    >>> decide(ranking, RatioPolicy(k=5, min_ratio=0.7)).kept_ids
    ('a', 'b')
    """
    order, set_aside, problem = candidate_order(ranking)
    if ranking.copies:
        order, set_aside = _without_copies(order, set_aside, ranking.copies)
    if isinstance(policy, ExpectedUtilityPolicy):
        return _decide_by_utility(ranking, policy, order, set_aside, problem)
    n, in_order = len(order), isinstance(order, range)
    flags = _score_flags(set_aside, problem) if set_aside or problem else ()
    n_kept = min(policy.k, n)
    if policy.min_ratio > 0.0:
        if ranking.kind is ScoreKind.RANK:
            relative_scores(ranking.kind, (1.0, 0.0))  # raises, and says what to use instead
        if problem is None and n:
            scores = cast(Sequence[float], ranking.scores)
            n_kept = _relative_prefix(ranking.kind, scores, order[:n_kept], policy)
    n_kept = max(n_kept, min(policy.min_keep or min(len(ranking.failures), 1), n))
    return Decision(ranking, policy, order, n_kept, flags, set_aside, in_order=in_order)


def _score_flags(
    set_aside: tuple[tuple[int, DropReason], ...], problem: Flag | None
) -> tuple[Flag, ...]:
    """Return the flags of the scores; a repeated id does not make a score unusable."""
    flags = [] if problem is None else [problem]
    if any(reason is DropReason.INVALID_SCORE for _, reason in set_aside):
        flags.insert(0, Flag.INVALID_SCORES)
    return tuple(dict.fromkeys(flags))


def _decide_by_utility(
    ranking: Ranking,
    policy: ExpectedUtilityPolicy,
    order: Sequence[int],
    set_aside: tuple[tuple[int, DropReason], ...],
    problem: Flag | None,
) -> Decision:
    """Apply a policy with a model; keep the top k by score if the model lacks a signal."""
    n, in_order = len(order), isinstance(order, range)
    # A score that is impossible for its kind is not a signal of the model; it matters without one.
    garbage = None if problem is Flag.DOMAIN_VIOLATION else problem
    flags = _score_flags(set_aside, garbage) if set_aside or garbage else ()
    can_be_known = n > 0 and problem is not Flag.SCORES_CONTRADICTED
    found = probabilities_of(ranking, order, policy.model) if can_be_known else None
    tokens = _tokens(ranking, order) if policy.per_token and n else None
    if found is None or (policy.per_token and tokens is None):
        if can_be_known:
            flags += (Flag.MISSING_SIGNALS,)
        if problem is not None and problem not in flags:  # only the scores can order them now
            flags += (problem,)
        n_kept = min(policy.k, n)
        return Decision(ranking, policy, order, n_kept, flags, set_aside, in_order=in_order)
    order, n_kept, p, weighed = _by_probability(ranking, policy, order, found, tokens)
    return Decision(ranking, policy, order, n_kept, flags, set_aside, p, weighed, in_order)


def _tokens(ranking: Ranking, order: Sequence[int]) -> FloatArray | None:
    """Return the candidates' numbers of tokens, in this order; None if unknown."""
    tokens = ranking.signals.get(TOKENS)
    if tokens is None or not np.isfinite(tokens).all():
        return None
    return tokens if isinstance(order, range) else tokens[[*order]]


def _by_probability(
    ranking: Ranking,
    policy: ExpectedUtilityPolicy,
    order: Sequence[int],
    probabilities: FloatArray,
    tokens: FloatArray | None,
) -> tuple[Sequence[int], int, list[float], list[float]]:
    """Order by P(relevant), ties as given; also return how many to keep, P and weighted P.

    With tokens, P weighed by length decides which are kept, and P their order.
    """
    weighed = probabilities if tokens is None else probabilities * weight_of(tokens)
    best_first = (-weighed).argsort(kind="stable")
    values, least = weighed[best_first].tolist(), policy.min_probability
    n_worthwhile = sum([value >= least for value in values[: policy.k]])
    n_kept = max(n_worthwhile, min(policy.min_keep or min(len(ranking.failures), 1), len(order)))
    found = values
    if tokens is not None:
        kept = best_first[:n_kept]
        best_first[:n_kept] = kept[(-probabilities[kept]).argsort(kind="stable")]
        values, found = weighed[best_first].tolist(), probabilities[best_first].tolist()
    indices = best_first.tolist()
    # Positions in the score order are the candidates' own if that order is as given.
    by_probability = indices if isinstance(order, range) else [order[index] for index in indices]
    return by_probability, n_kept, found, values


def decide_with_answers(
    ranking: Ranking, policy: ExpectedUtilityPolicy, name: str, model: AnswerModel
) -> Decision | None:
    """Decide by P(relevant) after an assessor's answers, which are one of the ranking's signals.

    A candidate without one keeps its P. None if there is no answer, or P cannot be computed.
    """
    answers, places = ranking.signals.get(ANSWER + name), ranking.signals.get(f"{ANSWER}place")
    if answers is None or not np.isfinite(answers).any():
        return None
    decision = decide(ranking, policy)
    if decision.probabilities is None:
        return None
    order: Sequence[int] = list(decision.order)
    after = model.updated(
        np.asarray(decision.probabilities),
        answers[order],
        None if places is None else places[order],
    )
    tokens = _tokens(ranking, order) if policy.per_token else None
    order, n_kept, p, weighed = _by_probability(ranking, policy, order, after, tokens)
    return replace(decision, order=order, n_kept=n_kept, probabilities=p, weighed=weighed)


def probabilities_of(
    ranking: Ranking, order: Sequence[int], model: RelevanceModel
) -> FloatArray | None:
    """Compute the candidates' P(relevant), in this order; see `RelevanceModel.probabilities`."""
    positions = None if isinstance(order, range) else order
    return model.probabilities(legs_of(ranking, order), ranking.signals, positions)


def sufficiency_of(
    decision: Decision, threshold: float | None, model: RelevanceModel | None = None
) -> tuple[float | None, bool | None]:
    """Judge whether the kept passages hold a relevant one, by the highest P(relevant) among them.

    It predicts that as well as models of the whole list do (DESIGN.md §5).

    Args:
        threshold: The least P that suffices; None if none is certified.
        model: The model of P(relevant), for a policy without its own.

    Returns:
        P, which is 0.0 if nothing is kept, and None without a model, or if the policy or the model
        was not applied as calibrated; whether P suffices, None without P or threshold.
    """
    n_kept, found = decision.n_kept, decision.probabilities
    if n_kept == 0:
        p = 0.0
    elif not _K_ALONE.isdisjoint(decision.flags):
        return None, None
    elif found is not None:
        p = float(found[0])
    else:
        if model is None:
            return None, None
        by_model = probabilities_of(decision.ranking, decision.order, model)
        if by_model is None:
            return None, None
        p = float(by_model[:n_kept].max())
    return p, None if threshold is None else p > 0.0 and p >= threshold


def _relative_prefix(
    kind: ScoreKind, scores: Sequence[float], order: Sequence[int], policy: RatioPolicy
) -> int:
    """Return the length of the longest prefix whose relative scores are at least min_ratio."""
    as_given = isinstance(order, range)
    ordered = scores[: len(order)] if as_given else [*map(scores.__getitem__, order)]
    for length, relative in enumerate(relative_scores(kind, ordered, policy.temperature)):
        if relative < policy.min_ratio:
            return length
    return len(order)


def _without_copies(
    order: Sequence[int], set_aside: tuple[tuple[int, DropReason], ...], copies: Mapping[int, int]
) -> tuple[Sequence[int], tuple[tuple[int, DropReason], ...]]:
    """Set aside all but the best candidate of each text."""
    best: dict[int, int] = {}
    repeated = [at for at in order if best.setdefault(copies.get(at, at), at) != at]
    return list(best.values()), (*set_aside, *[(at, DropReason.DUPLICATE_TEXT) for at in repeated])


def candidate_order(
    ranking: Ranking,
) -> tuple[Sequence[int], tuple[tuple[int, DropReason], ...], Flag | None]:
    """Order the usable candidates of a ranking, best first, before a policy is applied.

    Sorts by (score, upstream rank, passage id), so that ties never depend on input order, and keeps
    the best of the candidates with the same id. Keeps the upstream order (by upstream rank, else as
    given) if no score is usable, if the ranking is marked as contradicted, or if distances were not
    negated.

    Returns:
        Positions of the usable candidates; positions of the others, with the reason; the flag of
        scores that cannot be compared, None if they can. Kind ``rank`` needs no score.

    Raises:
        ConfigurationError: the numbers of scores and passage ids differ.
    """
    scores, ids = ranking.scores, ranking.passage_ids
    n = len(ids)
    if len(scores) != n:
        raise ConfigurationError(
            f"a ranking of {n} passage ids has {len(scores)} scores; give one score for each"
        )
    if n == 0:
        return (), (), None
    distinct = set(ids)
    by_rank = ranking.kind is ScoreKind.RANK
    if by_rank and all(score is None for score in scores):
        return (*_sorted_candidates(ranking, by_score=False, needs_score=False), None)
    if ranking.contradicted:
        return (*_sorted_candidates(ranking, by_score=False), Flag.SCORES_CONTRADICTED)
    set_aside: tuple[tuple[int, DropReason], ...] = ()
    are_plain = len(distinct) == n and _FAISS_PADDING_ID not in distinct
    positions = _strict_order(scores) if are_plain else ()
    if not positions:
        positions, set_aside = _sorted_candidates(ranking)
        if not positions:
            positions, set_aside = _sorted_candidates(ranking, by_score=False, needs_score=False)
            return positions, set_aside, None if by_rank else Flag.INVALID_SCORES
    best, worst = cast(float, scores[positions[0]]), cast(float, scores[positions[-1]])
    low, high = DOMAIN[ranking.kind]
    if low <= worst and best <= high:
        return positions, set_aside, None
    if ranking.kind is ScoreKind.DISTANCE:
        positions, set_aside = _sorted_candidates(ranking, by_score=False)
    return positions, set_aside, Flag.DOMAIN_VIOLATION


def _strict_order(scores: Sequence[float | None]) -> Sequence[int]:
    """Return positions by score if strictly descending, as they nearly always are; else empty."""
    order: Sequence[int] = range(len(scores))
    ordered: Sequence[float] = scores  # type: ignore[assignment]
    try:
        for is_sorted in (False, True):
            if is_sorted:
                order = sorted(order, key=ordered.__getitem__, reverse=True)
                ordered = list(map(ordered.__getitem__, order))
            if (
                all(map(gt, ordered, islice(ordered, 1, None)))
                and ordered[0] < INVALID_MAGNITUDE
                and ordered[-1] > -INVALID_MAGNITUDE
            ):
                return order
    except TypeError:  # some are not numbers
        pass
    return ()


def _sorted_candidates(
    ranking: Ranking, *, by_score: bool = True, needs_score: bool = True
) -> tuple[Sequence[int], tuple[tuple[int, DropReason], ...]]:
    """Sort the usable candidates as `candidate_order` does, or only by upstream rank."""
    scores, ids, ranks = ranking.scores, ranking.passage_ids, ranking.ranks
    order: Sequence[int] = range(len(ids))
    if _FAISS_PADDING_ID in ids or (needs_score and not all_valid(scores)):
        order = [
            at
            for at in order
            if ids[at] != _FAISS_PADDING_ID and (not needs_score or is_valid(scores[at]))
        ]
    if by_score:
        # Sorts are stable, so the least significant key goes first.
        order = sorted(order, key=ids.__getitem__)
    if ranks is not None:
        known = [_UNKNOWN_RANK if rank is None else rank for rank in ranks]
        order = sorted(order, key=known.__getitem__)
    if by_score:
        order = sorted(order, key=cast(Sequence[float], scores).__getitem__, reverse=True)
    return _distinct(order, ids)


def _distinct(
    order: Sequence[int], ids: Sequence[str]
) -> tuple[Sequence[int], tuple[tuple[int, DropReason], ...]]:
    """Keep the first candidate with each id, in this order; return the others with the reason."""
    if len(order) == len(ids) == len(set(ids)):
        return order, ()
    first: dict[str, int] = {}
    repeated = [at for at in order if first.setdefault(ids[at], at) != at]
    usable = set(order)
    garbage = [at for at in range(len(ids)) if at not in usable]
    return list(first.values()), (
        *[(at, DropReason.INVALID_SCORE) for at in garbage],
        *[(at, DropReason.DUPLICATE_ID) for at in repeated],
    )
