"""Time the default search in turns: python -m benchmarks.search_turns --former FOLDER --data DIR

The search that a new user gets (100 candidates, all signals, the ranker) beside the one without
signals, beside another checkout's, on fewer instructions, on larger collections
(`benchmarks._recycled`) and at depth 1,000; query vectors are given. Each checkout answers from a
process of its own, in turns as `benchmarks.turns` has them.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks._timing import environment
from benchmarks.turns import HERE, Checkout, of_turns

FORMER, NARROW = "former", "AVX2"
SIZES = (10_000, 100_000)


@dataclass(frozen=True)
class Comparison:
    """One case's time over another's.

    Attributes:
        one: Worker and case.
        other: Likewise.
        most: The ratio that the upper end of its interval must not exceed.
    """

    one: tuple[str, str]
    other: tuple[str, str]
    most: float | None = None


COMPARED = {
    "default, over the former": Comparison(("here", "default"), (FORMER, "default"), 1 / 2.8),
    "none, over the former": Comparison(("here", "none"), (FORMER, "none")),
    "default, over none": Comparison(("here", "default"), ("here", "none"), 5.5),
    "default, over the former, AVX2": Comparison((NARROW, "default"), (FORMER, "default"), 1 / 2.0),
    "default, over none, AVX2": Comparison((NARROW, "default"), (NARROW, "none"), 8.0),
    "10,000 passages": Comparison(
        ("here", "default, 10,000 passages"), ("here", "default"), 1.7 / 1.3
    ),
    "100,000 passages": Comparison(
        ("here", "default, 100,000 passages"), ("here", "default"), 3.0 / 1.3
    ),
    "depth 1,000": Comparison(("here", "default, depth 1,000"), ("here", "default"), 12.0),
}


def main() -> int:
    """Measure, print, and say whether the bars hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--former", type=Path, required=True, help="the other checkout")
    parser.add_argument("--data", type=Path, required=True, help="a BEIR folder")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.4, help="of a case in a turn")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    data = str(given.data.resolve())
    workers = {
        FORMER: Checkout(given.former, [data]),
        "here": Checkout(HERE, [data, *map(str, SIZES)]),
        NARROW: Checkout(HERE, [data], {"CTXGUARD_PROCESSOR": "avx2"}),
    }
    taken: dict[tuple[str, str], list[float]] = {
        (name, case): [] for name, worker in workers.items() for case in worker.cases
    }
    for turn in range(given.turns):
        for (name, case), times in list(taken.items())[:: 1 if turn % 2 else -1]:
            times.append(workers[name].median_ns(case, given.seconds))
    ratios = {name: of_turns(taken[each.one], taken[each.other]) for name, each in COMPARED.items()}
    table = Table("comparison", "µs", "over, µs", "ratio", "95%", "at most")
    for name, ratio in ratios.items():
        most = COMPARED[name].most
        table.add_row(
            name,
            f"{ratio.here_us:.0f}",
            f"{ratio.former_us:.0f}",
            f"{ratio.median:.3f}",
            f"{ratio.lower:.3f} to {ratio.upper:.3f}",
            "" if most is None else f"{most:.3f}",
        )
    Console().print(table)
    if given.json:
        found: dict[str, Any] = {"environment": environment(("ctxguard-rag", "numpy"))}
        found["comparisons"] = {
            name: {**asdict(ratio), "most": COMPARED[name].most} for name, ratio in ratios.items()
        }
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    missed = [
        name
        for name, ratio in ratios.items()
        if (most := COMPARED[name].most) is not None and ratio.upper > most
    ]
    if missed:
        Console(stderr=True).print(f"over the bar: {', '.join(missed)}")
    return int(bool(given.check and missed))


if __name__ == "__main__":
    sys.exit(main())
