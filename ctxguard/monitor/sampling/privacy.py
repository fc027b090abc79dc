"""Privacy: how much of a sample's text is stored, after redaction."""

from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Literal

from ctxguard.core.metadata_filter import Where
from ctxguard.errors import ConfigurationError
from ctxguard.monitor.redaction import Redactor, Text, kept, redact, redacted
from ctxguard.monitor.sampling.record import SampleRecord

TextName = Literal["stored", "hashed", "omitted"]

_REMEMBERED_TEXTS = 100_000


@dataclass(frozen=True, slots=True)
class Privacy:
    """How much of a request's text is stored.

    The filter of a request is stored as it is, because a search with a changed one would find what
    the request could not see. One in which the redactor finds something is withheld.

    Attributes:
        redactor: Applied to every text before it is written; None for no redaction. If it
            raises, the sample is lost, never written unredacted.
        query: Whether queries are stored, replaced by a keyed hash, or left out.
        passages: The same for titles and texts of passages. A judge that reads texts needs them:
            where they are hashed or left out, give the monitor the index. Without it, and with a
            query that is hashed or left out, samples are not judged and counted as ``incomplete``.
        hash_key: Keeps hashes from being reversed by a dictionary; needed if anything is hashed.

    Raises:
        ConfigurationError: at construction, for a hash without a key of 16 to 64 bytes, or another
            way to keep a text.
    """

    redactor: Redactor | None = redact
    query: Text | TextName = Text.STORED
    passages: Text | TextName = Text.STORED
    hash_key: bytes | None = None

    def __post_init__(self) -> None:
        for name in ("query", "passages"):
            given = getattr(self, name)
            if given not in list(Text):
                raise ConfigurationError(f"{name} {given!r} must be one of {', '.join(Text)}")
            kept("", Text(given), self.hash_key)
            # A text is one of them too. Through object.__setattr__, because this is frozen.
            object.__setattr__(self, name, Text(given))

    def apply(self, record: SampleRecord) -> SampleRecord:
        """Make of the record what may be stored.

        Raises:
            RedactionError: the redactor failed.
        """
        query = None if record.query is None else self._kept(record.query, self.query)
        passages = {
            position: replace(
                passage,
                title=self._kept(passage.title, self.passages, recurs=True) or "",
                text=self._kept(passage.text, self.passages, recurs=True) or "",
                metadata=None,
            )
            for position, passage in record.passages.items()
            if self.passages is not Text.OMITTED
        }
        withheld = record.where is not None and self._is_secret(record.where)
        return replace(
            record,
            query=query,
            passages=passages,
            where=None if withheld else record.where,
            where_withheld=withheld or record.where_withheld,
        )

    def _is_secret(self, where: Where) -> bool:
        """Tell whether a filter may not be written, or cannot be written unchanged."""
        texts = [str(value) for values in where.allowed.values() for value in values]
        return any(
            text != text.encode("utf-8", "replace").decode()
            or (self.redactor is not None and redacted(text, self.redactor) != text)
            for text in (*texts, *where.fields)
        )

    def _kept(self, text: str, how: Text | TextName, *, recurs: bool = False) -> str | None:
        if how is Text.STORED and self.redactor is not None:
            text = (redacted_once if recurs else redacted)(text, self.redactor)
        return kept(text, Text(how), self.hash_key)


DEFAULT_PRIVACY = Privacy()

_redactions: dict[tuple[Redactor, bytes], str | None] = {}
"""Redacted texts by redactor and hash of the text; None for a text that redaction left as it is."""


def redacted_once(text: str, redactor: Redactor) -> str:
    """Redact a passage's text, remembered because the same passages recur.

    Raises:
        RedactionError: the redactor failed.
    """
    # Redaction takes half a millisecond for a thousand characters, a hash a microsecond. Only
    # changed texts are kept, so that a hundred thousand passages take a few MB.
    key = redactor, blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    try:
        changed = _redactions[key]
    except KeyError:
        clean = redacted(text, redactor)
        if len(_redactions) >= _REMEMBERED_TEXTS:
            _redactions.clear()
        _redactions[key] = None if clean == text else clean
        return clean
    return text if changed is None else changed
