"""Redacts a text.

It runs before anything is written and fails closed: if a redactor raises, or returns something
other than text, the sample is lost (DESIGN.md §8). The rules are in ``patterns`` and ``keys``.
Pure, except that ``redacted`` and ``redacted_once`` call the given redactor; the latter remembers
its answers in the process.
"""

import re
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from string import ascii_letters, digits

from ctxguard.errors import RedactionError
from ctxguard.monitor.redaction.keys import KEY_RULES
from ctxguard.monitor.redaction.patterns import PERSONAL_RULES, Kind, Rule

Redactor = Callable[[str], str]
"""Returns a text without its secrets. If it raises, the sample is lost."""

RULES = (*KEY_RULES, *PERSONAL_RULES)

_MAX_ROUNDS = 8
_REMEMBERED_TEXTS = 100_000


def redact(text: str) -> str:
    """Replace e-mails, IP addresses, phone numbers, cards, bank accounts and keys with their kind.

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
        lowered, few_digits = text.lower(), has_few_digits(text)
        for rule in RULES:
            clean = apply_rule(rule, text, lowered, few_digits=few_digits)
            if clean != text:
                text, lowered, few_digits = clean, clean.lower(), has_few_digits(clean)
        if text == before:
            return text
    raise RedactionError(f"redaction still changes the text after {_MAX_ROUNDS} rounds")


_OF_DIGITS = (Kind.CARD, Kind.PHONE)
# No gap inside a phone or card number is longer; other scripts' zero-width signs aside.
_SIX_NEAR_DIGITS = re.compile(r"[0-9](?:[^0-9]{0,4}[0-9]){5}")


def has_few_digits(text: str) -> bool:
    """Return whether a text has too few digits for a card number or a phone number."""
    return text.isascii() and _SIX_NEAR_DIGITS.search(text) is None


def apply_rule(rule: Rule, text: str, lowered: str, *, few_digits: bool) -> str:
    """Replace every match of a rule; ``lowered`` is the same text in lower case."""
    if rule.hints and not any(map(lowered.__contains__, rule.hints)):
        return text
    if few_digits and rule.kind in _OF_DIGITS:
        return text
    if rule.reach is None or len(lowered) != len(text):  # İ becomes two characters.
        return rule.pattern.sub(rule.replace, text)
    # Only near the hints: a search that ignores case is ten times slower.
    pieces, end = [], 0
    for hint in _any_of(rule.hints).finditer(lowered):
        for start in range(max(end, hint.start() - rule.reach), hint.start() + 1):
            match = rule.pattern.match(text, start)
            if match is not None:
                pieces += [text[end:start], rule.replace(match)]
                end = match.end()
                break
    return "".join([*pieces, text[end:]])


@cache
def _any_of(hints: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, hints)))


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
    found = (apply_rule(rule, whole, lowered, few_digits=True) for rule in KEY_RULES)
    return text if all(each == whole for each in found) else whole


def redacted(text: str, redactor: Redactor | None) -> str:
    """Apply a redactor, if there is one, to a text; fail closed with a RedactionError.

    >>> redacted("a secret", lambda text: text.replace("secret", "[key]"))
    'a [key]'
    """
    if redactor is None:
        return text
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
"""Redacted texts by redactor and hash of the text; None if the text is unchanged."""


def redacted_once(text: str, redactor: Redactor | None) -> str:
    """Redact a passage's text as ``redacted`` does, but only once, because passages recur."""
    if redactor is None:
        return text
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
