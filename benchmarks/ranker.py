"""Train the ranker, and measure it on collections that it was not trained on.

    python -m benchmarks.ranker --data DIR … demo --unseen DIR … --json ranker.json
    python -m benchmarks.ranker --data DIR … demo --write

Each folder is a BEIR folder and a family of its own; ``demo`` is the demonstration's questions. For
each family of ``--data`` a ranker is trained on all the others and orders the candidates of the
family; those of ``--unseen`` are ordered by one that was trained on all of ``--data``. nDCG@10 is
compared with that of reciprocal ranks. Intervals are 95% paired bootstraps over queries; in the
mean over families each has the same weight.

The weights a minimise the weighted mean over the queries of

    −Σ_i g_i · ln softmax(X a)_i    and    penalty · |a|²,

where X holds the inputs of a query's candidates (`ctxguard.retrieval.signals`) and g_i is
candidate i's share in the sum of their grades (ListNet with the top probability; Cao et al., ICML
2007). A set of n queries weighs √n: with equal weights for all sets a query of a set of 20 would
count like 40 of one of 800, and with equal weights for all queries the largest set would decide
alone.

With ``--write`` the ranker of all families is written into the package, and for each family the one
of all the others into ``benchmarks/rankers``; a second run then gives the same files. Every
benchmark ranks a collection by the one that has not seen it (``benchmarks._collection``).
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ctxguard.retrieval.signals
from benchmarks._collection import RANKERS, Collection, default_cache
from benchmarks._command import CONSOLE, command, ended, figures
from benchmarks._gains import Gain, environment, gain
from calibration.fit import significant
from calibration.pools import LabelledPools, label
from calibration.replay import replay
from ctxguard.core.fusion import Fusion, fuse
from ctxguard.core.types import FloatArray, Route
from ctxguard.errors import CtxguardError
from ctxguard.measure.metrics import ndcg
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder
from ctxguard.retrieval.signals import INPUTS, Ranker, ranker_inputs

LEAST_MEAN_GAIN = 0.03
LEAST_GAIN = -0.01

PENALTY = 3e-3
_STEPS = 100
_TOLERANCE = 1e-10


@dataclass(frozen=True)
class Lists:
    """The candidates of queries as a ranker sees them, with their labels.

    Attributes:
        inputs: Shape (n_q, n_inputs, depth), 0 beyond the end of a query's candidates.
        shares: Shape (n_q, depth), each candidate's share in the grades of its query.
        retrieved: Shape (n_q, depth), False beyond the end.
    """

    inputs: FloatArray
    shares: FloatArray
    retrieved: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Family:
    """The replayed queries of one collection, with their labels."""

    name: str
    pools: LabelledPools


def family(folder: Path, cache: Path, embedder: SentenceTransformerEmbedder) -> Family:
    """Index a folder, or read its index from the cache, and replay its queries."""
    # The signals before the ranker do not depend on it.
    collection = Collection(folder, cache, embedder, ranker=Ranker.default())
    view = collection.retriever.with_fusion(Fusion("ranker")).on_route(Route.HYBRID)
    pools = replay(view, collection.dataset.queries)
    return Family(collection.name, label(pools, collection.dataset))


def training_lists(own: Family) -> Lists:
    """The queries of which a relevant passage was retrieved: others do not tell which is better."""
    pools = own.pools
    gains = np.maximum(pools.grades, 0) * pools.retrieved
    taken = np.flatnonzero(gains.any(axis=1))
    inputs = np.zeros((taken.size, len(INPUTS), pools.scores.shape[1]))
    for row, ranking in enumerate(pools.rows(taken).rankings()):
        found = ranker_inputs(ranking.legs, ranking.signals, fuse(ranking.legs, Fusion()))
        inputs[row, :, : found.shape[1]] = found
    gains = gains[taken]
    shares = gains / gains.sum(axis=1, keepdims=True)
    return Lists(inputs, shares, pools.retrieved[taken])


def train(sets: Sequence[Lists], penalty: float = PENALTY) -> FloatArray:
    """The weights of the inputs, shape (n_inputs,).

    Newton's method with halved steps; the loss is convex, and the penalty makes it strictly so.
    """
    weights = np.zeros(len(INPUTS))
    loss, slope, curvature = _loss(sets, weights, penalty)
    for _ in range(_STEPS):
        step = np.linalg.solve(curvature, slope)
        length = 1.0
        tried = _loss(sets, weights - step, penalty)
        while tried[0] > loss and length > _TOLERANCE:
            length /= 2.0
            tried = _loss(sets, weights - length * step, penalty)
        weights = weights - length * step
        loss, slope, curvature = tried
        if np.abs(length * step).max() < _TOLERANCE:
            break
    return weights


def _loss(
    sets: Sequence[Lists], weights: FloatArray, penalty: float
) -> tuple[float, FloatArray, FloatArray]:
    """The loss, its gradient and its second derivatives."""
    loss = penalty * float(weights @ weights)
    slope = 2.0 * penalty * weights
    curvature = 2.0 * penalty * np.eye(weights.size)
    of_all = sum(np.sqrt(len(each)) for each in sets)
    for each in sets:
        # Not matrix products, whose order of sums depends on the number of threads.
        scores = np.einsum("k,qkn->qn", weights, each.inputs)
        scores = np.where(each.retrieved, scores, -np.inf)
        scores -= scores.max(axis=1, keepdims=True)
        powers = np.exp(scores)
        totals = powers.sum(axis=1, keepdims=True)
        chances = powers / totals
        logs = np.where(each.retrieved, scores - np.log(totals), 0.0)
        share = np.full(len(each), 1.0 / (np.sqrt(len(each)) * of_all))
        loss -= float((share * (each.shares * logs).sum(axis=1)).sum())
        slope += np.einsum("q,qn,qkn->k", share, chances - each.shares, each.inputs)
        means = np.einsum("qn,qkn->qk", chances, each.inputs)
        weighted = each.inputs * (share[:, None] * chances)[:, None, :]
        curvature += np.einsum("qkn,qln->kl", weighted, each.inputs)
        curvature -= np.einsum("q,qk,ql->kl", share, means, means)
    return loss, slope, curvature


def train_ranker(families: Sequence[Family]) -> Ranker:
    """The ranker that is trained on some families."""
    weights = train([training_lists(each) for each in families])
    named = dict(zip(INPUTS, map(significant, weights), strict=True))
    return Ranker(named, tuple(each.name for each in families))


def ndcg_by_query(own: Family, ranker: Ranker | None) -> FloatArray:
    """nDCG@10 of each query, shape (n_q,), NaN for one without a relevant passage.

    Args:
        own: The candidates and their labels.
        ranker: Orders the candidates; None for reciprocal ranks.
    """
    grades = np.zeros_like(own.pools.grades)
    for row, ranking in enumerate(own.pools.rankings()):
        scores = fuse(ranking.legs, Fusion())
        if ranker is not None:
            scores = ranker.in_order @ ranker_inputs(ranking.legs, ranking.signals, scores)
        # Ties go by passage id, as in a search.
        order = np.lexsort((np.array(ranking.passage_ids), -scores))
        grades[row, : len(order)] = own.pools.grades[row, order]
    return ndcg(grades, own.pools.best_grades)


def unseen_rankers(families: Sequence[Family]) -> dict[str, Ranker]:
    """For each family the ranker that is trained on all the others."""
    return {
        own.name: train_ranker([each for each in families if each is not own]) for own in families
    }


def measured(
    families: Sequence[Family], rankers: Mapping[str, Ranker]
) -> dict[str, dict[str, FloatArray]]:
    """nDCG@10 of each answerable query by family and order, shape (n_q,)."""
    found = {}
    for own in families:
        values = {
            "reciprocal_rank": ndcg_by_query(own, None),
            "ranker": ndcg_by_query(own, rankers[own.name]),
        }
        found[own.name] = {order: each[~np.isnan(each)] for order, each in values.items()}
    return found


def report(families: Mapping[str, Mapping[str, FloatArray]], seed: int) -> dict[str, Any]:
    """Print a table and return the figures with the bars."""
    columns = ("queries", "reciprocal ranks", "ranker", "difference")
    table = figures("nDCG@10 on a family that took no part in training", ("family",), columns)
    gains: dict[str, Gain] = {}
    rows = {}
    for name, values in families.items():
        gains[name] = gain([values["ranker"] - values["reciprocal_rank"]], seed)
        means = {order: float(each.mean()) for order, each in values.items()}
        rows[name] = {"queries": values["ranker"].size, **means, "gain": vars(gains[name])}
        shown = [f"{mean:.3f}" for mean in means.values()]
        table.add_row(name, str(values["ranker"].size), *shown, _shown(gains[name]))
    mean = gain([each["ranker"] - each["reciprocal_rank"] for each in families.values()], seed)
    table.add_row("mean", "", "", "", _shown(mean))
    CONSOLE.print(table)
    bars = {
        f"{LEAST_MEAN_GAIN:+g} or more on the mean": mean.mean >= LEAST_MEAN_GAIN,
        f"no family below {LEAST_GAIN:+g}": all(x.mean >= LEAST_GAIN for x in gains.values()),
    }
    return {"families": rows, "mean_gain": vars(mean), "bars": bars}


def _shown(difference: Gain) -> str:
    return f"{difference.mean:+.3f} [{difference.lower:+.3f}, {difference.upper:+.3f}]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and write the figures; the exit status is 1 where a bar that was checked is missed."""
    parser = command("Train the ranker, and measure it on collections unseen.", seed=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="DIR")
    parser.add_argument("--unseen", type=Path, nargs="*", default=[], metavar="DIR")
    parser.add_argument("--cache", type=Path, default=default_cache(), metavar="DIR")
    parser.add_argument(
        "--write", action="store_true", help="write the ranker of all families into the package"
    )
    options = parser.parse_args(arguments)
    embedder = SentenceTransformerEmbedder()
    start = time.perf_counter()
    families = []
    for folder in (*options.data, *options.unseen):
        try:
            families.append(family(folder, options.cache, embedder))
        except CtxguardError as error:
            parser.error(f"{folder}: {error}")
        CONSOLE.print(f"[dim]{folder.name}: {time.perf_counter() - start:.0f} s so far[/dim]")
    trained = families[: len(options.data)]
    if len(trained) < 2:
        parser.error("give at least two families, so that one can be left out")
    whole, rankers = train_ranker(trained), unseen_rankers(trained)
    unseen = dict.fromkeys((each.name for each in families[len(trained) :]), whole)
    results = {
        "environment": environment(),
        "shipped": Ranker.default().digest(),
        **report(measured(families, rankers | unseen), options.seed),
    }
    if options.write:
        file = Path(ctxguard.retrieval.signals.__file__).with_name("ranker.json")
        RANKERS.mkdir(exist_ok=True)
        files = {file: whole} | {RANKERS / f"{name}.json": each for name, each in rankers.items()}
        for at, ranker in files.items():
            about = {"trained_on": ranker.trained_on, "weights": dict(ranker.weights)}
            at.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        CONSOLE.print(f"written: {file.name}, and {len(rankers)} in {RANKERS.name}")
    return ended(options, results, [bar for bar, met in results["bars"].items() if not met])


if __name__ == "__main__":
    sys.exit(main())
