"""Redaction of a text, and how much of it is written: the text itself, a hash, or nothing.

Redaction runs before anything is written and fails closed: if a redactor raises, or returns
something other than text, the sample is lost (DESIGN.md §8). The rules are in ``patterns`` and
``keys``. Pure: no I/O, no clock, no logging.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from string import ascii_letters, digits

from ctxguard.errors import ConfigurationError, RedactionError
from ctxguard.monitor.redaction.keys import KEY_RULES
from ctxguard.monitor.redaction.patterns import PERSONAL_RULES, Glance, Kind

Redactor = Callable[[str], str]
"""Returns its text without secrets. If it raises, the sample is lost."""

RULES = (*KEY_RULES, *PERSONAL_RULES)

_MAX_ROUNDS = 8
_REMEMBERED_TEXTS = 100_000
_HASH = re.compile(r"hash:[0-9a-f]{32}")
_KEY_BYTES = range(16, 65)  # BLAKE2b accepts up to 64


@dataclass(frozen=True, slots=True)
class PatternRedactor:
    """Replaces e-mail and IP addresses, phone numbers, cards, bank accounts and keys by their kind.

    This reduces the risk and guarantees nothing. It finds secrets by their form: digits of any
    script, also with zero-width characters between them; tokens with a known prefix; named values
    (``password=…``, ``--password …``, ``<password>…``), also in other languages; and runs of 16
    characters or more that look random. It does not find names, addresses, spelled-out secrets
    ("joe at example dot com"), a password of letters alone in running text, phone numbers of seven
    digits or of plain digits without a ``tel`` before them, a card number inside a longer number,
    letters of another script that look Latin, and what by itself looks like an id: a UUID, up to 63
    hexadecimal digits (a digest of SHA-1 or MD5, but also some keys), and four numbers below 100
    after a capitalised word (a version, but also some IP addresses). It errs towards redacting: an
    article number may be taken for a phone number. Its time is linear in the length of the text,
    whatever the text.

    Args:
        kinds: The kinds to replace; all by default.

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
        """Replace every match by its kind, such as ``[e-mail]``.

        Rounds are repeated until nothing is found, so that redacting twice changes nothing.

        Raises:
            RedactionError: not a text, or one that still changes after several rounds.
        """
        if not isinstance(text, str):
            raise RedactionError(f"only text can be redacted, and this is {type(text).__name__}")
        if Kind.KEY in self.kinds:
            text = _whole_keys(text)
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


# Between signs of a key, where no script needs them.
_SPLIT = re.compile(
    r"(?<=[A-Za-z0-9_\-+/=.])[\u00ad\u200b-\u200d\u2060\ufeff]+(?=[A-Za-z0-9_\-+/=.])"
)


_PLAIN = {ord(sign) + 0xFEE0: sign for sign in ascii_letters + digits + "-_"}
"""Full-width letters and digits, as East Asian keyboards write them."""


def _whole_keys(text: str) -> str:
    """Write keys in plain characters, not split by zero-width ones; else keep the text."""
    if text.isascii():
        return text
    whole = _SPLIT.sub("", text).translate(_PLAIN)
    if whole == text:
        return text
    lowered = whole.lower()
    return whole if any(rule.redact(whole, lowered) != whole for rule in KEY_RULES) else text


_redact_all = PatternRedactor()


def redact(text: str) -> str:
    """Replace everything that ``PatternRedactor`` finds.

    Raises:
        RedactionError: see ``PatternRedactor``.

    >>> redact("Authorization: Bearer abc.def")
    'Authorization: [key]'
    """
    return _redact_all(text)


def redacted(text: str, redactor: Redactor) -> str:
    """Apply a redactor to a text; fail closed.

    Raises:
        RedactionError: ``text`` is not a text, or the redactor raised or returned something else.
            The text must then not be written.

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


class Text(StrEnum):
    """How much of a text is written."""

    STORED = "stored"
    HASHED = "hashed"
    """Only whether two texts are equal can be told."""
    OMITTED = "omitted"


def hash_text(text: str, key: bytes) -> str:
    """Hash a text by keyed BLAKE2b: ``hash:`` and 32 hexadecimal digits.

    Args:
        text: Any text; lone surrogates are allowed.
        key: 16 to 64 secret bytes. With the key, short texts can be found by hashing a dictionary.

    Raises:
        ConfigurationError: a missing key, or one of another length.

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


def is_hash(text: str) -> bool:
    """Tell whether a text is one that ``hash_text`` returns.

    >>> is_hash("hash:bbaa9d89caab4e8a33f7ab287f7e0fdf"), is_hash("hash:tables")
    (True, False)
    """
    return _HASH.fullmatch(text) is not None


def kept(text: str, how: Text, key: bytes | None = None) -> str | None:
    """Return the part of a text that is written: the text itself, its hash, or None.

    Args:
        text: A text that is already redacted.
        how: How much of it is written.
        key: Key of the hash; needed for ``Text.HASHED`` only.

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
