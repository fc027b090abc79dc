"""Odd inputs: texts, JSON values and numbers, and files after a few changes."""

import json
import math
from collections.abc import Callable
from random import Random
from typing import Any

MOST_BYTES = 200_000
MOST_BODY_BYTES = 16 * 2**20

TOKENS = (
    *(b"null", b"true", b"-1", b"1e999", b"NaN", b"9" * 400, b'""', b"[]", b"{}", b'"\\ud800"'),
    *(b"[" * 3000, b'{"a":' * 3000, b"\0", b"\xff", b"\xef\xbb\xbf", b"\n", b"\t", b",", b'"'),
    *(b"1" * 5000, b"\xe2\x80\x8d", b"0", b"2", b"0.5", b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff"),
    *(b"PK\x03\x04", b"[1]"),
)
PARTS = (
    *("<", "/", "passage", "pass", "age", ">", "query", " ", "\n", "\r", "\t", "a", "1", "é", "م"),
    *("क", "्", "\u200c", "\u200d", "\ufe0f", "\U000e0101", "\U000e0061", "\u3164", "\u1160"),
    *("\u115f", "ㄱ", "\U0001f3f4", "👩", "❤", "\u20e3", "\ud800", "\x00", "\u202e", "ᠠ", "\u180e"),
    *("\u034f", "ק", "\u2800", "password: ", "8 (495) ", "123-45-67", "4111", "|", "=", "1111 "),
    *("81.2.69.142", "?key=", "Cookie: a=", "-----BEGIN ", "eyJ", "sk-", "@", ".", ":", "--", "'"),
)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 2**31, -(2**63), 2**64, 10**400, 0.5, -0.0, 1e308, math.nan),
    *(math.inf, -math.inf, "", "a", "1", "\ud800", "\x00", "../..", [], {}, [None], {"a": None}),
)


def text(random: Random, most: int = 40) -> str:
    """Parts of delimiters, scripts, secrets and any characters; one in twenty is long."""
    n = random.randint(0, most)
    parts = [
        random.choice(PARTS) if random.random() < 0.7 else chr(random.randrange(0x110000))
        for _ in range(n)
    ]
    whole = "".join(parts)
    return grown(whole, random) if random.random() < 0.05 else whole


def grown(whole: str, random: Random) -> str:
    """A text or a part of it many times: what is quadratic shows."""
    times = 2 ** random.randint(1, 14)
    return (whole * times)[: MOST_BYTES // 4]


def value(random: Random, depth: int = 3) -> Any:
    """A JSON value, sometimes of many members, and what only Python takes for one."""
    kind = random.random()
    if kind < 0.5 or depth == 0:
        return random.choice(ODD)
    if kind < 0.7:
        return text(random, 8)
    n = random.randint(0, 4) if random.random() < 0.98 else random.randint(100, 4000)
    if n > 4:
        # Integers of one hash make sets and dictionaries quadratic.
        step = random.choice((1, 2**61 - 1))
        return [row * step for row in range(n)]
    if kind < 0.85:
        return [value(random, depth - 1) for _ in range(n)]
    return {text(random, 3): value(random, depth - 1) for _ in range(n)}


def number(random: Random) -> float:
    """Mostly an ordinary number; whole ones are such that a float can hold them."""
    odd = [each for each in ODD if type(each) in (float, int) and each != 10**400]
    return random.choice(odd) if random.random() < 0.2 else random.uniform(-2.0, 2.0)


def altered(content: object, random: Random) -> object:
    """A JSON value of which a leaf, or a branch, is replaced, repeated or left out."""
    if isinstance(content, dict) and content and random.random() < 0.9:
        name = random.choice(list(content))
        changed = {**content, name: altered(content[name], random)}
        if random.random() < 0.1:
            del changed[name]
        if random.random() < 0.1:
            changed[text(random, 3)] = value(random)
        return changed
    if isinstance(content, list) and content and random.random() < 0.9:
        at = random.randrange(len(content))
        if random.random() < 0.05:
            return [*content, *[content[at]] * random.randint(1, 500)]
        return [*content[:at], altered(content[at], random), *content[at + 1 :]]
    if isinstance(content, str) and random.random() < 0.4:
        return content + text(random, 8)
    return value(random)


def body(content: object, random: Random) -> bytes:
    """A JSON body altered as a value, as bytes, or not at all; one in 50 is large."""
    if random.random() < 0.02:
        return large(content, random)
    kind = random.random()
    if kind < 0.05:
        return json.dumps(content).encode()
    if kind < 0.75:
        return json.dumps(altered(content, random)).encode()
    return changed(json.dumps(content).encode(), random)


_MARKS = [mark.encode() for mark in ("\u0301\u0323\u0327\u0345", "e\u0301\u0323")]
_PLACE = "@ here @"
_UNITS: tuple[bytes, ...] = (
    *(b"1", b"[]", b"{}", b'""', b'{"":1}', b"[[]]", b'"a b"', b'{"id":"a"}', b'{"text":"a"}'),
    *(b'"\\ud800"', b'"\\u00e9"', b'"\\\\"', '"a\u0301\u0323"'.encode(), b"1e400", b"9"),
)
_LETTERS = (b"a", b" ", b",", b"[{", b'\\"', b"\\\\", b"\\ud800", b"\\ud83d\\ude00", *_MARKS)


def large(content: object, random: Random) -> bytes:
    """A body of up to the limit of size: one of its values is a long text, or has many members."""
    size = int(2.0 ** random.uniform(16.0, 24.0))
    text, kind = json.dumps(_with_place(content, random)).encode(), random.random()
    if kind < 0.3:
        letters = random.choice(_LETTERS)
        value = b'"' + letters * (size // len(letters)) + b'"'
    elif kind < 0.5:
        letters = random.choice(_LETTERS) * random.choice((1, 40, 400))
        n = min(size // (len(letters) + 3), 10_000)
        value = b"[" + b",".join([b'"%s"' % letters] * n) + b"]"
    elif kind < 0.7:
        of = random.choice((b'"%d":1', b'"%040d":""', b'"%d":[]'))
        n = size // len(of % 10**6)
        value = b"{" + b",".join([of % at for at in range(n)]) + b"}"
    else:
        unit = random.choice(_UNITS)
        value = b"[" + b",".join([unit] * (size // (len(unit) + 1))) + b"]"
    return text.replace(json.dumps(_PLACE).encode(), value)[:MOST_BODY_BYTES]


def _with_place(content: object, random: Random) -> object:
    """A JSON value of which a leaf or a branch is to be replaced."""
    if isinstance(content, dict) and content and random.random() < 0.9:
        name = random.choice(list(content))
        return {**content, name: _with_place(content[name], random)}
    if isinstance(content, list) and content and random.random() < 0.5:
        at = random.randrange(len(content))
        return [*content[:at], _with_place(content[at], random), *content[at + 1 :]]
    return _PLACE


def changed(content: bytes, random: Random) -> bytes:
    """A file after a few changes: values replaced, bytes flipped, parts cut, moved or repeated."""
    for _ in range(random.randint(1, 4)):
        content = random.choice(_CHANGES)(content, random)[:MOST_BYTES]
    return content


def _at(new: Callable[[bytes, Random], bytes]) -> Callable[[bytes, Random], bytes]:
    """Replaces a part of a file."""

    def change(content: bytes, random: Random) -> bytes:
        start = random.randint(0, len(content))
        end = min(len(content), start + random.choice((0, 1, 2, 4, 8, 40, len(content))))
        return content[:start] + new(content[start:end], random) + content[end:]

    return change


def _flipped(part: bytes, random: Random) -> bytes:
    bit = 1 << random.randint(0, 7)
    return bytes([byte ^ bit for byte in part[:4]]) + part[4:]


def _with_value(content: bytes, random: Random) -> bytes:
    """The value after a colon or comma replaced: mostly still JSON, of another type."""
    ends = [at for at, byte in enumerate(content) if byte in b":,[\t "]
    token = random.choice(TOKENS)
    if not ends:
        return token
    start = random.choice(ends) + 1
    stops = [at for at in range(start, len(content)) if content[at] in b",}]\n\t"]
    return content[:start] + token + content[stops[0] if stops else len(content) :]


_CHANGES = (
    _at(lambda _, random: random.choice(TOKENS)),
    _at(lambda _, random: random.choice(TOKENS)),
    _at(lambda _, random: random.randbytes(random.randint(0, 20))),
    _at(lambda _, random: b""),
    _at(lambda part, random: part * random.choice((2, 2, 2, 50))),
    _at(_flipped),
    _with_value,
    _with_value,
)
