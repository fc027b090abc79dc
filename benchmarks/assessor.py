"""Ask a simulated assessor of known worth where it pays, on queries that took no part in the fit.

    python -m benchmarks.assessor --check --json benchmarks/results/assessor.json
    python -m benchmarks.assessor --collections musique --assessors "d′ 1" "d′ 1, shifted"

The collections are as in ``benchmarks.verdict``. In every split so many answerable queries (fewer
where the collection has fewer), and a proportional number of others, are labelled. ``calibrate`` is
given the assessor as by ``--ask``, and a guard with its profile and the same assessor answers all
other queries, by the verdict: recall, tokens and misleading passages are against today's first 5.

An answer about a candidate is d′ · relevant + noise. *Shifted*: each question moves all its answers
by a standard normal times 0.7. *Refusing*: a fifth of the candidates has no answer. *Garbage*: a
twentieth has a huge number of either sign.

Net is the gain in UDCG over the same calibration without an assessor, less 0.002 for every
candidate asked about. *Truth* is the net gain where answers are applied, and *forecast* what
calibration measured there.
"""

import argparse
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks._collection import default_cache
from benchmarks._served import (
    Answers,
    Bars,
    Recorded,
    asking_bars,
    asking_figures,
    asking_table,
    few_labels,
    mean_figures,
    print_bars,
    write_report,
)
from benchmarks.verdict import DATA, recorded
from calibration.settings import Settings
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder

SUMMARY = "Ask a simulated assessor where it pays."
COLLECTIONS = ("demo", "musique", "anthropic_docs", "medquad_nih")
LABELS = 100

TELLING, MISLED = "d′ 1.6", "demo"
MOST_MISLEADING = -0.35
LEAST_NET_OF_A_SET = -0.02
NO_WORTH, MOST_ASKING = "d′ 0", 0.02


@dataclass(frozen=True)
class Assessor:
    """A simulated assessor; see the text of this module."""

    d: float
    shift: float = 0.0
    refusing: float = 0.0
    garbage: float = 0.0

    def answers(self, collection: Recorded, seed: int) -> Answers:
        """Its answers about all candidates; equal seeds give equal ones."""
        rng = np.random.default_rng(seed)
        relevant = collection.pools.relevant
        found = self.d * relevant + rng.standard_normal(relevant.shape)
        found += self.shift * rng.standard_normal((len(relevant), 1))
        wild = rng.random(relevant.shape) < self.garbage
        found = np.where(wild, 1e3 * rng.standard_cauchy(relevant.shape), found)
        found[rng.random(relevant.shape) < self.refusing] = np.nan
        rows = zip(collection.texts, collection.pools.passage_ids, found.tolist(), strict=True)
        by_query = {text: dict(zip(ids, values, strict=False)) for text, ids, values in rows}
        return Answers(f"simulated, d′ {self.d:g}", by_query)


ASSESSORS: Mapping[str, Assessor] = {
    "d′ 0": Assessor(0.0),
    "d′ 1": Assessor(1.0),
    "d′ 1.6": Assessor(1.6),
    "d′ 1, shifted": Assessor(1.0, shift=0.7),
    "d′ 1, refusing": Assessor(1.0, refusing=0.2),
    "d′ 1, garbage": Assessor(1.0, garbage=0.05),
    "d′ −1": Assessor(-1.0),
}
DEFAULT_ASSESSORS = ("d′ 0", "d′ 1", "d′ 1.6")

Figures = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""``mean_figures`` by assessor and collection."""


def measured(
    collection: Recorded, assessor: Assessor, n: int, splits: int
) -> dict[str, float | None]:
    """Means over the splits of one collection."""
    return mean_figures(
        [
            asking_figures(
                collection,
                few_labels(collection.dataset, n, seed),
                Settings(seed=seed),
                assessor.answers(collection, seed),
            )
            for seed in range(splits)
        ]
    )


def bars(found: Figures) -> Bars:
    """What must hold, with the figure in words and whether it does; of what was measured."""
    kept: Bars = {}
    if MISLED in found.get(TELLING, {}):
        own = found[TELLING][MISLED]
        kept[f"{TELLING}, {MISLED}: misleading ≤ {MOST_MISLEADING:+.0%}, recall as today's"] = (
            f"{own['misleading']:+.0%}, recall {own['recall']:+.3f}",
            own["misleading"] <= MOST_MISLEADING and own["recall"] >= 0.0,
        )
    every = {f"{name}, {one}": own for name, by in found.items() for one, own in by.items()}
    worst = min(every, key=lambda name: every[name]["net"])
    kept[f"net gain in UDCG: no set below {LEAST_NET_OF_A_SET:g}"] = (
        f"{every[worst]['net']:+.3f}, {worst}",
        every[worst]["net"] >= LEAST_NET_OF_A_SET,
    )
    if NO_WORTH in found:
        share = float(np.mean([own["asking"] for own in found[NO_WORTH].values()]))
        kept[f"{NO_WORTH}: asks in at most {MOST_ASKING:.0%} of runs"] = (
            f"{share:.1%}",
            share <= MOST_ASKING,
        )
    return kept | asking_bars(list(every.values()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulation; with ``--check`` the exit status is 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.assessor", description=SUMMARY)
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR", help="of BEIR folders")
    parser.add_argument("--collections", nargs="+", default=COLLECTIONS, metavar="NAME")
    parser.add_argument("--assessors", nargs="+", default=DEFAULT_ASSESSORS, choices=ASSESSORS)
    parser.add_argument("--labels", type=int, default=LABELS, metavar="N")
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--cache", type=Path, default=default_cache(), metavar="DIR")
    parser.add_argument("--check", action="store_true", help="print what must hold")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    logging.getLogger("ctxguard").setLevel(logging.CRITICAL)  # assessors fail on purpose here
    console = Console(width=80)
    embedder, start = SentenceTransformerEmbedder(), time.perf_counter()
    found: dict[str, dict[str, dict[str, Any]]] = {}
    labelled: dict[str, int] = {}
    for one in options.collections:
        collection = recorded(one, options.data, options.cache, embedder)
        n = labelled[one] = min(options.labels, collection.most_labels)
        for name in options.assessors:
            own = measured(collection, ASSESSORS[name], n, options.splits)
            found.setdefault(name, {})[one] = own
        taken = time.perf_counter() - start
        console.print(f"[dim]{one}, {n} labels: {taken:.0f} s so far[/dim]")
    console.print(asking_table("asked, against today's first 5", found))
    kept = bars(found)
    if options.check:
        print_bars(kept, console)
    report = {"splits": options.splits, "labels": labelled, "assessors": found}
    write_report(options.json, kept, report)
    return int(options.check and not all(holds for _, holds in kept.values()))


if __name__ == "__main__":
    sys.exit(main())
