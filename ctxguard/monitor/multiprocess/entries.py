"""The numbers in one worker's file of prometheus-client's multiprocess mode, and exact sums.

The format is prometheus-client's: four bytes with the used length and four of padding; then
entries of a length, a JSON key padded to eight bytes, a value and a time, two doubles.
"""

import json
import re
import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import fsum, isfinite
from pathlib import Path
from typing import NamedTuple

FILE_NAME = re.compile(
    r"(?P<type>counter|histogram|summary|gauge(?=_(?P<mode>[a-z]+)_))(?:(?<=gauge)_[a-z]+)?"
    r"_(?P<process>.+?)(?:\.retired-[0-9a-f]+)?\.db"
)
"""A worker's file; ``retired-…`` marks a dead worker's, renamed so that no new one opens it."""

Labels = tuple[tuple[str, str], ...]


class Entry(NamedTuple):
    """One number of one process.

    Attributes:
        type: ``counter``, ``histogram``, ``summary`` or ``gauge``.
        mode: How a gauge's processes are put together; empty for the others.
        process: The process's id as its file name has it; empty for what was folded.
        metric: The metric's name, and ``name`` the series', such as ``…_bucket``.
        labels: Sorted by name; no lone surrogates.
        time_seconds: When a ``mostrecent`` gauge was set, in seconds since the epoch; else 0.
    """

    type: str
    mode: str
    process: str
    metric: str
    name: str
    labels: Labels
    documentation: str
    value: float
    time_seconds: float = 0.0


def exact_parts(values: Iterable[float]) -> list[float]:
    """Few numbers whose exact sum is that of many; the first is the sum itself, rounded.

    Rounding a part of a sum early can lower the whole by one unit in the last place, which
    Prometheus would take for a restarted counter.

    >>> exact_parts([1e16, 1.0, 1.0, -1e16])
    [2.0]
    >>> exact_parts([0.1] * 10)
    [1.0, 5.551115123125783e-17]
    """
    rest = list(values)
    parts: list[float] = []
    while (part := exact_sum(rest)) != 0.0 or not parts:
        parts.append(part)
        if not isfinite(part):
            break
        rest.append(-part)
    return parts


def exact_sum(values: Iterable[float]) -> float:
    """The exact sum, rounded once, so that it depends on no order; NaN and infinities add up.

    >>> exact_sum([0.1] * 10), exact_sum([float("inf"), 1.0])
    (1.0, inf)
    """
    values = list(values)
    try:
        return fsum(values)
    except (OverflowError, ValueError):
        return sum(values)


def read_worker_file(path: Path) -> list[Entry]:
    """Every number in one worker's file; all of them or none.

    Raises:
        ValueError: the name or the content is not of prometheus-client's making, or was cut
            short.
        OSError: the file cannot be read.
    """
    name = FILE_NAME.fullmatch(path.name)
    if name is None:
        raise ValueError("its name is not that of a worker's metrics")
    type_, mode, process = name["type"], name["mode"] or "", name["process"]
    # Values are read without a lock, as prometheus-client does: the used length is written last.
    data = path.read_bytes()
    if not data:
        raise ValueError("it is empty")
    try:
        return [
            Entry(type_, mode, process, *_parsed_key(key), value, time_seconds)
            for key, value, time_seconds in _raw_entries(data)
        ]
    except (struct.error, TypeError, AttributeError) as error:
        raise ValueError(f"it is damaged ({error})") from error


def _raw_entries(data: bytes) -> Iterator[tuple[bytes, float, float]]:
    (used,) = struct.unpack_from("i", data)
    if not 0 <= used <= len(data):
        raise ValueError(f"it is damaged: {used} bytes are said to be used of {len(data)}")
    position = 8
    while position < used:
        (length,) = struct.unpack_from("i", data, position)
        values_at = position + 4 + length + 8 - (length + 4) % 8
        if length <= 0 or values_at + 16 > used:
            raise ValueError(f"it is damaged at byte {position}")
        value, time_seconds = struct.unpack_from("dd", data, values_at)
        yield data[position + 4 : position + 4 + length], value, time_seconds
        position = values_at + 16


@lru_cache(maxsize=20_000)
def _parsed_key(key: bytes) -> tuple[str, str, Labels, str]:
    """Metric, series, labels and documentation.

    Raises:
        ValueError: not UTF-8, or not JSON.
        TypeError: not of this shape.
    """
    metric, name, labels, documentation = json.loads(key)
    pairs = sorted((_printable(label), _printable(value)) for label, value in labels.items())
    return _printable(metric), _printable(name), tuple(pairs), _printable(documentation)


def _printable(text: str) -> str:
    """The text with lone surrogates spelled out: one of them would stop every scrape."""
    if not isinstance(text, str):
        raise TypeError(f"{text!r} is no text")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
