"""Simulate readers whose costs are known, and what is fitted to their answers.

    python -m benchmarks.reader --repeats 200 --json results.json

A question has one relevant passage, and four answers to contexts of different passages. Three ways
to fit the costs of an irrelevant passage and of a hard negative are compared with the truth: within
questions, as fit utilities does; pooled, one regression over all answers; and conditional on how
many answers of a question are right.

Readers:
    even         log odds are a sum over passages, and questions differ in difficulty
    confounded   the same, and easy questions get more relevant and more irrelevant passages
    settled      confounded; most questions are always answered right or always wrong whatever the
                 context, and a passage changes the answer to few of them; its cost is the share of
                 answers that turn wrong, against those that a relevant passage turns right
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks._reader_baselines import conditional, pooled
from calibration.data.dataset import Dataset, Query
from calibration.reader.answers import Answer, mark, term_columns
from calibration.reader.utilities import fit_utilities
from calibration.reader.within_question import WithinFit
from ctxguard.core.types import FloatArray

SUMMARY = "Simulate readers whose costs are known, and what is fitted to their answers."
N_ANSWERS = 4
QUANTILE = 1.96
GAIN, IRRELEVANT, HARD = 3.0, 0.15, 0.45
COLUMNS: tuple[str, ...] = ("relevant", "irrelevant", "hard_negative")
COSTS: tuple[str, ...] = ("irrelevant", "hard_negative")
READERS = ("even", "confounded", "settled")
METHODS = ("within questions", "pooled", "conditional")

Counts = NDArray[Any]

COVERAGE_BAR = 0.9
"""Least coverage of intervals of 95% within questions, of readers whose log odds are sums."""


@dataclass(frozen=True)
class Simulation:
    """Answers with labels, and the true costs as shares of the gain."""

    answers: tuple[Answer, ...]
    dataset: Dataset
    truth: dict[str, float]


@dataclass(frozen=True)
class Outcome:
    """How one cost was fitted.

    Attributes:
        truth: The mean true cost, as a share of the gain.
        mean: The mean estimate.
        deviation: Standard deviation of the estimates.
        coverage: Share of intervals of 95% that hold the truth.
        none: Share of repeats without an estimate.
    """

    reader: str
    method: str
    cost: str
    truth: float
    mean: float | None
    deviation: float | None
    coverage: float | None
    none: float


def simulate(reader: str, n_questions: int, seed: int) -> Simulation:
    """One reader's answers to contexts of simulated questions."""
    rng = np.random.default_rng(seed)
    settled = reader == "settled"
    kind = rng.choice(["known", "never", "by context"], n_questions, p=[0.15, 0.2, 0.65])
    easy = rng.normal(0.0, 1.0, n_questions)
    if settled:
        easy = 0.3 * easy + np.select([kind == "known", kind == "never"], [1.2, -1.2])
    shape = (n_questions, N_ANSWERS)
    lean = np.zeros(n_questions) if reader == "even" else easy
    relevant, other = (1.0 / (1.0 + np.exp(-(at + lean[:, None]))) for at in (0.3, -0.5))
    held = rng.random(shape) < relevant
    irrelevant = rng.binomial(4, np.broadcast_to(other, shape))
    hard = rng.binomial(3, np.broadcast_to(other, shape))
    by_irrelevant, by_hard = (
        rng.random((n_questions, 5)) < 0.02,
        rng.random((n_questions, 4)) < 0.06,
    )

    def right(held: Counts, irrelevant: Counts, hard: Counts) -> FloatArray:
        if not settled:
            log_odds = -1.8 + 1.5 * easy[:, None] + GAIN * held
            log_odds = log_odds - IRRELEVANT * irrelevant - HARD * hard
            return np.asarray(1.0 / (1.0 + np.exp(-log_odds)))
        able = np.where((kind == "by context")[:, None], held, (kind == "known")[:, None])
        misled = _any_of_first(by_irrelevant, irrelevant) | _any_of_first(by_hard, hard)
        return np.asarray(0.02 + 0.96 * (able * ~misled))

    now = right(held, irrelevant, hard)
    truth: dict[str, float]
    if settled:
        every, none = np.ones(shape, dtype=bool), np.zeros(shape, dtype=bool)
        gain = (right(every, irrelevant, hard) - right(none, irrelevant, hard)).mean()
        truth = {
            "irrelevant": float((now - right(held, irrelevant + 1, hard)).mean() / gain),
            "hard_negative": float((now - right(held, irrelevant, hard + 1)).mean() / gain),
        }
    else:
        truth = {"irrelevant": IRRELEVANT / GAIN, "hard_negative": HARD / GAIN}
    correct = rng.random(shape) < now
    answers = []
    for q in range(n_questions):
        for a in range(N_ANSWERS):
            context = [f"r{q}"] * int(held[q, a])
            context += [f"x{q}-{i}" for i in range(irrelevant[q, a])]
            context += [f"h{q}-{i}" for i in range(hard[q, a])]
            if context:
                answers.append(Answer(f"q{q}", tuple(context), bool(correct[q, a])))
    dataset = Dataset(
        "simulated",
        tuple([Query(f"q{q}", f"question {q}") for q in range(n_questions)]),
        {f"q{q}": {f"r{q}": 1, **{f"x{q}-{i}": 0 for i in range(4)}} for q in range(n_questions)},
        {f"q{q}": {f"h{q}-{i}": "hard_negative" for i in range(3)} for q in range(n_questions)},
    )
    return Simulation(tuple(answers), dataset, truth)


def _any_of_first(marks: Counts, count: Counts) -> NDArray[np.bool_]:
    """Whether a question has a mark among its first ``count``, for each of its answers."""
    running = np.concatenate([np.zeros((len(marks), 1)), marks.cumsum(axis=1)], axis=1)
    return np.take_along_axis(running, count, axis=1) > 0


Estimate = tuple[float, float, float] | None
"""A cost with the ends of its interval."""


def fitted(method: str, simulation: Simulation) -> dict[str, Estimate]:
    """The costs by one method."""
    if method == "within questions":
        terms = fit_utilities(simulation.answers, simulation.dataset).terms
        return {
            name: None
            if (own := terms[name]).value is None or own.bounds is None
            else (own.value, *own.bounds)
            for name in COSTS
        }
    fit = pooled if method == "pooled" else conditional
    marked = mark(simulation.answers, simulation.dataset)
    columns = term_columns(marked.contexts)
    rows = np.stack([columns[name] for name in COLUMNS], axis=1)
    coefficients, covariance = fit(rows, marked.question, marked.correct)
    model = WithinFit(COLUMNS, coefficients, covariance, QUANTILE, len(rows))
    ratios = {name: model.ratio({name: -1.0}, {"relevant": 1.0}) for name in COSTS}
    return {
        name: None if r.value is None or r.bounds is None else (r.value, *r.bounds)
        for name, r in ratios.items()
    }


def outcomes(reader: str, n_questions: int, repeats: int, seed: int) -> list[Outcome]:
    """Every method on the same repeats."""
    simulations = [simulate(reader, n_questions, seed + each) for each in range(repeats)]
    found = []
    for method in METHODS:
        estimates = [fitted(method, simulation) for simulation in simulations]
        for name in COSTS:
            truth = [simulation.truth[name] for simulation in simulations]
            own = [(each[name], true) for each, true in zip(estimates, truth, strict=True)]
            defined = [(estimate, true) for estimate, true in own if estimate is not None]
            values = np.array([estimate[0] for estimate, _ in defined])
            covered = [estimate[1] <= true <= estimate[2] for estimate, true in defined]
            found.append(
                Outcome(
                    reader=reader,
                    method=method,
                    cost=name,
                    truth=float(np.mean(truth)),
                    mean=float(values.mean()) if defined else None,
                    deviation=float(values.std()) if defined else None,
                    coverage=float(np.mean(covered)) if defined else None,
                    none=1.0 - len(defined) / repeats,
                )
            )
    return found


def table(found: Sequence[Outcome]) -> Table:
    """The outcomes as a table."""
    result = Table(title="cost as a share of a relevant passage's gain")
    for name in ("reader", "cost", "method"):
        result.add_column(name, no_wrap=True)
    for name in ("truth", "mean", "deviation", "coverage", "none"):
        result.add_column(name, justify="right", no_wrap=True)
    for each in sorted(found, key=lambda o: (READERS.index(o.reader), COSTS.index(o.cost))):
        figures = (each.truth, each.mean, each.deviation, each.coverage, each.none)
        result.add_row(
            each.reader,
            each.cost,
            each.method,
            *["no data" if figure is None else f"{figure:.3f}" for figure in figures],
            end_section=each.method == METHODS[-1],
        )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulation; the exit status is 1 if intervals within questions miss their bar."""
    parser = argparse.ArgumentParser(prog="benchmarks.reader", description=SUMMARY)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    found = [
        outcome
        for reader in READERS
        for outcome in outcomes(reader, options.questions, options.repeats, options.seed)
    ]
    kept = all(
        each.coverage is not None and each.coverage >= COVERAGE_BAR
        for each in found
        if each.method == METHODS[0] and each.reader != "settled"
    )
    console = Console(width=100)
    console.print(table(found))
    console.print(
        f"{options.repeats} repeats of {options.questions} questions. Coverage within questions of "
        f"{COVERAGE_BAR:g} or more, of readers whose log odds are sums: {'yes' if kept else 'no'}."
    )
    if options.json is not None:
        results = {
            "repeats": options.repeats,
            "questions": options.questions,
            "seed": options.seed,
            "coverage_kept": kept,
            "outcomes": {
                reader: {
                    method: {
                        each.cost: asdict(each)
                        for each in found
                        if (each.reader, each.method) == (reader, method)
                    }
                    for method in METHODS
                }
                for reader in READERS
            },
        }
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
