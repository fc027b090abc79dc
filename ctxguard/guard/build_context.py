"""Builds the context from a retriever's result: check, decide, assemble, flag.

Reads passages from their source, and has the assessor's stage choose a question. It has no clock,
counters or locks; the guard has those, and counts the errors raised here.
"""

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, cast

from ctxguard.core.assembly import (
    Assembled,
    Assembly,
    assemble,
    bare_passages,
    first_readable,
    nothing_readable,
)
from ctxguard.core.columns import with_columns
from ctxguard.core.context import Context
from ctxguard.core.decision import Decision, decide, decide_with_answers, sufficiency_of
from ctxguard.core.metadata_filter import Where, verified
from ctxguard.core.passages import ReadPassages, copies_of, read_passages, with_tokens
from ctxguard.core.policies import ExpectedUtilityPolicy, Policy, RatioPolicy
from ctxguard.core.scores import is_contradicted
from ctxguard.core.signals import RANKING
from ctxguard.core.types import DropReason, Flag, Mode, Ranking, ScoreKind, StageFailure
from ctxguard.core.value_of_information import ANSWER, ASSESS, Assessment
from ctxguard.guard.assess import AssessorStage, Question
from ctxguard.guard.bound_profile import BoundProfile, RoutePolicy
from ctxguard.guard.observers import RequestSpan
from ctxguard.profile.schema import AssessorProfile

if TYPE_CHECKING:
    from ctxguard.retrieval.protocols import Retrieval


_BY_HAND = "mode 'enforce' was set by hand; the profile's verdict is 'shadow'"


class Request(NamedTuple):
    """A request in progress: the arguments of ``ContextGuard.retrieve``, and its answering state.

    A tuple, because tuples are the cheapest to make.

    Attributes:
        bound: The profile and the retriever that answer it, from retrieval to decision.
        mode: The mode given to the guard; None follows the profile's verdict on the answering
            route.
        probability: The probability with which the sampler selected it; 0.0 if it did not.
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
    mode: Mode | None
    probability: float
    span: RequestSpan | None
    is_retrieved: bool
    k: int | None


def decide_request(
    request: Request, retrieved: "Retrieval", score_kind: ScoreKind | None
) -> tuple[RoutePolicy, Decision]:
    """Check a retriever's result and decide on it with the policy of its route.

    Returns:
        The policy as far as it applies to these candidates, and the decision, before an assessor
        is asked.

    Raises:
        ConfigurationError: ``retrieved`` is neither a ranking nor hits, or the ranking cannot be
            decided on.
        FilterViolationError: a candidate does not satisfy the request's filter.
    """
    ranking = retrieved
    if not isinstance(ranking, Ranking):
        ranking = Ranking.from_hits(ranking, score_kind)
    if request.where is not None:
        ranking = verified(ranking, request.where)
    bound, route, k = request.bound, ranking.route, request.k
    applies = bound.policies[route]
    if k is not None:
        applies = replace(applies, today=_first(k))
    mode = applies.mode if request.mode is None else request.mode
    if mode is Mode.OFF:
        # It decides nothing, but samples are decided on again.
        opposed = request.is_retrieved and is_contradicted(ranking)
        flags = (Flag.SCORES_CONTRADICTED,) if opposed else ()
        bare = RoutePolicy(applies.today, applies.today, flags, mode=mode)
        return bare, _as_given(ranking, applies.today)
    if bound.signal_columns:
        ranking = with_columns(ranking, bound.signal_columns, request.query)
    applies = _for_scores(applies, ranking)
    policy = applies.policy
    if isinstance(policy, ExpectedUtilityPolicy) and policy.per_token:
        ranking = with_tokens(ranking)
    decision = decide(ranking, policy)
    # Most lists are in the order of their scores and have no ranks: that is seen for nothing.
    has_evidence = (
        not decision.in_order and request.is_retrieved
        if ranking.ranks is None
        else ranking.contradicted is None
    )
    if has_evidence and is_contradicted(ranking):
        ranking = replace(ranking, contradicted=True)
        decision = decide(ranking, policy)
    if decision.flags:
        if not decision.is_as_asked:
            applies = replace(applies, is_own=False)
        if Flag.MISSING_SIGNALS in decision.flags:
            differences = (*applies.differences, _missing_signals(ranking, policy))
            applies = replace(applies, differences=differences)
    if k is not None and not applies.is_own:
        if decision.flags:
            applies = replace(applies, flags=(*applies.flags, *decision.flags))
        decision = _as_given(ranking, applies.today)
    return applies, decision


def _for_scores(applies: RoutePolicy, ranking: Ranking) -> RoutePolicy:
    """Reduce a route's policy to its k if its threshold does not apply to these scores."""
    policy, kind, calibrated = applies.policy, ranking.kind, applies.score_kind
    if calibrated is not None and calibrated is not kind:
        # The profile knows this route, but its scores have another meaning here.
        flag, assessor = Flag.PROFILE_MISMATCH, None
        difference = (
            f"score kind of the route {ranking.route.value} is {kind.value!r}; it was "
            f"{calibrated.value!r}"
        )
    elif kind is ScoreKind.RANK and isinstance(policy, RatioPolicy) and policy.min_ratio > 0.0:
        flag, assessor = Flag.RANK_ONLY, applies.assessor
        difference = f"scores of the route {ranking.route.value} carry rank only"
    else:
        return applies
    return replace(
        applies,
        policy=RatioPolicy(k=policy.k),
        flags=(*applies.flags, flag),
        differences=(*applies.differences, difference),
        sufficiency=None,
        assessor=assessor,
        is_own=False,
    )


@lru_cache
def _first(k: int) -> RatioPolicy:
    return RatioPolicy(k=k)


def _as_given(ranking: Ranking, today: RatioPolicy) -> Decision:
    """Keep the first k candidates of a list, in its order."""
    n = len(ranking.passage_ids)
    return Decision(ranking, today, range(n), min(today.k, n))


def question_of(
    request: Request,
    applies: RoutePolicy,
    decision: Decision,
    profile: AssessorProfile,
    stage: AssessorStage | None,
) -> tuple[RoutePolicy, Decision, Question | None]:
    """Return the question to ask the assessor about a request; None if none is worth its price.

    If the profile relies on an assessor and it is absent or a different one, a stage is missing;
    likewise if signals that P needs are missing.
    """
    if stage is None or stage.fingerprint != profile.fingerprint:
        now = "absent" if stage is None else repr(stage.fingerprint)
        difference = f"the assessor is {now}, was {profile.fingerprint!r}"
        cause = "not the profile's assessor"
    else:
        ranking = decision.ranking
        unasked = decide(ranking, profile.policy)
        if Flag.MISSING_SIGNALS not in unasked.flags:
            question = stage.question(
                request.request_id, request.query, unasked, profile, where=request.where
            )
            return applies, decision, question
        difference = f"the assessor is not asked: {_missing_signals(ranking, profile.policy)}"
        cause = "P cannot be computed"
    applies = replace(applies, differences=(*applies.differences, difference))
    if profile.decision == "enforce":
        decision = _lacking(decision, StageFailure(ASSESS, cause))
    return applies, decision, None


def _lacking(decision: Decision, failure: StageFailure) -> Decision:
    ranking = replace(decision.ranking, failures=(*decision.ranking.failures, failure))
    return replace(decision, ranking=ranking)


def _assessed(
    decision: Decision, assessment: Assessment, applies: RoutePolicy, mode: Mode
) -> tuple[Decision, Assessment]:
    """Decide again with the answers, and add them to the ranking's signals."""
    profile = cast(AssessorProfile, applies.assessor)
    signals = {f"{ANSWER}{name}": values for name, values in assessment.answers.items()}
    signals[f"{ANSWER}place"] = assessment.places
    ranking = decision.ranking
    ranking = replace(ranking, signals={**ranking.signals, **signals})
    decision, enforced = replace(decision, ranking=ranking), profile.decision == "enforce"
    if assessment.failure is not None and enforced and assessment.failure not in ranking.failures:
        decision = _lacking(decision, assessment.failure)
    after = decide_with_answers(ranking, profile.policy, profile.name, profile.model)
    if after is None:
        return decision, assessment
    served = decision.kept if mode is Mode.ENFORCE else range(min(applies.today.k, len(ranking)))
    assessment = replace(assessment, applied=enforced, changed={*after.kept} != {*served})
    return after if enforced else decision, assessment


def build_context(
    request: Request,
    applies: RoutePolicy,
    decision: Decision,
    assembly: Assembly,
    assessment: Assessment | None = None,
) -> Context:
    """Build the context that answers a request (DESIGN.md §7).

    ``applies`` and ``decision`` are those of `decide_request`.

    Raises:
        StageUnavailableError: there are candidates, but none can be read.
    """
    mode = applies.mode if request.mode is None else request.mode
    flags, differences = (*applies.flags, *decision.flags), applies.differences
    sufficiency, read = applies.sufficiency, None
    if mode is not Mode.OFF:
        drops_copies = assembly.drop_duplicates and (applies.is_own or request.k is None)
        decision, assessment, read = _read(
            decision, assessment, applies, mode, assembly, drops_copies=drops_copies
        )
    ranking = decision.ranking
    # The threshold was certified for P without answers.
    uncertified = assessment is not None and assessment.applied
    if uncertified and request.mode is None:
        # The answers have a verdict of their own, whatever that on the route alone is.
        mode = Mode.ENFORCE
    p_sufficient = sufficient = None
    if sufficiency is not None and not uncertified:
        p_sufficient, sufficient = sufficiency_of(
            decision, sufficiency.threshold, sufficiency.model
        )
    assembled: Assembled = ((), (), (), ())
    if read is not None:
        assembled = assemble(decision, assembly, insufficient=sufficient is False, read=read)
    passages, dropped, failures, own_flags = assembled
    reasons = {drop.reason for drop in dropped} if dropped else ()
    if not passages and reasons == {DropReason.UNREADABLE}:
        # No kept passage can be read, and that must not look like nothing relevant.
        beyond = decision.order[decision.n_kept :]
        position = first_readable(ranking, beyond)
        if position is not None:
            decision = replace(decision, n_kept=decision.n_kept + beyond.index(position) + 1)
            passages, dropped, failures, own_flags = assemble(decision, assembly)
            flags = (*flags, Flag.UNREADABLE)
            # Both are about passages that are not served.
            p_sufficient = sufficient = None
        elif mode is Mode.ENFORCE:
            raise nothing_readable(failures)
    flags = (*flags, *own_flags)
    if mode is not Mode.ENFORCE:
        # In shadow mode assembly runs for the record alone.
        passages = bare_passages(ranking, applies.today.k)
    elif applies.mode is not Mode.ENFORCE and not uncertified:
        differences = (*differences, _BY_HAND)
    for flag, holds in (
        (Flag.DEGRADED, ranking.failures),
        (Flag.EMPTY_RETRIEVAL, not decision.order),
        (Flag.INSUFFICIENT, sufficient is False),
    ):
        if holds:
            flags += (flag,)
    return Context(
        request_id=request.request_id,
        query=request.query,
        route=ranking.route,
        mode=mode,
        passages=passages,
        decision=decision,
        dropped_in_assembly=dropped,
        flags=flags,
        failures=ranking.failures + failures,
        assembly=assembly,
        session_id=request.session_id,
        profile_id=request.bound.profile_id,
        differences=differences,
        p_sufficient=p_sufficient,
        sufficient=sufficient,
        where=request.where,
        today_k=applies.today.k,
        assessment=assessment,
        enforced=mode is Mode.ENFORCE and (applies.is_own or uncertified),
    )


def _read(
    decision: Decision,
    assessment: Assessment | None,
    applies: RoutePolicy,
    mode: Mode,
    assembly: Assembly,
    *,
    drops_copies: bool,
) -> tuple[Decision, Assessment | None, ReadPassages]:
    """Decide again with the answers, and read the kept passages; repeat if they include copies."""
    chosen = decision
    if assessment is not None:
        chosen, assessment = _assessed(decision, assessment, applies, mode)
    kept = chosen.order[: chosen.n_kept]
    read = read_passages(chosen.ranking.passages, kept, assembly.max_passage_chars)
    if drops_copies and copies_of(read.texts):
        # All texts are compared only once two copies would be served.
        copies = read_passages(decision.ranking.passages, decision.order).copies
        decision = decide(replace(decision.ranking, copies=copies), decision.policy)
        return _read(decision, assessment, applies, mode, assembly, drops_copies=False)
    return chosen, assessment, read


def _missing_signals(ranking: Ranking, policy: Policy) -> str:
    """Describe the signals that a policy's model needs and the ranking lacks."""
    model = cast(ExpectedUtilityPolicy, policy).model
    if set(model.legs) != (set(ranking.legs) or {RANKING}):
        has = ", ".join(sorted(ranking.legs)) or "none"
        legs = ", ".join(model.legs)
        return f"the policy requires scores from {legs}, but the answer has those from {has}"
    absent = [name for name in model.signals if name not in ranking.signals]
    if absent:
        return f"the policy requires signals that the answer lacks: {', '.join(absent)}"
    return "the policy requires every candidate's scores and signals, and some candidate lacks one"
