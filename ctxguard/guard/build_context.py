"""Builds the context from a retriever's result: check, decide, assemble, flag.

It has no clock, counters or locks; the guard has those, and counts the errors raised here.
"""

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from ctxguard.core.assembly import (
    Assembled,
    Assembly,
    assemble,
    bare_passages,
    first_readable,
    nothing_readable,
    read_passages,
)
from ctxguard.core.columns import with_columns
from ctxguard.core.context import Context
from ctxguard.core.decision import Decision, decide, decide_with_answers
from ctxguard.core.duplicates import copies_of
from ctxguard.core.metadata_filter import Where, verified
from ctxguard.core.policies import ExpectedUtilityPolicy, Policy, RatioPolicy
from ctxguard.core.scores import is_contradicted
from ctxguard.core.signals import RANKING
from ctxguard.core.sufficiency import p_sufficient, suffices
from ctxguard.core.tokens import with_tokens
from ctxguard.core.types import (
    DropReason,
    Flag,
    Mode,
    Ranking,
    ScoreKind,
    StageFailure,
)
from ctxguard.core.value_of_information import ANSWER, ASSESS, Assessment
from ctxguard.guard.assess import AssessorStage, Question
from ctxguard.guard.bound_profile import BoundProfile, RoutePolicy
from ctxguard.guard.observers import RequestSpan
from ctxguard.guard.wrapped_retriever import ranking_of
from ctxguard.profile.schema import SufficiencyProfile

if TYPE_CHECKING:
    from ctxguard.retrieval.protocols import Retrieval


_BY_HAND = "mode 'enforce' was set by hand; the profile's verdict is 'shadow'"


class Request(NamedTuple):
    """A request in progress: the arguments of ``ContextGuard.retrieve``, and its answering state.

    A tuple, because tuples are the cheapest to make.

    Attributes:
        request_id: The caller's id, or a random one.
        bound: The profile and the retriever that answer it, from retrieval to decision.
        mode: The guard's mode when the request began.
        follows_verdict: Whether the profile's verdict on the answering route decides the mode,
            because the guard was given none.
        probability: The probability with which the sampler selected it; 0.0 if it did not.
        span: The request's span; None without tracing.
        is_retrieved: Whether the guard's retriever answers it: a retriever's order is evidence of
            what its scores mean; the order of the caller's own results is not, unless ranked.
        k: Number of results served while nothing is enforced; None for the guard's ``k``.
    """

    query: str
    request_id: str
    session_id: str | None
    sample: bool
    where: Where | None
    bound: BoundProfile
    mode: Mode
    follows_verdict: bool
    probability: float
    span: RequestSpan | None
    is_retrieved: bool
    k: int | None


class Decided(NamedTuple):
    """A request after the decision, before an assessor is asked and the context assembled.

    Attributes:
        applies: The route's policy, with its consequences.
        mode: The mode of the request.
        decision: The decision by the policy alone.
        flags: Flags of the policy and of the scores.
        differences: Differences from the profile's system.
        sufficiency: The rule for when a context suffices; None if there is none.
        is_by_policy: Whether the route's policy decided, rather than the order alone.
    """

    applies: RoutePolicy
    mode: Mode
    decision: Decision
    flags: tuple[Flag, ...]
    differences: tuple[str, ...]
    sufficiency: SufficiencyProfile | None
    is_by_policy: bool = False


def decide_request(
    request: Request, retrieved: "Retrieval", score_kind: ScoreKind | None
) -> Decided:
    """Check a retriever's result and decide on it by the policy of its route.

    Args:
        request: The request.
        retrieved: The retriever's result for it: a ``Ranking``, or hits.
        score_kind: The kind of the scores of plain hits; None if not set.

    Raises:
        ConfigurationError: ``retrieved`` is neither a ranking nor hits, or the ranking cannot be
            decided on.
        FilterViolationError: a candidate does not satisfy the request's filter.
    """
    ranking = retrieved
    if not isinstance(ranking, Ranking):
        ranking = ranking_of(ranking, score_kind, is_returned=request.is_retrieved)
    if request.where is not None:
        ranking = verified(ranking, request.where)
    bound, route = request.bound, ranking.route
    applies, k = bound.policies[route], request.k
    if k is not None:
        applies = replace(applies, today=_first(k))
    mode = applies.mode if request.follows_verdict else request.mode
    if mode is Mode.OFF:
        # It decides nothing, but samples are decided on again.
        opposed = request.is_retrieved and is_contradicted(ranking)
        given = _as_given(ranking, applies.today)
        told = (Flag.SCORES_CONTRADICTED,) if opposed else ()
        return Decided(applies, mode, given, told, (), None)
    if bound.signal_columns:
        ranking = with_columns(ranking, bound.signal_columns, request.query)
    policy, flags, differences = applies.policy, applies.flags, applies.differences
    sufficiency, is_by_policy = applies.sufficiency, applies.is_own
    calibrated = applies.score_kind
    if calibrated is not None and calibrated is not ranking.kind:
        # The profile knows this route, but its scores have another meaning here.
        applies = replace(applies, assessor=None)
        policy, flags = RatioPolicy(k=policy.k), (*flags, Flag.PROFILE_MISMATCH)
        sufficiency, is_by_policy = None, False
        kinds = f"{ranking.kind.value!r}, was {calibrated.value!r}"
        differences = (*differences, f"score kind of the route {route.value} is {kinds}")
    elif ranking.kind is ScoreKind.RANK and policy.compares_scores:
        policy, flags = RatioPolicy(k=policy.k), (*flags, Flag.RANK_ONLY)
        sufficiency, is_by_policy = None, False
        differences = (*differences, f"scores of the route {route.value} carry rank only")
    if isinstance(policy, ExpectedUtilityPolicy) and policy.per_token:
        ranking = with_tokens(ranking)
    decision = decide(ranking, _serving(policy, ranking))
    # Most lists are in the order of their scores and have no ranks: that is seen for nothing.
    has_evidence = (
        not decision.in_order and request.is_retrieved
        if ranking.ranks is None
        else ranking.contradicted is None
    )
    if has_evidence and is_contradicted(ranking):
        ranking = replace(ranking, contradicted=True)
        decision = decide(ranking, _serving(policy, ranking))
    if decision.flags:
        is_by_policy &= decision.is_as_asked
        if Flag.MISSING_SIGNALS in decision.flags:
            differences = (*differences, _missing_signals(ranking, policy))
    flags = (*flags, *decision.flags)
    if k is not None and not is_by_policy:
        decision = _as_given(ranking, applies.today)
    return Decided(applies, mode, decision, flags, differences, sufficiency, is_by_policy)


@lru_cache
def _first(k: int) -> RatioPolicy:
    return RatioPolicy(k=k)


def _as_given(ranking: Ranking, today: RatioPolicy) -> Decision:
    """Keep the first k of a list as it is."""
    n = len(ranking.passage_ids)
    return Decision(ranking, today, range(n), min(today.k, n))


def question_of(
    request: Request, decided: Decided, stage: AssessorStage | None
) -> tuple[Decided, Question | None]:
    """Return the question to ask the assessor about a request; None if none is worth its price.

    If the profile relies on an assessor and it is absent or a different one, a stage is missing;
    likewise if signals that P needs are missing.
    """
    profile = decided.applies.assessor
    if profile is None or decided.mode is Mode.OFF:
        return decided, None
    if stage is None or stage.fingerprint != profile.fingerprint:
        now = "absent" if stage is None else repr(stage.fingerprint)
        difference = f"the assessor is {now}, was {profile.fingerprint!r}"
        cause = "not the assessor of the profile"
    else:
        ranking = decided.decision.ranking
        unasked = decide(ranking, _serving(profile.policy, ranking))
        if Flag.MISSING_SIGNALS not in unasked.flags:
            question = stage.question(
                request.request_id, request.query, unasked, profile, where=request.where
            )
            return decided, question
        difference = f"the assessor is not asked: {_missing_signals(ranking, profile.policy)}"
        cause = "P cannot be computed"
    if difference not in decided.differences:
        decided = decided._replace(differences=(*decided.differences, difference))
    if profile.decision == "enforce":
        failure = StageFailure(ASSESS, cause)
        decided = decided._replace(decision=_lacking(decided.decision, failure))
    return decided, None


_P = TypeVar("_P", bound=Policy)


def _serving(policy: _P, ranking: Ranking) -> _P:
    """Never abstain while a stage is missing: it might have found something relevant."""
    if policy.min_keep == 0 and ranking.failures:
        return replace(policy, min_keep=1)
    return policy


def _lacking(decision: Decision, failure: StageFailure) -> Decision:
    ranking = replace(decision.ranking, failures=(*decision.ranking.failures, failure))
    return replace(decision, ranking=ranking)


def _assessed(
    decision: Decision, assessment: Assessment, applies: RoutePolicy, mode: Mode
) -> tuple[Decision, Assessment]:
    """Decide again with the answers, and add them to the ranking's signals."""
    profile = applies.assessor
    if profile is None:
        return decision, assessment
    signals = {f"{ANSWER}{name}": values for name, values in assessment.answers.items()}
    signals[f"{ANSWER}place"] = assessment.places
    ranking = decision.ranking
    ranking = replace(ranking, signals={**ranking.signals, **signals})
    decision, enforced = replace(decision, ranking=ranking), profile.decision == "enforce"
    if assessment.failure is not None and enforced and assessment.failure not in ranking.failures:
        decision = _lacking(decision, assessment.failure)
    policy = _serving(profile.policy, ranking)
    after = decide_with_answers(ranking, policy, profile.name, profile.model)
    if after is None:
        return decision, assessment
    served = decision.kept if mode is Mode.ENFORCE else range(min(applies.today.k, len(ranking)))
    assessment = replace(assessment, applied=enforced, changed={*after.kept} != {*served})
    return after if enforced else decision, assessment


def build_context(
    request: Request,
    decided: Decided,
    assembly: Assembly,
    assessment: Assessment | None = None,
) -> Context:
    """Build the context that answers a request (DESIGN.md §7).

    Args:
        request: The request.
        decided: The result of `decide_request`.
        assembly: The settings that assemble the context from kept passages.
        assessment: The assessor's answers; None if it was not asked.

    Raises:
        StageUnavailableError: there are candidates, but none can be read.
    """
    applies, mode, flags, differences = (
        decided.applies,
        decided.mode,
        decided.flags,
        decided.differences,
    )
    sufficiency, is_by_policy = decided.sufficiency, decided.is_by_policy
    alone = decision = decided.decision
    drops_copies = assembly.drop_duplicates and (is_by_policy or request.k is None)
    if assessment is not None:
        decision, assessment = _assessed(alone, assessment, applies, mode)
    source, most = decision.ranking.passages, assembly.max_passage_chars
    read = None
    if mode is not Mode.OFF:
        read = read_passages(source, decision.order[: decision.n_kept], most)
        if drops_copies and copies_of(read.texts):
            decision = alone = _without_copies(alone)
            if assessment is not None:
                decision, assessment = _assessed(alone, assessment, applies, mode)
            read = read_passages(source, decision.order[: decision.n_kept], most)
    ranking = decision.ranking
    # The threshold was certified for P without answers.
    uncertified = assessment is not None and assessment.applied
    if uncertified and request.follows_verdict:
        # The answers have a verdict of their own, whatever that on the route alone is.
        mode = Mode.ENFORCE
    p_relevant, sufficient = (
        (None, None) if sufficiency is None or uncertified else _sufficiency(decision, sufficiency)
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
    flags = (*flags, *assembled.flags)
    if mode is not Mode.ENFORCE:
        # In shadow mode assembly runs for the record alone.
        passages = bare_passages(ranking, applies.today.k)
    elif applies.mode is not Mode.ENFORCE and not uncertified:
        differences = (*differences, _BY_HAND)
    if ranking.failures or not decision.order or sufficient is False:
        flags += _flags_of(decision, sufficient)
    return Context(
        request_id=request.request_id,
        query=request.query,
        route=ranking.route,
        mode=mode,
        passages=passages,
        decision=decision,
        dropped_in_assembly=assembled.dropped,
        flags=flags,
        failures=ranking.failures + assembled.failures,
        assembly=assembly,
        session_id=request.session_id,
        profile_id=request.bound.profile_id,
        differences=differences,
        p_sufficient=p_relevant,
        sufficient=sufficient,
        where=request.where,
        today_k=applies.today.k,
        assessment=assessment,
        enforced=mode is Mode.ENFORCE and (is_by_policy or uncertified),
    )


def _flags_of(decision: Decision, sufficient: bool | None) -> tuple[Flag, ...]:
    """Return the flags that do not depend on the policy and the scores."""
    holds = {
        Flag.DEGRADED: bool(decision.ranking.failures),
        Flag.EMPTY_RETRIEVAL: not decision.order,
        Flag.INSUFFICIENT: sufficient is False,
    }
    return tuple([flag for flag, is_so in holds.items() if is_so])


def _none_readable(assembled: Assembled) -> bool:
    return all(drop.reason is DropReason.UNREADABLE for drop in assembled.dropped)


def _sufficiency(
    decision: Decision, certified: SufficiencyProfile
) -> tuple[float | None, bool | None]:
    """Return P(sufficient) and the verdict on it; None if it cannot be computed."""
    probability = p_sufficient(decision, certified.model)
    return probability, suffices(probability, certified.threshold)


def _without_copies(decision: Decision) -> Decision:
    """Compare all texts and decide again, but only once two copies would be served."""
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
