"""Gives a surface its inputs, and measures what they take.

The surfaces are those of the modules that are imported here.
"""

import time
import traceback
import tracemalloc
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from ctxguard.errors import CtxguardError
from tests.fuzz import call_surfaces, command_surface, file_surfaces, http_surfaces  # noqa: F401
from tests.fuzz.surface import SURFACES, Input

MOST_SECONDS = 1.0
"""Of processor time, for any input."""
MOST_TIMES, FREE_BYTES = 10, 16 * 2**20
"""Bytes of memory for each byte of input, and what every input may take whatever its size."""
MEASURED = 20
"""Memory is measured of every so many inputs: that makes them several times slower."""
_MOST_FAILURES = 20
_SHOWN = 2_000
_WARM_UP = 20
_AGAIN_SECONDS = 0.25


@dataclass
class Report:
    """The most that inputs of a surface took, their numbers for ``--first``, and failures."""

    surface: str
    inputs: int = 0
    slowest_seconds: float = 0.0
    slowest_input: int | None = None
    peak_bytes: int = 0
    peak_input: int | None = None
    failures: list[dict[str, Any]] = field(default_factory=list)


def run(
    name: str, n_inputs: int, folder: Path, *, seed: int = 0, first: int = 0, measure: bool = True
) -> Report:
    """Give a surface so many inputs, the same for the same seed; at most 20 failures are kept."""
    report = Report(name)
    with ExitStack() as closing:
        make = SURFACES[name](folder, closing)
        # What the first calls import and compile is not an input's fault.
        for at in range(_WARM_UP if measure else 0):
            with suppress(Exception):
                make(Random(f"warm {at}")).run()
        for at in range(first, first + n_inputs):
            chance, traced = f"{seed} {name} {at}", measure and at % MEASURED == 0
            given = make(Random(chance))
            seconds, peak, error = _tried(given, traced=traced)
            most = MOST_TIMES * given.size + FREE_BYTES
            if error is None and (seconds > _AGAIN_SECONDS or peak > most):
                # Nor is what this one was the first to import, nor a busy machine.
                given = make(Random(chance))
                again, peak_again, error = _tried(given, traced=traced)
                seconds, peak = min(seconds, again), min(peak, peak_again)
            report.inputs += 1
            if seconds > report.slowest_seconds:
                report.slowest_seconds, report.slowest_input = round(seconds, 4), at
            if peak > report.peak_bytes:
                report.peak_bytes, report.peak_input = peak, at
            if error is None and measure and seconds > MOST_SECONDS:
                error = f"took {seconds:.1f} s of processor time for {given.size:,} bytes"
            if error is None and peak > most:
                error = f"took {peak:,} bytes of memory for {given.size:,} bytes"
            if error is not None:
                shown = repr(given.shown)[:_SHOWN]
                report.failures.append({"input": at, "why": error, "shown": shown})
                if len(report.failures) == _MOST_FAILURES:
                    break
    return report


def _tried(given: Input, *, traced: bool) -> tuple[float, int, str | None]:
    """Give an input; return the seconds and the memory that it took, and what it raised."""
    error = None
    if traced:
        tracemalloc.start()
    began = time.process_time()
    try:
        with suppress(CtxguardError):
            given.run()
    except Exception as raised:
        error = "".join(traceback.format_exception(raised)[-8:])[-3000:]
    seconds = time.process_time() - began
    peak = tracemalloc.get_traced_memory()[1] if traced else 0
    tracemalloc.stop()
    # Tracing makes everything several times slower.
    return 0.0 if traced else seconds, peak, error
