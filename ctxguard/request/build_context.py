"""Build the context that is served from what a retriever returned: check, decide, assemble, flag.

No clock, no counters and no locks: those are the guard's, which also counts the errors raised here.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ctxguard.core.context import Assembled, Assembly, Context, assemble, bare_passages
from ctxguard.core.decision import Decision, decide
from ctxguard.core.metadata_filter import verified
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Flag, Hit, Mode, Ranking, ScoreKind
from ctxguard.errors import ConfigurationError
from ctxguard.request.bound_profile import describe
from ctxguard.request.input import Request

if TYPE_CHECKING:
    from ctxguard.retrieval.protocols import Retrieval


def build_context(
    request: Request,
    retrieved: "Retrieval",
    score_kind: ScoreKind | None,
    assembly: Assembly,
    bare: RatioPolicy,
) -> Context:
    """The context that answers a request (DESIGN.md §7).

    Args:
        request: The request.
        retrieved: What the retriever returned for it: a ``Ranking``, or hits.
        score_kind: What the scores of plain hits mean; None if that was not set.
        assembly: How kept passages become a context.
        bare: The policy of the bare retriever: its top k.

    Raises:
        ConfigurationError: ``retrieved`` is neither a ranking nor hits, or is one that cannot be
            decided on.
        FilterViolationError: a candidate does not satisfy the request's filter.
    """
    ranking = retrieved if isinstance(retrieved, Ranking) else _ranking_of(retrieved, score_kind)
    given = request.input
    if given.where is not None:
        ranking = verified(ranking, given.where)
    decision, flags = _decide(request, ranking, bare)
    assembled = Assembled() if request.mode is Mode.OFF else assemble(decision, assembly)
    passages = assembled.passages
    if request.mode is not Mode.ENFORCE:
        # In shadow mode assembly runs for the record alone.
        passages = bare_passages(ranking, bare.k)
    if ranking.failures:
        flags = (*flags, Flag.DEGRADED)
    if len(ranking.passage_ids) == 0:
        flags = (*flags, Flag.EMPTY_RETRIEVAL)
    return Context(
        request_id=request.request_id,
        query=given.query,
        route=ranking.route,
        mode=request.mode,
        passages=passages,
        decision=decision,
        dropped_in_assembly=assembled.dropped,
        flags=flags,
        failures=ranking.failures + assembled.failures,
        assembly=assembly,
        segment=given.segment,
        session_id=given.session_id,
        profile_id=request.bound.profile_id,
    )


def _decide(
    request: Request, ranking: Ranking, bare: RatioPolicy
) -> tuple[Decision, tuple[Flag, ...]]:
    """The decision by the policy that applies, with the flags of the policy and of the scores."""
    if request.mode is Mode.OFF:
        n = len(ranking.passage_ids)
        return Decision(ranking, bare, range(n), min(bare.k, n)), ()
    bound, route = request.bound, ranking.route
    applies = bound.route_policies[route]
    if bound.segment_policies:
        applies = bound.segment_policies.get((route, request.input.segment), applies)
    policy, flags = applies.policy, applies.flags
    if applies.score_kind is not None and applies.score_kind is not ranking.kind:
        # The profile knows this route, but its scores have another meaning here.
        policy, flags = applies.top_k, (*flags, Flag.PROFILE_MISMATCH)
    elif ranking.kind is ScoreKind.RANK and applies.compares_scores:
        policy, flags = applies.top_k, (*flags, Flag.RANK_ONLY)
    decision = decide(ranking, policy)
    return decision, (*flags, *decision.flags)


def _ranking_of(retrieved: Iterable[Hit], score_kind: ScoreKind | None) -> Ranking:
    """A ranking from plain hits, refused with the mend where they are something else."""
    # An empty string or mapping is iterable too, and must not pass for an empty result.
    if not isinstance(retrieved, Iterable) or isinstance(retrieved, str | bytes | Mapping):
        raise ConfigurationError(
            f"the retriever returned {describe(retrieved)}; return a Ranking, or a list of Hits"
        )
    hits = tuple(retrieved)
    others = {kind for kind in set(map(type, hits)) if not issubclass(kind, Hit)}
    if others:
        raise ConfigurationError(
            f"the retriever returned {describe(retrieved)} that holds "
            f"{', '.join(sorted(map(_full_name, others)))}; make each item a ctxguard.Hit, as in "
            "Hit(passage_id, score, text), or return a Ranking"
        )
    if score_kind is None:
        raise ConfigurationError(
            "plain hits need score_kind on the guard: say what the scores mean, one of "
            + ", ".join(kind.value for kind in ScoreKind)
        )
    return Ranking.from_hits(hits, score_kind)


def _full_name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
