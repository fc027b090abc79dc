"""What may be written of a text: secrets replaced, and the text kept, hashed or left out.

Redaction runs before anything is written and fails closed: a redactor that raises, or returns
no text, loses the sample (DESIGN.md §8). The forms of secrets are in ``patterns`` and
``keys``. Pure: no
I/O, no clock, no logging.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

from ctxguard.errors import ConfigurationError, RedactionError
from ctxguard.monitor.redaction.keys import KEY_RULES
from ctxguard.monitor.redaction.patterns import PERSONAL_RULES, Glance, Kind

Redactor = Callable[[str], str]
"""Returns its text without what must not be written; anything that it raises loses the sample."""

RULES = (*KEY_RULES, *PERSONAL_RULES)

_MAX_ROUNDS = 8
_KEY_BYTES = range(16, 65)  # 64 is the most that BLAKE2b takes


@dataclass(frozen=True, slots=True)
class PatternRedactor:
    """Replaces e-mail addresses, phone numbers, cards, bank accounts and keys by their kind.

    A net, not a guarantee. It finds what has a tell-tale form: digits of any script, also with
    zero-width characters between them, tokens with a known prefix, values that are named
    (``password=…``), and long runs that look random, which takes digests along. It does not
    find names, addresses, what is spelled out ("joe at example dot com"), a short password in
    running text, phone numbers of seven digits or of plain digits without a ``tel`` before
    them, a card number inside a longer number, letters of another script made to look Latin.
    It errs towards redacting: an article number may read as a phone number. Time grows
    linearly with the text, whatever the text.

    Args:
        kinds: What is replaced; all by default.

    Raises:
        ConfigurationError: a kind that does not exist, or none at all.

    >>> redactor = PatternRedactor()
    >>> redactor("mail joe@example.org or call +49 30 1234567, card 4111 1111 1111 1111")
    'mail [e-mail] or call [phone], card [card]'
    >>> redactor("password=hunter2 was set on 2024-05-06 in release 1.2.3")
    'password=[key] was set on 2024-05-06 in release 1.2.3'
    """

    kinds: frozenset[Kind] = frozenset(Kind)

    def __post_init__(self) -> None:
        try:
            kinds = frozenset(Kind(kind) for kind in self.kinds)
        except (TypeError, ValueError):
            kinds = frozenset()
        if not kinds:
            raise ConfigurationError(
                f"redactor kinds {self.kinds!r} must be one or more of {[*map(str, Kind)]}"
            )
        object.__setattr__(self, "kinds", kinds)

    def __call__(self, text: str) -> str:
        """The text with every match replaced by its kind, such as ``[e-mail]``.

        Redacting twice changes nothing: rounds are repeated until nothing is found.

        Raises:
            RedactionError: no text, or one that still changes after several rounds.
        """
        if not isinstance(text, str):
            raise RedactionError(f"only text can be redacted, and this is {type(text).__name__}")
        for _ in range(_MAX_ROUNDS):
            before = text
            glance = Glance(text)
            for rule in RULES:
                if rule.kind in self.kinds and glance.may_match(rule):
                    clean = rule.redact(text, glance.lowered)
                    if clean != text:
                        text, glance = clean, Glance(clean)
            if text == before:
                return text
        raise RedactionError(f"a text still changed after {_MAX_ROUNDS} rounds of redaction")


_redact_all = PatternRedactor()


def redact(text: str) -> str:
    """The text without anything that ``PatternRedactor`` finds.

    Raises:
        RedactionError: see ``PatternRedactor``.

    >>> redact("Authorization: Bearer abc.def")
    'Authorization: [key]'
    """
    return _redact_all(text)


def redacted(text: str, redactor: Redactor) -> str:
    """What a redactor makes of a text; fails closed.

    Raises:
        RedactionError: there is no text, or the redactor raised or returned no text. The text
            must then not be written.

    >>> redacted("a secret", lambda text: text.replace("secret", "[key]"))
    'a [key]'
    """
    if not isinstance(text, str):
        raise RedactionError(f"only text can be redacted, and this is {type(text).__name__}")
    try:
        clean = redactor(text)
    except Exception as error:
        # Its message and its traceback's locals may quote the text.
        cause = type(error).__name__
        clean = None
    else:
        cause = f"it returned {type(clean).__name__}"
    if not isinstance(clean, str):
        raise RedactionError(f"the redactor failed ({cause}); the text was not written")
    return clean


class Text(StrEnum):
    """How much of a text is written."""

    STORED = "stored"
    HASHED = "hashed"
    """Equal texts can be told from different ones, and nothing more."""
    OMITTED = "omitted"


def hash_text(text: str, key: bytes) -> str:
    """A keyed BLAKE2b hash of a text: ``hash:`` and 32 hexadecimal digits.

    Args:
        text: Lone surrogates are hashed too.
        key: 16 to 64 secret bytes. Whoever has them can look short texts up in a dictionary.

    Raises:
        ConfigurationError: no key, or one of another length.

    >>> hash_text("reset my password", b"sixteen or more.")
    'hash:bbaa9d89caab4e8a33f7ab287f7e0fdf'
    """
    if not isinstance(key, bytes) or len(key) not in _KEY_BYTES:
        raise ConfigurationError(
            "hashing a text needs a key of 16 to 64 secret bytes: without one, a short query "
            "can be found by hashing a dictionary; make one with secrets.token_bytes(32)"
        )
    data = text.encode("utf-8", "surrogatepass")
    return "hash:" + blake2b(data, key=key, digest_size=16).hexdigest()


def kept(text: str, how: Text, key: bytes | None = None) -> str | None:
    """What is written of a text: itself, its hash, or None.

    Args:
        text: Already redacted.
        how: How much is written.
        key: Needed by ``Text.HASHED`` only.

    Raises:
        ConfigurationError: a hash without a key of 16 to 64 bytes.

    >>> kept("q", Text.STORED), kept("q", Text.OMITTED)
    ('q', None)
    """
    if how is Text.STORED:
        return text
    if how is Text.HASHED:
        return hash_text(text, key or b"")
    return None
