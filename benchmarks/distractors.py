"""Is a second threshold, on P(distractor), worth more than the one on P(relevant)?

    python -m benchmarks.distractors --data DIR … --json distractors.json

Where labels name passages that mislead (distractors, hard negatives), one model can tell
P(relevant) and another P(distractor), of the same features. On a random half of a collection the
plain form chooses k and the least P(relevant) of highest strict UDCG out of fold, and the other
form the most P(distractor) of a kept passage as well. The second threshold is *taken* only where
its gain out of fold is above its standard error. Both are measured on the other half; candidates
have all signals. Intervals are 95%, over queries' means of the halves in which they were measured.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._collection import Collection, View, default_cache
from benchmarks.policies import environment
from calibration.fit import fit_relevance, out_of_fold, probabilities
from calibration.pool_labels import IntArray, PoolLabels
from ctxguard.core.fusion import Fusion
from ctxguard.core.types import FloatArray
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder

SUMMARY = "Is a second threshold, on P(distractor), worth more than the one on P(relevant)?"
DEEPEST = 20
LEAST_RELEVANT = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6)
MOST_DISTRACTING = (1.0, 0.7, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05)


def misleading(labels: PoolLabels) -> PoolLabels:
    """The labels with a distractor or a hard negative in the place of a relevant passage."""
    return replace(labels, grades=(labels.negatives != None).astype(np.int64))  # noqa: E711


def utilities(view: View, relevant: FloatArray, distracting: FloatArray) -> FloatArray:
    """Strict UDCG of each query under every choice, shape (n_q, k, relevant, distracting)."""
    shape = (len(view.pools), DEEPEST, len(LEAST_RELEVANT), len(MOST_DISTRACTING))
    found = np.zeros(shape)
    discounts = 1.0 / np.log2(np.arange(2, DEEPEST + 2))
    for row, n in enumerate(view.pools.lengths.tolist()):
        order = np.argsort(-relevant[row, :n], kind="stable")
        p, d = relevant[row, order], distracting[row, order]
        worth = view.labels.utilities[row, order]
        for at, most in enumerate(MOST_DISTRACTING):
            left = np.flatnonzero(d <= most) if (d <= most).any() else np.array([0])
            left = left[:DEEPEST]
            gained = np.cumsum(worth[left] * discounts[: len(left)])
            for index, least in enumerate(LEAST_RELEVANT):
                kept = np.minimum(max(int((p[left] >= least).sum()), 1), np.arange(1, DEEPEST + 1))
                found[row, :, index, at] = gained[np.minimum(kept, len(left)) - 1]
    return found


def measure(collection: Collection, halves: int, seed: int) -> dict[str, Any] | None:
    """Choose on random halves and measure on the others; None without distractors."""
    view = collection.under(Fusion("ranker"))
    if not misleading(view.labels).relevant.any():
        return None
    n = len(view.pools)
    gains: dict[str, list[list[float]]] = {
        name: [[] for _ in range(n)] for name in ("two", "taken")
    }
    plain_values: list[float] = []
    taken = 0
    for half in range(halves):
        rows = list(range(n))
        random.Random(seed + half).shuffle(rows)
        fit_on, others = (np.array(sorted(part)) for part in (rows[: n // 2], rows[n // 2 :]))
        chosen, apart = _both(view, fit_on, others)
        # The first of the second thresholds keeps everything.
        plain_at = int(chosen.mean(axis=0)[..., 0].argmax()) * len(MOST_DISTRACTING)
        two_at = int(chosen.mean(axis=0).argmax())
        chosen, apart = (each.reshape(len(each), -1) for each in (chosen, apart))
        gain = chosen[:, two_at] - chosen[:, plain_at]
        is_taken = gain.mean() > gain.std(ddof=1) / np.sqrt(len(gain))
        taken += int(is_taken)
        plain, two = apart[:, plain_at], apart[:, two_at]
        plain_values.append(float(plain.mean()))
        for row, difference in zip(others.tolist(), (two - plain).tolist(), strict=True):
            gains["two"][row].append(difference)
            gains["taken"][row].append(difference if is_taken else 0.0)
    result: dict[str, Any] = {"queries": n, "plain": float(np.mean(plain_values))}
    for name, by_query in gains.items():
        means = np.array([np.mean(values) for values in by_query if values])
        spread = 1.96 * means.std(ddof=1) / np.sqrt(len(means))
        mean = float(means.mean())
        result[name] = {"value": mean, "lower": mean - spread, "upper": mean + spread}
    return {"name": collection.name, **result, "halves": halves, "taken_in": int(taken)}


def _both(view: View, fit_on: IntArray, others: IntArray) -> tuple[FloatArray, FloatArray]:
    """Strict UDCG out of fold on one half, and of models of that half on the other."""
    own, apart = view.rows(fit_on), view.rows(others)
    inside, outside = [], []
    for labels in (own.labels, misleading(own.labels)):
        inside.append(out_of_fold(own.pools, labels))
        model = fit_relevance(own.pools, labels)
        outside.append(probabilities(model, apart.pools))
    return utilities(own, *inside), utilities(apart, *outside)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every collection whose labels name distractors."""
    parser = argparse.ArgumentParser(prog="benchmarks.distractors", description=SUMMARY)
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="DIR")
    parser.add_argument("--halves", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, default=default_cache(), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    embedder = SentenceTransformerEmbedder()
    found = []
    table = Table("collection", "queries", "plain", "second threshold", "taken", "taken in")
    for folder in options.data:
        collection = Collection(folder, options.cache, embedder)
        if (one := measure(collection, options.halves, options.seed)) is not None:
            found.append(one)
            gains = [
                "{value:+.3f} [{lower:.3f}, {upper:.3f}]".format(**one[n]) for n in ("two", "taken")
            ]
            queries, share = str(one["queries"]), f"{one['taken_in']} of {one['halves']}"
            table.add_row(one["name"], queries, f"{one['plain']:.3f}", *gains, share)
    Console(width=120).print(table)
    if options.json is not None:
        results = {"environment": environment(), "sets": found}
        text = json.dumps(results, indent=2, ensure_ascii=False)
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
