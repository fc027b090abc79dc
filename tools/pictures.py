"""Make the pictures of the documentation: the demonstration in a terminal, a report, the console.

    python -m tools.pictures

Needs Chromium (Debian's package ``chromium``) for the pages. Takes as long as the demonstration.
Records what the pictures were made from (``picture_sources.py``).
"""

import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from rich.console import Console
from rich.text import Text
from starlette.applications import Starlette
from starlette.routing import Mount

from calibration.replay import silent
from calibration.report import report, write_html
from ctxguard._support.cache_folder import cache_folder
from ctxguard.cli.demonstration.corpus import passages
from ctxguard.cli.demonstration.labelled_questions import questions
from ctxguard.cli.demonstration.loop import calibrate_demo, open_index
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Hit
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.monitor.estimation.sampling_design import to_label
from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.sampling.sampler import Sampler
from ctxguard.monitor.service import Monitor
from ctxguard.monitor.store import SampleStore
from ctxguard.monitor.store.writer import SampleWriter
from ctxguard.server.console.routes import console_routes
from tools.picture_sources import PICTURES, record

COLUMNS = 100


def terminal() -> None:
    """What ``ctxguard demo`` prints, as SVG."""
    done = subprocess.run(
        [sys.executable, "-m", "ctxguard", "demo"],
        env={**os.environ, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, color_system="standard")
        console.print(Text.from_ansi(done.stdout.replace(str(Path.home()), "~")))
    console.save_svg(str(PICTURES / "terminal.svg"), title="ctxguard demo")


def first_screen() -> None:
    """The top of the report that calibrating the demonstration gives, as PNG."""
    retriever, _ = open_index(cache_folder() / "demo-index", silent)
    calibration = calibrate_demo(retriever, questions(), silent)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        write_html(report(calibration, retriever.passage), page)
        _photograph(page.as_uri(), "report.png", height=1000)


def label_page() -> None:
    """The console's page Label on some of the demonstration's questions, as PNG."""
    labelled = questions()
    words = {passage: set(_words(f"{passage.title} {passage.text}")) for passage in passages()}

    def search(query: str, *, depth: int) -> list[Hit]:
        wanted = set(_words(query))
        shared = {one: len(wanted & own) / len(wanted) for one, own in words.items()}
        best = sorted(shared, key=lambda one: -shared[one])[:depth]
        return [Hit(one.passage_id, shared[one], one.text, title=one.title) for one in best]

    sampler = Sampler(1.0, seed="pictures", capacity=40)
    policy = RatioPolicy(k=5, min_ratio=0.0)
    guard = ContextGuard(search, policy=policy, score_kind="ratio", sampler=sampler)
    with SampleStore.open("sqlite://") as store:
        writer = SampleWriter(sampler, store)
        for query in labelled.queries[:40]:
            guard.retrieve(query.text, request_id=query.query_id)
        writer.flush()
        grades = {query.text: labelled.qrels.get(query.query_id, {}) for query in labelled.queries}
        monitor = Monitor(store, LabelJudge(grades))
        monitor.step()
        writer.stop()
        to_label(store, monitor.series, 60)
        with _served(store) as address:
            _photograph(f"http://{address}/console/label?annotator=Ann", "console.png", height=760)


@contextmanager
def _served(store: SampleStore) -> Iterator[str]:
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


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]{3,}", text.lower())


def _photograph(address: str, name: str, *, height: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(  # noqa: S603
            [
                *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *("--disable-background-networking", "--virtual-time-budget=10000"),
                *(f"--window-size=1280,{height}", f"--user-data-dir={folder}/browser"),
                *(f"--screenshot={PICTURES / name}", address),
            ],
            check=True,
            capture_output=True,
        )


if __name__ == "__main__":
    terminal()
    first_screen()
    label_page()
    record()
