"""Builds the context from a retriever's result: check, decide, assemble, flag.

No clock, no counters and no locks: the guard has those, and also counts the errors raised here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from ctxguard.core.assembly import first_readable, nothing_readable
from ctxguard.core.conflicts import find_conflicts
from ctxguard.core.context import (
    Assembled,
    Assembly,
    Context,
    assemble,
    bare_passages,
    read_passages,
)
from ctxguard.core.copies import copies_of
from ctxguard.core.decision import Decision, decide
from ctxguard.core.metadata_filter import verified
from ctxguard.core.policies import ExpectedUtilityPolicy, Policy
from ctxguard.core.signals import RANKING
from ctxguard.core.sufficiency import p_sufficient, suffices
from ctxguard.core.types import DropReason, Flag, Mode, Passage, Ranking, ScoreKind
from ctxguard.profile.schema import SufficiencyProfile
from ctxguard.request.bound_profile import RoutePolicy
from ctxguard.request.input import Request
from ctxguard.request.wrapped_retriever import ranking_of

if TYPE_CHECKING:
    from ctxguard.retrieval.protocols import Retrieval


_BY_HAND = "mode 'enforce' was set by hand; the profile's verdict is 'shadow'"


def build_context(
    request: Request,
    retrieved: "Retrieval",
    score_kind: ScoreKind | None,
    assembly: Assembly,
) -> Context:
    """Build the context that answers a request (DESIGN.md §7).

    Args:
        request: The request.
        retrieved: The retriever's result for it: a ``Ranking``, or hits.
        score_kind: The kind of the scores of plain hits; None if not set.
        assembly: The settings that assemble the context from kept passages.

    Raises:
        ConfigurationError: ``retrieved`` is neither a ranking nor hits, or the ranking cannot be
            decided on.
        FilterViolationError: a candidate does not satisfy the request's filter.
        StageUnavailableError: there are candidates, but none can be read.
    """
    ranking = retrieved if isinstance(retrieved, Ranking) else ranking_of(retrieved, score_kind)
    given = request.input
    if given.where is not None:
        ranking = verified(ranking, given.where)
    bound = request.bound
    applies = bound.applies(ranking.route, given.segment)
    mode = applies.mode if request.follows_verdict else request.mode
    decision, flags, differences, sufficiency = _decide(mode, ranking, applies)
    source, most = ranking.passages, assembly.max_passage_chars
    read = None
    if mode is not Mode.OFF:
        read = read_passages(source, decision.order[: decision.n_kept], most)
        if assembly.drop_duplicates and copies_of(read.texts):
            decision = _without_copies(decision)
            read = read_passages(source, decision.order[: decision.n_kept], most)
    p_relevant, sufficient = (
        (None, None) if sufficiency is None else _sufficiency(decision, sufficiency)
    )
    assembled = (
        Assembled()
        if read is None
        else assemble(decision, assembly, insufficient=sufficient is False, read=read)
    )
    passages = assembled.passages
    if assembled.dropped and not passages and _none_readable(assembled):
        # No kept passage can be read, and that must not look like nothing relevant.
        beyond = decision.order[decision.n_kept :]
        position = first_readable(ranking, beyond)
        if position is not None:
            decision = replace(decision, n_kept=decision.n_kept + beyond.index(position) + 1)
            assembled = assemble(decision, assembly)
            passages, flags = assembled.passages, (*flags, Flag.UNREADABLE)
            # Both are about passages that are not served.
            p_relevant = sufficient = None
        elif mode is Mode.ENFORCE:
            raise nothing_readable(assembled.failures)
    if assembled.flags:
        flags = (*flags, *assembled.flags)
    if mode is not Mode.ENFORCE:
        # In shadow mode assembly runs for the record alone.
        passages = bare_passages(ranking, applies.today.k)
    elif applies.mode is not Mode.ENFORCE and request.arm_probability is None:
        differences = (*differences, _BY_HAND)
    return Context(
        request_id=request.request_id,
        query=given.query,
        route=ranking.route,
        mode=mode,
        passages=passages,
        decision=decision,
        dropped_in_assembly=assembled.dropped,
        flags=(*flags, *_flags_of(decision, sufficient, given.query, passages, assembly)),
        failures=ranking.failures + assembled.failures,
        assembly=assembly,
        segment=given.segment,
        session_id=given.session_id,
        profile_id=bound.profile_id,
        differences=differences,
        p_sufficient=p_relevant,
        sufficient=sufficient,
        where=given.where,
        arm_probability=request.arm_probability,
        today_k=applies.today.k,
    )


def _flags_of(
    decision: Decision,
    sufficient: bool | None,
    query: str,
    passages: Sequence[Passage],
    assembly: Assembly,
) -> Iterator[Flag]:
    """Yield the flags that do not depend on the policy and the scores."""
    if decision.ranking.failures:
        yield Flag.DEGRADED
    if not decision.order:
        yield Flag.EMPTY_RETRIEVAL
    if sufficient is False:
        yield Flag.INSUFFICIENT
    if assembly.flag_conflicts and find_conflicts(query, [each.text for each in passages]):
        yield Flag.CONFLICTING


def _none_readable(assembled: Assembled) -> bool:
    return all(drop.reason is DropReason.UNREADABLE for drop in assembled.dropped)


def _decide(
    mode: Mode, ranking: Ranking, applies: RoutePolicy
) -> tuple[Decision, tuple[Flag, ...], tuple[str, ...], SufficiencyProfile | None]:
    """Decide by the policy that applies; return flags and differences from the profile too.

    The flags are those of the policy and of the scores. The last item says when a context suffices.
    """
    if mode is Mode.OFF:
        n = len(ranking.passage_ids)
        return Decision(ranking, applies.today, range(n), min(applies.today.k, n)), (), (), None
    route = ranking.route
    policy, flags, differences = applies.policy, applies.flags, applies.differences
    sufficiency = applies.sufficiency
    if applies.score_kind is not None and applies.score_kind is not ranking.kind:
        # The profile knows this route, but its scores have another meaning here.
        policy, flags = applies.top_k, (*flags, Flag.PROFILE_MISMATCH)
        sufficiency = None
        kinds = f"{ranking.kind.value!r}, was {applies.score_kind.value!r}"
        differences = (*differences, f"score kind of the route {route.value} is {kinds}")
    elif ranking.kind is ScoreKind.RANK and applies.compares_scores:
        policy, flags = applies.top_k, (*flags, Flag.RANK_ONLY)
        sufficiency = None
        differences = (*differences, f"scores of the route {route.value} carry rank only")
    if policy.min_keep == 0 and ranking.failures:
        # If a stage is missing, finding nothing relevant is no ground to abstain.
        policy = replace(policy, min_keep=1)
    decision = decide(ranking, policy)
    if Flag.MISSING_SIGNALS in decision.flags:
        differences = (*differences, _missing_signals(ranking, policy))
    return decision, (*flags, *decision.flags), differences, sufficiency


def _sufficiency(
    decision: Decision, certified: SufficiencyProfile
) -> tuple[float | None, bool | None]:
    """Return P(sufficient) and the verdict on it; None if it cannot be computed."""
    probability = p_sufficient(decision, certified.model)
    return probability, suffices(probability, certified.threshold)


def _without_copies(decision: Decision) -> Decision:
    """Compare all texts and decide again; postponed until two copies would be served."""
    ranking = decision.ranking
    read = read_passages(ranking.passages, decision.order)
    positions = read.positions
    copies = {positions[at]: positions[first] for at, first in copies_of(read.texts).items()}
    return decide(replace(ranking, copies=copies), decision.policy)


def _missing_signals(ranking: Ranking, policy: Policy) -> str:
    """Describe the signals that a policy's model needs and the ranking lacks."""
    model = cast(ExpectedUtilityPolicy, policy).model
    if set(model.legs) != (set(ranking.legs) or {RANKING}):
        has = ", ".join(sorted(ranking.legs)) or "none"
        return f"the policy needs scores of {', '.join(model.legs)}, the answer has those of {has}"
    absent = [name for name in model.signals if name not in ranking.signals]
    if absent:
        return f"the policy needs signals that the answer lacks: {', '.join(absent)}"
    return "the policy needs every candidate's scores and signals, and some candidate lacks one"
