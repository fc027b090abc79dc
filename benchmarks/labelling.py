"""Count the passages that a person grades until labelled requests are usable.

    python -m benchmarks.labelling --data DIR… --json labelling.json --check

Requests ask queries of a labelled collection, drawn with replacement. BM25 finds 50 passages, of
which the first 5 are served; all requests are sampled, stored and judged by a judge of sensitivity
0.85 and specificity 0.90. Then 50 are picked, and a simulated person grades the rows of their file
by the labels, as the guide says: from top to bottom, and no further where that is not needed. A
request is usable for a metric where the estimates use it.

Depths:
    served    what precision, MRR and UDCG need
    pool      what recall needs besides (``ctxguard label export --recall``)
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from benchmarks._collection import all_splits
from calibration.data.dataset import Dataset
from calibration.data.readers import read_corpus
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import DEFAULT_K, Hit, Passage
from ctxguard.guard import ContextGuard
from ctxguard.monitor.estimation.plan import usable_for
from ctxguard.monitor.estimation.terms import Metric
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.labels.files import IF_NONE_ABOVE, RowToLabel, in_file_order
from ctxguard.monitor.labels.samples import confirmed_share, graded_samples
from ctxguard.monitor.redaction import Text
from ctxguard.monitor.sampling.privacy import Privacy
from ctxguard.monitor.sampling.sampler import Sampler
from ctxguard.monitor.sampling.writer import SampleWriter
from ctxguard.monitor.service import Monitor
from ctxguard.monitor.store import LabelDepth, LabelRow, SampleStore
from ctxguard.request.telemetry import Telemetry
from ctxguard.retrieval.index.lexical import Bm25sIndex

SUMMARY = "Count the passages that a person grades until labelled requests are usable."
SENSITIVITY, SPECIFICITY = 0.85, 0.90
DEPTH = 50
REQUESTS, PICKED = 200, 50
MOST_PASSAGES = 500
"""The bar, for all three metrics of ``LabelDepth.SERVED``."""

COUNTED = (Metric.PRECISION, Metric.UDCG, Metric.MRR, Metric.RECALL)

Pools = Mapping[str, Sequence[Hit]]


@dataclass(frozen=True)
class Outcome:
    """What one depth costs over one collection.

    Attributes:
        collection: The folder's name.
        depth: How much of each request is graded.
        passages: Passages graded, on average over the repeats.
        most_passages: In the worst repeat.
        rows: Rows of the file, on average.
        expected: What the export says beforehand, on average.
        usable: Requests usable for each metric, on average.
        least_usable: The same in the worst repeat.
    """

    collection: str
    depth: str
    passages: float
    most_passages: int
    rows: float
    expected: float
    usable: Mapping[str, float]
    least_usable: Mapping[str, int]


@dataclass(frozen=True)
class Graded:
    """One file, graded."""

    passages: int
    rows: int
    expected: float
    usable: Mapping[Metric, int]


class ErringJudge:
    """Sees relevance with known error rates, the same for the same passage of a query."""

    name, version, max_grade, reads_text = "erring", "1", 1, False

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self._relevant = {
            query.text: relevant(dataset, query.query_id) for query in dataset.queries
        }
        self._seed = seed

    def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment]:
        return [self._verdict(query, passage.passage_id) for passage in passages]

    def _verdict(self, query: str, name: str) -> Judgment:
        luck = random.Random(f"{self._seed} {query} {name}").random()
        rate = SENSITIVITY if name in self._relevant[query] else 1.0 - SPECIFICITY
        return Judgment(name, int(luck < rate))


def relevant(dataset: Dataset, query_id: str) -> set[str]:
    """The passages that answer a query."""
    return {name for name, grade in dataset.qrels.get(query_id, {}).items() if grade > 0}


def bm25_pools(folder: Path, dataset: Dataset) -> Pools:
    """The first candidates of each query, by its text."""
    passages = list(read_corpus(folder))
    index = Bm25sIndex.build([f"{one.title} {one.text}" for one in passages])
    pools = {}
    for query in dataset.queries:
        hits = index.search(query.text, DEPTH)
        found = zip(hits.rows.tolist(), hits.scores.tolist(), strict=True)
        pools[query.text] = [Hit(passages[row].passage_id, score, text="") for row, score in found]
    return pools


def judged_store(dataset: Dataset, pools: Pools, seed: int) -> tuple[SampleStore, str]:
    """A store of judged requests, and the series of their judgments."""
    store = SampleStore.open("sqlite://")
    sampler = Sampler(1.0, seed=str(seed))
    writer = SampleWriter(sampler, store, privacy=Privacy(redactor=None, passages=Text.OMITTED))
    guard = ContextGuard(
        lambda query, depth: pools[query][:depth],
        score_kind="ratio",
        policy=RatioPolicy(k=DEFAULT_K),
        sampler=sampler,
        depth=DEPTH,
        telemetry=Telemetry(CollectorRegistry()),
    )
    asked = random.Random(seed).choices([query.text for query in dataset.queries], k=REQUESTS)
    for number, query in enumerate(asked):
        guard.retrieve(query, request_id=f"{seed}-{number}")
    writer.flush()
    monitor = Monitor(store, ErringJudge(dataset, seed))
    while monitor.step():
        pass
    return store, monitor.series


def graded(store: SampleStore, series: str, dataset: Dataset, depth: LabelDepth) -> Graded:
    """Have a person grade one file, and see what the grades suffice for."""
    ids = store.pick_for_labels(series, PICKED, depth=depth)
    samples = list(graded_samples(store, series, ids).values())
    samples.sort(key=lambda sample: in_file_order(sample.record.request_id))
    truth = {query.text: relevant(dataset, query.query_id) for query in dataset.queries}
    files = [sample.rows(depth) for sample in samples]
    labels = [label for rows in files for label in by_the_guide(rows, truth)]
    store.add_labels(labels)
    usable = Counter(
        metric
        for sample in graded_samples(store, series, ids).values()
        for metric in usable_for(sample)
    )
    confirmed = confirmed_share(store, series, [])
    expected = sum(sample.expected_passages(depth, confirmed) for sample in samples)
    return Graded(len(labels), sum(map(len, files)), expected, usable)


def by_the_guide(rows: Sequence[RowToLabel], truth: Mapping[str, set[str]]) -> Iterator[LabelRow]:
    """The labels that a person gives who follows the guide, of the rows of one request."""
    found = False
    for row in rows:
        if found and row.when == IF_NONE_ABOVE:
            return
        grade = int(row.passage_id in truth[row.query])
        found = found or grade > 0
        yield LabelRow(row.request_id, row.passage_id, grade, None, "person", 0.0)


def outcomes(folder: Path, repeats: int) -> list[Outcome]:
    """Both depths over one collection."""
    dataset = all_splits(folder)
    pools = bm25_pools(folder, dataset)
    found: dict[LabelDepth, list[Graded]] = {depth: [] for depth in LabelDepth}
    for seed in range(repeats):
        for depth in LabelDepth:
            store, series = judged_store(dataset, pools, seed)
            found[depth].append(graded(store, series, dataset, depth))
            store.close()
    return [
        Outcome(
            folder.resolve().name,
            depth.value,
            mean(one.passages for one in files),
            max(one.passages for one in files),
            mean(one.rows for one in files),
            mean(one.expected for one in files),
            {each.value: mean(one.usable[each] for one in files) for each in COUNTED},
            {each.value: min(one.usable[each] for one in files) for each in COUNTED},
        )
        for depth, files in found.items()
    ]


def is_met(outcome: Outcome) -> bool:
    """Whether all of the requests were usable for few enough passages, in every repeat."""
    if outcome.depth == LabelDepth.POOL.value:
        return outcome.least_usable[Metric.RECALL.value] == PICKED
    wanted = (Metric.PRECISION, Metric.UDCG, Metric.MRR)
    usable = all(outcome.least_usable[metric.value] == PICKED for metric in wanted)
    return usable and outcome.passages <= MOST_PASSAGES


def table(found: Sequence[Outcome]) -> Table:
    """One row for each collection and depth."""
    names = ("passages", "worst", "rows", "said before", *(each.value for each in COUNTED))
    result = Table(title=f"Passages that a person grades for {PICKED} requests")
    result.add_column("collection")
    result.add_column("depth")
    for name in names:
        result.add_column(name, justify="right")
    for one in found:
        figures = (one.passages, one.most_passages, one.rows, one.expected, *one.usable.values())
        result.add_row(one.collection, one.depth, *(f"{figure:.0f}" for figure in figures))
    return result


def _over_collections(
    found: Sequence[Outcome], best: Callable[[Iterable[float]], float]
) -> dict[str, float]:
    return {
        depth.value: best(one.passages for one in found if one.depth == depth.value)
        for depth in LabelDepth
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; with --check the exit status is 1 where a collection misses the bar."""
    parser = argparse.ArgumentParser(prog="benchmarks.labelling", description=SUMMARY)
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="DIR")
    parser.add_argument("--repeats", type=int, default=20, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    parser.add_argument("--check", action="store_true", help="fail where the bar is missed")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    found = [one for folder in options.data for one in outcomes(folder, options.repeats)]
    Console(width=120).print(table(found))
    if options.json is not None:
        report = {
            "picked": PICKED,
            "repeats": options.repeats,
            "seconds": round(time.perf_counter() - start, 1),
            "least": _over_collections(found, min),
            "most": _over_collections(found, max),
            "collections": {
                name: {one.depth: asdict(one) for one in found if one.collection == name}
                for name in dict.fromkeys(one.collection for one in found)
            },
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return int(options.check and not all(map(is_met, found)))


if __name__ == "__main__":
    sys.exit(main())
