"""Describes errors for logs and answers, without quoting their messages.

A library's message may hold the query, a passage or a password. The error's type and the place
where it was raised do not, and are enough to find it. Pure, except that ``drop_tracebacks`` edits
the error.
"""

import os
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING

from ctxguard.errors import CtxguardError

if TYPE_CHECKING:
    from pydantic import ValidationError


def describe_error(error: BaseException) -> str:
    """Describe an error without quoting its message, unless it is one of ctxguard's own.

    Any other is described by its type, the operating system's text for its number if it has one,
    and the innermost line of the program that raised it.

    >>> describe_error(ValueError("the query was: my secret"))
    'ValueError'
    >>> describe_error(ConnectionRefusedError(111, "by host of tenant 7"))
    'ConnectionRefusedError (Connection refused)'
    """
    kind = type(error).__name__
    if isinstance(error, CtxguardError):
        return f"{kind}: {error}"
    if isinstance(error, OSError) and isinstance(error.errno, int):
        kind += f" ({os.strerror(error.errno)})"
    places = list(walk_tb(error.__traceback__))
    if not places:
        return kind
    frame, line = places[-1]
    return f"{kind} at {Path(frame.f_code.co_filename).name}:{line}"


def reason_of(message: str) -> str:
    """Return a pydantic message without the prefix that it adds to errors from our own checks."""
    return message.removeprefix("Value error, ")


def first_fault(error: "ValidationError") -> str:
    """Return the first field of a file that fails validation, and the reason."""
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(map(str, first["loc"])) or "the file"
    return f"{field}: {reason_of(first['msg'])}"


def drop_tracebacks(error: BaseException) -> None:
    """Remove the tracebacks of a handled error and of the errors that caused it.

    A frame of a traceback often holds the error itself, if only through a future: a cycle. All that
    a request held, such as the scores of a million passages, would then stay in memory until the
    garbage collector ran.
    """
    each: BaseException | None = error
    while each is not None and each.__traceback__ is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
