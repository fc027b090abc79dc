"""The rerank protocol of Cohere, Jina, vLLM and TEI: scores that carry the decision.

Kept documents score their calibrated P(relevant), dropped ones exactly 0.0. If the reranker fails,
the documents keep their order: an outage never fails a query or empties its answer. Calls the
scorer and the guard, reads the clocks, and works on a long body on a thread.
"""

from collections.abc import Mapping, Sequence
from itertools import repeat
from time import perf_counter, time
from typing import Annotated, Any, NotRequired

import numpy as np
from pydantic import Field, TypeAdapter, with_config
from starlette.types import Scope
from typing_extensions import TypedDict

from ctxguard import __version__
from ctxguard.core.context import Context
from ctxguard.core.passages import copies_of
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.scores import INVALID_MAGNITUDE, all_valid, is_valid, relative_scores
from ctxguard.core.types import CheckedPassages, Ranking, ScoreKind, StageFailure, StageTiming
from ctxguard.endpoints.forms import FORMS, MARKS, RerankForm
from ctxguard.guard.context_guard import DEFAULT_MAX_QUERY_CHARS
from ctxguard.resilience.stage import failure_of
from ctxguard.retrieval.hybrid.search import RERANK
from ctxguard.server.problems import Problem, ProblemKind, invalid
from ctxguard.server.scoring import BoundedScorer
from ctxguard.server.service import Service
from ctxguard.server.settings import ServiceSettings
from ctxguard.server.wire import DESCRIBED, off_the_loop

ALIAS = "ctxguard:"
DEFAULT_MODEL = "ctxguard"
OMIT, FULL = "ctxguard:omit", "ctxguard:full"

LEAST_KEPT = 1e-6
"""The least score of a kept document, since clients take 0.0 to mean that it was dropped."""


class Document(TypedDict):
    """A document with a text; its other fields are not read."""

    text: str


# A list of a million wrong things is one mistake: a list of their errors would take seconds.
_Documents = Annotated[
    list[Annotated[str | Document, Field(union_mode="left_to_right")]], Field(fail_fast=True)
]


_Count = Annotated[int, Field(ge=0)]


# No `oneOf` of the two required fields: generators of clients type no body that has alternatives.
@with_config(DESCRIBED)
class RerankRequest(TypedDict):
    """Documents to rerank: ``documents`` as Cohere, Jina and vLLM name them, or TEI's ``texts``."""

    query: str
    documents: NotRequired[_Documents]
    texts: NotRequired[Annotated[list[str], Field(fail_fast=True)]]
    model: NotRequired[str | None]
    """Passed on to the reranker. ctxguard:omit leaves out what is dropped, ctxguard:full never."""
    top_n: NotRequired[_Count | None]
    """The most results; dropped documents are left out. Absent, 0 or the number of documents:
    all of them."""
    top_k: NotRequired[_Count | None]
    """``top_n`` of Voyage."""
    truncation: NotRequired[bool | None]
    """A field of Voyage that is not used."""
    return_documents: NotRequired[bool | None]
    return_text: NotRequired[bool | None]
    max_tokens_per_doc: NotRequired[Annotated[int, Field(ge=1)] | None]


_Few = Annotated[list[str], Field(min_length=1, max_length=1)]


class ScoreRequest(TypedDict):
    """Texts to score against a single text, in vLLM's format."""

    text_1: str | _Few
    text_2: str | Annotated[list[str], Field(fail_fast=True)]
    model: NotRequired[str | None]


_USAGE = {"total_tokens": 0, "prompt_tokens": 0}
BODIES: dict[tuple[str, ...], TypeAdapter[Any]] = {
    FORMS["cohere"].paths: TypeAdapter(RerankRequest),  # and Voyage's and TEI's
    FORMS["score"].paths: TypeAdapter(ScoreRequest),
}
"""The type of a request's body, by the paths that take it."""
_DOCUMENTS = frozenset([form.documents for form in FORMS.values()])


Pairs = list[tuple[int, float]]
"""Positions of documents, with their scores, best first."""


async def rerank(
    service: Service, scorer: BoundedScorer, given: Mapping[str, Any], scope: Scope
) -> tuple[Any, StageFailure | None]:
    """Answer a rerank request."""
    form, query, texts = _asked_of(service, given)
    asked = given.get("model")
    if asked is not None and asked.startswith(ALIAS) and asked not in (OMIT, FULL):
        raise Problem(
            ProblemKind.UNKNOWN_ALIAS,
            f"aliases are {OMIT} and {FULL}; any other model is the reranker's own",
        )
    copies = await off_the_loop(scope, copies_of, texts)
    ranking, order = await _scored(service, scorer, query, texts, given, copies=copies)
    request_id = scope["state"]["request_id"]
    most = None if form.most is None else given.get(form.most)
    # The number of documents that are served where no policy is enforced.
    k = max(min(most or len(texts), len(texts)), 1)
    context = await service.guard.afilter(query, ranking, request_id=request_id, k=k)
    pairs, kept, dropped = ranked_of(context)
    failure = next(iter(context.decision.ranking.failures), None)
    if most or asked == OMIT:
        pairs = _fewer(pairs, kept, ranking.copies, most, asked)
    if form.in_order:
        pairs.sort(key=lambda pair: order[pair[0]])
    is_echoed = form.echo is not None and given.get(form.echo)
    results: list[dict[str, object]] = []
    for at, score in pairs:
        result = {"index": order[at], form.score: score, **form.each}
        if is_echoed:
            text = texts[order[at]]
            result[form.echoed] = {"text": text} if form.echoes_object else text
        results.append(result)
    if form.results is None:
        return results, failure
    meta = {
        "request_id": context.request_id,
        "policy": context.profile_id,
        "mode": context.mode.value,
        "kept": kept,
        "would_keep": context.decision.n_kept - len(context.dropped_in_assembly),
        "dropped": dropped,
        "flags": [*map(str, context.flags)],
        "degraded": (
            None if failure is None else {"stage": failure.stage, "kind": failure.kind.value}
        ),
    }
    return {
        **form.envelope,
        "id": context.request_id,
        "model": asked or service.settings.rerank_model or DEFAULT_MODEL,
        form.results: results,
        "meta": {"ctxguard": meta},
        "usage": _USAGE,
    }, failure


def _asked_of(service: Service, given: Mapping[str, Any]) -> tuple[RerankForm, str, list[str]]:
    """Find a request's form, its query and its texts."""
    form = FORMS["cohere"]
    for mark in MARKS:
        if mark in given:
            form = MARKS[mark]
            break
    if _DOCUMENTS & given.keys() != {form.documents}:
        raise invalid("give the documents as `documents`, or as `texts`")
    query, documents = given[form.query], given[form.documents]
    if not isinstance(query, str):
        (query,) = query
    if isinstance(documents, str):
        documents = [documents]
    texts: list[str] = documents
    if not set(map(type, documents)) <= {str}:
        texts = [each if isinstance(each, str) else each["text"] for each in documents]
    if len(texts) > service.settings.max_documents:
        raise service.too_many(len(texts), "documents")
    if len(query) > DEFAULT_MAX_QUERY_CHARS:
        raise invalid(
            f"the query has {len(query):,} characters, but the limit is {DEFAULT_MAX_QUERY_CHARS:,}"
        )
    return form, query, texts


async def _scored(
    service: Service,
    scorer: BoundedScorer,
    query: str,
    texts: list[str],
    given: Mapping[str, Any],
    *,
    copies: dict[int, int],
) -> tuple[Ranking, Sequence[int]]:
    """Rank the documents by the reranker's scores, or in their order with its failure.

    Returns:
        The ranking, and the position in the request of each candidate.
    """
    settings, n, model = service.settings, len(texts), given.get("model")
    # A profile is of one model, whatever a request names.
    if model and (
        settings.rerank_model or model.startswith(ALIAS) or service.guard.profile is not None
    ):
        model = None
    scores: list[float | None] = [None] * n
    order: Sequence[int] = range(n)
    failures: tuple[StageFailure, ...] = ()
    timings: tuple[StageTiming, ...] = ()
    if texts:
        began_at, began = time(), perf_counter()
        distinct = [text for at, text in enumerate(texts) if at not in copies] if copies else texts
        try:
            found = await scorer.scores(
                query, distinct, model or None, given.get("max_tokens_per_doc")
            )
            if copies:
                firsts = (at for at in range(n) if at not in copies)
                score_of = dict(zip(firsts, found, strict=True))
                found = np.array([score_of[copies.get(at, at)] for at in range(n)])
            # The first of equal scores is better; documents without one are last.
            keys = np.where(np.abs(found) < INVALID_MAGNITUDE, found, -np.inf)
            best_first = (-keys).argsort(kind="stable")
            order, scores = best_first.tolist(), found[best_first].tolist()
        except Exception as error:
            failures = (failure_of(RERANK, error),)
        timings = (StageTiming(RERANK, began_at, perf_counter() - began),)
    if copies:
        place_of = {at: place for place, at in enumerate(order)}
        copies = {place_of[at]: place_of[first] for at, first in copies.items()}
    ids = [*map(str, order)]
    ranking = Ranking(
        ids,
        scores,
        service.kind,
        CheckedPassages((ids, [*map(texts.__getitem__, order)])),
        ranks=range(1, n + 1),
        failures=failures,
        timings=timings,
        copies=copies,
        contradicted=False,
    )
    return ranking, order


def ranked_of(context: Context) -> tuple[Pairs, int, dict[str, int]]:
    """Order all documents, with scores, as in the answer; count the kept, and drops by reason.

    Degraded: the documents' own order, with scores that fall from below 1 to above 0. Where no
    policy is enforced: the reranker's order and scores, and nothing is dropped. A copy follows the
    document that it repeats, with the same score, and does not count as kept.
    """
    decision, ranking = context.decision, context.decision.ranking
    if ranking.failures:
        n = len(ranking)
        return [(at, (n - at) / (n + 1)) for at in range(n)], n, {}
    if not context.enforced or ranking.kind is ScoreKind.RANK:
        scores: Any = ranking.scores
        if not all_valid(scores):  # documents without a valid one are last
            valid = [score for score in scores if is_valid(score)]
            scores = valid + [min(valid, default=0.0)] * (len(scores) - len(valid))
        return [*enumerate(scores)], len(scores), {}
    kept, beyond = list(decision.kept), decision.order[decision.n_kept :]
    scores = decision.probabilities
    if scores is None:
        policy = decision.policy
        temperature = policy.temperature if isinstance(policy, RatioPolicy) else 1.0
        valid = [float(ranking.scores[at] or 0.0) for at in kept]
        scores = relative_scores(ranking.kind, valid, temperature)
    shown = list(scores[: len(kept)])
    if kept and not LEAST_KEPT <= shown[-1] <= shown[0] <= 1.0:
        shown = [min(max(score, LEAST_KEPT), 1.0) for score in shown]
    positions, aside = kept, [at for at, _ in decision.set_aside]
    if ranking.copies:
        equal = {at: [at] for at in kept}
        for at, first in ranking.copies.items():
            if first in equal:
                equal[first].append(at)
        shown = [score for ats, score in zip(equal.values(), shown, strict=True) for _ in ats]
        positions = [at for ats in equal.values() for at in ats]
        aside = [at for at in aside if ranking.copies.get(at, at) not in equal]
    pairs = [*zip(positions, shown, strict=True), *zip([*beyond, *aside], repeat(0.0))]
    dropped = {reason.value: count for reason, count in context.dropped_by_reason.items()}
    return pairs, len(kept), dropped


def _fewer(
    pairs: Pairs, kept: int, copies: Mapping[int, int], top_n: int | None, asked: str | None
) -> Pairs:
    """Cut to the requested number of results, best first; copies stay only if there is room."""
    n = len(pairs)
    omits = asked == OMIT or (top_n and top_n < n and asked != FULL)
    most = min(kept if omits else n, top_n or n)
    room = most - n + len(copies)
    if room < len(copies):
        extra = set(sorted(copies)[: max(room, 0)])
        pairs = [pair for pair in pairs if pair[0] not in copies or pair[0] in extra]
    return pairs[:most]


def clients_documents(settings: ServiceSettings) -> dict[str, tuple[str, object]]:
    """Return the paths that clients query before they rerank, with their answers."""
    name = settings.rerank_model or settings.reranker or DEFAULT_MODEL
    models = [
        {"id": each, "object": "model", "created": 0, "owned_by": DEFAULT_MODEL}
        for each in (name, OMIT, FULL)
    ]
    info = {
        "model_id": name,
        "model_sha": None,
        "model_dtype": "float32",
        "model_type": {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}},
        "max_concurrent_requests": settings.max_in_flight,
        "max_client_batch_size": settings.max_documents,
        "auto_truncate": True,
        "version": __version__,
    }
    return {
        "/v1/models": (
            "Names that a request may give as its model",
            {"object": "list", "data": models},
        ),
        "/info": ("The reranker and its limits, as TEI tells them", info),
    }
