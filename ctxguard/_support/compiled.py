"""Compiles loops with numba; they then run without the interpreter lock.

Import this module only from modules that are imported through `ctxguard._support.extras.require`:
numba comes with an extra. A compiled function calls only those of its own file: numba's cache on
disk does not see a change in another one.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

_P = ParamSpec("_P")
_T = TypeVar("_T")

SUMS_REORDERED = frozenset({"reassoc", "nsz", "contract"})
"""Sums may be reordered, and so vectorised; NaN and infinities keep their meaning."""


def compiled(
    fastmath: frozenset[str] = frozenset(),
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Compile on first use, or read from numba's cache on disk where it can be written."""

    def compile_loop(loop: Callable[_P, _T]) -> Callable[_P, _T]:
        flags = set(fastmath)
        try:
            return cast(Callable[_P, _T], numba.njit(loop, cache=True, nogil=True, fastmath=flags))
        except RuntimeError:
            # Neither the package nor the user's cache folder is writable: compile per process.
            return cast(Callable[_P, _T], numba.njit(loop, nogil=True, fastmath=flags))

    return compile_loop
