"""Take a judge's grades as labels, and a few of people: is the gain what it seems?

    python -m benchmarks.judged_lists --data ../shared/data/trec_dl20 --check --json FILE

The lists and judges of `benchmarks.real_lists`. The first 20 candidates of each question are judged
by a recorded judge; the qrels are the grades of people, who grade about 400 of these passages, as
``label export`` asks for them, anew in each draw. The policy is fitted as ``ctxguard calibrate
--store`` fits it, each question decided by the fit of the others, and its gain in UDCG over
the first 5 is compared with the truth, by all qrels.

*By labels* is the gain of the policy that is fitted where people grade every candidate.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from benchmarks._served import Answers, Bars, Recorded, plain_table, print_bars, write_report
from benchmarks.real_lists import DATA, read_lists, read_verdicts
from calibration.asked_questions import JUDGED_DEPTH
from calibration.fit import fold_numbers
from calibration.judged_requests import JudgedRequests, decided, decided_by_others
from calibration.settings import Settings
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.scores import discounts
from ctxguard.core.types import FloatArray
from ctxguard.measure.rows import (
    FAR,
    MISSING,
    NEAR,
    NEAR_DROPPED,
    PASSAGE,
    REQUEST,
    UNGRADED,
    YES,
    Rows,
    rank_group,
)
from ctxguard.measure.worth import Utilities
from ctxguard.monitor.estimation.sampling_design import GO_ON

SUMMARY = "Take a judge's grades as labels, with a few of people."
LEAST_COVERAGE, MOST_WORSE = 0.93, 0.02
GRADES = 400
SAYS_YES: Mapping[str, float] = {"4prompts_llama3-8b": 5.0}
"""The least verdict that is a yes; 1 of the other judges."""


class JudgedList(NamedTuple):
    """A list as a judge sees it, before anybody grades.

    Attributes:
        judged: Its first candidates.
        relevant: Shape (m,), by the qrels.
    """

    judged: JudgedRequests
    relevant: FloatArray


def judged_list(recorded: Recorded, judge: Answers, settings: Settings) -> JudgedList:
    """Have the recorded judge judge the first candidates; those without a verdict are left out."""
    pools, k = recorded.pools, settings.serving_k
    least = SAYS_YES.get(judge.fingerprint, 1.0)
    verdicts = np.full(pools.scores.shape, np.nan)
    for place, ids in enumerate(pools.passage_ids):
        first = ids[:JUDGED_DEPTH]
        found = judge.assess(recorded.texts[place], first)[judge.fingerprint]
        verdicts[place, : len(first)] = np.where(np.isnan(found), np.nan, found >= least)
    rows = rows_of(np.where(recorded.pools.retrieved, verdicts, -1.0), k, settings.utilities)
    folds, stands_for = fold_numbers(pools.query_ids), np.zeros(len(pools))
    column = rows.passages["position"]
    relevant = recorded.pools.relevant[rows.request, column].astype(np.float64)
    return JudgedList(JudgedRequests(rows, folds, stands_for, pools), relevant)


def rows_of(verdicts: FloatArray, k: int, utilities: Utilities) -> Rows:
    """Make the rows of lists of which the first k are served.

    Args:
        verdicts: Shape (n, depth), 1 for yes and 0 for no; NaN for a candidate that is not judged,
            negative where there is none.
        utilities: What a passage is worth.
    """
    is_judged = ~np.isnan(verdicts)
    row, column = np.nonzero(~(verdicts < 0.0))
    own, verdict = is_judged[row, column], verdicts[row, column]
    is_served = own & (column < k)
    passages, requests = np.zeros(row.size, PASSAGE), np.zeros(len(verdicts), REQUEST)
    passages["position"], passages["rank"] = column, np.where(is_served, column + 1, 0)
    dropped = np.where(column < k + NEAR_DROPPED, NEAR, FAR)
    passages["group"] = np.where(is_served, rank_group(column + 1), dropped)
    passages["judge_grade"], passages["size"] = np.where(own, verdict > 0.0, MISSING), own
    judged = np.where(verdict > 0.0, utilities.relevant, utilities.irrelevant)
    passages["worth"], passages["people_grade"] = (
        np.where(own, judged, utilities.unjudged),
        UNGRADED,
    )
    requests["n_passages"] = np.bincount(row, minlength=len(verdicts))
    requests["n_served"] = np.bincount(row[is_served], minlength=len(verdicts))
    requests["probability"] = requests["run_probability"] = 1.0
    return Rows(requests, passages, row)


def graded(own: JudgedList, settings: Settings, seed: int, n: int = GRADES) -> JudgedRequests:
    """Let people grade about n passages, as the draw asks where it can open all questions.

    The first passage of each is graded and, in six of ten, those below down to the first relevant
    one; all others have one coin, as large as the budget allows (``sampling_design``).
    """
    judged, worths = own.judged, (settings.utilities.relevant, settings.utilities.irrelevant)
    rows, rank, random = judged.rows, judged.rows.passages["rank"], np.random.default_rng([seed, 7])
    goes_on = random.random(len(judged.pools)) < GO_ON
    likely = np.where(rows.passages["judge_grade"] == YES, 0.8, 0.2)
    reached, in_run = (
        _none_above(rows, each) * (goes_on[rows.request] | (rank == 1))
        for each in (likely, own.relevant)
    )
    is_judged = rows.passages["size"] > 0.0
    is_first = (rank == 1) | ((rank == 0) & (rows.passages["position"] == 0))
    left = n - float(reached.sum())
    coin = min(left / np.count_nonzero(is_judged & ~is_first), 1.0)
    chance = np.where((in_run > 0.0) | is_first, 1.0, coin)
    taken = is_judged & (random.random(rank.size) < chance)
    passages, requests = rows.passages.copy(), rows.requests.copy()
    passages["people_grade"] = np.where(taken, own.relevant, UNGRADED)
    passages["people_worth"] = np.where(own.relevant > 0.0, *worths)
    passages["asked_probability"] = np.where(taken, chance, 0.0)
    requests["draw"], requests["is_run"], requests["run_probability"] = 1, goes_on, GO_ON
    every, found_rows = np.ones(len(judged.pools)), Rows(requests, passages, rows.request)
    found = replace(judged, rows=found_rows, stands_for=every)
    # No grade changes them: computed once for all draws.
    found.__dict__["features"] = judged.features
    return found


def _none_above(rows: Rows, relevance: FloatArray) -> FloatArray:
    """Return P(no passage served above each is relevant), shape (m,); 0 of a dropped one."""
    by_rank = 1.0 - rows.by_rank(relevance)
    above = np.cumprod(np.column_stack([np.ones(len(by_rank)), by_rank]), axis=1)
    rank = rows.passages["rank"].astype(np.intp)
    return np.where(rank > 0, above[rows.request, np.maximum(rank - 1, 0)], 0.0)


class Draw(NamedTuple):
    """The gain over the first k in one draw, as estimated and in truth.

    Attributes:
        truth: Of the same contexts, by all qrels of judged candidates.
        udcg: UDCG of these contexts over today's, by all qrels.
    """

    value: float
    lower: float
    upper: float
    truth: float
    udcg: float
    grades: float


def drawn(
    recorded: Recorded, own: JudgedList, settings: Settings, seed: int, n: int = GRADES
) -> Draw:
    """Fit the policy to one draw of about n grades, and estimate its gain."""
    judged = graded(own, settings, seed, n)
    today = RatioPolicy(k=settings.serving_k)
    new, old = decided_by_others(judged, settings), decided(judged.pools, today)
    udcg = judged.gain(new, old)["udcg"]
    utilities, is_judged = settings.utilities, judged.rows.passages["size"] > 0.0
    worth = np.where(own.relevant > 0.0, utilities.relevant, utilities.irrelevant)
    worth = np.where(is_judged, worth, utilities.unjudged)
    by_rank = np.concatenate([[0.0], discounts(new.shape[1])])
    apart = by_rank[new] - by_rank[old]
    truth = apart[judged.rows.request, judged.rows.passages["position"]] @ worth / len(judged.pools)
    labels = recorded.pools
    by_all = (np.where(labels.retrieved, labels.utilities, 0.0) * apart).sum(axis=1).mean()
    value, (lower, upper) = udcg.value or 0.0, udcg.bounds or (0.0, 0.0)
    return Draw(
        value,
        lower,
        upper,
        float(truth),
        float(by_all),
        float(judged.is_graded.sum()),
    )


def figures(draws: Sequence[Draw]) -> dict[str, float]:
    """Sum up the draws of one judge and list."""
    value, lower, upper, truth, udcg, grades = np.array(draws).T
    return {
        "rmse": float(np.sqrt(np.mean((value - truth) ** 2))),
        "bias": float(np.mean(value - truth)),
        "coverage": float(np.mean((lower <= truth) & (truth <= upper))),
        "half_width": float(np.mean(upper - lower) / 2.0),
        "truth": float(truth.mean()),
        "udcg": float(udcg.mean()),
        "grades": float(grades.mean()),
    }


def means(by_list: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Average over the lists of a judge; of errors the root of the mean square."""
    rows = list(by_list.values())
    found = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    return {**found, "rmse": float(np.sqrt(np.mean([row["rmse"] ** 2 for row in rows])))}


def bars(judges: Mapping[str, Mapping[str, float]]) -> Bars:
    """What must hold, with the figure in words and whether it does."""
    coverage = float(np.mean([own["coverage"] for own in judges.values()]))
    worst = min(judges, key=lambda name: judges[name]["udcg"] - judges[name]["by_labels"])
    apart = judges[worst]["udcg"] - judges[worst]["by_labels"]
    return {
        f"coverage at least {LEAST_COVERAGE:g}": (f"{coverage:.3f}", coverage >= LEAST_COVERAGE),
        f"policy at most {MOST_WORSE:g} UDCG worse than by labels": (
            f"{apart:+.3f}, {worst}",
            apart >= -MOST_WORSE,
        ),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; with ``--check`` the exit status is 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.judged_lists", description=SUMMARY)
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR")
    parser.add_argument("--draws", type=int, default=300, metavar="N")
    parser.add_argument("--judges", nargs="*", metavar="NAME", help="which (default all)")
    parser.add_argument("--check", action="store_true", help="print what must hold")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    console, start, settings = Console(width=80), time.perf_counter(), Settings()
    lists = read_lists(options.data)
    judges: dict[str, dict[str, dict[str, float]]] = {}
    for file in sorted((options.data / "verdicts").glob("*.tsv")):
        if options.judges is not None and file.stem not in options.judges:
            continue
        judge = read_verdicts(file, lists[0].dataset)
        for each in lists:
            own = judged_list(each, judge, settings)
            draws = [drawn(each, own, settings, seed) for seed in range(options.draws)]
            by_labels = drawn(each, own, settings, 0, n=own.relevant.size)
            judges.setdefault(file.stem, {})[each.name] = {
                **figures(draws),
                "by_labels": by_labels.udcg,
            }
    by_judge = {name: means(by_list) for name, by_list in judges.items()}
    columns = ("error", "bias", "coverage", "half", "UDCG", "by labels")
    table = plain_table(f"{GRADES} grades, {options.draws} draws", ("judge",), columns)
    for name, own_figures in by_judge.items():
        table.add_row(
            name,
            f"{own_figures['rmse']:.3f}",
            f"{own_figures['bias']:+.3f}",
            f"{own_figures['coverage']:.3f}",
            f"{own_figures['half_width']:.3f}",
            f"{own_figures['udcg']:+.3f}",
            f"{own_figures['by_labels']:+.3f}",
        )
    console.print(table)
    console.print(f"[dim]{time.perf_counter() - start:.0f} s[/dim]")
    found = bars(by_judge)
    if options.check:
        print_bars(found, console)
    report = {
        "draws": options.draws,
        "grades": GRADES,
        "judges": judges,
        "means": by_judge,
    }
    write_report(options.json, found, report)
    return int(options.check and not all(holds for _, holds in found.values()))


if __name__ == "__main__":
    sys.exit(main())
