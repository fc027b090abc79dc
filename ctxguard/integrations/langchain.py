"""Wraps LangChain's vector stores and retrievers for a guard, and a guard as its retriever.

Needs ``langchain-core`` alone. For agents see ``langchain_agents``. Calls the store and the guard,
and keeps the current run in a context variable.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from itertools import islice
from operator import attrgetter
from typing import Any

from ctxguard._support.extras import require
from ctxguard.core.context import Context
from ctxguard.core.metadata_filter import Where
from ctxguard.core.types import Flag, Mode, Passage, Ranking, ScoreKind, ScoreKindName, member_of
from ctxguard.errors import ConfigurationError
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.guard.wrapped_retriever import describe
from ctxguard.integrations.documents import (
    METADATA_KEY,
    columns_of,
    filtered,
    ranking_of_documents,
    served,
    titled,
)

require("langchain_core", "langchain")

from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, Field

WhereArguments = Callable[[Where], Mapping[str, Any]]
"""Translates a filter into the keyword arguments that the vector store's search expects."""

# The run of the `GuardedRetriever` that searches, whose child a wrapped retriever's run is.
_run: ContextVar[Any] = ContextVar("ctxguard_langchain_run", default=None)


class WrappedVectorStore:
    """A LangChain vector store as a retriever that ``ContextGuard`` and ``calibrate`` take.

    It calls ``similarity_search_with_score`` and keeps its scores. A document's id is the store's,
    or else a digest of the text.

    Args:
        store: The vector store.
        score_kind: The kind of its scores.
        where_arguments: Translates a request's filter into keyword arguments of the search, such as
            ``lambda where: {"filter": ...}``. None for a store that is never asked with a filter.
            The guard checks every document's metadata again.

    Raises:
        ConfigurationError: ``store`` is not a vector store, or the kind of score is unknown.
    """

    def __init__(
        self,
        store: Any,
        *,
        score_kind: ScoreKind | ScoreKindName,
        where_arguments: WhereArguments | None = None,
    ) -> None:
        if not callable(getattr(store, "similarity_search_with_score", None)):
            raise ConfigurationError(
                f"{describe(store)} has no similarity_search_with_score: pass the vector store "
                "itself, or wrap a retriever in WrappedRetriever instead"
            )
        self._store = store
        self._kind = member_of(ScoreKind, score_kind, "score_kind")
        self._where_arguments = where_arguments

    def retrieve(self, query: str, *, depth: int, where: Where | None = None) -> Ranking:
        """Return the store's ``depth`` nearest documents, with their scores.

        Raises:
            ConfigurationError: ``where`` is given without ``where_arguments``, or the store did not
                return pairs of a document and a score.
        """
        pairs = self._store.similarity_search_with_score(
            query, k=depth, **_translated(where, self._where_arguments)
        )
        return self._ranking(pairs, depth)

    async def aretrieve(self, query: str, *, depth: int, where: Where | None = None) -> Ranking:
        """``retrieve`` without blocking the event loop."""
        pairs = await self._store.asimilarity_search_with_score(
            query, k=depth, **_translated(where, self._where_arguments)
        )
        return self._ranking(pairs, depth)

    def _ranking(self, pairs: Any, depth: int) -> Ranking:
        try:
            # A string or a mapping is wrong, even an empty one.
            rows = [pairs] if isinstance(pairs, str | Mapping) else list(islice(pairs, depth))
            documents, scores = zip(*rows, strict=True) if rows else ((), ())
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"the vector store returned {describe(pairs)}, but similarity_search_with_score "
                "must return a list of pairs of a Document and a score"
            ) from None
        return ranking_of(documents, self._kind, scores)


class WrappedRetriever:
    """A LangChain retriever as a retriever that ``ContextGuard`` and ``calibrate`` take.

    Its documents have no scores, so only their order counts (kind ``rank``). Its runs are children
    of the `GuardedRetriever`'s runs.

    Args:
        retriever: Anything with ``invoke(query)`` that returns documents, best first. It sets the
            number of documents itself.
        where_arguments: As for `WrappedVectorStore`, but into keyword arguments of ``invoke``.
    """

    def __init__(self, retriever: Any, *, where_arguments: WhereArguments | None = None) -> None:
        if not callable(getattr(retriever, "invoke", None)):
            raise ConfigurationError(
                f"{describe(retriever)} is not a LangChain retriever: it has no invoke"
            )
        self._retriever = retriever
        self._where_arguments = where_arguments

    def retrieve(self, query: str, *, depth: int, where: Where | None = None) -> Ranking:
        """Return the retriever's first ``depth`` documents.

        Raises:
            ConfigurationError: ``where`` is given without ``where_arguments``, or the retriever did
                not return documents.
        """
        arguments = _translated(where, self._where_arguments)
        return _first(self._retriever.invoke(query, _child_config(), **arguments), depth)

    async def aretrieve(self, query: str, *, depth: int, where: Where | None = None) -> Ranking:
        """``retrieve`` without blocking the event loop."""
        arguments = _translated(where, self._where_arguments)
        return _first(await self._retriever.ainvoke(query, _child_config(), **arguments), depth)


class GuardedRetriever(BaseRetriever):  # type: ignore[misc]
    """A ``ContextGuard`` as a LangChain retriever.

    The id of its run is the request's id. Each document has the decision on it in
    ``metadata["ctxguard"]`` (`ctxguard.integrations.documents.served`). ``invoke`` also takes
    ``where``, ``session_id`` and ``sample``, as ``ContextGuard.retrieve`` does.

    Attributes:
        guard: What retrieves and decides; of `WrappedVectorStore`, `WrappedRetriever`,
            ``SeparateLegs`` or any other retriever.
        k: The most documents to return, the best ones that the guard serves. ``invoke`` accepts it
            too.
    """

    guard: ContextGuard
    k: int | None = Field(default=None, ge=1)

    def _get_relevant_documents(
        self, query: str, *, run_manager: Any, k: int | None = None, **options: Any
    ) -> list[Document]:
        parent = _run.set(run_manager)
        try:
            context = self.guard.retrieve(query, request_id=str(run_manager.run_id), **options)
        finally:
            _run.reset(parent)
        return documents_of(context, self.k if k is None else k)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: Any, k: int | None = None, **options: Any
    ) -> list[Document]:
        parent = _run.set(run_manager)
        try:
            request_id = str(run_manager.run_id)
            context = await self.guard.aretrieve(query, request_id=request_id, **options)
        finally:
            _run.reset(parent)
        return documents_of(context, self.k if k is None else k)

    def render(self, documents: Sequence[Document]) -> str:
        """Render the documents that this retriever returned as text for the model.

        The guard's ``assembly`` applies: sanitised, delimiters escaped. In a chain, write
        ``retriever | retriever.render``.
        """
        insufficient = self.guard.mode is Mode.ENFORCE and (
            not documents
            or Flag.INSUFFICIENT in documents[0].metadata.get(METADATA_KEY, {}).get("flags", ())
        )
        passages = [_passage(document.id or "", document) for document in documents]
        return self.guard.assembly.render(passages, insufficient=insufficient)


class GuardedCompressor(BaseDocumentCompressor):  # type: ignore[misc]
    """A ``ContextGuard`` as a LangChain document compressor: it filters retrieved documents.

    Documents get the same ``metadata["ctxguard"]`` as from `GuardedRetriever`.

    Attributes:
        guard: Decides; it needs no retriever. Its ``score_kind`` is the kind of the scores.
        score_key: Where the score is in a document's metadata, such as ``relevance_score`` behind a
            reranker; None if only the order counts.
    """

    guard: ContextGuard
    score_key: str | None = None
    model_config = ConfigDict(arbitrary_types_allowed=True)

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Any = None
    ) -> list[Document]:
        """Return the documents that the guard keeps; the run that retrieved them is the request."""
        run_id = getattr(callbacks, "parent_run_id", None)
        context = filtered(
            self.guard,
            query,
            ranking_by_metadata(self.guard, documents, self.score_key),
            request_id=None if run_id is None else str(run_id),
        )
        return documents_of(context)

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Any = None
    ) -> list[Document]:
        """Compress on the event loop, as it takes only microseconds."""
        return self.compress_documents(documents, query, callbacks)


def ranking_of(
    documents: Sequence[Document], score_kind: ScoreKind | None, scores: Sequence[Any] | None
) -> Ranking:
    """Build a ranking from documents and their scores, best first."""
    (ids,) = columns_of(documents, "LangChain documents", attrgetter("id"))
    return ranking_of_documents(documents, ids, scores, score_kind, _passage)


def ranking_by_metadata(
    guard: ContextGuard, documents: Sequence[Document], score_key: str | None
) -> Ranking:
    """Build a ranking from documents whose metadata holds their scores."""
    if score_key is None:
        return ranking_of(documents, ScoreKind.RANK, None)
    scores = [(getattr(document, "metadata", None) or {}).get(score_key) for document in documents]
    return ranking_of(documents, guard.score_kind, scores)


def documents_of(context: Context, k: int | None = None) -> list[Document]:
    """Return the served passages, at most the best ``k``, in presentation order."""
    if k is not None and k < 1:
        raise ConfigurationError(f"k {k!r} must be at least 1, or None for all that are kept")
    documents = [
        Document(passage.text, id=passage.passage_id, metadata=_metadata(passage, decision))
        for passage, _, decision in served(context)
    ]
    if k is None or k >= len(documents):
        return documents
    if context.mode is not Mode.ENFORCE:
        return documents[:k]
    ranks = [document.metadata[METADATA_KEY]["rank"] for document in documents]
    last = sorted(ranks)[k - 1]
    return [document for document, rank in zip(documents, ranks, strict=True) if rank <= last]


def _passage(passage_id: str, document: Document) -> Passage:
    return titled(passage_id, document.page_content, document.metadata)


def _metadata(passage: Passage, decision: Mapping[str, Any]) -> dict[Any, Any]:
    """Join a passage's metadata and decision, and its title if no document was its source."""
    metadata = {**(passage.metadata or {}), METADATA_KEY: decision}
    if passage.title:
        metadata.setdefault("title", passage.title)
    return metadata


def _translated(where: Where | None, translate: WhereArguments | None) -> Mapping[str, Any]:
    if where is None:
        return {}
    if translate is None:
        raise ConfigurationError(
            "this retriever cannot filter, and an unfiltered search would show passages that "
            "`where` forbids: give where_arguments, which translates the filter for the store"
        )
    return translate(where)


def _child_config() -> dict[str, Any]:
    """Configure a child of the guarded retriever's run, if there is such a run."""
    run = _run.get()
    return {} if run is None else {"callbacks": run.get_child()}


def _first(documents: Iterable[Document], depth: int) -> Ranking:
    if not isinstance(documents, Iterable) or isinstance(documents, str | Mapping):
        raise ConfigurationError(
            f"the retriever returned {describe(documents)}; it must return a list of Documents"
        )
    return ranking_of(list(islice(documents, depth)), None, None)
