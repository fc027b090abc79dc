"""What a surface is: something that reads what others wrote, and how an odd input is given to it.

Whatever the input, a surface returns, or raises an error of ctxguard's own.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import NamedTuple

from ctxguard.core.types import Hit
from ctxguard.endpoints.failures import CallError
from ctxguard.endpoints.http import Answer
from ctxguard.endpoints.replies import document_of

HITS = [Hit("a", 2.0, "one"), Hit("b", 1.0, "two")]


class Input(NamedTuple):
    """One input of a surface: what a failure shows of it, its bytes, and the call that gives it."""

    shown: object
    size: int
    run: Callable[[], object]


Make = Callable[[Random], Input]
"""Makes another input."""

Open = Callable[[Path, ExitStack], Make]
"""Opens a surface, with a folder of its own; what it opens is closed with the stack."""

SURFACES: dict[str, Open] = {}

SLOW: set[str] = set()
"""Surfaces of which an input takes tens of milliseconds: these have fewer."""


def surface(name: str, *, is_slow: bool = False) -> Callable[[Open], Open]:
    def add(opened: Open) -> Open:
        SURFACES[name] = opened
        SLOW.update([name] if is_slow else [])
        return opened

    return add


def stateless(name: str, *, is_slow: bool = False) -> Callable[[Make], object]:
    """Adds a surface that needs neither a folder nor anything open."""
    return lambda make: surface(name, is_slow=is_slow)(lambda folder, closing: make)


def called(call: Callable[..., object], *arguments: object) -> Input:
    return Input(arguments, len(repr(arguments)), lambda: call(*arguments))


def answered(body: bytes, read: Callable[[object], object]) -> object:
    try:
        return read(document_of(Answer(200, {}, body), "host"))
    except CallError as error:
        return error
