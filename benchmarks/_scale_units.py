"""What one passage, request, sample, verdict and process cost, measured on this machine.

Figures that another command publishes are read from its report and not measured again.
"""

import json
import random
import sqlite3
import statistics
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

from benchmarks._live_runs import SQLITE
from benchmarks._live_service import Pick, Service, Setting, label_some
from benchmarks._live_traffic import (
    DAY_SECONDS,
    JudgeErrors,
    Shape,
    SimulatedJudge,
    draw_traffic,
)
from benchmarks._scale_model import Index, Queue, Units
from benchmarks._scale_prometheus import series_bytes
from benchmarks._search_data import DEPTH, prepare
from benchmarks.figures import RESULTS, value_at
from benchmarks.index_update import KnownVectors
from benchmarks.sampling import Stub, ranking
from benchmarks.store import (
    BATCH,
    entries,
    fill_judged,
    finished,
    payloads,
    postgresql,
    scan,
)
from ctxguard.cli.demonstration.corpus import passages as demo_passages
from ctxguard.core.fusion import Fusion
from ctxguard.core.types import Hit, Passage, ScoreKind
from ctxguard.guard import ContextGuard
from ctxguard.monitor.estimation.terms import table_of
from ctxguard.monitor.judges.prompt import messages
from ctxguard.monitor.sampling.sampler import Sampler
from ctxguard.monitor.store import Limits, SampleStore, WorkerCounts
from ctxguard.request.telemetry import Telemetry
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index.hybrid_index import SignalLevel
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder
from ctxguard.retrieval.models.files import bundled_model

FEW, MORE = 150, 450
"""Passages of two indexes: what grows with their number is their difference."""
SEARCHED = (21_000, 42_000)
"""Passages of two indexes that are searched."""
VECTORS = 5_000
BATCHES = 20
SCANNED = 20_000
QUERIES = 40
_LEVELS: tuple[SignalLevel, ...] = ("none", "full")
_VERDICTS = 12
"""Of a sample that ``benchmarks.store`` finishes."""
_TYPES = {"vector": "vector_ip_ops", "halfvec": "halfvec_ip_ops", "bit": "bit_hamming_ops"}


def published(report: str, path: str) -> float:
    """A figure of another command's report."""
    found = json.loads((RESULTS / f"{report}.json").read_text(encoding="utf-8"))
    return float(value_at(found, path))


def measure() -> tuple[Units, dict[str, Any]]:
    """Every unit cost, and what they rest on besides."""
    corpus = list(demo_passages())
    passages = corpus[:: len(corpus) // MORE][:MORE]
    embedder = SentenceTransformerEmbedder()
    index = index_costs(passages, embedder)
    prompt, reply = tokens(passages[:100])
    processes = exported()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # A server that runs as another user must reach its folder.
        folder.chmod(0o755)
        stores = {"sqlite": sqlite_costs(folder)}
        with postgresql(folder) as url:
            stores["postgresql"] = postgresql_costs(url)
            pgvector = pgvector_bytes(url, index.dimension)
    units = Units(
        index=index,
        guard_ms=published("overhead", "sizes/100/guard, ratio, hits/p50") / 1e3,
        utility_ms=published("overhead", "sizes/100/guard, expected_utility/p50") / 1e3,
        service_ms=published("serve", "cases/rerank/service_cpu") / 1e3,
        request_bytes=request_bytes(),
        stores=stores,
        pgvector_bytes=pgvector,
        prompt_tokens=prompt,
        reply_tokens=reply,
        losses_per_sample=processes.losses,
        guard_series=processes.guard_series,
        monitor_series=processes.monitor_series,
        series_bytes=series_bytes(),
    )
    return units, {
        "passages": len(passages),
        "simulated_verdicts": processes.verdicts,
        "runtime": embedder.runtime,
    }


def index_costs(passages: Sequence[Passage], embedder: SentenceTransformerEmbedder) -> Index:
    """Of the embedded index; processor time, so that other work on the machine counts little."""
    texts = [passage.text for passage in passages]
    build_ms = {}
    HybridRetriever.build(passages[:2], embedder=embedder)  # the token table, and compiled loops
    for level in _LEVELS:
        start = time.process_time()
        retriever = HybridRetriever.build(passages, embedder=embedder, signals=level)
        build_ms[level] = 1e3 * (time.process_time() - start) / len(passages)
    start = time.process_time()
    embedder.encode_passages(texts)
    encode_ms = 1e3 * (time.process_time() - start) / len(texts)
    few = HybridRetriever.build(passages[:FEW], embedder=embedder, signals="full")
    more, less = saved_bytes(retriever), saved_bytes(few)
    grown = {name: (more[name] - less[name]) / (len(passages) - FEW) for name in more}
    retriever.warm_up()
    search_ms, per_million = search_costs()
    queries = [" ".join(text.split()[:8]) for text in texts[:QUERIES]]
    return Index(
        words=statistics.mean(len(text.split()) for text in texts),
        dimension=embedder.dimension,
        vectors=grown["vectors"],
        postings=grown["postings"],
        passages=grown["passages"],
        terms=grown["lexical"],
        pieces=grown["pieces"],
        encode_ms=encode_ms,
        build_ms={str(level): taken for level, taken in build_ms.items()},
        query_ms=_median_ms(lambda n: embedder.encode_query(queries[n]), len(queries)),
        search_ms=search_ms,
        searched=SEARCHED[-1],
        search_ms_per_million=per_million,
        signals_ms=_signals_ms(retriever, queries),
    )


def _signals_ms(retriever: HybridRetriever, queries: Sequence[str]) -> float:
    """Milliseconds that the signals of a query's candidates take, its encoding apart."""
    given = [retriever.encode_query(query) for query in queries]

    def median(view: HybridRetriever) -> float:
        return _median_ms(lambda n: view.retrieve(queries[n], query_vector=given[n]), len(queries))

    return max(0.0, median(retriever) - median(retriever.with_fusion(Fusion())))


def search_costs() -> tuple[float, float]:
    """Milliseconds of a search of both legs, and what a million passages more would add.

    From two indexes without signals, of generated passages with vectors at hand. Both are above
    the size from which codes are compared before vectors.
    """
    found = []
    with tempfile.TemporaryDirectory() as name:
        for n in SEARCHED:
            corpus = prepare(n, Path(name), n_queries=QUERIES)
            texts = corpus.texts()
            retriever = HybridRetriever.build(
                [Passage(f"p{row}", text) for row, text in enumerate(texts)],
                embedder=KnownVectors(texts, corpus.vectors),
                signals="none",
            )

            def search(turn: int) -> object:
                at = turn % QUERIES
                return retriever.retrieve(  # noqa: B023 - called before the next one is built
                    corpus.queries[at],  # noqa: B023
                    depth=DEPTH,
                    query_vector=corpus.query_vectors[at],  # noqa: B023
                )

            search(0)
            found.append(_median_ms(search, 10 * QUERIES))
    grown = (found[-1] - found[0]) / (SEARCHED[-1] - SEARCHED[0])
    return found[-1], max(0.0, 1e6 * grown)


def saved_bytes(retriever: HybridRetriever) -> Counter[str]:
    """Bytes of a saved index by what its files begin with; without the token table."""
    found = Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        retriever.save(Path(name) / "index")
        for file in Path(name).rglob("generation-*/*"):
            found[file.name.partition(".")[0]] += file.stat().st_size
    return found


def _median_ms(call: Callable[[int], object], n: int) -> float:
    taken = []
    for turn in range(n):
        start = time.process_time()
        call(turn)
        taken.append(1e3 * (time.process_time() - start))
    return statistics.median(taken)


def request_bytes(requests: int = 50) -> float:
    """Memory that an answered request holds, with candidates whose texts are its own."""

    def search(query: str, *, depth: int) -> list[Hit]:
        return [
            Hit(f"{query} {rank}", 1.0 - rank / 200, text=f"{query} {rank} " * 50)
            for rank in range(depth)
        ]

    found = ContextGuard(
        search, score_kind=ScoreKind.COSINE, telemetry=Telemetry(CollectorRegistry())
    )
    found.retrieve("first")
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        kept = [found.retrieve(f"request {n}") for n in range(requests)]
        return (tracemalloc.get_traced_memory()[0] - before) / len(kept)
    finally:
        tracemalloc.stop()


def sqlite_costs(folder: Path) -> Queue:
    """Of a store on a file."""
    path = folder / "samples.db"

    def size() -> int:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return path.stat().st_size

    return queue_costs(f"sqlite:///{path}", size)


def postgresql_costs(url: str) -> Queue:
    """Of a store on a server; its tables with their indexes."""
    import psycopg

    def size() -> int:
        with psycopg.connect(url, autocommit=True) as connection:
            found = connection.execute(
                "SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c "
                "WHERE c.relkind = 'r' AND c.relname LIKE 'ctxguard%'"
            ).fetchone()
        return int(found[0]) if found else 0

    return queue_costs(url, size)


def queue_costs(url: str, size: Callable[[], int]) -> Queue:
    """Append, claim and finish batches, and read judged requests, from one client."""
    limits = Limits(max_bytes=None)
    with SampleStore.open(url, limits=limits) as store:
        bodies, chance = payloads(200, 0), random.Random(0)
        batches = [entries(bodies, n * BATCH, chance) for n in range(BATCHES)]
        empty = size()
        append_ms = _median_of(lambda n: store.append("writer", batches[n], WorkerCounts(BATCH)))
        appended = size()
        claimed: list[Any] = []
        claim_ms = _median_of(
            lambda _: claimed.append(store.claim("units", BATCH, lease_seconds=600.0))
        )
        done = [finished(samples, np.random.default_rng(0)) for samples in claimed]
        finish_ms = _median_of(lambda n: store.finish("units", done[n]))
        judged = size()
        fill_judged(store, SCANNED)
        scanned = scan(store, SCANNED, repeats=3)
    samples = BATCH * BATCHES
    return Queue(
        sample_bytes=(appended - empty) / samples,
        verdict_bytes=(judged - appended) / samples / _VERDICTS,
        append_ms=append_ms,
        claim_ms=claim_ms,
        finish_ms=finish_ms,
        scan_us=1e6 * scanned.seconds / scanned.rows,
    )


def _median_of(batch: Callable[[int], object]) -> float:
    """Milliseconds of one sample of a batch, by the clock: a database works elsewhere."""
    taken = []
    for n in range(BATCHES):
        start = time.monotonic()
        batch(n)
        taken.append(1e3 * (time.monotonic() - start) / BATCH)
    return statistics.median(taken)


def pgvector_bytes(url: str, dimension: int) -> dict[str, float]:
    """Bytes of a passage's HNSW index, m = 16, by type of vector."""
    import psycopg

    rows = np.random.default_rng(0).standard_normal((VECTORS, dimension)).astype(np.float32)
    found = {}
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        connection.execute(f"CREATE TABLE passages (vector vector({dimension}))")
        with connection.cursor().copy("COPY passages FROM STDIN") as copy:
            for row in rows.tolist():
                copy.write_row((json.dumps(row),))
        for kind, order in _TYPES.items():
            value = "binary_quantize(vector)" if kind == "bit" else "vector"
            connection.execute(
                f"CREATE INDEX by_{kind} ON passages "
                f"USING hnsw ((({value})::{kind}({dimension})) {order})"
            )
            size = connection.execute(f"SELECT pg_relation_size('by_{kind}')").fetchone()
            found[kind] = int(size[0]) / VECTORS if size else 0.0
    return found


def tokens(passages: Sequence[Passage]) -> tuple[float, float]:
    """Word pieces of a judge's prompt and reply, by the bundled model's tokenizer."""
    from tokenizers import Tokenizer

    folder = bundled_model()
    assert folder is not None
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    prompts = [
        sum(count(part["content"]) for part in messages("how do I parse JSON?", passage.text))
        for passage in passages
    ]
    return statistics.median(prompts), float(count('{"grade": 3}'))


class Exported(NamedTuple):
    """What processes export, and what a simulated day of judging gives.

    Attributes:
        guard_series: Of a serving process.
        monitor_series: Of a monitor with labels.
        losses: Recall losses of a judged request, on average.
        verdicts: Of a judged request of 20 candidates.
    """

    guard_series: int
    monitor_series: int
    losses: float
    verdicts: float


def exported() -> Exported:
    """Count series, losses and verdicts where requests were served and judged."""
    registry = CollectorRegistry()
    ContextGuard(
        Stub(ranking()),
        score_kind=ScoreKind.RATIO,
        sampler=Sampler(1.0),
        telemetry=Telemetry(registry),
    ).retrieve("query")
    rng = np.random.default_rng(0)
    traffic = draw_traffic(Shape(n=8_000, seconds=DAY_SECONDS), rng)
    judge = SimulatedJudge(traffic, JudgeErrors(0.9, 0.95), rng)
    with (
        SQLITE.stores() as urls,
        closing(Service(next(urls), traffic, judge, Setting(), "units")) as service,
    ):
        service.serve(DAY_SECONDS)
        service.write()
        service.judge_waiting()
        label_some(service, Pick(1, 100))
        service.maintain()
        monitor_series = len(service.scrape())
        table = table_of(service.store.judged(service.monitors[0].series).summaries)
        with closing(sqlite3.connect(service.file)) as connection:
            rows = connection.execute("SELECT verdicts FROM ctxguard_verdicts").fetchall()
    return Exported(
        guard_series=_series(registry),
        monitor_series=monitor_series,
        losses=float(np.isfinite(table["recall_loss"]).mean()),
        verdicts=statistics.mean(len(json.loads(row[0])) for row in rows),
    )


def _series(registry: CollectorRegistry) -> int:
    lines = generate_latest(registry).decode().splitlines()
    return sum(not line.startswith("#") for line in lines)


def from_dict(found: Mapping[str, Any]) -> Units:
    """Units as a report holds them."""
    stores = {name: Queue(**queue) for name, queue in found["stores"].items()}
    return Units(**{**found, "index": Index(**found["index"]), "stores": stores})
