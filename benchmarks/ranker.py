"""Train the pooled ranker, and measure it on collections that it was not trained on.

    python -m benchmarks.ranker --data DIR … demo --json ranker.json
    python -m benchmarks.ranker --data DIR … demo --write

Each folder is a BEIR folder and a family of its own; ``demo`` is the demo's questions. Candidates
are those of the hybrid route. For each family a ranker is trained on all the others and orders the
family's candidates; nDCG@10 is compared with that of reciprocal ranks. A folder that has the splits
train and test is trained on by the first and measured by the second; of any other all queries are
used for both. Intervals are 95% paired bootstraps over queries; in the mean over families each has
the same weight.

With ``--write`` a ranker is trained on all families and written into the package, and for each
family one on all the others into ``benchmarks/rankers``; a second run then gives the same files.
Every benchmark ranks a collection by the one that has not seen it (``benchmarks._collection``).
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import ctxguard.retrieval.signals.ranker
from benchmarks._collection import DEMO, RANKERS, Collection, default_cache
from benchmarks.policies import Gain, environment, gain
from calibration.data.dataset import Dataset
from calibration.data.readers import read_beir, splits
from calibration.pool_labels import PoolLabels, label
from calibration.ranker import ndcg_by_query, train_ranker
from calibration.replay import Pools, replay
from ctxguard.core.fusion import Fusion
from ctxguard.core.types import FloatArray, Route
from ctxguard.errors import CtxguardError
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder
from ctxguard.retrieval.signals.ranker import INPUTS, Ranker, RankerLevel

SUMMARY = "Train the pooled ranker, and measure it on collections that it was not trained on."
LEAST_MEAN_GAIN = 0.03
LEAST_GAIN = -0.01

_SENTENCES = ("sentence_match", "token_match", "sentence_similarity")


@dataclass(frozen=True)
class Family:
    """The replayed queries of one collection.

    Attributes:
        name: Its folder's.
        training: What rankers for the other families are trained on.
        test: What is measured.
    """

    name: str
    training: tuple[Pools, PoolLabels]
    test: tuple[Pools, PoolLabels]


def family(folder: Path, cache: Path, embedder: SentenceTransformerEmbedder) -> Family:
    """Index a folder and replay its queries, or read both from the cache."""
    # Signals do not depend on the ranker.
    collection = Collection(folder, cache, embedder, ranker=Ranker.default())
    view = collection.retriever.with_fusion(Fusion("ranker")).on_route(Route.HYBRID)

    def replayed(dataset: Dataset) -> tuple[Pools, PoolLabels]:
        pools = replay(view, dataset.queries, cache=cache / "pools")
        return pools, label(pools, dataset)

    if folder != DEMO and {"train", "test"} <= set(splits(folder)):
        training, test = (replayed(read_beir(folder, name)) for name in ("train", "test"))
    else:
        training = test = replayed(collection.dataset)
    return Family(collection.name, training, test)


def on_level(pools: Pools, level: RankerLevel) -> Pools:
    """The pools as an index of a level gives them."""
    if level == "full":
        return pools
    return replace(
        pools,
        signals={name: each for name, each in pools.signals.items() if name not in _SENTENCES},
    )


def unseen_rankers(families: Sequence[Family]) -> dict[str, Ranker]:
    """For each family the ranker that is trained on all the others."""
    return {
        own.name: train_ranker({each.name: each.training for each in families if each is not own})
        for own in families
    }


def leave_one_out(
    families: Sequence[Family], rankers: Mapping[str, Ranker]
) -> dict[RankerLevel, dict[str, dict[str, FloatArray]]]:
    """nDCG@10 of each answerable query by level, family and order, shape (n_q,)."""
    found: dict[RankerLevel, dict[str, dict[str, FloatArray]]] = {level: {} for level in INPUTS}
    for own in families:
        for level in INPUTS:
            pools, labels = on_level(own.test[0], level), own.test[1]
            values = {
                "reciprocal_rank": ndcg_by_query(pools, labels, None),
                "ranker": ndcg_by_query(pools, labels, rankers[own.name]),
            }
            found[level][own.name] = {
                order: each[~np.isnan(each)] for order, each in values.items()
            }
    return found


def report(
    found: Mapping[RankerLevel, Mapping[str, Mapping[str, FloatArray]]],
    seed: int,
    console: Console,
) -> dict[str, Any]:
    """Print a table for each level and return the figures with the bars."""
    results: dict[str, Any] = {"levels": {}, "bars": {}}
    for level, families in found.items():
        table = Table(title=f"nDCG@10 on a family that took no part in training, {level}")
        for column in ("family", "queries", "reciprocal ranks", "ranker", "difference"):
            table.add_column(column, justify="left" if column == "family" else "right")
        gains: dict[str, Gain] = {}
        rows = {}
        for name, values in families.items():
            gains[name] = gain([values["ranker"] - values["reciprocal_rank"]], seed)
            means = {order: float(each.mean()) for order, each in values.items()}
            rows[name] = {"queries": values["ranker"].size, **means, "gain": vars(gains[name])}
            table.add_row(
                name,
                str(values["ranker"].size),
                *(f"{mean:.3f}" for mean in means.values()),
                _shown(gains[name]),
            )
        mean = gain([each["ranker"] - each["reciprocal_rank"] for each in families.values()], seed)
        table.add_row("mean", "", "", "", _shown(mean))
        console.print(table)
        results["levels"][level] = {"families": rows, "mean_gain": vars(mean)}
        results["bars"] |= {
            f"{level}: {LEAST_MEAN_GAIN:+g} or more on the mean": mean.mean >= LEAST_MEAN_GAIN,
            f"{level}: no family below {LEAST_GAIN:+g}": all(
                each.mean >= LEAST_GAIN for each in gains.values()
            ),
        }
    for bar, met in results["bars"].items():
        console.print(f"{'met   ' if met else 'MISSED'} {bar}")
    return results


def _shown(difference: Gain) -> str:
    return f"{difference.mean:+.3f} [{difference.lower:+.3f}, {difference.upper:+.3f}]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit status is 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.ranker", description=SUMMARY)
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="DIR")
    parser.add_argument("--cache", type=Path, default=default_cache(), metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    parser.add_argument(
        "--write", action="store_true", help="write the ranker of all families into the package"
    )
    options = parser.parse_args(arguments)
    console = Console(width=120)
    embedder = SentenceTransformerEmbedder()
    start = time.perf_counter()
    families = []
    for folder in options.data:
        try:
            families.append(family(folder, options.cache, embedder))
        except CtxguardError as error:
            parser.error(f"{folder}: {error}")
        console.print(f"[dim]{folder.name}: {time.perf_counter() - start:.0f} s so far[/dim]")
    if len(families) < 2:
        parser.error("give at least two families, so that one can be left out")
    rankers = unseen_rankers(families)
    results = {
        "environment": environment(),
        "shipped": Ranker.default().digest(),
        **report(leave_one_out(families, rankers), options.seed, console),
    }
    if options.write:
        file = Path(ctxguard.retrieval.signals.ranker.__file__).with_name("ranker.json")
        train_ranker({each.name: each.training for each in families}).save(file)
        RANKERS.mkdir(exist_ok=True)
        for name, ranker in rankers.items():
            ranker.save(RANKERS / f"{name}.json")
        console.print(f"written: {file.name}, and {len(rankers)} in {RANKERS.name}")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0 if all(results["bars"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
