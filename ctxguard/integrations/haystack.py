"""Haystack: converts documents to a ranking, and served passages back to documents.

The component is `haystack_integrations.components.rankers.ctxguard.ContextGuardRanker`: pipelines
are loaded with classes of that namespace only.
"""

from collections.abc import Sequence
from dataclasses import replace

from ctxguard._support.extras import require
from ctxguard.core.context import Context
from ctxguard.core.types import Passage, Ranking, ScoreKind, ScoreKindName, member_of
from ctxguard.errors import ConfigurationError
from ctxguard.integrations.documents import METADATA_KEY, ranking_of_documents, served, titled

require("haystack", "haystack")

from haystack import Document


def ranking_of(
    documents: Sequence[Document], score_kind: ScoreKind | ScoreKindName | None
) -> Ranking:
    """Make the ranking of documents, for a retriever to pass to ``calibrate``.

    As in ``lambda query, *, depth: ranking_of(search.run(query, top_k=depth)["documents"],
    "ratio")``.

    Args:
        documents: The documents of a Haystack retriever, best first.
        score_kind: What their scores mean; of kind ``distance``, lower is better. None if they have
            none.

    Raises:
        ConfigurationError: they are not documents, or have scores without a kind.
    """
    try:
        ids = [document.id for document in documents]
        scores = [document.score for document in documents]
    except (AttributeError, TypeError):
        raise ConfigurationError(
            f"expected a list of Haystack documents, got a {type(documents).__name__} of other "
            "objects"
        ) from None
    kind = None if score_kind is None else member_of(ScoreKind, score_kind, "score_kind")
    return ranking_of_documents(documents, ids, scores, kind, _passage)


def documents_of(context: Context, documents: Sequence[Document]) -> list[Document]:
    """Return copies of the served documents, with their decisions in ``meta["ctxguard"]``.

    Args:
        context: The guard's answer.
        documents: The guard's input, in the same order.
    """
    return [
        replace(
            documents[position],
            content=passage.text,
            meta={**documents[position].meta, METADATA_KEY: decision},
        )
        for passage, position, decision in served(context)
    ]


def _passage(passage_id: str, document: Document) -> Passage:
    # A document without text is not readable, which assembly says of it.
    return titled(passage_id, document.content, document.meta)
