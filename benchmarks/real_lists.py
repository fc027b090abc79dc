"""Calibrate on lists of real retrievers, and ask recorded language models about them.

    python -m benchmarks.real_lists --data ../shared/data/trec_dl20 --check --json FILE

The folder holds ``queries.jsonl``, ``qrels`` and ``runs`` (TREC runs of several retrievers), and
in ``verdicts`` what language models said of the same passages. It is read in place and needs no
texts: a passage is its id. A passage of grade 2 or more is relevant, any other judged one is not.

In every split so many queries are labelled, and all others measure. Each context is served by its
verdict: today's first 5 where it is not enforced. Recall is less that of today's first 5; *equal*
is recall less that of the first k of equal size on the mean. Rules that people set need no labels,
but for P > .5 (logistic in the score) and the best fixed k; each keeps 20 passages at most.

An assessor answers by recorded verdicts, as ``calibrate --ask`` asks it. Net is the gain in
UDCG over the same calibration without it, less 0.002 for every candidate asked about;
*truth* is the same where answers are applied, and *forecast* what calibration measured there.
"""

import argparse
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._served import (
    Answers,
    Bars,
    Recorded,
    Served,
    asking_bars,
    asking_figures,
    asking_table,
    few_labels,
    mean_figures,
    plain_table,
    print_bars,
    write_report,
)
from calibration.data.dataset import Dataset
from calibration.data.readers import read_beir, read_trec_run
from calibration.fit import fit_relevance, predicted
from calibration.replay import replay
from calibration.retrievers import RecordedRankings
from calibration.settings import Context, Settings
from ctxguard.core.scores import discounts
from ctxguard.core.types import FloatArray, ScoreKind
from ctxguard.measure.rows import IntArray

SUMMARY = "Calibrate on lists of real retrievers, and ask recorded language models about them."
DATA = Path("../shared/data/trec_dl20")
LABELS, ASKING_LABELS = (20, 27), 27
LEAST_RELEVANT = 2
MAX_K = 20
"""The largest context of the rules that people set."""

BM25 = "bm25"

LEAST_OF_A_LIST: Mapping[Context, float] = {"leaner": -0.015, "balanced": -0.01}
"""Recall less today's, in the worst list."""
MORE_THAN_EQUAL = 0.02
LEAST_NET_OF_A_LIST = -0.02
CONTEXTS: tuple[Context, ...] = get_args(Context)

Rule = Callable[[Recorded, IntArray, IntArray], IntArray]
"""How many passages are kept of each other query, given the rows of the labelled and the others."""


def above(least: Callable[[FloatArray], FloatArray]) -> Rule:
    """Keep what scores above a threshold made of the best score, shape (n_q, 1)."""

    def rule(collection: Recorded, _labelled: IntArray, rows: IntArray) -> IntArray:
        scores = collection.pools.scores[rows]
        kept: IntArray = (scores > least(scores[:, :1])).sum(axis=1)
        return kept

    return rule


def probable(collection: Recorded, labelled: IntArray, rows: IntArray) -> IntArray:
    """Keep what is relevant with a probability above a half, by the labelled queries."""
    model = fit_relevance(collection.pools.rows(labelled))
    kept: IntArray = (predicted(model, collection.pools.rows(rows)) > 0.5).sum(axis=1)
    return kept


def elbow(collection: Recorded, _labelled: IntArray, rows: IntArray) -> IntArray:
    """Keep what comes before the largest fall of the score."""
    falls = -np.diff(collection.pools.scores[rows, : MAX_K + 1], axis=1)
    kept: IntArray = np.nan_to_num(falls, nan=-1.0).argmax(axis=1) + 1
    return kept


def best_k(collection: Recorded, labelled: IntArray, rows: IntArray) -> IntArray:
    """Keep the number that has the highest UDCG on the labelled queries."""
    worth = collection.pools.utilities[labelled, :MAX_K] * discounts(MAX_K)
    return np.full(rows.size, int(worth.cumsum(axis=1).mean(axis=0).argmax()) + 1)


RULES: Mapping[str, Rule] = {
    "score > 0": above(np.zeros_like),
    "P > .5": probable,
    "elbow": elbow,
    "70% of the top": above(lambda best: 0.7 * best),
    "best fixed k": best_k,
}


def read_truth(folder: Path) -> Dataset:
    """The queries with their labels: relevant from ``LEAST_RELEVANT`` on."""
    dataset = read_beir(folder)
    qrels = {
        query_id: {name: int(grade >= LEAST_RELEVANT) for name, grade in grades.items()}
        for query_id, grades in dataset.qrels.items()
    }
    return replace(dataset, qrels=qrels)


def read_lists(folder: Path) -> list[Recorded]:
    """The list of every retriever."""
    dataset, found = read_truth(folder), []
    for file in sorted((folder / "runs").glob("*.run")):
        kind = ScoreKind.RATIO if file.stem == BM25 else ScoreKind.INNER_PRODUCT
        run = RecordedRankings.of_run(read_trec_run(file), dataset.queries, kind)
        found.append(Recorded(file.stem, dataset, replay(run, dataset.queries)))
    return found


def read_verdicts(file: Path, dataset: Dataset) -> Answers:
    """What a language model said of every passage."""
    texts = {query.query_id: query.text for query in dataset.queries}
    found: dict[str, dict[str, float]] = {text: {} for text in texts.values()}
    for line in file.read_text(encoding="utf-8").splitlines()[1:]:
        query_id, passage_id, verdict = line.split("\t")
        if query_id in texts:
            found[texts[query_id]][passage_id] = float(verdict)
    return Answers(file.stem, found)


def contexts_of(collection: Recorded, n: int, seed: int) -> dict[str, dict[str, float]]:
    """Every context and rule in one split, less today's first 5."""
    labelled = few_labels(collection.dataset, n, seed)
    rows = collection.others(labelled)
    own = np.setdiff1d(np.arange(len(collection.pools)), rows)
    today = collection.first(rows)
    served: dict[str, Served] = {}
    for context in CONTEXTS:
        profile = collection.calibrated(labelled, Settings(seed=seed, context=context)).profile
        served[context] = collection.served(profile, rows)
    for name, rule in RULES.items():
        served[name] = collection.first(rows, rule(collection, own, rows).clip(1, MAX_K))
    found = {}
    for name, each in served.items():
        equal = collection.recall_at(rows, float(each.tokens.mean()))
        figures = each.less(today)
        found[name] = {
            "recall": figures["recall"],
            "equal": float(np.nanmean(each.recall)) - equal,
            "kept": figures["kept"],
        }
    return found


def bars(by_labels: Mapping[int, Any], asking: Mapping[str, Any]) -> Bars:
    """What must hold, with the figure in words and whether it does."""
    found: Bars = {}
    for n, lists in by_labels.items():
        for context, least in LEAST_OF_A_LIST.items():
            worst = min(lists, key=lambda name: lists[name][context]["recall"])
            recall = lists[worst][context]["recall"]
            found[f"{n} labels, {context}: recall of no list below {least:g}"] = (
                f"{recall:+.3f}, {worst}",
                recall >= least,
            )
        recall, equal, kept = (
            float(np.mean([own["richer"][figure] for own in lists.values()]))
            for figure in ("recall", "equal", "kept")
        )
        found[f"{n} labels, richer: {MORE_THAN_EQUAL:+g} over the first k of equal size"] = (
            f"{equal:+.3f}, recall {recall:+.3f} at {kept:.1f} passages",
            equal >= MORE_THAN_EQUAL,
        )
    every = {f"{name} on {one}": at for name, by in asking.items() for one, at in by.items()}
    if every:
        worst = min(every, key=lambda name: every[name]["net"])
        found[f"asking: no net below {LEAST_NET_OF_A_LIST:g}"] = (
            f"{every[worst]['net']:+.3f}, {worst}",
            every[worst]["net"] >= LEAST_NET_OF_A_LIST,
        )
        found |= asking_bars(list(every.values()))
    return found


def contexts_table(n: int, lists: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table:
    """A row for each context and rule: recall by list, and the means over the lists."""
    title = f"{n} labels, recall less today's"
    found = plain_table(title, ("",), (*lists, "mean", "equal", "kept"))
    for policy in next(iter(lists.values())):
        own = [by_policy[policy] for by_policy in lists.values()]
        recall, equal, kept = (
            float(np.mean([each[name] for each in own])) for name in ("recall", "equal", "kept")
        )
        found.add_row(
            policy,
            *(f"{each['recall']:+.3f}" for each in own),
            f"{recall:+.3f}",
            f"{equal:+.3f}",
            f"{kept:.1f}",
        )
    return found


def measured(
    lists: Sequence[Recorded], verdicts: Sequence[Answers], options: argparse.Namespace
) -> tuple[dict[int, Any], dict[str, Any]]:
    """The means over the splits: by labels, list and policy; by assessor and list."""
    by_labels: dict[int, Any] = {}
    for n in options.labels:
        own = by_labels[n] = {}
        for each in lists:
            splits = [contexts_of(each, n, seed) for seed in range(options.splits)]
            own[each.name] = {
                policy: {
                    name: float(np.mean([split[policy][name] for split in splits]))
                    for name in splits[0][policy]
                }
                for policy in splits[0]
            }
    asking: dict[str, Any] = {}
    for assessor in verdicts:
        for each in lists:
            found = [
                asking_figures(
                    each,
                    few_labels(each.dataset, options.asking_labels, seed),
                    Settings(seed=seed),
                    assessor,
                )
                for seed in range(options.splits)
            ]
            asking.setdefault(assessor.fingerprint, {})[each.name] = mean_figures(found)
    return by_labels, asking


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; with ``--check`` the exit status is 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.real_lists", description=SUMMARY)
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR")
    parser.add_argument("--labels", type=int, nargs="+", default=LABELS, metavar="N")
    parser.add_argument("--asking-labels", type=int, default=ASKING_LABELS, metavar="N")
    parser.add_argument("--splits", type=int, default=8)
    parser.add_argument(
        "--verdicts", nargs="*", metavar="NAME", help="which assessors (default all; none for none)"
    )
    parser.add_argument("--check", action="store_true", help="print what must hold")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    logging.getLogger("ctxguard").setLevel(logging.CRITICAL)  # modes are set by hand here
    console, start = Console(width=80), time.perf_counter()
    lists = read_lists(options.data)
    verdicts = [
        read_verdicts(file, lists[0].dataset)
        for file in sorted((options.data / "verdicts").glob("*.tsv"))
        if options.verdicts is None or file.stem in options.verdicts
    ]
    by_labels, asking = measured(lists, verdicts, options)
    for n, own in by_labels.items():
        console.print(contexts_table(n, own))
    if asking:
        console.print(asking_table(f"{options.asking_labels} labels, asked", asking))
    console.print(f"[dim]{time.perf_counter() - start:.0f} s[/dim]")
    found = bars(by_labels, asking)
    if options.check:
        print_bars(found, console)
    write_report(
        options.json,
        found,
        {
            "splits": options.splits,
            "labels": by_labels,
            "asking": {"labels": options.asking_labels, "assessors": asking},
        },
    )
    return int(options.check and not all(holds for _, holds in found.values()))


if __name__ == "__main__":
    sys.exit(main())
