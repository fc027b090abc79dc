"""Defines how an engine stores an index: its settings, passages and filter tokens. Pure."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

from pydantic import TypeAdapter

from ctxguard.core.corpus_sketch import passage_digest
from ctxguard.core.metadata_filter import Where, tokens
from ctxguard.core.types import Passage
from ctxguard.errors import DataError
from ctxguard.retrieval.index.hybrid_index import SignalLevel
from ctxguard.retrieval.protocols import Float32Array

FORMAT = 3
"""Version of the settings and of what engines store; other versions are refused."""

PASSAGE = ("passage_id", "title", "text", "metadata")
"""The stored fields that make a passage."""

_LONGEST_TOKEN = 120
SIGN = 2**63
"""Subtracted from digests before they are stored: the order is kept, and databases can hold
them."""


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """The settings that an index was built with, kept in the engine so that its URL suffices.

    Attributes:
        embedder, embedder_weights: The name of the model, and the digest of its weights.
        dimension: Length of a vector.
        analyser, analyser_fingerprint: The name of the analyser, and its rules.
        mean_length: Mean number of terms of a passage when the index was built, > 0.
        format: `FORMAT` of the release that built it.
    """

    embedder: str
    embedder_weights: str
    dimension: int
    analyser: str
    analyser_fingerprint: str
    mean_length: float
    signals: SignalLevel
    format: int = FORMAT

    def to_json(self) -> str:
        """Write as one JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` wrote.

        Raises:
            DataError: it is not such an object, or a newer release wrote it.
        """
        try:
            found = json.loads(text)
            version = found["format"]
            if version == FORMAT:
                return TypeAdapter(cls).validate_python(found)
        except Exception as error:
            raise DataError(
                f"the settings of the index cannot be read ({type(error).__name__}: {error}); "
                "build the index again"
            ) from error
        raise DataError(
            f"the index has format {version!r}, but this release reads {FORMAT}: use the release "
            "that built it, or build the index again"
        )


class IndexedPassage(NamedTuple):
    """A passage as an engine stores it.

    Attributes:
        vector: Its unit vector, shape (dimension,).
        terms: The terms of its title and text, each as often as it occurs.
        revision: See `revision_of`.
    """

    passage: Passage
    vector: Float32Array
    terms: Sequence[str]
    revision: int

    def stored(self) -> dict[str, Any]:
        """Return the fields by name, without vector and terms.

        ``digest`` identifies id, title and text by 64 bits, less `SIGN`.
        """
        passage = self.passage
        return {
            "passage_id": passage.passage_id,
            "title": passage.title,
            "text": passage.text,
            # As a string, because engines' numbers end at 64 bits and Python's do not.
            "metadata": json.dumps(passage.metadata, ensure_ascii=False),
            "filter_tokens": filter_tokens(passage.metadata),
            "digest": passage_digest(passage) - SIGN,
            "revision": self.revision,
        }


def passage_of(row: Any) -> Passage | None:
    """Build a passage from a stored row, or from whatever an engine returned instead.

    None if a field of `PASSAGE` is missing: without metadata no filter could be checked.
    """
    try:
        passage_id, title, text, metadata = [row[name] for name in PASSAGE]
        found = json.loads(metadata)
    except (KeyError, TypeError, ValueError):
        return None
    if not all(isinstance(each, str) for each in (passage_id, title, text)):
        return None
    return Passage(passage_id, text, title, found)


def filter_tokens(metadata: object) -> list[str]:
    """List the strings in a passage's metadata that filters match: one per field and value.

    Engines compare texts, and `Where` also tells ``"1"`` from ``1`` and ``True``. So each token
    is JSON of the field, the value's type and the value; a long one is replaced by its digest.

    >>> filter_tokens({"tenant": "a", "groups": [1, True]})
    ['["tenant","str","a"]', '["groups","int","1"]', '["groups","bool",true]']
    """
    if not isinstance(metadata, Mapping):
        return []
    return list(
        dict.fromkeys(
            _token(name, *token)
            for name, value in metadata.items()
            if isinstance(name, str)
            for token in tokens(value)
        )
    )


def where_tokens(where: Where | None) -> tuple[tuple[str, ...], ...]:
    """List the tokens that satisfy each condition of a filter; a list may be empty.

    >>> where_tokens(Where(tenant=["b", "a"], level=1))
    (('["level","int","1"]',), ('["tenant","str","a"]', '["tenant","str","b"]'))
    """
    conditions = () if where is None else where.conditions
    return tuple(
        [tuple(sorted(_token(name, *token) for token in allowed)) for name, allowed in conditions]
    )


def _token(name: str, kind: str, value: object) -> str:
    text = json.dumps([name, kind, value], separators=(",", ":"))
    if len(text) <= _LONGEST_TOKEN:
        return text
    return "#" + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def revision_of(passage: Passage) -> int:
    """Hash a passage and its metadata to 64 bits, minus `SIGN`; a `DataError` if not JSON."""
    try:
        content = json.dumps(
            [passage.passage_id, passage.title, passage.text, passage.metadata], sort_keys=True
        )
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the metadata of passage {passage.passage_id!r} cannot be written as JSON: {error}"
        ) from error
    digest = hashlib.blake2b(content.encode(), digest_size=8).digest()
    return int.from_bytes(digest) - SIGN
