"""Splits long passages into chunks that the embedding model can read whole, with their parent's id.

A chunk is a passage of its own. Its id is its parent's with ``#`` and a number from 1, it has its
parent's title and metadata, and names its parent in the metadata, so that labels of whole documents
can be read as labels of their chunks. Pure.
"""

import re
from collections.abc import Iterable, Iterator

from ctxguard.core.types import Passage
from ctxguard.retrieval.index.passages import searchable_text, without_surrogates
from ctxguard.retrieval.models.window import PassageWindow

_CHUNK_ID = re.compile(r".+#[1-9][0-9]*", re.DOTALL)

CHUNK_OF = "chunk_of"
"""The metadata of a chunk that holds the id of the passage it is of."""


def chunked(passages: Iterable[Passage], window: PassageWindow) -> Iterator[Passage]:
    """Yield passages, splitting those that are longer than the model's window.

    Raises:
        MissingExtraError: a passage is longer, and the splitting library is not installed.
    """
    for passage in passages:
        if not window.is_longer(without_surrogates(searchable_text(passage))):
            yield passage
            continue
        text, title = without_surrogates(passage.text), without_surrogates(passage.title)
        heading = f"{title}\n" if title else ""
        metadata = {**(passage.metadata or {}), CHUNK_OF: passage.passage_id}
        for number, chunk in enumerate(window.split(text, heading), start=1):
            yield Passage(chunk_id(passage.passage_id, number), chunk, passage.title, metadata)


def chunk_id(passage_id: str, number: int) -> str:
    """Return the id of a passage's chunk, numbered from 1."""
    return f"{passage_id}#{number}"


def is_chunk_id(passage_id: str) -> bool:
    """Return whether an id has the form of a chunk's; only the passage tells for certain.

    >>> is_chunk_id("kettle#2"), is_chunk_id("kettle")
    (True, False)
    """
    return _CHUNK_ID.fullmatch(passage_id) is not None


def document_of(passage: Passage) -> str | None:
    """Return the id of a chunk's parent; None if the passage is not a chunk."""
    document = (passage.metadata or {}).get(CHUNK_OF)
    return document if isinstance(document, str) else None
