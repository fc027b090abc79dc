"""Passages with the same text: retrieved ones, and labelled ones that no query found.

A guard serves one of them in place of all, so a label of any of them applies to the one retrieved,
and together they count as one relevant passage.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import count

from ctxguard.core.duplicates import text_key
from ctxguard.core.types import Passage
from ctxguard.retrieval.chunks import chunk_id, document_of, is_chunk_id

PassageOf = Callable[[str], Passage]


class KnownTexts:
    """The texts of passages by id, as digests.

    Attributes:
        document_of: The documents of passages that are chunks, by the chunks' ids.
    """

    def __init__(self) -> None:
        self._keys: dict[str, bytes | None] = {}
        self._chunks: dict[str, list[str]] = {}
        self.document_of: dict[str, str] = {}

    def add(self, passage: Passage) -> None:
        """Note a passage; the first text of an id stays."""
        name = passage.passage_id
        if name in self._keys:
            return
        self._keys[name] = text_key(passage.text)
        document = document_of(passage) if is_chunk_id(name) else None
        if document is not None:
            self.document_of[name] = document

    def key(self, passage_id: str) -> bytes | None:
        """Return the digest of a passage's text; None if the text is unknown or has no word."""
        return self._keys.get(passage_id)

    def look_up(self, labelled: Iterable[str], passage_of: PassageOf) -> None:
        """Note the passages and documents that labels name, as far as they can be looked up."""
        for name in sorted(labelled):
            if not self._is_known(name, passage_of):
                chunks = [*self._chunks_of(name, passage_of)]
                if chunks:
                    self._chunks[name] = chunks

    def same(self) -> dict[str, str]:
        """Map the ids of passages, and of documents, with the same text to the first of them."""
        by_text: dict[object, list[str]] = {}
        for name, key in self._keys.items():
            if key is not None:
                by_text.setdefault(key, []).append(name)
        for document, chunks in self._chunks.items():
            by_text.setdefault(tuple(map(self.key, chunks)), []).append(document)
        several = [names for names in by_text.values() if len(names) > 1]
        return {name: min(names) for names in several for name in names}

    def _chunks_of(self, document: str, passage_of: PassageOf) -> Iterator[str]:
        for number in count(1):
            name = chunk_id(document, number)
            self._is_known(name, passage_of)
            if self.document_of.get(name) != document:
                return
            yield name

    def _is_known(self, name: str, passage_of: PassageOf) -> bool:
        if name not in self._keys:
            with suppress(Exception):  # anyone's code: if it fails, the text is unknown
                passage = passage_of(name)
                if isinstance(passage, Passage) and passage.passage_id == name:
                    self.add(passage)
        return name in self._keys
