"""Tries a million odd inputs against every surface: ``python -m tests.fuzz``.

Each surface runs in a process of its own, so that one that ends the process is a finding like any
other. Writes what they took to ``benchmarks/results/fuzz.json``; exits with 1 where one failed.
"""

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.measured_run import FREE_BYTES, MOST_SECONDS, MOST_TIMES, run
from tests.fuzz.surface import SLOW, SURFACES

LEAST = 10_000
"""Inputs of each surface, of a million in all."""
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "fuzz.json"


def shares(total: int) -> dict[str, int]:
    """How many inputs each surface has: slow ones a hundredth, the others what is left."""
    least = -(-total * LEAST // 1_000_000)
    rest = -(-(total - least * len(SLOW)) // (len(SURFACES) - len(SLOW)))
    return {name: least if name in SLOW else rest for name in SURFACES}


def _one(name: str, n_inputs: int, seed: int, first: int) -> None:
    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        report = run(name, n_inputs, Path(folder), seed=seed, first=first)
        print(json.dumps(asdict(report)), flush=True)  # noqa: T201


def _in_a_process(name: str, n_inputs: int, *, seed: int) -> dict[str, Any]:
    began = time.perf_counter()
    command = [sys.executable, "-m", "tests.fuzz", "--only", name]
    command += ["--inputs", str(n_inputs), "--seed", str(seed)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = child.stdout.splitlines()
    if child.returncode == 0 and lines:
        report: dict[str, Any] = json.loads(lines[-1])
    else:
        why = f"the process ended with {child.returncode}: {child.stderr[-2000:]}"
        report = {"surface": name, "inputs": 0, "failures": [{"why": why}]}
    report["seconds"] = round(time.perf_counter() - began, 1)
    print(  # noqa: T201
        f"{name:<42}{report['inputs']:>9,} inputs{report.get('slowest_seconds', 0.0):>8.3f} s"
        f"{report.get('peak_bytes', 0) / 2**20:>8.1f} MiB{len(report['failures']):>4} failures",
        flush=True,
    )
    return report


def main() -> int:
    """Run the surfaces named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="in all, or of --only")
    parser.add_argument("--jobs", type=int, default=2, help="surfaces that run at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="SURFACE", help="one surface, in this process")
    parser.add_argument("--first", type=int, default=0, help="number of the first input of --only")
    given = parser.parse_args()
    if given.only is not None:
        _one(given.only, given.inputs, given.seed, given.first)
        return 0
    with ThreadPoolExecutor(given.jobs) as pool:
        names, numbers = zip(*shares(given.inputs).items(), strict=True)
        reports = list(pool.map(partial(_in_a_process, seed=given.seed), names, numbers))
    document = {
        "inputs": sum(report["inputs"] for report in reports),
        "seed": given.seed,
        "limits": {
            "seconds": MOST_SECONDS,
            "bytes_for_each_byte": MOST_TIMES,
            "free_bytes": FREE_BYTES,
        },
        "surfaces": reports,
    }
    RESULTS.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return int(any(report["failures"] for report in reports))


if __name__ == "__main__":
    sys.exit(main())
