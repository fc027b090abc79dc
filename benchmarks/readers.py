"""Does a measure rank contexts as real readers answer, and what does a passage cost them?

    python -m benchmarks.readers --data ../shared/data/readers --check --json FILE

``readers.jsonl.gz`` of ``--data`` holds recorded answers of language models: which passages were in
the context, and how correct the answer was. *Concordance* of a measure: of two contexts of one
question whose answers differ in correctness, the share in which the measure prefers the better one;
a tie counts half. It is the mean over questions, then over the readers of a set, then over sets. A
closed-book answer is that of the empty context. Where the order of a context was not recorded, its
passages stand in random order, and a measure has its expectation over them.

Intervals resample questions (95%, percentile). *Left out*: the form that agrees best with all other
readers of the set, and its concordance with the reader left out.

*Price*: by how much the answers fall for each passage more that is not relevant, as a share of what
one relevant passage gains over none.
"""

import argparse
import gzip
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from benchmarks._served import Bars, plain_table, print_bars, write_report
from ctxguard.core.types import FloatArray
from ctxguard.measure.worth import PRESETS, Utilities

SUMMARY = "Compare measures with recorded answers of real readers."
DATA = Path("../shared/data/readers")
FILE = "readers.jsonl.gz"
FRONTIER = "nq"
"""The set of the frontier readers."""

DECIDES = "UDCG, readers"
LEAST, LEAST_OVER_RECALL, LEAST_OVER_STRICT = 0.68, 0.08, 0.11
RESAMPLES = 1_000
FORM = "UDCG, −{:g}"
COSTS = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2)
"""Costs of a passage that is not relevant, among which a form is chosen without a reader."""


class Answer(NamedTuple):
    """One recorded answer.

    Attributes:
        context: A letter a passage, as in the README of the data.
        ordered: Whether the letters are in the order of the context.
        relevant: How many relevant passages exist, 1 at least.
        correct: In [0, 1].
    """

    context: str
    ordered: bool
    relevant: int
    correct: float


Measure = Callable[[FloatArray, FloatArray, int], float]
"""Worth of a context by the share that is relevant at each rank, the rank discounts, and how many
relevant passages exist."""

Answers = Mapping[tuple[str, str], Mapping[str, Sequence[Answer]]]
"""By set and reader, then by question."""


def read_answers(file: Path) -> Answers:
    """Read the recorded answers; the first line says where they come from."""
    found: dict[tuple[str, str], dict[str, list[Answer]]] = defaultdict(lambda: defaultdict(list))
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        next(lines)
        for line in lines:
            row = json.loads(line)
            counts = row.get("counts", {})
            context = row.get("labels", "".join(name * counts[name] for name in counts))
            answer = Answer(context, "labels" in row, max(row["relevant"], 1), row["correct"])
            block = "docs" if row["block"] == "closed" else row["block"]
            found[row["set"], row["reader"]][f"{block} {row['question']}"].append(answer)
    return found


def udcg_of(utilities: Utilities) -> Callable[[Answer], float]:
    """UDCG of a context by the kinds of its passages; another copy gains nothing."""
    worth = {"R": utilities.relevant, "H": utilities.hard_negative}

    def measured(answer: Answer) -> float:
        worths = np.array([worth.get(kind, utilities.irrelevant) for kind in answer.context])
        return float(_placed(worths, answer) @ _discounts(worths.size))

    return measured


def of_relevant(measure: Measure) -> Callable[[Answer], float]:
    """A measure that sees relevance alone."""

    def measured(answer: Answer) -> float:
        relevant = np.array([kind == "R" for kind in answer.context], dtype=np.float64)
        discounts = _discounts(relevant.size)
        return measure(_placed(relevant, answer), discounts, answer.relevant)

    return measured


def _placed(worths: FloatArray, answer: Answer) -> FloatArray:
    if answer.ordered or not worths.size:
        return worths
    return np.full(worths.size, worths.mean())


def _discounts(n: int) -> FloatArray:
    return 1.0 / np.log2(np.arange(2, n + 2))


def _saturating(relevant: FloatArray, discounts: FloatArray, n: int) -> float:
    return float(relevant @ (0.5 + 0.5 * discounts)) / n - 0.05 * math.log2(1 + relevant.size)


MEASURES: Mapping[str, Callable[[Answer], float]] = {
    DECIDES: udcg_of(PRESETS["readers"]),
    "UDCG, strict": udcg_of(PRESETS["strict"]),
    "recall": of_relevant(lambda relevant, _, n: float(relevant.sum()) / n),
    "precision": of_relevant(lambda relevant, _, __: float(relevant.sum()) / max(relevant.size, 1)),
    "nDCG": of_relevant(lambda relevant, d, n: float(relevant @ d) / float(_discounts(n).sum())),
    "share found less length": of_relevant(_saturating),
    **{
        FORM.format(cost): udcg_of(
            Utilities(irrelevant=-cost, unjudged=-cost, hard_negative=-max(cost, 0.1))
        )
        for cost in COSTS
    },
}
CANDIDATES = (*(FORM.format(cost) for cost in COSTS), "share found less length")
"""Forms among which one is chosen without a reader."""


def concordances(answers: Sequence[Answer]) -> dict[str, float] | None:
    """Concordance of each measure within one question; None where no two answers differ."""
    correct = np.array([answer.correct for answer in answers])
    one, other = np.triu_indices(correct.size, 1)
    better = np.sign(correct[one] - correct[other])
    differ = better != 0
    if not differ.any():
        return None
    found = {}
    for name, measure in MEASURES.items():
        values = np.round([measure(answer) for answer in answers], 12)
        prefers = np.sign(values[one] - values[other])
        found[name] = float(((prefers * better)[differ] + 1.0).mean() / 2.0)
    return found


class Table(NamedTuple):
    """Concordance by reader and question of one set.

    Attributes:
        readers: Length n_r.
        values: By measure, shape (n_r, n_questions), NaN where no two answers differ.
    """

    readers: tuple[str, ...]
    values: Mapping[str, FloatArray]

    def macro(self, name: str, columns: Any = slice(None)) -> float:
        """Mean over the readers of a measure's mean over questions."""
        values = self.values[name][:, columns]
        n = (~np.isnan(values)).sum(axis=1)
        return float((np.nansum(values, axis=1)[n > 0] / n[n > 0]).mean())

    def resampled(self, name: str, less: str | None = None) -> tuple[float, float]:
        """Interval of a measure, or of its difference from another, over resampled questions."""
        random, n = np.random.default_rng(0), self.values[name].shape[1]
        samples = []
        for _ in range(RESAMPLES):
            columns = random.integers(0, n, n)
            value = self.macro(name, columns)
            samples.append(value - (0.0 if less is None else self.macro(less, columns)))
        lower, upper = np.quantile(samples, [0.025, 0.975]).tolist()
        return lower, upper

    def left_out(self) -> dict[str, tuple[str, float]]:
        """By reader, the form that agrees best with the others, and its own concordance."""
        found = {}
        for place, reader in enumerate(self.readers):
            others = [row for row in range(len(self.readers)) if row != place]
            if not others:
                continue
            best = max(CANDIDATES, key=lambda name: np.nanmean(self.values[name][others]))
            found[reader] = best, float(np.nanmean(self.values[best][place]))
        return found


def tables(answers: Answers) -> dict[str, Table]:
    """Concordance of every set."""
    by_set: dict[str, dict[str, dict[str, dict[str, float]]]] = defaultdict(dict)
    for (name, reader), by_question in answers.items():
        own = {question: concordances(rows) for question, rows in by_question.items()}
        by_set[name][reader] = {q: found for q, found in own.items() if found is not None}
    found = {}
    for name, by_reader in by_set.items():
        questions = sorted({question for own in by_reader.values() for question in own})
        values = {
            measure: np.array(
                [
                    [own.get(q, {}).get(measure, np.nan) for q in questions]
                    for own in by_reader.values()
                ]
            )
            for measure in MEASURES
        }
        found[name] = Table(tuple(by_reader), values)
    return found


class Price(NamedTuple):
    """What passages that are not relevant cost one reader.

    Attributes:
        gain: Correctness with one relevant passage alone less that without any, None where that
            was not recorded.
        fall: By numbers of passages (from, to): the fall of correctness over a shared set of
            questions, where one relevant passage is there in both.
    """

    gain: float | None
    fall: Mapping[tuple[int, int], float]

    def each(self, step: tuple[int, int]) -> float | None:
        """The fall for each passage more, as a share of the gain."""
        return None if self.gain is None else self.fall[step] / (step[1] - step[0]) / self.gain


def price(by_question: Mapping[str, Sequence[Answer]]) -> Price:
    """Compare contexts that hold one relevant passage, by their number of passages."""
    by_size: dict[int, dict[str, float]] = defaultdict(dict)
    for question, rows in by_question.items():
        sizes: dict[int, list[float]] = defaultdict(list)
        for row in rows:
            if row.context.count("R") == 1 or not row.context:
                sizes[len(row.context)].append(row.correct)
        for size, values in sizes.items():
            by_size[size][question] = float(np.mean(values))

    def fall(few: int, many: int) -> float | None:
        shared = by_size[few].keys() & by_size[many].keys()
        return (
            float(np.mean([by_size[few][q] - by_size[many][q] for q in shared]))
            if len(shared) >= 30
            else None
        )

    numbers = sorted(size for size in by_size if size)
    steps = {step: fall(*step) for step in pairwise(numbers)}
    gain = fall(1, 0) if 0 in by_size and 1 in by_size else None
    return Price(gain, {step: value for step, value in steps.items() if value is not None})


def bars(frontier: Table | None) -> Bars:
    """What must hold of the measure that decides."""
    if frontier is None:
        return {}
    own, recall, strict = map(frontier.macro, (DECIDES, "recall", "UDCG, strict"))
    return {
        f"concordance of the frontier readers ≥ {LEAST:g}": (f"{own:.3f}", own >= LEAST),
        f"above recall by ≥ {LEAST_OVER_RECALL:g}": (
            f"{own - recall:+.3f}",
            own - recall >= LEAST_OVER_RECALL,
        ),
        f"above UDCG by ≥ {LEAST_OVER_STRICT:g}": (
            f"{own - strict:+.3f}",
            own - strict >= LEAST_OVER_STRICT,
        ),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; with ``--check`` the exit status is 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.readers", description=SUMMARY)
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR", help=f"holds {FILE}")
    parser.add_argument("--check", action="store_true", help="print what must hold")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    console, start = Console(width=80), time.perf_counter()
    answers = read_answers(options.data / FILE)
    by_set = tables(answers)
    report: dict[str, Any] = {"sets": {}, "price": {}}
    for name, table in by_set.items():
        title = f"concordance with {len(table.readers)} readers of {name}"
        shown = plain_table(title, ("measure",), ("value", "95% interval", "less recall"))
        figures = {}
        for measure in MEASURES:
            bounds, apart = table.resampled(measure), table.resampled(measure, "recall")
            value = table.macro(measure)
            figures[measure] = {"value": value, "bounds": bounds, "over_recall": apart}
            shown.add_row(
                measure,
                f"{value:.3f}",
                f"[{bounds[0]:.3f}, {bounds[1]:.3f}]",
                f"[{apart[0]:+.3f}, {apart[1]:+.3f}]",
            )
        console.print(shown)
        left_out = table.left_out()
        for reader, (form, value) in left_out.items():
            console.print(f"  without {reader}: {form} is chosen, {value:.3f}", highlight=False)
        report["sets"][name] = {
            "readers": table.readers,
            "measures": figures,
            "left_out": left_out,
        }
    macro = {name: float(np.mean([t.macro(name) for t in by_set.values()])) for name in MEASURES}
    report["macro"] = macro
    shown = plain_table(f"mean over {len(by_set)} sets", ("measure",), ("value",))
    for name, value in macro.items():
        shown.add_row(name, f"{value:.3f}")
    console.print(shown)
    shown = plain_table("price of a passage", ("reader",), ("gain", "passages", "fall", "each"))
    for (_, reader), by_question in answers.items():
        own = price(by_question)
        rows = []
        for few, many in own.fall:
            each = own.each((few, many))
            rows.append({"from": few, "to": many, "fall": own.fall[few, many], "each": each})
            shown.add_row(
                reader,
                "" if own.gain is None else f"{own.gain:+.3f}",
                f"{few} to {many}",
                f"{own.fall[few, many]:+.3f}",
                "" if each is None else f"{each:+.4f}",
            )
        report["price"][reader] = {"gain": own.gain, "steps": rows}
    console.print(shown)
    console.print(f"[dim]{time.perf_counter() - start:.0f} s[/dim]")
    found = bars(by_set.get(FRONTIER))
    if options.check:
        print_bars(found, console)
    write_report(options.json, found, report)
    return int(options.check and not all(holds for _, holds in found.values()))


if __name__ == "__main__":
    sys.exit(main())
