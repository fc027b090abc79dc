"""The rerank protocol: score, decide, and say it in the scores, as Cohere, Jina, vLLM and TEI do.

Kept documents have their calibrated P(relevant), dropped ones exactly 0.0. A reranker that
fails leaves the documents in their order: its outage neither fails a query nor empties it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from time import perf_counter, time
from typing import Annotated, Any, Literal, NotRequired, cast

from msgspec import Meta
from pydantic import Field, TypeAdapter, create_model
from starlette.types import Scope
from typing_extensions import TypedDict

from ctxguard.core.context import Context
from ctxguard.core.copies import copies_of
from ctxguard.core.decision import candidate_order
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.scores import relative_scores
from ctxguard.core.types import (
    CheckedPassages,
    Flag,
    Mode,
    Ranking,
    ScoreKind,
    StageFailure,
    StageTiming,
)
from ctxguard.guard import ContextGuard
from ctxguard.resilience import failure_of
from ctxguard.retrieval.rerank_forms import FORMS, Protocol, RerankForm, form_of
from ctxguard.server.problems import HttpAnswer, Problem, ProblemKind
from ctxguard.server.scoring import STAGE, BoundedScorer
from ctxguard.server.wire import Body, answer

ALIAS = "ctxguard:"
DEFAULT_MODEL = "ctxguard"
OMIT, FULL = "ctxguard:omit", "ctxguard:full"

LEAST_KEPT = 1e-6
"""The least score of a kept document: clients take 0.0 for one that was dropped."""

_PLAIN = frozenset(
    {
        Flag.UNCALIBRATED,
        Flag.PROFILE_MISMATCH,
        Flag.ROUTE_UNCALIBRATED,
        Flag.DOMAIN_VIOLATION,
        Flag.MISSING_SIGNALS,
        Flag.RANK_ONLY,
    }
)
"""Where one of these is flagged nothing calibrated was decided, and the reranker's order holds."""


class Document(TypedDict):
    """A document with a text; its other fields are not read."""

    text: str


# A list of a million wrong things is one mistake: a list of their errors would take seconds.
_Documents = Annotated[
    list[Annotated[str | Document, Field(union_mode="left_to_right")]], Field(fail_fast=True)
]


_Count = Annotated[int, Field(ge=0), Meta(ge=0)]


# No `oneOf` of the two required fields: generators of clients type no body that has alternatives.
class RerankRequest(TypedDict):
    """Documents to rerank: ``documents`` as Cohere, Jina and vLLM name them, ``texts`` as TEI."""

    query: str
    documents: NotRequired[_Documents]
    texts: NotRequired[Annotated[list[str], Field(fail_fast=True)]]
    model: NotRequired[
        Annotated[
            str | None,
            Field(
                description="Passed on to the reranker. ctxguard:omit leaves out what is dropped, "
                "ctxguard:full never does."
            ),
        ]
    ]
    top_n: NotRequired[
        Annotated[
            _Count | None,
            Field(
                description="The most results; dropped ones are left out. Absent, 0, or as many "
                "as there are documents: all, dropped ones with a score of 0.0.",
            ),
        ]
    ]
    top_k: NotRequired[Annotated[_Count | None, Field(description="``top_n`` of Voyage.")]]
    truncation: NotRequired[Annotated[bool | None, Field(description="Of Voyage; not used.")]]
    return_documents: NotRequired[bool | None]
    return_text: NotRequired[bool | None]
    max_tokens_per_doc: NotRequired[Annotated[int, Field(ge=1), Meta(ge=1)] | None]


_Few = Annotated[list[str], Field(min_length=1, max_length=1), Meta(min_length=1, max_length=1)]


class ScoreRequest(TypedDict):
    """Texts to score against one, as vLLM names them."""

    text_1: str | _Few
    text_2: str | Annotated[list[str], Field(fail_fast=True)]
    model: NotRequired[str | None]


class Degraded(TypedDict):
    """Why the reranker's scores are missing."""

    stage: str
    kind: str


class GuardMeta(TypedDict):
    """The decision on a request."""

    request_id: str
    policy: Annotated[str | None, Field(description="Id of the profile; null without one.")]
    mode: str
    kept: int
    dropped: Annotated[dict[str, int], Field(description="How many each reason dropped.")]
    flags: list[str]
    degraded: Degraded | None


def answer_type(name: str, form: RerankForm) -> Any:
    """The type of a form's answers, for the OpenAPI document."""
    result: dict[str, Any] = {
        **{key: (Literal[value], ...) for key, value in form.each.items()},
        "index": (int, Field(description="Its position in the request, from 0.")),
        form.score: (float, Field(description="In (0, 1] if it is kept, 0.0 if it is dropped.")),
    }
    if form.echo is not None:
        echoed: Any = Document if form.echoes_object else str
        result[form.echoed] = echoed, Field(default_factory=echoed)
    results: Any = list[create_model(f"{name.title()}Result", **result)]  # type: ignore[misc]
    if form.results is None:
        return results
    whole: dict[str, Any] = {
        **{key: (Literal[value], ...) for key, value in form.envelope.items()},
        "id": (str, ...),
        "model": (str, ...),
        form.results: (results, ...),
        "meta": (dict[Literal["ctxguard"], GuardMeta], ...),
        "usage": (dict[str, int], Field(description="Zero: the reranker counts, if at all.")),
    }
    return create_model(f"{name.title()}Answer", **whole)


_USAGE = {"total_tokens": 0, "prompt_tokens": 0}
_SPOKEN: tuple[tuple[tuple[Protocol, ...], Any], ...] = (
    (("cohere", "voyage", "tei"), RerankRequest),
    (("score",), ScoreRequest),
)
BODIES: dict[tuple[str, ...], tuple[Body[Any], TypeAdapter[Any]]] = {
    FORMS[names[0]].paths: (
        Body(asks),
        TypeAdapter(reduce(or_, [answer_type(name, FORMS[name]) for name in names])),
    )
    for names, asks in _SPOKEN
}
"""The types of a request and of its answer, by the paths that take it."""
_DOCUMENTS = frozenset([form.documents for form in FORMS.values()])


@dataclass(frozen=True, slots=True)
class Ranked:
    """All documents in the order of the answer.

    Attributes:
        positions: Positions of the documents, best first.
        scores: Their scores, in that order; they never rise.
        kept: How many are kept, copies of others not counted.
        dropped: How many each reason dropped.
    """

    positions: Sequence[int]
    scores: Sequence[float]
    kept: int
    dropped: dict[str, int]


class RerankEndpoint:
    """Answers rerank requests.

    Args:
        guard: Decides.
        scorer: Scores.
        kind: The kind of the scores.
        model: The scorer's own model, which requests cannot change; None if they may name one.
        max_documents: The most documents of a request.
        request: The fields of a request.
    """

    def __init__(
        self,
        guard: ContextGuard,
        scorer: BoundedScorer,
        kind: ScoreKind,
        model: str | None,
        *,
        max_documents: int,
        request: Body[Any],
    ) -> None:
        self._guard = guard
        self._scorer = scorer
        self._kind = kind
        self._model = model
        self._most_chars = guard.max_query_chars
        self._max_documents = max_documents
        self._request = request
        self._ids = tuple(map(str, range(max_documents)))
        # Of equal scores the first in the request is the better.
        self._ranks = tuple(range(1, max_documents + 1))

    async def __call__(self, scope: Scope) -> HttpAnswer:
        """Answer one request.

        Raises:
            Problem: it cannot be answered.
        """
        state = scope["state"]
        given = self._request.read(state["body"])
        form = form_of(given)
        query, texts = self._asked_of(given, form)
        asked = given.get("model")
        if asked is not None and asked.startswith(ALIAS) and asked not in (OMIT, FULL):
            raise Problem(
                ProblemKind.UNKNOWN_ALIAS,
                f"aliases are {OMIT} and {FULL}; any other model is the reranker's own",
            )
        ranking = await self._scored(query, texts, given)
        context = await self._guard.afilter(query, ranking, request_id=state["request_id"])
        ranked = ranked_of(context)
        failure = next(iter(context.decision.ranking.failures), None)
        headers = None
        if failure is not None:
            state["degraded"] = True
            headers = {"x-ctxguard-degraded": failure.kind.value}
        most = None if form.most is None else given.get(form.most)
        pairs = _shown(ranked, ranking.copies, most, asked)
        if form.in_order:
            pairs.sort()
        score_name = form.score
        results: list[dict[str, object]] = [{"index": at, score_name: score} for at, score in pairs]
        if form.each:
            results = [{**result, **form.each} for result in results]
        if form.echo is not None and given.get(form.echo):
            for result, (at, _) in zip(results, pairs, strict=True):
                result[form.echoed] = {"text": texts[at]} if form.echoes_object else texts[at]
        if form.results is None:
            return answer(results, headers)
        meta: GuardMeta = {
            "request_id": context.request_id,
            "policy": context.profile_id,
            "mode": context.mode.value,
            "kept": ranked.kept,
            "dropped": ranked.dropped,
            "flags": [*map(str, context.flags)],
            "degraded": (
                None if failure is None else {"stage": failure.stage, "kind": failure.kind.value}
            ),
        }
        return answer(
            {
                **form.envelope,
                "id": context.request_id,
                "model": asked or self._model or DEFAULT_MODEL,
                form.results: results,
                "meta": {"ctxguard": meta},
                "usage": _USAGE,
            },
            headers,
        )

    def _asked_of(self, given: Mapping[str, Any], form: RerankForm) -> tuple[str, list[str]]:
        """The query and the texts of a request.

        Raises:
            Problem: not one of the fields for documents is there, or something is too long.
        """
        if _DOCUMENTS & given.keys() != {form.documents}:
            raise Problem(
                ProblemKind.INVALID_REQUEST, "give the documents as `documents`, or as `texts`"
            )
        query, documents = given[form.query], given[form.documents]
        if not isinstance(query, str):
            (query,) = query
        if isinstance(documents, str):
            documents = [documents]
        texts: list[str] = documents
        if not set(map(type, documents)) <= {str}:
            texts = [each if isinstance(each, str) else each["text"] for each in documents]
        if len(texts) > self._max_documents:
            raise Problem(
                ProblemKind.INVALID_REQUEST,
                f"{len(texts):,} documents, the limit is {self._max_documents:,}: send fewer, or "
                "start the service with a larger max-documents",
            )
        if len(query) > self._most_chars:
            raise Problem(
                ProblemKind.INVALID_REQUEST,
                f"the query has {len(query):,} characters, the limit is {self._most_chars:,}",
            )
        return query, texts

    async def _scored(self, query: str, texts: list[str], given: Mapping[str, Any]) -> Ranking:
        """The documents with the reranker's scores, or with the reason why there are none."""
        n, model = len(texts), given.get("model")
        # A profile is of one model, whatever a request names.
        if model and (self._model or model.startswith(ALIAS) or self._guard.profile is not None):
            model = None
        scores: list[float | None] = [None] * n
        failures: tuple[StageFailure, ...] = ()
        timings: tuple[StageTiming, ...] = ()
        copies = copies_of(texts)
        if texts:
            began_at, began = time(), perf_counter()
            distinct = (
                [text for at, text in enumerate(texts) if at not in copies] if copies else texts
            )
            try:
                found = await self._scorer.scores(
                    query, distinct, model or None, given.get("max_tokens_per_doc")
                )
                scores = found.tolist()
                if copies:
                    firsts = (at for at in range(n) if at not in copies)
                    score_of = dict(zip(firsts, scores, strict=True))
                    scores = [score_of[copies.get(at, at)] for at in range(n)]
            except Exception as error:
                failures = (failure_of(STAGE, error),)
            timings = (StageTiming(STAGE, began_at, perf_counter() - began),)
        return Ranking(
            self._ids[:n],
            scores,
            self._kind,
            CheckedPassages((self._ids, texts)),
            ranks=self._ranks[:n],
            failures=failures,
            timings=timings,
            copies=copies,
        )


def ranked_of(context: Context) -> Ranked:
    """Every document in the order of the answer, with its score.

    Degraded: the documents' own order, with scores that fall from below 1 to above 0. Where
    nothing calibrated was decided: the reranker's order and scores, and nothing is dropped. A copy
    follows the document that it repeats, with the same score.
    """
    decision, ranking = context.decision, context.decision.ranking
    if ranking.failures:
        n = len(ranking)
        return Ranked(range(n), [(n - at) / (n + 1) for at in range(n)], n, {})
    if context.mode is not Mode.ENFORCE or ranking.kind is ScoreKind.RANK:
        return _plain(context)
    if not _PLAIN.isdisjoint(context.flags):
        return _plain(context)
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
    dropped = [*beyond, *aside]
    return Ranked(
        [*positions, *dropped],
        [*shown, *[0.0] * len(dropped)],
        len(kept),
        {reason.value: count for reason, count in context.dropped_by_reason.items()},
    )


def _plain(context: Context) -> Ranked:
    """The reranker's own order and scores; documents without a valid one last, with the least."""
    decision, ranking = context.decision, context.decision.ranking
    order, set_aside = decision.order, decision.set_aside
    is_by_score = isinstance(decision.policy, RatioPolicy) and context.mode is not Mode.OFF
    if ranking.copies or not is_by_score:
        order, set_aside, _ = candidate_order(ranking)
    given = cast(Sequence[float], ranking.scores)
    scores = list(map(given.__getitem__, order))
    if set_aside:
        scores += [min(scores, default=0.0)] * len(set_aside)
        order = [*order, *[at for at, _ in set_aside]]
    return Ranked(order, scores, len(order), {})


def _shown(
    ranked: Ranked, copies: Mapping[int, int], top_n: int | None, asked: str | None
) -> list[tuple[int, float]]:
    """The position and score of each result, best first; copies where there is room for them."""
    pairs = list(zip(ranked.positions, ranked.scores, strict=True))
    n = len(pairs)
    omits = asked == OMIT or (top_n and top_n < n and asked != FULL)
    most = min(ranked.kept if omits else n, top_n or n)
    room = most - n + len(copies)
    if room < len(copies):
        extra = set(sorted(copies)[: max(room, 0)])
        pairs = [pair for pair in pairs if pair[0] not in copies or pair[0] in extra]
    return pairs[:most]
