"""Finds ids in a graded file that spreadsheets rewrote or people mistyped. Reads the store."""

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from pathlib import Path

from ctxguard._support.words import count
from ctxguard.errors import DataError
from ctxguard.monitor.store import LabelRow, SampleStore

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = rf"(?:{'|'.join(_MONTHS)})[a-z]*"
_MONTH_FIRST = re.compile(rf"({_MONTH})[-/., ]*(\d{{1,4}})(?!\d)", re.IGNORECASE)
_DAY_FIRST = re.compile(rf"(\d{{1,4}})[-/., ]*({_MONTH})", re.IGNORECASE)
_NUMBERS = re.compile(r"\d{1,4}(?:[-/.]\d{1,4}){1,2}")
_SIMILAR = 0.8
_MOST_SUGGESTED = 100
"""The most unknown ids for which the nearest known id is searched."""


def check_ids(store: SampleStore, rows: Iterable[LabelRow], path: Path) -> None:
    """Refuse a file's labels if some of its ids were changed.

    A request whose text was deleted accepts any passage, since its passages are unknown; one that
    the store does not know, and that resembles none that was picked, may be too old.

    Raises:
        DataError: a passage is not a candidate of its request, or a request was probably meant to
            be another one.
    """
    graded: dict[str, dict[str, None]] = {}
    for row in rows:
        graded.setdefault(row.request_id, {})[row.passage_id] = None
    candidates: dict[str, set[str]] = {}
    for record in store.records(store.find(list(graded))).values():
        candidates.setdefault(record.request_id, set()).update(record.passage_ids)
    known = store.known_requests(graded)
    wrong: list[tuple[str | None, str]] = [(None, each) for each in graded if each not in known]
    wrong += [
        (request_id, each)
        for request_id, passages in graded.items()
        for each in passages
        if each not in candidates.get(request_id, passages)
    ]
    picked: set[str] = set()
    if len(known) < len(graded):
        several = (store.picked_samples(series) for series in store.series())
        picked = {one.request_id for some in several for one in some}
    words, is_changed = [], False
    for place, (request_id, each) in enumerate(wrong):
        lacking = "no request" if request_id is None else f"request {request_id!r}: no passage"
        meant = None
        if place < _MOST_SUGGESTED:
            meant = probably_meant(each, picked if request_id is None else candidates[request_id])
        hint = "" if meant is None else f" (did you mean {meant!r}?)"
        words.append(f"{lacking} {each!r}{hint}")
        is_changed |= request_id is not None or meant is not None
    if is_changed:
        raise DataError(
            f"contains {count(len(wrong), 'id')} that the store does not know, so none of "
            "its labels were imported; write the ids exactly as they were exported: "
            + "; ".join(words),
            path=path,
        )


def probably_meant(wrong: str, known: Collection[str]) -> str | None:
    """Find the known id that a spreadsheet or a person has altered; None unless there is just one.

    >>> probably_meant("12-May", ["may-12", "may-13"]), probably_meant("7", ["007", "008"])
    ('may-12', '007')
    >>> probably_meant("kettel-1", ["kettle-1", "piano-1"])
    'kettle-1'
    """
    for read in (_as_text, _as_number, _as_dates):
        own = read(wrong)
        found = [each for each in known if own & read(each)]
        if found:
            return found[0] if len(found) == 1 else None
    close = get_close_matches(wrong, known, n=2, cutoff=_SIMILAR)
    return close[0] if len(close) == 1 else None


def _as_text(name: str) -> set[str]:
    return {" ".join(name.casefold().strip("'\"").split())}


def _as_number(name: str) -> set[float]:
    try:
        return {float(name.replace(",", "."))}
    except ValueError:
        return set()


def _as_dates(name: str) -> set[tuple[int, int]]:
    """Return the pairs of month and day, or of month and year, that a string may mean.

    A spreadsheet turns an id such as ``5-12`` into ``12-May`` or ``May-12``, by its country; of
    numbers alone any from 1 to 12 may be the month.
    """
    if match := _MONTH_FIRST.fullmatch(name) or _DAY_FIRST.match(name):
        word, number = sorted(match.groups(), key=str.isdigit)
        return {(_MONTHS.index(word[:3].casefold()) + 1, int(number) % 100)}
    if _NUMBERS.fullmatch(name):
        numbers = [int(part) % 100 for part in re.split(r"\D", name)]
        return {(one, other) for one in numbers if 0 < one <= 12 for other in numbers}
    return set()
