"""Lays out the output of commands: facts, headings, notes, figures, and tables.

On a terminal that is too narrow, a table changes its form but never its content. If its columns
fit, it is printed as it is. Otherwise each record becomes a block with one line for each field.
Only texts are wrapped: a figure stays on one line, and nothing is cut off. Pure.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ctxguard._support.words import figure
from ctxguard.core.render import one_line
from ctxguard.measure.interval import Interval

NO_DATA = "no data"
_TEXT_WIDTH = 24

Row: TypeAlias = Sequence[Text]
Cells: TypeAlias = Sequence[str | Text]
Shown: TypeAlias = Iterable[RenderableType]
"""Parts of a result, printed one below the other."""


def facts(*rows: tuple[str, str | None]) -> RenderableType:
    """Lay out names with their values, one per line, leaving out those that are None."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        if value is not None:
            grid.add_row(name, one_line(value))
    return grid if grid.row_count else Group()


def heading(text: str) -> RenderableType:
    """Lay out a blank line and a heading."""
    return Text(f"\n{one_line(text)}", style="bold")


def remark(text: str, label: str = "note", style: str = "yellow") -> Text:
    """Lay out one line under a label, such as a note beside the result."""
    return Text.assemble((f"{label}: ", style), (one_line(text), "not bold default"))


def dim(text: str) -> Text:
    """Lay out a line of explanation."""
    return Text(text, style="dim")


def number(value: float | None, digits: int = 3, sign: str = "") -> str:
    """Write a value with at most three digits, or ``no data``; a difference with the sign ``+``.

    >>> number(0.12345), number(-0.0001, 2, "+"), number(12.345), number(None)
    ('0.123', '+0.00', '12.3', 'no data')
    """
    return NO_DATA if value is None else figure(value, digits, sign)


def bounds(found: Interval, digits: int = 3, sign: str = "", form: str = "[{}, {}]") -> str:
    """Write the bounds of an estimate; return an empty string if it has none."""
    if found.bounds is None:
        return ""
    return form.format(*[number(each, digits, sign) for each in found.bounds])


def interval(found: Interval, digits: int = 2, sign: str = "") -> str:
    """Write an estimate, and its bounds if it has any."""
    return f"{number(found.value, digits, sign)} {bounds(found, digits, sign)}".rstrip()


class TextTable:
    """A table that prints itself in the form that fits the width.

    A column whose header ends in ``>`` holds figures: right-aligned, and each on one line. A row
    whose first cell is empty continues the record above it.

    >>> rows = TextTable(["metric", "mean>"], [["recall", "0.810"]])
    """

    def __init__(
        self, columns: Sequence[str], rows: Iterable[Cells], title: str | None = None
    ) -> None:
        self._columns, self._title = columns, title
        self._rows = [
            [Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows
        ]
        for row in self._rows:
            if len(row) != len(columns):
                raise ValueError(f"{len(row)} cells for {len(columns)} columns")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._title is not None:
            yield Text(self._title, style="italic")
        yield Text()
        yield from _fitting(self._columns, self._rows, console, options)


def _fitting(
    columns: Sequence[str], rows: Sequence[Row], console: Console, options: ConsoleOptions
) -> Iterator[RenderableType]:
    """Lay out the table if it fits, else a block for each record."""
    table = _table(columns, rows)
    least = Measurement.get(console, options.update(max_width=10**6), table).minimum
    if least <= options.max_width:
        yield Padding(table, (0, 0, 1, 0))
        return
    records: list[list[Row]] = []
    for row in rows:
        if row[0].plain or not records:
            records.append([])
        records[-1].append(row)
    for record in records:
        yield from _block(columns, record, console, options)


def _block(
    columns: Sequence[str], record: Sequence[Row], console: Console, options: ConsoleOptions
) -> Iterator[RenderableType]:
    """Lay out a record under its first cell: its fields, or its rows in the form that fits."""
    head = (dim(columns[0].removesuffix(">")), record[0][0])
    yield Text(" ").join([part for part in head if part.plain])
    if len(record) > 1:
        yield from _fitting(columns[1:], [row[1:] for row in record], console, options)
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", max_width=max(options.max_width // 3, _TEXT_WIDTH))
    grid.add_column(overflow="fold")
    for name, cell in zip(columns[1:], record[0][1:], strict=True):
        if cell.plain:
            grid.add_row(name.removesuffix(">"), cell)
    yield Padding(grid, (0, 0, 1, 2))


def _table(columns: Sequence[str], rows: Sequence[Row]) -> Table:
    """Make the table, keeping figures on one line and columns of text wide enough to read."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for place, name in enumerate(columns):
        longest = max((row[place].cell_len for row in rows), default=0)
        header = name.removesuffix(">")
        if header == name:
            table.add_column(Text(name), min_width=min(longest, _TEXT_WIDTH), overflow="fold")
        else:
            width = max([longest, 1, *(Text(word).cell_len for word in header.split())])
            table.add_column(Text(header), justify="right", min_width=width)
    for cells in rows:
        table.add_row(*cells)
    return table
