"""What every benchmark command shares: its options, its table, its report and its exit status."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

CONSOLE = Console(width=150, highlight=False)


def command(summary: str, *, seed: bool = False) -> ArgumentParser:
    """Make the parser of a command with ``--json`` and ``--check``, and ``--seed`` if it draws."""
    parser = ArgumentParser(description=summary)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    if seed:
        parser.add_argument("--seed", type=int, default=0)
    return parser


def figures(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """Make a table whose ``right`` columns hold figures, aligned to the right."""
    found = Table(title=title, title_justify="left")
    for name in left:
        found.add_column(name, no_wrap=True)
    for name in right:
        found.add_column(name, justify="right")
    return found


def ended(options: Namespace, report: Mapping[str, Any], missed: Sequence[str] = ()) -> int:
    """Write the report, print the missed bars, and return the exit status.

    Args:
        options: Those of `command`.
        report: The figures, as JSON.
        missed: The missed bars in words.
    """
    for line in missed:
        CONSOLE.print(f"MISSED {line}", markup=False)
    if options.json is not None:
        text = json.dumps(report, indent=2, ensure_ascii=False)
        options.json.write_text(f"{text}\n", encoding="utf-8")
    return int(bool(options.check and missed))
