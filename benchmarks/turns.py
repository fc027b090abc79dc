"""Time guard, search and store of two checkouts in turns.

    python -m benchmarks.turns --former FOLDER --data DIR… --check

Each checkout answers from a process of its own, with its own environment (``.venv`` in its folder,
this one's where there is none) and its own code. In each turn every case runs in both, one directly
after the other, in an order that alternates; a turn's figure is the ratio of their medians of
processor time. The bar holds for the lower 95% bound of the median ratio (order statistics; exact
whatever the distribution).
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scipy.stats import binom

from benchmarks._command import CONSOLE, command, ended, figures
from benchmarks._timing import environment

WORKER = Path(__file__).with_name("_turns_worker.py")
HERE = Path(__file__).parent.parent
BAR = 1.03


@dataclass(frozen=True)
class Ratio:
    """One case's time here over its time in the former checkout.

    Attributes:
        median: Of the turns' ratios.
        lower: Lower end of the median's two-sided 95% interval.
        upper: Upper end of it.
        here_us: Median processor time of a call here, in microseconds.
        former_us: The same in the former checkout.
        turns: Number of turns.
    """

    median: float
    lower: float
    upper: float
    here_us: float
    former_us: float
    turns: int


class Checkout:
    """A checkout's worker process.

    Args:
        folder: The checkout.
        collections: BEIR folders whose searches are timed too.
    """

    def __init__(self, folder: Path, collections: Sequence[Path]) -> None:
        own = folder / ".venv/bin/python"
        python = own if own.exists() else sys.executable
        self._process = subprocess.Popen(  # noqa: S603  the checkout is the caller's
            [python, "-P", WORKER, *map(Path.resolve, collections)],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.cases: list[str] = self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the worker ended with {self._process.wait()}")
        return json.loads(line)

    def median_ns(self, case: str, seconds: float) -> float:
        """Run a case for some seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([case, seconds]) + "\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        """End the worker."""
        self._process.communicate()


def of_turns(here: Sequence[float], former: Sequence[float]) -> Ratio:
    """The median ratio with the interval between two order statistics.

    Args:
        here: Nanoseconds by turn.
        former: The same, as long.
    """
    ratios = sorted(one / other for one, other in zip(here, former, strict=True))
    n = len(ratios)
    below = max(int(binom.ppf(0.025, n, 0.5)) - 1, 0)
    return Ratio(
        statistics.median(ratios),
        ratios[below],
        ratios[n - 1 - below],
        statistics.median(here) / 1e3,
        statistics.median(former) / 1e3,
        n,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and say whether the bar holds."""
    parser = command("Time guard, search and store of two checkouts in turns.")
    parser.add_argument("--former", type=Path, required=True, help="the other checkout")
    parser.add_argument(
        "--data", type=Path, nargs="+", default=[], metavar="DIR", help="BEIR folders to search"
    )
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a case in a turn")
    given = parser.parse_args(arguments)
    former, here = (Checkout(one, given.data) for one in (given.former, HERE))
    taken: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in here.cases}
    for turn in range(given.turns):
        for name, (ours, theirs) in taken.items():
            for which, times in ((here, ours), (former, theirs))[:: 1 if turn % 2 else -1]:
                times.append(which.median_ns(name, given.seconds))
    here.close()
    former.close()
    ratios = {name: of_turns(*times) for name, times in taken.items()}
    table = figures(
        "processor time of a call", ("case",), ("here, µs", "former, µs", "ratio", "95%")
    )
    for name, ratio in ratios.items():
        shown = f"{ratio.here_us:.1f}", f"{ratio.former_us:.1f}"
        interval = f"{ratio.lower:.3f} to {ratio.upper:.3f}"
        table.add_row(name, *shown, f"{ratio.median:.3f}", interval)
    CONSOLE.print(table)
    report = {
        "environment": environment(("ctxguard-rag", "numpy")),
        "bar": BAR,
        "cases": {name: asdict(ratio) for name, ratio in ratios.items()},
    }
    missed = [f"{name}: over {BAR}" for name, ratio in ratios.items() if ratio.lower > BAR]
    return ended(given, report, missed)


if __name__ == "__main__":
    sys.exit(main())
