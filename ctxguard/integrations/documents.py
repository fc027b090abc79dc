"""Converts a framework's documents to a ranking, and the guard's decisions to their metadata.

Calls the guard and the caller's functions that read a document, and touches nothing else.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count, repeat
from typing import Any

from ctxguard.core.context import Context
from ctxguard.core.scores import is_valid
from ctxguard.core.types import Passage, PassagesBy, Ranking, ScoreKind, ScoreKindName, member_of
from ctxguard.errors import ConfigurationError
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.guard.wrapped_retriever import describe

METADATA_KEY = "ctxguard"
"""The key of the decision in a document's metadata."""

Read = Callable[[str, Any], Passage]
"""Makes a passage from an id and a framework's document."""


def columns_of(
    documents: Sequence[Any], expected: str, *read: Callable[[Any], Any]
) -> list[list[Any]]:
    """Read columns of a framework's documents, such as ids and scores.

    Raises:
        ConfigurationError: they are not the ``expected`` documents.
    """
    try:
        return [list(map(each, documents)) for each in read]
    except (AttributeError, TypeError):
        kinds = describe(documents)
        if isinstance(documents, list | tuple):
            kinds = ", ".join(sorted({type(each).__name__ for each in documents}))
        raise ConfigurationError(f"expected {expected}, got {kinds}") from None


def ranking_of_documents(
    documents: Sequence[Any],
    ids: Sequence[str | None],
    scores: Sequence[Any] | None,
    score_kind: ScoreKind | ScoreKindName | None,
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
        ConfigurationError: there are scores but no kind, or the kind is unknown.
    """
    kind = None if score_kind is None else member_of(ScoreKind, score_kind, "score_kind")
    if kind is None and scores is not None and any(score is not None for score in scores):
        raise ConfigurationError(
            "these documents have scores: set the guard's score_kind to the kind of these scores, "
            "one of " + ", ".join(kind.value for kind in ScoreKind)
        )
    if scores is None or kind is None:
        scores, kind = [None] * len(documents), ScoreKind.RANK
    elif kind is ScoreKind.DISTANCE:
        scores = [-score if is_valid(score) else None for score in scores]
    known = _known_ids(documents, ids, read)
    return Ranking(
        passage_ids=known,
        scores=scores,
        kind=kind,
        passages=PassagesBy(lambda at: read(known[at], documents[at])),
        ranks=range(1, len(documents) + 1),
    )


def _known_ids(documents: Sequence[Any], ids: Sequence[str | None], read: Read) -> Sequence[str]:
    """Return the ids; a document without one gets a digest of its text.

    Documents that share a text get a number from the second on: they may differ otherwise.
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
    """Make a passage, titled by the ``title`` in its metadata if that is a string."""
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
    """Filter a framework's documents; if no policy is enforced, all or the guard's ``k`` pass."""
    k = max(len(ranking), 1) if guard.k is None else guard.k
    return guard.filter(query, ranking, k=k, **options)


Served = tuple[Passage, int, dict[str, Any]]
"""A served passage, its candidate's position in the ranking, and the decision on it."""
_Candidate = tuple[int, int | None, float | None, str | None]
"""Position, rank, probability and reason of a candidate."""


def served(context: Context) -> list[Served]:
    """Return the passages that a context serves, each with its decision, ready for JSON.

    A decision holds the ``request_id``, the candidate's ``score``, its calibrated ``probability``
    (None without a model), its 1-based ``rank`` in the decision's order (None if it was set aside),
    the ``reason`` for which it would be dropped (None if it is kept; where it is enforced all are),
    and the answer's ``flags``.
    """
    ranking, flags = context.decision.ranking, [flag.value for flag in context.flags]
    rows_of: dict[str, list[_Candidate]] = {}
    for row in sorted(_rows(context)):  # candidates may share an id where nothing is dropped
        rows_of.setdefault(ranking.passage_ids[row[0]], []).append(row)
    found = []
    for passage in context.passages:
        position, rank, probability, reason = rows_of[passage.passage_id].pop(0)
        score = ranking.scores[position]
        decision = {
            "request_id": context.request_id,
            "score": float(score) if is_valid(score) else None,  # type: ignore[arg-type]
            "probability": probability,
            "rank": rank,
            "reason": reason,
            "flags": [*flags],
        }
        found.append((passage, position, decision))
    return found


def _rows(context: Context) -> Iterable[_Candidate]:
    """List only candidates that may be served; decisions on all would take ten times as long."""
    decision = context.decision
    if context.enforced:
        return zip(decision.kept, count(1), decision.probabilities or repeat(None), repeat(None))
    positions = [*decision.order, *[position for position, _ in decision.set_aside]]
    return [
        (at, each.rank, each.probability, None if each.reason is None else each.reason.value)
        for at, each in zip(positions, context.decisions, strict=True)
    ]
