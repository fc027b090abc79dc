"""Reads label files, one label per line; contradictory lines are refused by number."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import TypeVar, cast

from calibration.data.dataset import DistractorKind
from calibration.data.text_files import read_lines, shown, whole_number
from ctxguard.errors import DataError

_GRADE_HEADERS = {"score", "grade", "relevance", "rel", "label"}
_KINDS = ("hard_negative", "distractor")
_FORM = "write three, separated by tabs: query id, passage id, and the label"

Label = TypeVar("Label", int, DistractorKind)

# A label and its line number, by (query id, passage id).
Labels = dict[tuple[str, str], tuple[Label, int]]


def read_grades(path: Path, counts: Counter[str]) -> "Labels[int]":
    """Read the rows of a BEIR qrels file: query id, passage id, grade; a header is allowed.

    Raises:
        DataError: a row cannot be read, rows contradict each other, or there is no row.
    """
    rows = [
        (number, query_id, passage_id, grade_of(value, path, number, counts))
        for number, (query_id, passage_id, value) in read_rows(path, (3,), _FORM, _GRADE_HEADERS)
    ]
    if not rows:
        raise DataError("holds no label", path=path)
    return labels_of(path, rows, counts)


def read_kinds(path: Path, counts: Counter[str]) -> "Labels[DistractorKind]":
    """Read the rows of a ``distractors.tsv``: query id, passage id, kind; empty if absent.

    Raises:
        DataError: a row cannot be read, or rows contradict each other.
    """
    if not path.exists():
        return {}
    rows = [
        (number, query_id, passage_id, kind_of(value, path, number))
        for number, (query_id, passage_id, value) in read_rows(path, (3,), _FORM, {"kind"})
    ]
    return labels_of(path, rows, counts)


def labels_of(
    path: Path, rows: Iterable[tuple[int, str, str, Label]], counts: Counter[str]
) -> "Labels[Label]":
    """Index rows (line, query id, passage id, label) by query and passage; count repeats.

    Raises:
        DataError: two rows label one passage differently.
    """
    labels: Labels[Label] = {}
    for line, query_id, passage_id, value in rows:
        earlier = labels.setdefault((query_id, passage_id), (value, line))
        if earlier[1] == line:
            continue
        if earlier[0] != value:
            raise DataError(
                f"query {shown(query_id)}, passage {shown(passage_id)} is labelled {value} here "
                f"and {earlier[0]} on line {earlier[1]}",
                path=path,
                line=line,
            )
        counts[f"rows of {path.name} repeat another"] += 1
    return labels


def by_query(labels: "Labels[Label]") -> dict[str, dict[str, Label]]:
    """Group labels by query id and then passage id, in the order of the file."""
    grouped: dict[str, dict[str, Label]] = {}
    for (query_id, passage_id), (value, _) in labels.items():
        grouped.setdefault(query_id, {})[passage_id] = value
    return grouped


def grade_of(value: object, path: Path, line: int, counts: Counter[str]) -> int:
    """Parse a grade, at least 0; a negative one, which some tracks give to spam, counts as 0.

    Raises:
        DataError: it is not a whole number.
    """
    grade = whole_number(value, path, line, "grade")
    if grade < 0:
        counts["negative grades read as 0, judged not relevant"] += 1
    return max(grade, 0)


def kind_of(value: object, path: Path, line: int) -> DistractorKind:
    """Check a kind of distractor.

    Raises:
        DataError: it is neither ``hard_negative`` nor ``distractor``.
    """
    if value not in _KINDS:
        raise DataError(
            f"kind {shown(value)} is unknown; use {' or '.join(_KINDS)}", path=path, line=line
        )
    return cast(DistractorKind, value)


def read_rows(
    path: Path, columns: Container[int], form: str, headers: Container[str] = ()
) -> Iterator[tuple[int, list[str]]]:
    """Yield lines with their columns, separated by tabs or, without any, by white space.

    Args:
        columns: The numbers of columns that a line may have.
        form: Says what they are, for the error.
        headers: A first line that ends in one of these is skipped.

    Raises:
        DataError: a line has another number of columns, or an empty one.
    """
    first = True
    for number, text in read_lines(path):
        cells = [c.strip() for c in (text.split("\t") if "\t" in text else text.split())]
        if len(cells) not in columns or not all(cells):
            n = len([cell for cell in cells if cell])
            raise DataError(f"{shown(text)} has {n} columns; {form}", path=path, line=number)
        if not (first and cells[-1].casefold() in headers):
            yield number, cells
        first = False
