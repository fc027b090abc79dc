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


class Input(NamedTuple):
    """One input of a surface.

    Attributes:
        shown: What a failure shows of it.
        size: In bytes.
        run: Gives it to the surface.
    """

    shown: object
    size: int
    run: Callable[[], object]


Make = Callable[[Random], Input]
"""Makes another input."""


Open = Callable[[Path, ExitStack], Make]
"""Opens a surface, with a folder of its own; what it opens is closed with the stack."""


class Surface(NamedTuple):
    """What reads the inputs.

    Attributes:
        open: Opens it.
        is_slow: Whether an input takes tens of milliseconds: it is tried as often as it must be.
    """

    open: Open
    is_slow: bool = False


SURFACES: dict[str, Surface] = {}


def surface(name: str, *, is_slow: bool = False) -> Callable[[Open], Open]:
    def add(opened: Open) -> Open:
        SURFACES[name] = Surface(opened, is_slow)
        return opened

    return add


def stateless(name: str, *, is_slow: bool = False) -> Callable[[Make], Make]:
    """Adds a surface that needs neither a folder nor anything open."""

    def add(make: Make) -> Make:
        SURFACES[name] = Surface(lambda folder, closing: make, is_slow)
        return make

    return add


def called(call: Callable[..., object], *arguments: object) -> Input:
    return Input(arguments, len(repr(arguments)), lambda: call(*arguments))


HITS = [Hit("a", 2.0, "one"), Hit("b", 1.0, "two")]


def answered(body: bytes, read: Callable[[object], object]) -> object:
    try:
        return read(document_of(Answer(200, {}, body), "host"))
    except CallError as error:
        return error
