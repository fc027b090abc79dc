"""Gives a surface its inputs, and measures what they take."""

import time
import traceback
import tracemalloc
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from ctxguard.errors import CtxguardError
from tests.fuzz.surface import Input, Make
from tests.fuzz.surfaces import SURFACES

MOST_SECONDS = 1.0
"""Of processor time, for any input."""
MOST_TIMES, FREE_BYTES = 10, 16 * 2**20
"""Bytes of memory for each byte of input, and what every input may take whatever its size."""
MEASURED = 20
"""Memory is measured of every so many inputs: that makes them several times slower."""
_SHOWN = 2_000
_WARM_UP = 20
_AGAIN_SECONDS = 0.25


class _Took(NamedTuple):
    seconds: float
    bytes: int
    error: str | None


@dataclass
class Report:
    """What the inputs of a surface took.

    Attributes:
        inputs: How many were tried.
        slowest_seconds: Of processor time.
        slowest_input: The number of that input, for ``--first``.
        largest_bytes: Size of the largest input.
        peak_bytes: The most memory that a measured input took.
        peak_of_bytes: The size of that input.
        peak_input: Its number.
        failures: Inputs that took too much, or raised what is not an error of ctxguard's own.
    """

    surface: str
    inputs: int = 0
    slowest_seconds: float = 0.0
    slowest_input: int | None = None
    largest_bytes: int = 0
    peak_bytes: int = 0
    peak_of_bytes: int = 0
    peak_input: int | None = None
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, at: int, given: Input, took: _Took) -> None:
        """Count the input of this number."""
        self.inputs += 1
        self.largest_bytes = max(self.largest_bytes, given.size)
        if took.seconds > self.slowest_seconds:
            self.slowest_seconds, self.slowest_input = round(took.seconds, 4), at
        if took.bytes > self.peak_bytes:
            self.peak_bytes, self.peak_of_bytes = took.bytes, given.size
            self.peak_input = at

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
    # What the first calls import and compile is not an input's fault.
    for at in range(_WARM_UP if measure else 0):
        with suppress(Exception):
            make(Random(f"warm {at}")).run()
    for at in inputs:
        name, traced = f"{seed} {report.surface} {at}", measure and at % MEASURED == 0
        given = make(Random(name))
        took = _tried(given, traced=traced)
        if took.error is None and (took.seconds > _AGAIN_SECONDS or not _fits(given, took)):
            # Nor is what this one was the first to import, nor a busy machine.
            given = make(Random(name))
            again = _tried(given, traced=traced)
            took = _Took(
                min(took.seconds, again.seconds), min(took.bytes, again.bytes), again.error
            )
        report.add(at, given, took)
        why = took.error
        if why is None and measure and took.seconds > MOST_SECONDS:
            why = f"took {took.seconds:.1f} s of processor time for {given.size:,} bytes"
        if why is None and not _fits(given, took):
            why = f"took {took.bytes:,} bytes of memory for {given.size:,} bytes"
        if why is not None:
            report.failures.append({"input": at, "why": why, "shown": repr(given.shown)[:_SHOWN]})
            if len(report.failures) == 20:
                break


def _fits(given: Input, took: _Took) -> bool:
    return took.bytes <= MOST_TIMES * given.size + FREE_BYTES


def _tried(given: Input, *, traced: bool) -> _Took:
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
    return _Took(0.0 if traced else seconds, peak, error)
