"""The compiled module: the loops that run for every request, in C (``*.c`` beside this file).

Where it was not built, or ``CTXGUARD_PROCESSOR=none`` switches it off, `kernels` is None and the
numpy reference beside each caller gives the same answers more slowly. Look at ``kernels`` when a
function is called, never when a module is imported: tests set it to None.
"""

from types import ModuleType

kernels: ModuleType | None
"""The functions in C; None where the reference serves."""

absent: str | None
"""Why `kernels` is None; None where it is there."""

try:
    from ctxguard._support._compiled import _kernels  # type: ignore[attr-defined]
except ImportError as error:
    kernels, absent = None, str(error)
else:
    kernels, absent = _kernels, None


def standing() -> str:
    """Say what computes, for people; with the mend where the compiled module is absent."""
    if kernels is not None:
        return f"compiled, with the instructions of {kernels.processor}"
    return (
        f"numpy computes, several times more slowly: the compiled module is absent ({absent}); "
        "install a C compiler or ziglang, then ctxguard-rag anew"
    )
