"""Redaction of a text.

It runs before anything is written and fails closed: if a redactor raises, or returns
something other than text, the sample is lost (DESIGN.md §8). The rules are in ``patterns`` and
``keys``. Pure: no I/O, no clock, no logging.
"""

import re
from collections.abc import Callable
from hashlib import blake2b
from string import ascii_letters, digits

from ctxguard.errors import RedactionError
from ctxguard.monitor.redaction.keys import KEY_RULES
from ctxguard.monitor.redaction.patterns import PERSONAL_RULES, has_many_digits

Redactor = Callable[[str], str]
"""Returns its text without secrets. If it raises, the sample is lost."""

RULES = (*KEY_RULES, *PERSONAL_RULES)

_MAX_ROUNDS = 8
_REMEMBERED_TEXTS = 100_000


def redact(text: str) -> str:
    """Replace e-mail and IP addresses, phone numbers, cards, bank accounts and keys by their kind.

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
    whatever the text. Rounds are repeated until nothing is found, so that redacting twice changes
    nothing.

    Raises:
        RedactionError: the argument is not a string, or still changes after several rounds.

    >>> redact("mail joe@example.org or call +49 30 1234567, card 4111 1111 1111 1111")
    'mail [e-mail] or call [phone], card [card]'
    >>> redact("password=hunter2 was set on 2024-05-06 in release 1.2.3")
    'password=[key] was set on 2024-05-06 in release 1.2.3'
    """
    if not isinstance(text, str):
        raise RedactionError(f"only a string can be redacted, not {type(text).__name__}")
    text = _whole_keys(text)
    for _ in range(_MAX_ROUNDS):
        before = text
        lowered, many_digits = text.lower(), has_many_digits(text)
        for rule in RULES:
            if rule.may_match(lowered, many_digits=many_digits):
                clean = rule.redact(text, lowered)
                if clean != text:
                    text, lowered, many_digits = clean, clean.lower(), has_many_digits(clean)
        if text == before:
            return text
    raise RedactionError(f"redaction still changes the text after {_MAX_ROUNDS} rounds")


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


def redacted(text: str, redactor: Redactor) -> str:
    """Apply a redactor to a text; fail closed.

    Raises:
        RedactionError: ``text`` is not a string, or the redactor raised or did not return one.
            The text must then not be written.

    >>> redacted("a secret", lambda text: text.replace("secret", "[key]"))
    'a [key]'
    """
    if not isinstance(text, str):
        raise RedactionError(f"only a string can be redacted, not {type(text).__name__}")
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
"""Redacted texts by redactor and hash of the text; None for a text left unchanged."""


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
