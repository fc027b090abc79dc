"""Computes signals from columns of passages' metadata, such as a passage's date or source.

Each signal depends only on the query and the candidates of one list, so that it means the same next
year: a passage's age counts from the newest candidate. Pure: no I/O of its own, no clock, no
logging; `with_columns` and `metadata_of` read passages, which may run anyone's code.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from ctxguard.core.types import FloatArray, Ranking
from ctxguard.errors import ConfigurationError

ColumnKind = Literal["time", "version", "number", "source"]

MOST_COLUMNS = 8
"""The most columns in a profile."""

MOST_SOURCES = 20
"""How many of a column's values have a signal of their own: the most common ones."""

_FEWEST_OF_SOURCE = 3
_MOST_VALUE_CHARS = 100
_MOST_PARSED = 4_096
_MINUTES_A_DAY = 1_440
_DATE = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)"
    r"(?:[T ](\d\d):(\d\d)(?::\d\d(?:[.,]\d{1,9})?)?(?:Z|[+-]\d\d(?::?\d\d)?)?)?",
    re.ASCII,
)
_VERSION = re.compile(r"v?(\d{1,9}(?:\.\d{1,9}){0,5})(?:[-+.]?[A-Za-z][\w.+-]{0,30})?", re.ASCII)
_ASKED_VERSION = re.compile(r"(?<![\w.])v?(\d{1,9}(?:\.\d{1,9}){1,5})(?!\d)", re.ASCII)
_ASKED_YEAR = re.compile(r"(?<!\d)(?:19|20)\d\d(?!\d)", re.ASCII)
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class SignalColumn:
    """A column of the passages' metadata that gives signals.

    ``time`` (dates and times), ``version`` and ``number`` give ``COLUMN:age``: how far a candidate
    lies behind the highest in the list, as a logarithm; a candidate without a value has the mean.
    ``source`` gives ``COLUMN:VALUE`` for each of ``sources``, 1 for candidates with that value; a
    penalised regression shrinks the effect of each towards the mean. All but ``number`` give
    ``COLUMN:named`` as well: 1 if the query names the candidate's value (a year, a version, or the
    words of a source), −1 if it names only other candidates' values, 0 if it names none.

    Attributes:
        name: The field of the metadata.
        unit: The difference that counts as one, > 0; in days for times, in releases for versions.
        sources: The values with a signal of their own, sorted.
    """

    name: str
    kind: ColumnKind
    unit: float = 1.0
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name or ":" in self.name:
            raise ConfigurationError(
                f"{self.name!r} cannot be the name of a signal column: a name must not be empty or "
                "contain a colon"
            )
        if not 0.0 < self.unit < math.inf:
            raise ConfigurationError(
                f"the unit {self.unit!r} of column {self.name!r} must be finite and > 0"
            )

    def signals(self, query: str, values: Sequence[object]) -> dict[str, FloatArray]:
        """Compute the column's signals for one list of candidates, shape (n,) each.

        ``values`` has each candidate's; the result is empty if none has one.

        >>> column = SignalColumn("version", "version")
        >>> found = column.signals("what is new in 2.1?", ["1.9", "2.1.3", "2.0"])
        >>> {name: values.round(2).tolist() for name, values in found.items()}
        {'version:age': [1.1, 0.0, 0.69], 'version:named': [-1.0, 1.0, -1.0]}
        """
        if self.kind == "source":
            texts = [_source(value) for value in values]
            if not any(texts):
                return {}
            found = {
                self._signal(source): np.array([text == source for text in texts], np.float64)
                for source in self.sources
            }
        else:
            numbers = _numbers(self.kind, values)
            known = ~np.isnan(numbers)
            if not known.any():
                return {}
            ages = np.log1p((numbers[known].max() - numbers) / self.unit)
            ages[~known] = ages[known].mean()
            found = {self._signal("age"): ages}
        if self.kind != "number":
            found[self._signal("named")] = _named(self.kind, query, values)
        return found

    def _signal(self, what: str) -> str:
        # A full stop separates a signal from its transform.
        return f"{self.name}:{what}".replace(".", "_")


def read_column(name: str, values: Iterable[object]) -> SignalColumn:
    """Infer a column's kind from the values of many candidates, with None for a missing value.

    Raises:
        ConfigurationError: no candidate has a value, all values are the same, or most are unique
            and not times, versions or numbers.

    >>> read_column("updated_at", ["2024-03-01", None, "2021-11-05T10:00:00Z"]).kind
    'time'
    >>> read_column("source", ["wiki", "forum"] * 3).sources
    ('forum', 'wiki')
    """
    present = [value for value in values if value is not None and value != ""]
    if not present:
        raise ConfigurationError(f"no candidate has the signal column {name!r} in its metadata")
    if len({str(value) for value in present}) == 1:
        raise ConfigurationError(f"signal column {name!r} has the same value for every candidate")
    for kind in ("time", "version", "number"):
        numbers = _numbers(kind, present)
        if not np.isnan(numbers).any():
            return SignalColumn(name, kind, float(np.std(numbers)) if kind == "number" else 1.0)
    counts = Counter(filter(None, map(_source, present)))
    common = [text for text, n in counts.most_common(MOST_SOURCES) if n >= _FEWEST_OF_SOURCE]
    if 2 * sum(counts[text] for text in common) < len(present):
        raise ConfigurationError(
            f"signal column {name!r} holds neither times, versions nor numbers, and most of its "
            f"values are rare ({len(counts):,} for {len(present):,} candidates): nothing can be "
            "learned about a value that few candidates have"
        )
    return SignalColumn(name, "source", sources=tuple(sorted(common)))


def with_columns(ranking: Ranking, columns: Sequence[SignalColumn], query: str) -> Ranking:
    """Return a ranking with the columns' signals added to its own.

    A ranking whose passages cannot be read is returned as it is: a model that needs the signals
    then refuses.
    """
    try:
        metadata = metadata_of(ranking)
        signals: dict[str, FloatArray] = {}
        for column in columns:
            signals |= column.signals(query, [fields.get(column.name) for fields in metadata])
    except Exception:  # reading a passage runs anyone's code, and metadata may hold anything
        return ranking
    return replace(ranking, signals={**ranking.signals, **signals})


def metadata_of(ranking: Ranking) -> list[Mapping[str, Any]]:
    """Return the metadata of every candidate, empty if it has none."""
    return [ranking.passages[position].metadata or {} for position in range(len(ranking))]


def _numbers(kind: ColumnKind, values: Sequence[object]) -> FloatArray:
    """Return the values on a scale, NaN for those of a different kind."""
    if kind == "version":
        parsed = [_version(value) for value in values]
        ranks = {each: rank for rank, each in enumerate(sorted({v for v in parsed if v}))}
        return np.array([math.nan if each is None else ranks[each] for each in parsed], np.float64)
    read = _days if kind == "time" else _number
    return np.array([read(value) for value in values], np.float64)


def _number(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    number = float(value) if is_number else math.nan  # type: ignore[arg-type]
    return number if abs(number) < 1e30 else math.nan


def _days(value: object) -> float:
    """Return the days from the year 0 to a date or time in ISO 8601; NaN for any other value."""
    if isinstance(value, str) and len(value) <= _MOST_VALUE_CHARS:
        return _parsed_days(value)
    return _parsed_days(str(value)) if hasattr(value, "isoformat") else math.nan


@lru_cache(maxsize=_MOST_PARSED)
def _parsed_days(text: str) -> float:
    """Parse a time; offsets from UTC are less than a day and are ignored."""
    match = _DATE.fullmatch(text.strip())
    if match is None:
        return math.nan
    year, month, day, hour, minute = (int(part or 0) for part in match.groups())
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60):
        return math.nan
    # Years begin in March, so that the leap day is the last one (Hinnant's days_from_civil). Of our
    # own, because a module with a clock has no place in the core.
    year -= month <= 2
    of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    days = 365 * year + year // 4 - year // 100 + year // 400 + of_year
    return days + (60 * hour + minute) / _MINUTES_A_DAY


def _version(value: object) -> tuple[int, ...] | None:
    is_text = isinstance(value, str) and len(value) <= _MOST_VALUE_CHARS
    return _parsed_version(str(value)) if is_text else None


@lru_cache(maxsize=_MOST_PARSED)
def _parsed_version(text: str) -> tuple[int, ...] | None:
    match = _VERSION.fullmatch(text.strip())
    return None if match is None else tuple(int(part) for part in match[1].split("."))


def _source(value: object) -> str:
    """Return the name of a source; empty if the value is not a source."""
    if isinstance(value, bool | int) or (isinstance(value, str) and value):
        return str(value)[:_MOST_VALUE_CHARS]
    return ""


def _named(kind: ColumnKind, query: str, values: Sequence[object]) -> FloatArray:
    """Return 1 for values that the query names and −1 for the others; all 0 if it names none."""
    named: Sequence[bool] = ()
    if kind == "version":
        asked = [tuple(map(int, text.split(".")))[:6] for text in _ASKED_VERSION.findall(query)]
        if asked:
            named = [
                version is not None and any(_is_within(version, each) for each in asked)
                for version in map(_version, values)
            ]
    elif kind == "time":
        if years := set(_ASKED_YEAR.findall(query)):
            named = [_year(value) in years for value in values]
    else:
        words = _spaced(query)
        named = [len(text := _spaced(_source(value))) > 2 and text in words for value in values]
    if not any(named):
        return np.zeros(len(values))
    return np.where(named, 1.0, -1.0)


@lru_cache(maxsize=_MOST_PARSED)
def _spaced(text: str) -> str:
    return f" {' '.join(_WORD.findall(text.casefold()))} "


def _is_within(version: tuple[int, ...], asked: tuple[int, ...]) -> bool:
    """Return whether one version covers the other, as 2.1 covers 2.1.3 and 2.1.0 covers 2.1."""
    shorter = min(len(version), len(asked))
    return version[:shorter] == asked[:shorter] and not any(asked[shorter:])


def _year(value: object) -> str:
    return "" if math.isnan(_days(value)) else str(value).strip()[:4]
