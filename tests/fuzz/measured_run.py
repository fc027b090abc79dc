"""Gives a surface its inputs, and measures what they take."""

import time
import traceback
import tracemalloc
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from ctxguard.errors import CtxguardError
from tests.fuzz.surfaces import SURFACES, Input, Make

MOST_SECONDS = 1.0
"""Of processor time, for any input."""
MOST_TIMES, FREE_BYTES = 10, 16 * 2**20
"""Bytes of memory for each byte of input, and what every input may take whatever its size."""
MEASURED = 20
"""Memory is measured of every so many inputs: that makes them several times slower."""
_SHOWN = 2_000
_WARM_UP = 20


@dataclass
class Report:
    """What the inputs of a surface took.

    Attributes:
        inputs: How many were tried.
        slowest_seconds: Of processor time.
        largest_bytes: Size of the largest input.
        peak_bytes: The most memory that a measured input took.
        peak_of_bytes: The size of that input.
        failures: Inputs that took too much, or raised what is no error of ctxguard's own.
    """

    surface: str
    inputs: int = 0
    slowest_seconds: float = 0.0
    largest_bytes: int = 0
    peak_bytes: int = 0
    peak_of_bytes: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def run(
    name: str, n_inputs: int, folder: Path, *, seed: int = 0, first: int = 0, measure: bool = True
) -> Report:
    """Give a surface so many inputs, the same for the same seed; at most 20 failures are kept."""
    report = Report(name)
    with ExitStack() as closing:
        make = SURFACES[name].open(folder, closing)
        _give(make, report, range(first, first + n_inputs), seed=seed, measure=measure)
    return report


def _give(make: Make, report: Report, inputs: range, *, seed: int, measure: bool) -> None:
    # What the first calls import and compile is no input's fault.
    for at in range(_WARM_UP if measure else 0):
        with suppress(Exception):
            make(Random(f"warm {at}")).run()
    for at in inputs:
        given = make(Random(f"{seed} {report.surface} {at}"))
        why = _failure(given, report, traced=measure and at % MEASURED == 0, timed=measure)
        if why is not None:
            report.failures.append({"input": at, "why": why, "shown": repr(given.shown)[:_SHOWN]})
            if len(report.failures) == 20:
                break


def _failure(given: Input, report: Report, *, traced: bool, timed: bool) -> str | None:
    if traced:
        tracemalloc.start()
    began = time.process_time()
    try:
        with suppress(CtxguardError):
            given.run()
    except Exception as error:
        return "".join(traceback.format_exception(error)[-8:])[-3000:]
    finally:
        took = time.process_time() - began
        peak = tracemalloc.get_traced_memory()[1] if traced else 0
        tracemalloc.stop()
    report.inputs += 1
    report.largest_bytes = max(report.largest_bytes, given.size)
    if peak > report.peak_bytes:
        report.peak_bytes, report.peak_of_bytes = peak, given.size
    if not traced and took > report.slowest_seconds:
        report.slowest_seconds = round(took, 4)
    if timed and not traced and took > MOST_SECONDS:
        return f"took {took:.1f} s of processor time for {given.size:,} bytes"
    if peak > MOST_TIMES * given.size + FREE_BYTES:
        return f"took {peak:,} bytes of memory for {given.size:,} bytes"
    return None
