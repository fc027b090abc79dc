"""Runs every command and prints its output: exit codes, errors, notes, progress and JSON.

Progress goes to standard error, so that standard output holds only the result. Writes to both,
reads the clock, and sets environment variables that silence libraries.
"""

import json
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any

from pydantic_core import to_jsonable_python
from rich.console import Console, Group
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ctxguard.cli._tables import Shown, remark
from ctxguard.core.render import one_line
from ctxguard.errors import CalibrationError, CtxguardError, ProfileMismatchError

_LINE_SECONDS = 10.0
"""Seconds between two lines of progress if standard error is not a terminal."""
FINDING = 1
BAD_INPUT = 2

DEBUG = "CTXGUARD_DEBUG"

Passes = Callable[[str, int | None], Callable[[int], None]]
"""Begins a pass with a name and a number of steps (None if unknown); returns a function that adds
finished steps."""

_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
_OUR_FOLDERS = [
    f"{Path(__file__).parents[2] / name}{os.sep}" for name in ("ctxguard", "calibration")
]


def run(work: Callable[["Output"], object], *, as_json: bool) -> None:
    """Run a command; errors become an exit code and one message, not a traceback."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    for stream in (sys.stdout, sys.stderr):
        # A character that the encoding lacks is printed as a question mark.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        work(Output(as_json=as_json))
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # the reader has gone, and nobody would see a message
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        message = _described(error)
        if as_json:
            print_json({"error": {"type": type(error).__name__, "message": message}})
        finding = isinstance(error, CalibrationError | ProfileMismatchError)
        label, style = ("finding", "bold yellow") if finding else ("error", "bold red")
        print_labelled(label, style, message)
        raise SystemExit(FINDING if finding else BAD_INPUT) from None


def _described(error: Exception) -> str:
    if isinstance(error, ProfileMismatchError):
        differences = "; ".join(error.differences)
        return (
            f"the profile was calibrated on another system than this index: {differences}. "
            "Calibrate again on this index, or name the index that the profile was calibrated on"
        )
    if isinstance(error, CtxguardError):
        return str(error)
    if isinstance(error, OSError) and error.strerror is not None:
        return f"{f'{error.filename}: ' if error.filename else ''}{error.strerror}"
    if isinstance(error, MemoryError):
        return "this machine has run out of memory: process less at once"
    place, traceback = _place_of_others(error), f"set {DEBUG}=1 for the traceback"
    if place is not None:
        return f"{type(error).__name__} in {place}: {error} (in your code; {traceback})"
    return f"unexpected {type(error).__name__}: {error} ({traceback}, and please report it)"


def _place_of_others(error: BaseException) -> str | None:
    """Return the last line of code outside ctxguard and the installed libraries.

    A user's retriever, assessor or client may raise anything.
    """
    roots = (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), *_OUR_FOLDERS, "<")
    place = None
    for frame, line in walk_tb(error.__traceback__):
        if not frame.f_code.co_filename.startswith(roots):
            place = f"{frame.f_code.co_filename}, line {line}"
    return place


def print_labelled(label: str, style: str, text: str) -> None:
    """Print one line to standard error, under a label such as ``warning``."""
    _terminal(stderr=True).print(remark(text, label, style), soft_wrap=True)


def _terminal(*, stderr: bool = False) -> Console:
    """Make a console that prints text as it is: brackets in a passage are not markup."""
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False)


class Output:
    """Prints the result, the notes and the progress of a command.

    Args:
        as_json: Whether the result is one JSON document. Notes then go to standard error,
            otherwise to standard output.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.out = _terminal()
        self.err = _terminal(stderr=True)
        self.as_json = as_json

    def result(
        self,
        document: Mapping[str, object],
        shown: Shown,
        notes: Sequence[str] | None = None,
        *,
        found: bool = False,
    ) -> None:
        """Print the result as JSON or for people, and end the command if it is a finding.

        Notes stand in the JSON document too, unless they are None.
        """
        if self.as_json:
            print_json(document if notes is None else {**document, "notes": notes})
        else:
            self.out.print(Group(*shown), crop=False)
        self.note(*notes or ())
        if found:
            raise SystemExit(FINDING)

    def findings(self, lines: Iterable[str]) -> None:
        """Print findings, one line each, and end the command if there are any."""
        found = list(lines)
        for line in found:
            self.err.print(Text(f"finding: {one_line(line)}"))
        if found:
            raise SystemExit(FINDING)

    def note(self, *lines: str) -> None:
        """Print notes beside the result, one line each."""
        for line in lines:
            (self.err if self.as_json else self.out).print(remark(line))

    def text(self, text: str, end: str = "\n") -> None:
        """Print text as it is."""
        sys.stdout.write(text + end)

    @contextmanager
    def passes(self) -> Iterator[Passes]:
        """Show progress on standard error: bars, or an occasional line if it is not a terminal."""
        progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True, compact=True),
            console=self.err,
        )

        def begin(name: str, total: int | None) -> Callable[[int], None]:
            task, so_far = progress.add_task(name, total=total), 0
            said_at, said = time.monotonic(), 0

            def advance(done: int) -> None:
                nonlocal so_far, said_at, said
                progress.advance(task, done)
                so_far += done
                seconds = time.monotonic() - said_at
                # A pass that reports its start is a long one.
                if not self.err.is_terminal and (seconds >= _LINE_SECONDS or not so_far):
                    self.err.print(f"{name}: {_so_far(so_far, total, so_far - said, seconds)}")
                    said_at, said = time.monotonic(), so_far

            return advance

        with progress:
            yield begin
            for task in progress.tasks:
                if task.total is None:
                    progress.update(task.id, total=task.completed)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Show on standard error that work is under way whose number of steps is unknown."""
        with self.err.status(Text(what)):
            yield


def _so_far(done: int, total: int | None, lately: int, seconds: float) -> str:
    """Describe a pass's progress, and the time left at its recent speed.

    >>> _so_far(300, 1_500, 100, 20.0), _so_far(300, None, 100, 20.0), _so_far(0, 1_500, 0, 0.0)
    ('300 of 1,500, about 4 min left', '300 so far', '0 of 1,500')
    """
    if total is None:
        return f"{done:,} so far"
    if not lately or done >= total:
        return f"{done:,} of {total:,}"
    left = (total - done) * seconds / lately
    scale, unit = (3_600.0, "h") if left >= 7_200.0 else (60.0, "min")
    return f"{done:,} of {total:,}, about {max(left / scale, 1.0):.0f} {unit} left"


def by_total(
    begin: Callable[[str, int], Callable[[int], None]], name: str
) -> Callable[[int, int], None]:
    """Make a function that takes the number of finished steps of a pass, and the total."""
    advance: Callable[[int], None] | None = None
    said = 0

    def tell(done: int, total: int) -> None:
        nonlocal advance, said
        advance = begin(name, total) if advance is None else advance
        advance(done - said)
        said = done

    return tell


def as_json(document: Mapping[str, object], indent: int | None = None) -> str:
    """Write one JSON document; records and enumerations become plain values."""
    return json.dumps(to_jsonable_python(document), indent=indent, allow_nan=False)


def print_json(document: Mapping[str, object]) -> None:
    """Print one JSON document to standard output."""
    sys.stdout.write(as_json(document, indent=2) + "\n")


def picked(record: object, *names: str) -> dict[str, Any]:
    """Pick the attributes that keep their names in a JSON document."""
    return {name: getattr(record, name) for name in names}
