"""Haystack: the guard as a component, in the namespace from which pipelines are loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from ctxguard import ConfigurationError, ContextGuard, Where
from ctxguard._support.extras import require
from ctxguard.core.types import ModeName, Passage, Ranking, ScoreKind, ScoreKindName
from ctxguard.integrations.documents import (
    METADATA_KEY,
    columns_of,
    filtered,
    ranking_of_documents,
    served,
    titled,
)
from ctxguard.profile.comparison import ProfileCheck

require("haystack", "haystack")

from haystack import Document, component, default_to_dict
from haystack.core.errors import SerializationError

__all__ = ["ContextGuardRanker", "ranking_of"]


@component
class ContextGuardRanker:
    """Keeps the documents that a calibrated policy lets through.

    Each document that is returned is a copy, with the decision in ``meta["ctxguard"]``
    (`ctxguard.integrations.documents.served`).

    Args:
        profile: The path of a calibrated profile; None to pass all documents, or the first ``k``.
        score_kind: What the documents' scores mean. None if they have none, and only the order
            counts.
        k: The most documents while nothing is calibrated or enforced; None for all.
        mode: ``enforce``; ``shadow`` decides and records, but passes the list; ``off``; None for
            the profile's verdict.
        fingerprint: Identifies the system that retrieves, for the profile.
        strict: Raise if the profile was made for another system, or is unverified.
        guard: A guard in place of all these settings, such as one that samples. A pipeline with one
            cannot be saved; give it to a loaded pipeline by ``DeserializationCallbacks``.

    Raises:
        ConfigurationError: a setting is out of range, or ``guard`` is given beside others.
        ProfileFormatError: ``profile`` is the path of a file that is not a profile.
        ProfileMismatchError: ``strict`` is set, and anything differs or cannot be compared.
    """

    def __init__(
        self,
        profile: str | None = None,
        *,
        score_kind: ScoreKindName | None = None,
        k: int | None = None,
        mode: ModeName | None = None,
        fingerprint: dict[str, str] | None = None,
        strict: bool = False,
        guard: ContextGuard | None = None,
    ) -> None:
        own: dict[str, Any] = {"profile": profile, "score_kind": score_kind, "k": k, "mode": mode}
        self._settings = {**own, "fingerprint": fingerprint, "strict": strict}
        if guard is not None and any(self._settings.values()):
            raise ConfigurationError("give a guard or settings of one, not both")
        self._is_given = guard is not None
        self._guard = guard or ContextGuard(**own, check=ProfileCheck(fingerprint, strict=strict))

    @component.output_types(documents=list[Document], text=str, flags=list[str])  # type: ignore[untyped-decorator]
    def run(
        self,
        query: str,
        documents: list[Document],
        where: dict[str, Any] | None = None,
        request_id: str | None = None,
        session_id: str | None = None,
    ) -> Mapping[str, Any]:
        """Keep the clean ones of the documents that were retrieved for a query, best first.

        Args:
            query: The question that was searched.
            documents: What was retrieved, best first.
            where: Fields of ``meta`` and their allowed values, which every document must satisfy.
                It is only checked: the document store's filter applies it.
            request_id: Identifies the request in samples; None for a random one.
            session_id: The session that the request belongs to.

        Returns:
            ``documents``, best first; ``text``, what to give the model: rendered, sanitised,
            delimiters escaped; ``flags``, what was unusual.

        Raises:
            QueryError: the query is too long.
            ConfigurationError: the documents have scores and no ``score_kind``, or ``where`` cannot
                be checked.
            FilterViolationError: a document does not satisfy ``where``; nothing is returned.
            StageUnavailableError: there are documents, and none has a text.
        """
        context = filtered(
            self._guard,
            query,
            ranking_of(documents, self._guard.score_kind),
            request_id=request_id,
            session_id=session_id,
            where=None if where is None else Where(where),
        )
        kept = [
            replace(
                documents[at],
                content=passage.text,
                meta={**documents[at].meta, METADATA_KEY: decided},
            )
            for passage, at, decided in served(context)
        ]
        return {
            "documents": kept,
            "text": context.text,
            "flags": [flag.value for flag in context.flags],
        }

    @component.output_types(documents=list[Document], text=str, flags=list[str])  # type: ignore[untyped-decorator]
    async def run_async(
        self,
        query: str,
        documents: list[Document],
        where: dict[str, Any] | None = None,
        request_id: str | None = None,
        session_id: str | None = None,
    ) -> Mapping[str, Any]:
        """Do what ``run`` does, on the event loop: it takes microseconds and waits for nothing."""
        answer: Mapping[str, Any] = self.run(query, documents, where, request_id, session_id)
        return answer

    def to_dict(self) -> dict[str, Any]:
        """Return the settings, for a pipeline that is saved.

        Raises:
            SerializationError: the component was given a guard.
        """
        if self._is_given:
            raise SerializationError(
                "a ContextGuardRanker with a guard of its own cannot be saved: give it settings "
                "(profile, score_kind, k, mode, fingerprint, strict)"
            )
        data: dict[str, Any] = default_to_dict(self, **self._settings)
        return data


def ranking_of(
    documents: Sequence[Document], score_kind: ScoreKind | ScoreKindName | None
) -> Ranking:
    """Make the ranking of documents, best first, for a retriever to pass to ``calibrate``.

    As in ``lambda query, *, depth: ranking_of(search.run(query, top_k=depth)["documents"],
    "ratio")``. See `ctxguard.integrations.documents.ranking_of_documents`.
    """
    read = attrgetter("id"), attrgetter("score")
    ids, scores = columns_of(documents, "a list of Haystack documents", *read)
    return ranking_of_documents(documents, ids, scores, score_kind, _passage)


def _passage(passage_id: str, document: Document) -> Passage:
    # A document without text is not readable, which assembly says of it.
    return titled(passage_id, document.content, document.meta)
