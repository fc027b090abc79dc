"""What an index in an engine holds, what it is asked, and what an engine's adapter does."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple, Protocol, Self

from ctxguard.core.corpus_sketch import passage_digest
from ctxguard.core.metadata_filter import Where, tokens
from ctxguard.core.types import Passage, Ranking
from ctxguard.errors import ConfigurationError, DataError
from ctxguard.retrieval.protocols import Float32Array

LEXICAL = "lexical"
DENSE = "dense"

FORMAT = 1
"""Version of what an index holds beside its passages; another is refused."""

_LONGEST_TOKEN = 120
_SIGN = 2**63


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """What an index in an engine was built with. Kept in the engine, so that a URL opens it.

    Attributes:
        embedder: The name of the model that made the vectors.
        embedder_weights: The digest of its weights.
        dimension: Length of a vector.
        analyser: Name of what splits texts into terms.
        analyser_fingerprint: Its rules.
        mean_length: Terms of a passage on the mean when the index was built, > 0.
        format: `FORMAT` of the release that built it.
    """

    embedder: str
    embedder_weights: str
    dimension: int
    analyser: str
    analyser_fingerprint: str
    mean_length: float
    format: int = FORMAT

    def to_json(self) -> str:
        """As one JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """What `to_json` wrote.

        Raises:
            DataError: it is something else, or a newer release wrote it.
        """
        try:
            found = json.loads(text)
            version = found["format"]
            if version != FORMAT:
                raise DataError(
                    f"the index has format {version!r} and this release reads {FORMAT}: use the "
                    "release that built it, or build the index again"
                )
            settings = cls(**{field.name: field.type(found[field.name]) for field in fields(cls)})  # type: ignore[operator]
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"the settings of the index cannot be read ({type(error).__name__}: {error}); "
                "build the index again"
            ) from error
        return settings


class IndexedPassage(NamedTuple):
    """A passage as an engine stores it.

    Attributes:
        passage: The passage.
        vector: Its unit vector, shape (dimension,).
        terms: The terms of its title and text, each as often as it occurs.
        filter_tokens: See `filter_tokens`.
        digest: Identifies its id, title and text, as a signed number of 64 bits; see
            `signed_digest`.
        revision: Identifies all of it, metadata too; likewise signed.
    """

    passage: Passage
    vector: Float32Array
    terms: Sequence[str]
    filter_tokens: Sequence[str]
    digest: int
    revision: int


@dataclass(frozen=True, slots=True)
class LegQuery:
    """What an engine is asked for one request.

    Attributes:
        terms: The query's terms, each as often as it occurs; None if the lexical leg is not asked.
        vector: The query's unit vector, shape (dimension,); None if the dense leg is not asked.
        depth: The most candidates of each leg, ≥ 1.
        any_of: What the passages must satisfy: of each of these sets of filter tokens, at least
            one. None of the sets is empty; no set at all for no filter.
    """

    terms: Sequence[str] | None
    vector: Float32Array | None
    depth: int
    any_of: tuple[tuple[str, ...], ...] = ()


class Engine(Protocol):
    """One index in an engine. Safe to use from several threads at once.

    Any method may raise the client's own errors, which count as an outage.
    """

    @property
    def settings(self) -> IndexSettings:
        """What the index was built with."""
        ...

    def fingerprint(self) -> Mapping[str, str]:
        """What of the engine's own settings decides which candidates it finds.

        Without the corpus: its sketch tells how much of that has changed.
        """
        ...

    def search(self, query: LegQuery, /) -> Mapping[str, Ranking]:
        """The candidates of each leg that is asked, best first, by ``lexical`` and ``dense``.

        At most ``depth`` of a leg, unless the engine scores the candidates of one leg in the other
        too. Scores of ``dense`` are cosines. Those of ``lexical`` are BM25 where the engine gives
        it, and a passage without a term of the query is not among them. Passages have their
        metadata.
        """
        ...

    def read(self, passage_ids: Sequence[str], /) -> Mapping[str, Passage]:
        """The passages with these ids, as far as they are there."""
        ...

    def count(self) -> int:
        """How many passages there are."""
        ...

    def revisions(self, passage_ids: Sequence[str] | None = None, /) -> Mapping[str, int]:
        """The revision of each of these passages that is there, or of all for None."""
        ...

    def smallest_digests(self, n: int, /) -> Sequence[int]:
        """The ``n`` smallest digests of passages, or all if there are fewer; signed."""
        ...

    def write(self, passages: Sequence[IndexedPassage], /) -> None:
        """Insert passages, in place of those with the same ids. At most 512 at a time."""
        ...

    def delete(self, passage_ids: Sequence[str], /) -> None:
        """Delete passages; an id that is not there is no error. At most 512 at a time."""
        ...

    def finish(self) -> None:
        """Called after the last ``write`` or ``delete`` of a change: make it visible to searches.

        Also what is cheaper once at the end, such as building an index of the vectors.
        """
        ...

    def close(self) -> None:
        """Close its connections."""
        ...


def filter_tokens(metadata: object) -> list[str]:
    """What a passage's metadata can match, as texts: one for each field and value.

    Engines compare texts, and `Where` also tells ``"1"`` from ``1`` and ``True``. So each token
    is JSON of the field, the value's type and the value; of a long one a digest.

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
    """For each condition of a filter the tokens any of which will do; one may be empty.

    >>> where_tokens(Where(tenant=["b", "a"], level=1))
    (('["level","int","1"]',), ('["tenant","str","a"]', '["tenant","str","b"]'))
    """
    if where is None:
        return ()
    return tuple(
        [
            tuple(sorted(_token(name, *token) for token in allowed))
            for name, allowed in where.conditions
        ]
    )


def _token(name: str, kind: str, value: object) -> str:
    text = json.dumps([name, kind, value], separators=(",", ":"))
    if len(text) <= _LONGEST_TOKEN:
        return text
    return "#" + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def signed_digest(passage: Passage) -> int:
    """`passage_digest` less 2⁶³: in the order of digests, and within what databases can store.

    >>> signed_digest(Passage("a", "text")) + 2**63 == passage_digest(Passage("a", "text"))
    True
    """
    return passage_digest(passage) - _SIGN


def unsigned_digest(stored: int) -> int:
    """The `passage_digest` of a stored digest."""
    return stored + _SIGN


def revision_of(passage: Passage) -> int:
    """64 bits that identify a passage with its metadata, as a signed number.

    Raises:
        DataError: the metadata cannot be written as JSON.
    """
    try:
        content = json.dumps(
            [passage.passage_id, passage.title, passage.text, passage.metadata], sort_keys=True
        )
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the metadata of passage {passage.passage_id!r} cannot be written as JSON: {error}"
        ) from error
    digest = hashlib.blake2b(content.encode(), digest_size=8).digest()
    return int.from_bytes(digest) - _SIGN


def checked_batch(passages: Iterable[IndexedPassage], dimension: int) -> list[IndexedPassage]:
    """Passages to write, whose vectors have the index's dimension.

    Raises:
        ConfigurationError: one has another.
    """
    batch = list(passages)
    for one in batch:
        if one.vector.shape != (dimension,):
            raise ConfigurationError(
                f"the vector of passage {one.passage.passage_id!r} has shape {one.vector.shape}, "
                f"those of the index ({dimension},): encode with the index's embedder"
            )
    return batch
