"""Short calls timed in turns, and what a run's figures depend on.

Machines are noisy for seconds at a time, so every case runs a little in every round, in another
order each time; the median of the rounds is the figure, and their spread says how far to trust it.
"""

import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Call = Callable[[], object]
Clock = Callable[[], int]
"""Nanoseconds: ``time.perf_counter_ns`` or, of the processor, ``time.thread_time_ns``."""

_WARM_UP_CALLS = 20
_FAST_PRODUCTS = (
    "avx2",
    "avx512f",
    "avx_vnni",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
)
_FEWEST_CALLS = 10


@dataclass(frozen=True)
class Timing:
    """Microseconds per call of one case.

    Attributes:
        p50: Median over the rounds of their medians.
        p99: Median over the rounds of their 99th percentiles.
        minimum: The quickest call of all.
        lowest_p50: The quickest round's median.
        highest_p50: The slowest round's median.
        calls: In all rounds together.
    """

    p50: float
    p99: float
    minimum: float
    lowest_p50: float
    highest_p50: float
    calls: int

    @classmethod
    def of(cls, rounds: Sequence[Sequence[int]]) -> "Timing":
        """From the nanoseconds of every call, by round."""
        medians = [statistics.median(taken) / 1e3 for taken in rounds]
        tails = [sorted(taken)[int(0.99 * (len(taken) - 1))] / 1e3 for taken in rounds]
        return cls(
            p50=statistics.median(medians),
            p99=statistics.median(tails),
            minimum=min(map(min, rounds)) / 1e3,
            lowest_p50=min(medians),
            highest_p50=max(medians),
            calls=sum(map(len, rounds)),
        )


def interleaved(
    cases: Mapping[str, Call],
    *,
    rounds: int,
    calls: int,
    seconds: float,
    seed: int = 0,
    between: Call = lambda: None,
    clock: Clock = time.perf_counter_ns,
) -> dict[str, Timing]:
    """Time every case call by call, in rounds; the garbage collector stays on.

    Args:
        cases: By name.
        rounds: How often every case has its turn, ≥ 1.
        calls: In one turn.
        seconds: A turn's length at most, by estimate; slow cases get fewer calls.
        seed: Of the order of the turns.
        between: Called after every turn, outside of the clock.
        clock: Its own time is taken off.
    """
    order = list(cases)
    own = round(statistics.median(_nanoseconds(lambda: None, 1000, clock)))
    per_turn = {name: _calls_within(seconds, call, calls) for name, call in cases.items()}
    taken: dict[str, list[list[int]]] = {name: [] for name in cases}
    shuffle = random.Random(seed).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times = _nanoseconds(cases[name], per_turn[name], clock)
            taken[name].append([each - own for each in times])
            between()
    return {name: Timing.of(taken[name]) for name in cases}


def _nanoseconds(call: Call, n: int, clock: Clock = time.perf_counter_ns) -> list[int]:
    taken = []
    for _ in range(n):
        started = clock()
        call()
        taken.append(clock() - started)
    return taken


def _calls_within(seconds: float, call: Call, most: int) -> int:
    """How many calls fit into a turn, after warming up."""
    call()
    one = statistics.median(_nanoseconds(call, 3)) / 1e9
    fit = int(seconds / max(one, 1e-9))
    _nanoseconds(call, min(_WARM_UP_CALLS, fit))
    return max(min(most, fit), min(most, _FEWEST_CALLS))


def environment(packages: Sequence[str], threads: int = 1) -> dict[str, Any]:
    """What the figures depend on.

    Args:
        packages: Whose versions are told; that of one that is not installed is None.
        threads: How many the timed calls may use.
    """
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "threads": threads,
        "versions": {name: _version(name) for name in packages},
    }


def processor() -> str:
    """Name the processor, with what makes products of matrices fast on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    about = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    flags = about.get("flags", about.get("Features", "")).split()
    name = " ".join(
        [
            about.get("model name", platform.machine()),
            *(f"{part} {about[part]}" for part in ("cpu family", "model") if part in about),
        ]
    )
    return f"{name} ({', '.join([flag for flag in _FAST_PRODUCTS if flag in flags])})"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
