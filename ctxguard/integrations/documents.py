"""A framework's documents as a ranking, and the guard's decisions for the framework's metadata."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count, repeat
from typing import Any

from ctxguard.core.context import Context
from ctxguard.core.scores import is_valid
from ctxguard.core.types import Passage, PassagesBy, Ranking, ScoreKind
from ctxguard.errors import ConfigurationError
from ctxguard.guard import ContextGuard

METADATA_KEY = "ctxguard"
"""Where a decision is in a document's metadata."""

Read = Callable[[str, Any], Passage]
"""The passage of an id and a framework's document."""


def ranking_of_documents(
    documents: Sequence[Any],
    ids: Sequence[str | None],
    scores: Sequence[Any] | None,
    score_kind: ScoreKind | None,
    read: Read,
) -> Ranking:
    """Make the ranking of a framework's documents, best first.

    Args:
        documents: As the framework gave them.
        ids: The framework's ids; None is replaced by a digest of the document's text.
        scores: The framework's scores; None if it has none.
        score_kind: The kind of the scores; distances are negated. None is allowed only without
            scores.
        read: Converts a document to a passage.

    Raises:
        ConfigurationError: there are scores but no kind.
    """
    if score_kind is None and scores is not None and any(score is not None for score in scores):
        raise ConfigurationError(
            "these documents have scores: set the guard's score_kind to their kind, one of "
            + ", ".join(kind.value for kind in ScoreKind)
        )
    if scores is None or score_kind is None:
        scores, score_kind = [None] * len(documents), ScoreKind.RANK
    elif score_kind is ScoreKind.DISTANCE:
        scores = [-score if is_valid(score) else None for score in scores]
    known = _known_ids(documents, ids, read)
    return Ranking(
        passage_ids=known,
        scores=scores,
        kind=score_kind,
        passages=PassagesBy(lambda at: read(known[at], documents[at])),
        ranks=range(1, len(documents) + 1),
    )


def _known_ids(documents: Sequence[Any], ids: Sequence[str | None], read: Read) -> Sequence[str]:
    """Return the ids, with a digest of its text for each document that has none.

    If several such documents share a text, all after the first get a number, since they may be
    different documents.
    """
    if all(ids):
        return tuple(ids)  # type: ignore[arg-type]
    repeats: dict[str, int] = {}
    known = []
    for document, own in zip(documents, ids, strict=True):
        if own:
            known.append(own)
            continue
        digest = text_digest(read("", document).text)
        repeats[digest] = n = repeats.get(digest, 0) + 1
        known.append(digest if n == 1 else f"{digest}-{n}")
    return tuple(known)


def titled(passage_id: str, text: Any, metadata: Mapping[str, Any]) -> Passage:
    """Make a passage whose title is a string in its metadata, if there is one."""
    title = metadata.get("title")
    return Passage(passage_id, text, title if isinstance(title, str) else "", metadata)


def text_digest(text: object) -> str:
    """Hash a text to 128 bits as hexadecimal digits, the same in every process.

    >>> text_digest("The kettle boils water.")
    'be478882465f5c73753b82fd5bdffac4'
    """
    encoded = str(text).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()


def filtered(guard: ContextGuard, query: str, ranking: Ranking, **options: Any) -> Context:
    """Filter a framework's documents; all pass if no policy is enforced.

    Args:
        guard: Decides; its ``k``, if set, applies.
        query: The query.
        ranking: The ranking of the documents.
        options: As for ``ContextGuard.filter``.
    """
    k = max(len(ranking), 1) if guard.k is None else guard.k
    return guard.filter(query, ranking, k=k, **options)


Served = tuple[Passage, int, dict[str, Any]]
"""A passage that is served, its candidate's position in the ranking, and what was decided on it."""


def served(context: Context) -> list[Served]:
    """Return the passages that a context serves, each with its decision, ready for JSON.

    A decision holds the ``request_id``, the candidate's ``score``, its calibrated ``probability``
    (None without a model), its 1-based ``rank`` in the decision's order (None if it was set aside),
    the ``reason`` for which it would be dropped (None if it is kept; where it is enforced all are),
    and the answer's ``flags``.
    """
    request_id, scores = context.request_id, context.decision.ranking.scores
    flags = [flag.value for flag in context.flags]
    rows = _kept(context) if context.enforced else _candidates(context)
    return [
        (
            passage,
            position,
            {
                "request_id": request_id,
                "score": float(score) if is_valid(score := scores[position]) else None,  # type: ignore[arg-type]
                "probability": probability,
                "rank": rank,
                "reason": reason,
                "flags": [*flags],
            },
        )
        for passage, position, rank, probability, reason in rows
    ]


_Row = tuple[Passage, int, int | None, float | None, str | None]
"""Passage, position, rank, probability and reason of a candidate."""


def _kept(context: Context) -> Iterable[_Row]:
    """Pair kept passages with their decisions; decisions on all would take ten times as long."""
    decision, passages = context.decision, context.passages
    kept, probabilities = decision.kept, decision.probabilities or repeat(None)
    if context.assembly.order == "rank" and not context.dropped_in_assembly:
        return zip(passages, kept, count(1), probabilities, repeat(None))
    ids = decision.ranking.passage_ids
    rows = zip(kept, count(1), probabilities, repeat(None))
    row_of = {ids[row[0]]: row for row in rows}
    return [(passage, *row_of[passage.passage_id]) for passage in passages]


def _candidates(context: Context) -> Iterable[_Row]:
    """Pair served passages with their decisions, even dropped ones and those that share an id."""
    decision = context.decision
    positions = [*decision.order, *[position for position, _ in decision.set_aside]]
    candidates = dict(zip(positions, context.decisions, strict=True))
    places: dict[str, list[int]] = {}
    for position, name in enumerate(decision.ranking.passage_ids):
        places.setdefault(name, []).append(position)
    for passage in context.passages:  # in any order, such as the best at both ends
        at = places[passage.passage_id].pop(0)
        candidate = candidates[at]
        reason = None if candidate.reason is None else candidate.reason.value
        yield passage, at, candidate.rank, candidate.probability, reason
