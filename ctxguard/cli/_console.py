"""What every command shares: how errors end a command, and how progress, figures and JSON look.

Progress and notes go to standard error, so that standard output holds the answer alone.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import typer
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from ctxguard.errors import CalibrationError, CtxguardError, DataError, ProfileMismatchError
from ctxguard.render import sanitise

FINDING = 1
BAD_INPUT = 2
INTERRUPTED = 130
BROKEN_PIPE = 141

NO_DATA = "no data"
DEBUG = "CTXGUARD_DEBUG"

Passes = Callable[[str, int], Callable[[int], None]]
"""Told the name and the size of a pass; returns what is told of each step."""

_FINDINGS = (CalibrationError, ProfileMismatchError)
_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


class Command(TyperCommand):
    """A command that ends in an exit code and one readable message, never in a traceback."""

    def invoke(self, ctx: Any) -> Any:
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        for stream in (sys.stdout, sys.stderr):
            # What a terminal's encoding lacks is shown as a question mark, not as a crash.
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # Python flushes standard output once more at exit, which must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise typer.Exit(BROKEN_PIPE) from None
        except Exception as error:
            if os.environ.get(DEBUG):
                raise
            if ctx.params.get("as_json"):
                print_json({"error": _described(error)})
            _print_error(error)
            raise typer.Exit(FINDING if isinstance(error, _FINDINGS) else BAD_INPUT) from None
        return result


def _described(error: Exception) -> dict[str, object]:
    about: dict[str, object] = {"type": type(error).__name__, "message": _message(error)}
    if isinstance(error, DataError):
        about["path"] = None if error.path is None else str(error.path)
        about["line"] = error.line
    if isinstance(error, ProfileMismatchError):
        about["differences"] = list(error.differences)
    return about


def _message(error: Exception) -> str:
    if isinstance(error, ProfileMismatchError):
        return (
            "the profile was calibrated on another system than this index: "
            + "; ".join(error.differences)
            + ". Calibrate again on this index, or name the one that it was made on"
        )
    if isinstance(error, CtxguardError):
        return str(error)
    if isinstance(error, OSError) and error.strerror is not None:
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}{error.strerror}"
    return (
        f"unexpected {type(error).__name__}: {error} (set {DEBUG}=1 for the traceback, and report "
        "it please)"
    )


def _print_error(error: Exception) -> None:
    found = isinstance(error, _FINDINGS)
    line = Text("finding: " if found else "error: ", style="bold yellow" if found else "bold red")
    line.append(one_line(_message(error)), style="not bold default")
    _Terminal(stderr=True).print(line, soft_wrap=True)


class _Terminal(Console):
    """A console that takes text as it is: brackets in a passage are no markup."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, highlight=False, emoji=False)

    def on_broken_pipe(self) -> None:
        # Rich would end the process with the exit code of a finding.
        raise  # noqa: PLE0704 - called while the error is handled


class Output:
    """Where a command's answer and its notes go.

    Args:
        as_json: The answer is one JSON document on standard output, and notes go to standard
            error; otherwise both are for a person, on standard output.

    Attributes:
        out: Standard output.
        err: Standard error.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.out = _Terminal()
        self.err = _Terminal(stderr=True)
        self._notes = self.err if as_json else self.out

    def note(self, text: str) -> None:
        """One line that the reader should know beside the answer."""
        line = Text("note: ", style="yellow")
        self._notes.print(line.append(one_line(text), style="default"))

    def facts(self, rows: Iterable[tuple[str, str]]) -> None:
        """Names and what they are, one a line."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column()
        for name, value in rows:
            grid.add_row(name, one_line(value))
        self.out.print(grid)

    def heading(self, text: str) -> None:
        """A line above what belongs together."""
        self.out.print()
        self.out.print(Text(one_line(text), style="bold"))

    @contextmanager
    def passes(self) -> Iterator[Passes]:
        """Progress on standard error, a bar with a rate for each pass."""
        progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            _Rate(),
            TimeRemainingColumn(elapsed_when_finished=True, compact=True),
            console=self.err,
        )

        def begin(name: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(name, total=total)
            return lambda done: progress.advance(task, done)

        with progress:
            yield begin

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Say what is under way where it has no size; a terminal shows that time passes."""
        with self.err.status(Text(what)):
            yield


class _Rate(ProgressColumn):
    """Steps a second since the pass began, also where it went in one step."""

    def render(self, task: Task) -> Text:
        seconds = task.finished_time or task.elapsed
        if not seconds or not task.completed:
            return Text("")
        return Text(f"{task.completed / seconds:,.0f}/s", style="progress.data.speed")


class Estimate(Protocol):
    """A mean with its interval, as the profile's ``Interval`` has it."""

    @property
    def value(self) -> float | None: ...
    @property
    def lower(self) -> float | None: ...
    @property
    def upper(self) -> float | None: ...


def print_json(document: Mapping[str, object]) -> None:
    """One JSON document on standard output."""
    typer.echo(json.dumps(document, indent=2, allow_nan=False))


def table(*columns: str, title: str | None = None) -> Table:
    """An empty table in the house's look; columns whose name ends in ``>`` hold figures.

    >>> [column.justify for column in table("metric", "mean>").columns]
    ['left', 'right']
    """
    made = Table(
        box=box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
        title_style="italic",
        pad_edge=False,
    )
    for name in columns:
        figures = name.endswith(">")
        made.add_column(
            name.removesuffix(">"), justify="right" if figures else "left", no_wrap=figures
        )
    return made


def number(value: float | None) -> str:
    """Three decimals, or that there is none.

    >>> number(0.12345), number(None)
    ('0.123', 'no data')
    """
    return NO_DATA if value is None else f"{value:.3f}"


def interval(estimate: Estimate) -> str:
    """The bounds of an estimate; empty where one value has no spread or there is none."""
    if estimate.lower is None or estimate.upper is None:
        return ""
    return f"[{estimate.lower:.3f}, {estimate.upper:.3f}]"


def size(n_bytes: int) -> str:
    """Bytes for people, in binary units.

    >>> size(512), size(3 * 2**20)
    ('512 B', '3.0 MiB')
    """
    value, units = float(n_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def one_line(text: str) -> str:
    """Text that a terminal can be handed: no control characters, white space as one blank.

    >>> one_line("a\\x1b[31mb\\n  c")
    'a[31mb c'
    """
    return " ".join(sanitise(text).split())


def check_writable(file: Path, option: str) -> None:
    """Refuse a file that could not be written, before hours of work rather than after.

    Raises:
        typer.BadParameter: it is a folder, or no file can be made there.
    """
    if file.is_dir():
        raise typer.BadParameter(f"{file} is a folder; name a file", param_hint=option)
    existing = file.absolute().parent
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise typer.BadParameter(f"{existing} is no folder", param_hint=option)
    if not os.access(existing, os.W_OK):
        raise typer.BadParameter(f"{existing} cannot be written to", param_hint=option)
