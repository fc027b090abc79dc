"""Causes every fault, and prints the effect and whether the accounts add up.

    python tests/chaos --size small --faults "disk full" "reranker stopped"

Each fault runs in a process of its own, against the real components. The exit status is 1 if one
did not pass.
"""

import argparse
import sys
import time

from faults import FAULTS
from isolation import run_isolated
from serving import Size


def main() -> int:
    """Run the faults that are named; 1 if one did not pass."""
    parser = argparse.ArgumentParser(prog="chaos", description="Faults, one process each.")
    parser.add_argument("--size", type=Size, choices=list(Size), default=Size.FULL)
    parser.add_argument(
        "--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS), metavar="FAULT"
    )
    options = parser.parse_args()
    passed = 0
    for name in options.faults:
        started = time.monotonic()
        report = run_isolated(name, options.size)
        passed += not report.wrong
        seconds = time.monotonic() - started
        lines = [f"{'FAIL' if report.wrong else 'pass'}  {seconds:5.1f} s  {name}"]
        lines += [FAULTS[name][0], report.observed, report.accounts]
        sys.stdout.write("\n      ".join(lines + [f"FAIL {each}" for each in report.wrong]) + "\n")
    sys.stdout.write(f"{passed} of {len(options.faults)} passed ({options.size.value} size)\n")
    return 0 if passed == len(options.faults) else 1


if __name__ == "__main__":
    sys.exit(main())
