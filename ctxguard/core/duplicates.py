"""Finds texts that copy an earlier one: equal apart from Unicode form, case and white space.

All code that handles copies uses this rule. A text is compared in full only if its end equals that
of another, and at most once, so the time grows with the length of the texts. Pure: no I/O, no
clock, no logging.
"""

import re
from collections.abc import Sequence
from hashlib import blake2b
from operator import itemgetter
from unicodedata import normalize

_END_WINDOW = 40
_END = 16
_LAST_WINDOW, _LAST_LETTERS = (itemgetter(slice(-n, None)) for n in (_END_WINDOW, _END))

_MOST_CHARS = 100_000
"""A longer text counts as a copy only of exactly the same text."""

_MOST_FOLDED = 500_000
"""Characters beyond ASCII that are folded in all texts; the texts after them count as longer."""

_ASCII_SPACE = bytes(code for code in range(128) if chr(code).isspace())

# Normalising takes quadratic time to order the marks of one letter, so runs are broken up, as in
# Unicode's stream-safe format.
_RUN = re.compile(r"[^\w\s\x00-\x7f]{30}")
_BREAK = "\u034f"


def copies_of(texts: Sequence[str]) -> dict[int, int]:
    """Map the position of each copy to the position of the first text that it repeats.

    Texts are compared in Unicode's compatibility form (as in NFKC), ignoring case, with each run of
    white space as one space. A text without words is not a copy.

    >>> copies_of(["One  two", "three", "ONE\\ntwo", "", "", "ｏｎｅ two"])
    {2: 0, 5: 0}
    """
    # Nearly always all texts end differently, by letters alone.
    ends = list(map(_LAST_WINDOW, texts))
    if not "".join(ends).isascii():
        ends = [end if end.isascii() else _letters(end) for end in ends]
    are_whole = max(map(len, texts), default=0) <= _END_WINDOW
    coded = "\0".join(ends).encode(errors="surrogatepass")
    if _ends_differ(coded, len(ends), 0 if are_whole else _END):
        return {}
    first_of: dict[str, int] = {}
    for at, text in enumerate(texts):
        first_of.setdefault(text, at)
    by_end: dict[str, list[str]] = {}
    left = _MOST_FOLDED
    for text in first_of:
        left -= 0 if text.isascii() else len(text)
        if len(text) <= _MOST_CHARS and (left >= 0 or text.isascii()):
            by_end.setdefault(_end(text), []).append(text)
    wordless = set(by_end.pop("", ()))
    for equal_ends in by_end.values():
        if len(equal_ends) > 1:
            first_of_key: dict[bytes, int] = {}
            for text in equal_ends:
                first_of[text] = first_of_key.setdefault(_key(text), first_of[text])
    return {
        at: first
        for at, text in enumerate(texts)
        if (first := first_of[text]) != at and text not in wordless
    }


def text_key(text: str) -> bytes | None:
    """Return a 16-byte digest that a text shares with its copies; None for a text without words."""
    if len(text) > _MOST_CHARS:
        encoded = text.encode(errors="surrogatepass")
        return blake2b(encoded, digest_size=16, person=b"long").digest()
    return _key(text) if text and not text.isspace() else None


def _ends_differ(coded: bytes, n: int, above: int) -> bool:
    """Return whether n ends, joined by NUL, all differ and are longer than ``above`` letters."""
    letters = coded.lower().translate(None, _ASCII_SPACE).decode(errors="surrogatepass").split("\0")
    differ = len(set(map(_LAST_LETTERS, letters))) == len(letters) == n
    return differ and min(map(len, letters)) > above


def _end(text: str) -> str:
    """Return the last letters of a text, which its copies share; empty if it has none."""
    letters = _letters(text[-_END_WINDOW:])
    if len(letters) <= _END and len(text) > _END_WINDOW:
        letters = _letters(text)
    return letters[-_END:]


def _key(text: str) -> bytes:
    """Return a digest of a text's words, to save memory."""
    words = " ".join(_folded(text).split())
    return blake2b(words.encode(errors="surrogatepass"), digest_size=16).digest()


def _letters(text: str) -> str:
    return "".join(_folded(text).replace(_BREAK, "").split())


def _folded(text: str) -> str:
    if text.isascii():
        return text.casefold()
    text = normalize("NFKD", _RUN.sub(rf"\g<0>{_BREAK}", text))
    return normalize("NFKD", text.casefold())
