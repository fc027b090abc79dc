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

    def run(name: str) -> Report:
        report = run_isolated(name, FAULTS[name][0], options.size)
        passed = "pass" if report.passed else "FAIL"
        lines = [f"{passed}  {report.seconds:5.1f} s  {name}: {report.expected}"]
        lines += [report.observed, report.accounts, *[f"FAIL {wrong}" for wrong in report.wrong]]
        sys.stdout.write("\n      ".join(lines) + "\n")
        return report

    with ThreadPoolExecutor(options.jobs) as jobs:
        reports = list(jobs.map(run, options.faults))
    passed = sum(report.passed for report in reports)
    sys.stdout.write(f"{passed} of {len(reports)} passed ({options.size.value} size)\n")
    if options.json is not None:
        rows = [asdict(report) | {"passed": report.passed} for report in reports]
        content = {"size": options.size.value, "faults": rows}
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0 if passed == len(reports) else 1


if __name__ == "__main__":
    sys.exit(main())
