"""Simulate how often and how soon judged traffic lets a policy rise from shadow to enforce.

    python -m benchmarks.rise --check --json benchmarks/results/rise.json

Years of judged requests, with a look a day: how many let a policy rise whose loss is at the limit,
and after how many days one without a loss rises.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from calibration.settings import MAX_LOSS, TOLERANCE
from ctxguard.core.types import FloatArray
from ctxguard.monitor.estimation.promotion import DELTA, FEWEST_LABELLED, log_wealth

SUMMARY = "Simulate how often and how soon judged traffic lets a policy rise."
YEARS = 1_000

Draw = Callable[[np.random.Generator, tuple[int, int]], FloatArray]


def _differences(losses: float, share: float, gains: float) -> Draw:
    """Some requests lose a share of their relevant passages, some gain as much, others nothing."""

    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> FloatArray:
        chances = [losses, gains, 1.0 - losses - gains]
        return share * rng.choice([-1.0, 1.0, 0.0], shape, p=chances)

    return draw


AT_THE_LIMIT: dict[str, Draw] = {
    "a tenth of requests lose half": _differences(0.1, 0.5, 0.0),
    "15% lose half, 5% gain half": _differences(0.15, 0.5, 0.05),
    "a twentieth lose everything": _differences(0.05, 1.0, 0.0),
    "a fifth lose a quarter": _differences(0.2, 0.25, 0.0),
}
OF_NO_LOSS: dict[str, Draw] = {
    "2% lose half, 2% gain half": _differences(0.02, 0.5, 0.02),
    "5% lose half, 5% gain half": _differences(0.05, 0.5, 0.05),
    "5% lose everything, 5% gain as much": _differences(0.05, 1.0, 0.05),
}
REQUESTS_A_DAY = (50, 200, 500)
DAYS = 365
_RUNS_AT_ONCE = 20
MISSED = 0.2
"""Share of losses that a judge misses who errs."""
_GRADED_A_DAY = 10


def days_to_rise(draw: Draw, per_day: int, years: int, *, meets_mean: bool) -> FloatArray:
    """The first day at whose end a policy rises, of each simulated year; infinite where none.

    Args:
        draw: Differences in recall of judged requests.
        per_day: Requests that are judged each day.
        years: How many to simulate.
        meets_mean: Whether the mean so far must not lie below −tolerance either.
    """
    rng, days = np.random.default_rng(per_day), []
    for _ in range(years // _RUNS_AT_ONCE):
        differences = draw(rng, (per_day * DAYS, _RUNS_AT_ONCE))
        wealth = np.maximum.accumulate(log_wealth(differences, MAX_LOSS), axis=0)
        risen = wealth[per_day - 1 :: per_day] >= -np.log(DELTA)
        if meets_mean:
            n = np.arange(1, len(differences) + 1)[:, None]
            risen &= (differences.cumsum(axis=0) / n)[per_day - 1 :: per_day] >= -TOLERANCE
        days.append(np.where(risen.any(axis=0), risen.argmax(axis=0) + 1.0, np.inf))
    return np.concatenate(days)


def risen_by_erring_judge(draw: Draw, years: int) -> float:
    """The share of years that rise where the judge misses losses and people grade some requests.

    Fifty requests are judged a day and ten graded; people's grades replace the judge's.
    """
    rng, risen = np.random.default_rng(0), 0
    days = np.arange(1, DAYS + 1)
    for _ in range(years // _RUNS_AT_ONCE):
        truth = draw(rng, (50 * DAYS, _RUNS_AT_ONCE))
        is_graded = (np.arange(len(truth)) % 50 < _GRADED_A_DAY)[:, None]
        is_missed = (truth < 0.0) & (rng.random(truth.shape) < MISSED) & ~is_graded
        seen = np.where(is_missed, 0.0, truth)
        wealth = np.maximum.accumulate(log_wealth(seen, MAX_LOSS), axis=0)[49::50]
        graded = truth[is_graded[:, 0]].cumsum(axis=0)[_GRADED_A_DAY - 1 :: _GRADED_A_DAY]
        n_graded = (_GRADED_A_DAY * days)[:, None]
        agrees = (n_graded >= FEWEST_LABELLED) & (graded / n_graded >= -TOLERANCE)
        risen += int(((wealth >= -np.log(DELTA)) & agrees).any(axis=0).sum())
    return risen / years


def traffic(years: int, console: Console) -> dict[str, Any]:
    """Print and return how often and how soon simulated traffic lets a policy rise."""
    limit = {
        name: float(np.isfinite(days_to_rise(draw, 50, years, meets_mean=False)).mean())
        for name, draw in AT_THE_LIMIT.items()
    }
    median = {
        name: {
            str(n): float(np.median(days_to_rise(draw, n, min(years, 200), meets_mean=True)))
            for n in REQUESTS_A_DAY
        }
        for name, draw in OF_NO_LOSS.items()
    }
    for name, share in limit.items():
        console.print(f"loss at the limit, {name}: {share:.1%} of {years:,} years rise")
    for name, own in median.items():
        days = ", ".join(f"{n} a day: {day:g}" for n, day in own.items())
        console.print(f"no loss, {name}: median days to rise, {days}")
    erring = {name: risen_by_erring_judge(draw, years) for name, draw in AT_THE_LIMIT.items()}
    for name, share in erring.items():
        console.print(f"a judge misses {MISSED:.0%} of losses, {name}: {share:.1%} of years rise")
    words = f"with the loss at the limit {DELTA:.0%} of years rise at most"
    of_erring = f"so do those of a judge that misses {MISSED:.0%} of losses"
    kept = {words: max(limit.values()) <= DELTA, of_erring: max(erring.values()) <= DELTA}
    for each, holds in kept.items():
        console.print(f"{'holds' if holds else 'MISSED'}: {each}")
    return {
        "years": years,
        "limit": limit,
        "limit_by_erring_judge": erring,
        "median_days": median,
        "bars": kept,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulation; with ``--check`` the exit status is 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.rise", description=SUMMARY)
    parser.add_argument("--years", type=int, default=YEARS)
    parser.add_argument("--check", action="store_true", help="fail where a bar is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    simulated = traffic(options.years, Console(width=80))
    if options.json is not None:
        options.json.write_text(json.dumps(simulated, indent=2) + "\n", encoding="utf-8")
    return int(options.check and not all(simulated["bars"].values()))


if __name__ == "__main__":
    sys.exit(main())
