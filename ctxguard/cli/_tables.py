"""Tables that change their form, never their content, where a terminal is too narrow for them.

A table whose columns fit is printed as it is. Otherwise each record becomes a block with one line
for each field. Only texts are wrapped: a figure stays on one line, and nothing is cut off.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_TEXT_WIDTH = 24
_WIDE_GAP = 3
_GAP = 2


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: The header, which may be empty.
        figures: Whether the cells are figures: right-aligned, and each on one line.
    """

    name: str
    figures: bool


@dataclass(frozen=True)
class _Row:
    cells: tuple[Text, ...]
    end_section: bool


class TextTable:
    """A table that prints itself in the form that fits the width.

    A row whose first cell is empty continues the record above it.

    Args:
        columns: The columns.
        title: Printed above the table.
    """

    def __init__(self, columns: Sequence[Column], title: str | None = None) -> None:
        self._columns = tuple(columns)
        self._title = title
        self._rows: list[_Row] = []

    def add_row(self, *cells: str | Text, end_section: bool = False) -> None:
        """Add a row; a rule follows one that ends a section, where the form has rules.

        Raises:
            ValueError: there is not one cell for each column.
        """
        if len(cells) != len(self._columns):
            raise ValueError(f"{len(cells)} cells for {len(self._columns)} columns")
        texts = tuple(Text(cell) if isinstance(cell, str) else cell for cell in cells)
        self._rows.append(_Row(texts, end_section))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console
        if self._title is not None:
            yield Text(self._title, style="italic")
        yield Text()
        yield from _fitting(self._columns, self._rows, options.max_width)


def _fitting(
    columns: Sequence[Column], rows: Sequence[_Row], width: int
) -> Iterator[RenderableType]:
    """The first form that fits: the table, or a block for each record."""
    for gap in (_WIDE_GAP, _GAP):
        widths = _widths(columns, rows, width, gap)
        if widths is not None:
            yield _table(columns, rows, widths, gap)
            return
    for record in _records(rows):
        yield from _block(columns, record, width)


def _block(
    columns: Sequence[Column], record: Sequence[_Row], width: int
) -> Iterator[RenderableType]:
    """A record under its first cell: its other fields, or its rows in the form that fits."""
    head = (Text(columns[0].name, "dim"), record[0].cells[0])
    yield Text(" ").join([part for part in head if part.plain])
    rest = [_Row(row.cells[1:], row.end_section) for row in record]
    if len(rest) > 1:
        yield from _fitting(columns[1:], rest, width)
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", max_width=max(width // 3, _TEXT_WIDTH))
    grid.add_column(overflow="fold")
    for column, cell in zip(columns[1:], rest[0].cells, strict=True):
        if cell.plain:
            grid.add_row(column.name, cell)
    yield Padding(grid, (0, 0, 1, 2))


def _records(rows: Sequence[_Row]) -> list[list[_Row]]:
    """The rows of each record: one with a first cell, and those without that follow it."""
    records: list[list[_Row]] = []
    for row in rows:
        if row.cells[0].plain or not records:
            records.append([])
        records[-1].append(row)
    return records


def _table(
    columns: Sequence[Column], rows: Sequence[_Row], widths: Sequence[int], gap: int
) -> Padding:
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, gap - _GAP)
    )
    for column, width in zip(columns, widths, strict=True):
        justify: JustifyMethod = "right" if column.figures else "left"
        table.add_column(Text(column.name), justify=justify, width=width, overflow="fold")
    for row in rows:
        table.add_row(*row.cells, end_section=row.end_section)
    return Padding(table, (0, 0, 1, 0))


def _widths(
    columns: Sequence[Column], rows: Sequence[_Row], width: int, gap: int
) -> list[int] | None:
    """The width of each column in a table of at most ``width``; None if it does not fit.

    Columns begin at their least width, and what is left is given to them in their order.
    """
    widths = [_least_width(column, cells) for column, cells in _by_column(columns, rows)]
    spare = width - sum(widths) - _gaps(len(columns), gap)
    if spare < 0:
        return None
    for position, natural in enumerate(_natural_widths(columns, rows)):
        added = min(spare, natural - widths[position])
        widths[position] += added
        spare -= added
    return widths


def _natural_widths(columns: Sequence[Column], rows: Sequence[_Row]) -> list[int]:
    """The width of each column if nothing in it is wrapped."""
    return [
        max(Text(column.name).cell_len, *(cell.cell_len for cell in cells), 1)
        for column, cells in _by_column(columns, rows)
    ]


def _least_width(column: Column, cells: Sequence[Text]) -> int:
    """The width below which a figure, or a word, would be broken, or a text hard to read."""
    header = _longest_word(column.name)
    if column.figures:
        return max(header, *(cell.cell_len for cell in cells), 1)
    longest = max((cell.cell_len for cell in cells), default=0)
    words = max((_longest_word(cell.plain) for cell in cells), default=0)
    return max(header, words, min(longest, _TEXT_WIDTH), 1)


def _longest_word(text: str) -> int:
    return max((Text(word).cell_len for word in text.split()), default=0)


def _by_column(
    columns: Sequence[Column], rows: Sequence[_Row]
) -> list[tuple[Column, tuple[Text, ...]]]:
    return [
        (column, tuple(row.cells[position] for row in rows))
        for position, column in enumerate(columns)
    ]


def _gaps(n_columns: int, gap: int) -> int:
    return gap * (n_columns - 1)
