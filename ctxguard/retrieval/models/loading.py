"""Loads models with sentence-transformers, for torch.

Reads the model's files and ``/proc/cpuinfo``, silences transformers meanwhile, and limits torch to
one thread in forked children.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from ctxguard._support.extras import require


def load(kind: str, folder: Path, **options: Any) -> Any:
    """Load a model of a sentence-transformers class by name, without output."""
    torch()
    library = require("sentence_transformers", "embedded")
    with quiet_loading():
        return getattr(library, kind)(str(folder), **options)


@cache
def torch() -> Any:
    """Import torch, and limit it to one thread in processes forked later.

    Its threads stay in the parent, and a child would wait for them forever.
    """
    library = require("torch", "embedded")
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=partial(library.set_num_threads, 1))
    return library


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Hide the progress bar and the remarks that transformers writes to standard error."""
    library = require("transformers.utils.logging", "embedded")
    level, had_bar = library.get_verbosity(), library.is_progress_bar_enabled()
    library.set_verbosity_error()
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.set_verbosity(level)
        if had_bar:
            library.enable_progress_bar()


def is_faster_in_bfloat16() -> bool:
    """Return whether torch in bfloat16 encodes faster than onnxruntime in 32 bits.

    That is .6 times as fast on Intel's AVX-512 without AMX, 1.8 times on AMD's. With AMX, which is
    made for bfloat16, it was not measured.
    """
    try:
        about = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in about and ("amx_bf16" in about or "GenuineIntel" not in about)
