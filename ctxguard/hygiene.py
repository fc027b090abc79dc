"""Errors in words that quote nobody, for logs and for what an answer says of its failures.

A library's message may hold the query, a passage or a password. Its type and the place where it
was raised do not, and are enough to find it.
"""

import os
from pathlib import Path
from traceback import walk_tb

from ctxguard.errors import CtxguardError


def describe_error(error: BaseException) -> str:
    """What an error is, without words of others.

    Errors of ctxguard's own keep their messages, which name settings, sizes and ids. Any other is
    its type, what the operating system calls its number where it has one, and the innermost line
    of the program that raised it.

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


def forget_frames(
    error: BaseException, of: type[BaseException] | tuple[type[BaseException], ...] = BaseException
) -> None:
    """Have a handled error, and those that it came of, let go of the frames that it passed.

    A frame often holds the error, if only through a future, and every frame its caller. All that a
    request held, the scores of a million passages with it, would then wait for the garbage
    collector.

    Args:
        error: The last of them.
        of: What they are; those from the first that is something else are left alone.
    """
    each: BaseException | None = error
    while isinstance(each, of) and each.__traceback__ is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
