"""Causes every fault, and prints the effect and whether the accounts add up.

    python tests/chaos --size small --faults "disk full" "reranker stopped" --json chaos.json

Each fault runs in a process of its own, against the real components. The exit status is 1 if one
did not pass.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from faults import FAULTS
from isolation import Report, run_isolated
from rich.console import Console
from rich.table import Table
from serving import Size


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the faults that are named; 1 if one did not pass."""
    parser = argparse.ArgumentParser(prog="chaos", description="Faults, one process each.")
    parser.add_argument("--size", type=Size, choices=list(Size), default=Size.FULL)
    parser.add_argument(
        "--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS), metavar="FAULT"
    )
    parser.add_argument("--jobs", type=int, default=1, help="faults at once (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the reports here too")
    options = parser.parse_args(arguments)
    console = Console(width=200, highlight=False)

    def run(name: str) -> Report:
        report = run_isolated(name, FAULTS[name].expected, options.size)
        console.print(f"{'pass' if report.passed else 'FAIL'}  {report.seconds:5.1f} s  {name}")
        return report

    with ThreadPoolExecutor(options.jobs) as jobs:
        reports = list(jobs.map(run, options.faults))
    console.print(table_of(reports))
    for report in reports:
        for wrong in report.wrong:
            console.print(f"FAIL {report.name}: {wrong}", markup=False)
    passed = sum(report.passed for report in reports)
    console.print(f"{passed} of {len(reports)} passed ({options.size.value} size)")
    if options.json is not None:
        rows = [asdict(report) | {"passed": report.passed} for report in reports]
        content = {"size": options.size.value, "faults": rows}
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0 if passed == len(reports) else 1


def table_of(reports: Sequence[Report]) -> Table:
    """The reports, a line each."""
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
    for report in reports:
        table.add_row(
            report.name,
            report.expected,
            report.observed,
            report.requests,
            report.candidates,
            report.samples,
            "yes" if report.passed else "NO",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
