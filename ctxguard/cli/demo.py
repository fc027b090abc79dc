"""``ctxguard demo``: the whole loop on this Python's own documentation."""

import platform
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from ctxguard.cli._console import (
    Output,
    Passes,
    interval,
    number,
    one_line,
    print_json,
    table,
)
from ctxguard.cli._inputs import cache_folder
from ctxguard.cli._words import policy_in_words
from ctxguard.types import Passage, Route

if TYPE_CHECKING:
    from calibration.calibrate import Calibration
    from ctxguard.context import Context
    from ctxguard.demo.loop import BeforeAfter, Tradeoff, Watched
    from ctxguard.profile import Evidence, Interval
    from ctxguard.retrieval.protocols import Progress

_COMPARED = ("udcg_strict", "harm", "precision", "recall", "mrr", "kept")
_SCRAPED = (
    "ctxguard_requests_total",
    "ctxguard_dropped_candidates_total",
    'ctxguard_estimate{metric="recall",window="recent"',
    'ctxguard_estimate{metric="mrr",window="recent"',
    'ctxguard_estimate{metric="udcg",window="recent"',
)
_WORTH = {2: "answers", 1: "helps", 0: "irrelevant", -1: "distractor"}
_STYLE = {2: "green", 1: "green", 0: "dim", -1: "red"}


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("demo")(demo)


def demo(
    *,
    index: Annotated[
        Path | None, typer.Option(help="Where the index is kept. (default: the user's cache)")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Keep /metrics open until Ctrl-C.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The whole loop on real text: index, calibrate, guard, watch.

    The text is the documentation of the Python that runs this, read from the interpreter; the
    questions were written and labelled by hand. Nothing is downloaded.
    """
    from ctxguard.demo import loop, passages, questions

    # Counted before the models' libraries are loaded, which replace a function here and there.
    total = sum(1 for _ in passages())
    output = Output(as_json=as_json)
    folder = cache_folder() / "demo-index" if index is None else index
    asked = questions()
    with output.passes() as passes:
        retriever, built = loop.open_index(folder, _encoding(passes, total))
        calibration = loop.calibrate_demo(retriever, asked, passes)
        shown = loop.before_and_after(retriever, calibration)
        watched = loop.watch(
            retriever, calibration, progress=passes("serving traffic", loop.REQUESTS)
        )
    evidence = loop.held_out_evidence(calibration)
    with _metrics_endpoint(watched) as url:
        if as_json:
            print_json(_document(calibration, evidence, shown, watched))
        else:
            how = "built" if built else "opened"
            _show_setup(output, calibration, f"{len(retriever):,} passages, {how} in {folder}")
            _show_evidence(output, evidence)
            _show_tradeoffs(output, loop.tradeoffs(calibration))
            _show_question(output, shown)
            _show_watching(output, watched, _scrape(url))
            _show_next(output, folder)
        if serve:
            output.note(f"metrics are served at {url} until Ctrl-C")
            threading.Event().wait()


def _encoding(passes: Passes, total: int) -> "Progress":
    """A bar that appears with the first passage encoded, where there is anything to encode."""
    advance, done = None, 0

    def told(now: int) -> None:
        nonlocal advance, done
        if advance is None:
            advance = passes("encoding passages", total)
        advance(now - done)
        done = now

    return told


@contextmanager
def _metrics_endpoint(watched: "Watched") -> Iterator[str]:
    """Serve the registry over HTTP on a free port of this machine only."""
    from prometheus_client import start_http_server

    server, thread = start_http_server(0, addr="127.0.0.1", registry=watched.registry)
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _scrape(url: str) -> list[str]:
    """The most telling lines of what Prometheus would read."""
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - our own endpoint
        lines = answer.read().decode().splitlines()
    return [line for line in lines if line.startswith(_SCRAPED) and not line.endswith(" 0.0")]


def _show_setup(output: Output, calibration: "Calibration", corpus: str) -> None:
    output.heading(f"1. The documentation of Python {platform.python_version()} as a corpus")
    dataset = calibration.dataset
    output.facts(
        [
            ("corpus", corpus),
            (
                "questions",
                f"{len(dataset)}, {len(dataset.answerable)} answerable; half choose, half measure",
            ),
        ]
    )
    for note in dataset.notes:
        output.note(note)
    output.heading("2. Calibrated: a policy for every route")
    for route, chosen in calibration.profile.routes.items():
        output.facts([(route.value, policy_in_words(chosen.policy))])
    certificate = calibration.profile.routes[Route.HYBRID].certificate
    if certificate is not None:
        output.facts([("certificate", certificate.statement)])


def _show_evidence(output: Output, evidence: "Mapping[str, Evidence]") -> None:
    n = max(found.queries for found in evidence.values())
    output.heading(f"   What each policy gives on {n} questions that took no part in the choice")
    names = list(evidence)
    shown = table("metric", *[f"{name}>" for name in names])
    shown.columns[0].no_wrap = True
    for metric in _COMPARED:
        cells = [evidence[name].metrics[metric] for name in names]
        shown.add_row(metric, *map(_short, cells))
    output.out.print(shown)


def _short(cell: "Interval") -> str:
    """A mean and its interval in two decimals, so that three fit side by side in 80 columns."""
    if cell.value is None or cell.lower is None or cell.upper is None:
        return number(cell.value)
    return f"{cell.value:.2f} [{cell.lower:.2f},{cell.upper:.2f}]"


def _show_tradeoffs(output: Output, tradeoffs: "list[Tradeoff]") -> None:
    output.heading("   If recall matters more: what a promise (calibrate --alpha) would cost")
    shown = table("recall loss at most>", "recall loss>", "udcg_strict>", "kept>")
    for found in tradeoffs:
        shown.add_row(
            f"{found.most_recall_loss:g}",
            number(found.recall_loss),
            number(found.udcg_strict),
            number(found.kept),
        )
    output.out.print(shown)


def _show_question(output: Output, shown: "BeforeAfter") -> None:
    output.heading("3. Guarded: one held-out question, the median in what the guard changes")
    output.facts([("question", shown.query.text)])
    grid = Table.grid(padding=(0, 4))
    grid.add_row(_column("before: top 5", shown, shown.bare))
    grid.add_row(_column("after: the guard", shown, shown.guarded))
    output.out.print(grid)


def _column(title: str, shown: "BeforeAfter", context: "Context") -> Table:
    made = table(
        "#>", "passage", "label", title=f"{title} (strict UDCG {shown.udcg(context):+.2f})"
    )
    for place, passage in enumerate(context.passages, start=1):
        label = _label(shown, passage)
        made.add_row(str(place), one_line(passage.title), Text(_WORTH[label], style=_STYLE[label]))
    return made


def _label(shown: "BeforeAfter", passage: Passage) -> int:
    return shown.labels.get(passage.passage_id, 0)


def _show_watching(output: Output, watched: "Watched", scraped: list[str]) -> None:
    output.heading(
        f"4. Watched: {watched.requests} requests, {watched.sampled} of them sampled and judged"
    )
    shown = table("metric", "live estimate>", "95% interval>", "truth>", "n>")
    for metric, truth in watched.truth.items():
        estimate = watched.estimates[metric]
        shown.add_row(
            metric.value,
            number(estimate.value),
            interval(estimate),
            number(truth),
            str(estimate.n),
        )
    output.out.print(shown)
    output.heading("   The same on /metrics, as Prometheus reads it")
    for line in scraped:
        output.out.print(Text(line, style="dim"), soft_wrap=True)


def _show_next(output: Output, folder: Path) -> None:
    output.heading("Next")
    output.out.print(f'  ctxguard query --index {folder} "wait for the first of several tasks"')
    output.out.print("  ctxguard index CORPUS --out DIR     with a corpus of your own")
    output.out.print("  ctxguard demo --serve               to look at /metrics")


def _document(
    calibration: "Calibration",
    evidence: "Mapping[str, Evidence]",
    shown: "BeforeAfter",
    watched: "Watched",
) -> dict[str, object]:
    return {
        "profile": calibration.profile.model_dump(mode="json"),
        "held_out": {name: found.model_dump(mode="json") for name, found in evidence.items()},
        "question": {
            "text": shown.query.text,
            "before": shown.bare.to_dict(),
            "after": shown.guarded.to_dict(),
        },
        "watched": {
            "requests": watched.requests,
            "sampled": watched.sampled,
            "estimates": {
                metric.value: {
                    "value": estimate.value,
                    "lower": estimate.lower,
                    "upper": estimate.upper,
                    "n": estimate.n,
                    "truth": watched.truth.get(metric),
                }
                for metric, estimate in watched.estimates.items()
            },
        },
    }
