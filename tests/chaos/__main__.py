"""Brings about every fault, and prints what came of it and whether the accounts add up.

    python tests/chaos --size small --rows "disk full" "queue full" --json chaos.json

Each fault in a process of its own, against the real components. The exit status is 1 where a row
did not pass.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from apart import Told, run_apart
from catalogue import ROWS
from rich.console import Console
from rich.table import Table
from scene import Size


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows."""
    parser = argparse.ArgumentParser(prog="chaos", description="Faults, one process each.")
    parser.add_argument("--size", type=Size, choices=list(Size), default=Size.FULL)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW")
    parser.add_argument("--jobs", type=int, default=1, help="rows at once (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was seen here too")
    options = parser.parse_args(arguments)
    console = Console(width=200, highlight=False)

    def run(name: str) -> Told:
        told = run_apart(name, ROWS[name].expected, options.size)
        console.print(f"{'pass' if told.passed else 'FAIL'}  {told.seconds:5.1f} s  {name}")
        return told

    with ThreadPoolExecutor(options.jobs) as jobs:
        seen = list(jobs.map(run, options.rows))
    console.print(table_of(seen))
    for told in seen:
        for wrong in told.wrong:
            console.print(f"FAIL {told.name}: {wrong}", markup=False)
    passed = sum(told.passed for told in seen)
    console.print(f"{passed} of {len(seen)} passed ({options.size.value} size)")
    if options.json is not None:
        rows = [asdict(told) | {"passed": told.passed} for told in seen]
        report = {"size": options.size.value, "rows": rows}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if passed == len(seen) else 1


def table_of(seen: Sequence[Told]) -> Table:
    """What came of every fault."""
    table = Table(show_lines=True)
    for column, ratio in (
        ("fault", 3),
        ("expected", 5),
        ("observed", 6),
        ("requests", 4),
        ("candidates", 3),
        ("sampled", 4),
    ):
        table.add_column(column, ratio=ratio)
    table.add_column("pass", no_wrap=True)
    for told in seen:
        table.add_row(
            told.name,
            told.expected,
            told.observed,
            told.requests,
            told.candidates,
            told.samples,
            "yes" if told.passed else "NO",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
