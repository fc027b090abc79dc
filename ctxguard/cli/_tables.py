"""Tables that change form, but never content, on a terminal too narrow for them.

A table whose columns fit is printed as it is. Otherwise each record becomes a block with one line
for each field. Only texts are wrapped: a figure stays on one line, and nothing is cut off.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_TEXT_WIDTH = 24

Row: TypeAlias = Sequence[Text]


class TextTable:
    """A table that prints itself in the form that fits the width.

    A row whose first cell is empty continues the record above it.

    Args:
        columns: The headers; a column whose name ends in ``>`` holds figures: right-aligned, and
            each on one line.
        rows: The cells, one for each column.
        title: Printed above the table.

    Raises:
        ValueError: a row has not one cell for each column.

    >>> rows = TextTable(["metric", "mean>"], [["recall", "0.810"]])
    """

    def __init__(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[str | Text]],
        title: str | None = None,
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
    head = (Text(columns[0].removesuffix(">"), "dim"), record[0][0])
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
    """Make the table, whose figures stay on one line and whose texts do not get too narrow."""
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
