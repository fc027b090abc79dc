"""From what a retriever gave back to the context that is served: check, decide, assemble, flag.

No clock, no counts and no locks: those are the guard's, and so are the errors raised here.
"""

from collections.abc import Iterable, Mapping

from ctxguard.context import Assembled, Assembly, Context, assemble, bare_passages
from ctxguard.errors import ConfigurationError
from ctxguard.policy import Decision, Policy, RatioPolicy, decide
from ctxguard.request import Request
from ctxguard.serving import Retrieval, describe
from ctxguard.types import Flag, Hit, Mode, Ranking, ScoreKind
from ctxguard.where import Where, verified


def ranking_of(
    retrieved: Retrieval, score_kind: ScoreKind | None, where: Where | None = None
) -> Ranking:
    """What a retriever gave back, as a ranking that the filter allows.

    Args:
        retrieved: A ``Ranking``, or hits.
        score_kind: What plain hits' scores mean; None where nobody said.
        where: The filter that the retriever was asked to apply; None for none.

    Raises:
        ConfigurationError: neither a ranking nor hits, or hits whose scores mean nothing known.
        FilterViolationError: a candidate that the filter does not allow.

    >>> ranking_of([Hit("a", 2.0), Hit("b", 1.0)], ScoreKind.RATIO).passage_ids
    ('a', 'b')
    """
    ranking = retrieved if isinstance(retrieved, Ranking) else _from_hits(retrieved, score_kind)
    return ranking if where is None else verified(ranking, where)


def _from_hits(retrieved: Iterable[Hit], score_kind: ScoreKind | None) -> Ranking:
    # An empty string or mapping is iterable too, and must not pass for an empty result.
    iterable = isinstance(retrieved, Iterable) and not isinstance(retrieved, str | bytes | Mapping)
    hits = tuple(retrieved) if iterable else None
    if hits is None or not all(issubclass(kind, Hit) for kind in set(map(type, hits))):
        raise ConfigurationError(
            f"the retriever returned {describe(retrieved)}; return a Ranking, or Hit "
            "objects together with score_kind"
        )
    if score_kind is None:
        raise ConfigurationError(
            "plain hits need score_kind on the guard: say what the scores mean, one of "
            + ", ".join(kind.value for kind in ScoreKind)
        )
    return Ranking.from_hits(hits, score_kind)


def answer(
    request: Request, ranking: Ranking, mode: Mode, assembly: Assembly, bare: RatioPolicy
) -> Context:
    """The context that answers a request (DESIGN.md §7).

    Args:
        request: Is served by the plan of the route that answered.
        ranking: Every candidate.
        mode: Whether the decision is taken, and whether it is served.
        assembly: How kept passages become a context.
        bare: The policy of the bare retriever: its top k.
    """
    decision, flags = _decided(request, ranking, mode, bare)
    if mode is Mode.ENFORCE:
        assembled = assemble(decision, assembly)
    else:
        assembled = Assembled(bare_passages(ranking, bare.k))
    if ranking.failures:
        flags = (*flags, Flag.DEGRADED)
    if not len(ranking):
        flags = (*flags, Flag.EMPTY_RETRIEVAL)
    asked = request.asked
    return Context(
        request_id=request.request_id,
        query=asked.query,
        route=ranking.route,
        mode=mode,
        passages=assembled.passages,
        decision=decision,
        dropped_in_assembly=assembled.dropped,
        flags=flags,
        failures=ranking.failures + assembled.failures,
        assembly=assembly,
        segment=asked.segment,
        session_id=asked.session_id,
        profile_id=request.serving.profile_id,
    )


def _decided(
    request: Request, ranking: Ranking, mode: Mode, bare: RatioPolicy
) -> tuple[Decision, tuple[Flag, ...]]:
    """The decision by the plan that applies, and what was unusual about plan and scores."""
    if mode is Mode.OFF:
        n = len(ranking)
        return Decision(ranking, bare, range(n), min(bare.k, n)), ()
    plan = request.serving.plan(ranking.route, request.asked.segment)
    policy, flags = plan.policy, plan.flags
    if plan.kind is not None and plan.kind is not ranking.kind:
        # The profile knows this route, but its scores have another meaning here.
        policy, flags = RatioPolicy(k=policy.k), (*flags, Flag.PROFILE_MISMATCH)
    elif ranking.kind is ScoreKind.RANK and compares_scores(policy):
        policy, flags = RatioPolicy(k=policy.k), (*flags, Flag.RANK_ONLY)
    decision = decide(ranking, policy)
    return decision, (*flags, *decision.flags) if decision.flags else flags


def compares_scores(policy: Policy) -> bool:
    """Whether a policy needs scores that say more than an order.

    >>> compares_scores(RatioPolicy(min_ratio=0.5)), compares_scores(RatioPolicy(k=3))
    (True, False)
    """
    return isinstance(policy, RatioPolicy) and policy.min_ratio > 0.0
