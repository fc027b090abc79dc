"""``ctxguard demo``: index, calibrate, guard and monitor on this Python's own documentation."""

import platform
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ctxguard._support.cache_folder import cache_folder
from ctxguard._support.settings import SettingsModel, optional, setting
from ctxguard._support.words import figure
from ctxguard.cli._console import Output, bounds, number, one_line, picked
from ctxguard.cli._results import print_differences
from ctxguard.cli._store import IN_WORDS, tokens_in_words
from ctxguard.core.types import Route

if TYPE_CHECKING:
    from calibration.calibrate import Calibration
    from calibration.report.before_after import BeforeAfter
    from ctxguard.cli.demonstration.loop import MonitoredTraffic, ShownQuestion
    from ctxguard.core.types import Passage

_SCRAPED = re.compile(r'ctxguard_estimate\{.*metric="udcg",window="recent"|ctxguard_requests_total')
_METRICS = ("recall", "udcg", "kept", "tokens")
_MARKS = {2: ("✓", "green"), 1: ("✓", "green"), 0: ("", "dim"), -1: ("✗", "red")}
"""Mark and style of a passage by its label: answers, helps, irrelevant, distractor."""


class DemoCommand(SettingsModel):
    index: Path | None = optional(
        "Index folder to open, or to build on the first run.",
        "FOLDER",
        default="ctxguard/demo-index in the user's cache folder",
    )
    serve: bool = setting("Serve the metrics over HTTP until Ctrl-C.", value=False)

    def __call__(self, output: Output) -> None:
        """The text is the documentation of the Python that runs this command; the questions were
        written and labelled by hand. Nothing is downloaded.
        """
        from prometheus_client import start_http_server

        from calibration.report import summarise
        from ctxguard.cli.demonstration import loop, questions

        folder = self.index or cache_folder() / "demo-index"
        labelled = questions()
        with output.passes() as passes:
            retriever, built = loop.open_index(folder, passes)
            calibration = loop.calibrate_demo(retriever, labelled, passes)
            counted, shown = loop.before_and_after(retriever, calibration)
            traffic = loop.monitor_traffic(retriever, calibration, passes)

        def show() -> None:
            how = "built" if built else "opened"
            _show_setup(output, calibration, f"{len(retriever):,} passages ({how})")
            _show_questions(output, counted, shown)
            _show_traffic(output, traffic)
            _show_next(output, folder)

        document = {
            "summary": summarise(calibration.outcomes[Route.HYBRID]),
            "answers": counted.answers,
            "misleading": counted.misleading,
            "irrelevant": counted.irrelevant,
            **picked(traffic, "requests", "sampled", "estimates", "truth"),
        }
        output.result(document, show)
        if self.serve:
            server, _ = start_http_server(0, addr="127.0.0.1", registry=traffic.registry)
            url = f"http://127.0.0.1:{server.server_port}/metrics"
            output.note(f"metrics are served at {url} until Ctrl-C")
            threading.Event().wait()


def _show_setup(output: Output, calibration: "Calibration", corpus: str) -> None:
    from calibration.report import summarise

    dataset, verdict = calibration.dataset, calibration.profile.verdict
    questions = f"{len(dataset)} labelled questions, {len(dataset.answerable)} answerable"
    k = calibration.settings.serving_k
    summary = summarise(calibration.outcomes[Route.HYBRID])
    output.facts(
        ("verdict", "" if verdict is None else verdict.short),
        ("in short", summary.in_short),
        ("corpus", f"the documentation of Python {platform.python_version()}: {corpus}"),
        ("", questions),
        ("today", f"the first {k} of BM25 and of vectors, fused by rank"),
    )
    print_differences(Route.HYBRID, summary, output, _METRICS)


def _show_questions(
    output: Output, counted: "BeforeAfter", shown: "Mapping[str, ShownQuestion]"
) -> None:
    answers, misleading, irrelevant = counted.answers, counted.misleading, counted.irrelevant
    output.heading("Before and after, over all questions (✓ relevant, ✗ misleads)")
    output.facts(
        ("the answer", "{kept} keep it, {gained} gain it, {lost} lose it".format(**answers)),
        ("misleading", "{:,} before, {:,} after".format(*misleading)),
        ("not relevant", "{:,} before, {:,} after".format(*irrelevant)),
    )
    if misleading[1] >= misleading[0]:
        output.note(
            "a scorer sees likeness, so what misleads stays; a model that reads can tell: "
            "calibrate with --ask (how far near misses fool real models is not known)"
        )
    for name, question in shown.items():
        output.out.print()
        output.out.print(
            Text(f"{name}: {one_line(question.query.text)}"), no_wrap=True, overflow="ellipsis"
        )
        rows = Table.grid(padding=(0, 2))
        for when, passages in (("today", question.before), ("guard", question.after)):
            rows.add_row(f"  {when}", str(len(passages)), _passages(question, passages))
        output.out.print(rows)


def _passages(question: "ShownQuestion", passages: "Sequence[Passage]") -> Text:
    """Print the marked passages of a context by name, and how many others there are."""
    names = []
    for passage in passages:
        mark, style = _MARKS[question.labels.get(passage.passage_id, 0)]
        if mark:
            # ``http.client.HTTPConnection.request (method)`` is too long for a list.
            name = one_line(passage.title).partition(" (")[0]
            names.append(Text(f"{mark} {'.'.join(name.split('.')[-2:])}", style=style))
    if len(names) < len(passages):
        others = len(passages) - len(names)
        names.append(Text(f"{others} other{'s' * (others > 1)}", style="dim"))
    return Text(", ").join(names)


def _show_traffic(output: Output, traffic: "MonitoredTraffic") -> None:
    from prometheus_client import generate_latest

    output.heading(
        f"Monitoring: {traffic.requests} requests, {traffic.sampled} of them sampled and judged"
    )
    output.facts(*tokens_in_words(traffic.counts))
    rows = []
    for metric, truth in traffic.truth.items():
        estimate = traffic.estimates[metric]
        figures = (number(estimate.value), bounds(estimate), number(truth), str(estimate.n))
        rows.append((IN_WORDS.get(metric.value, metric.value), *figures))
    output.table(("metric", "estimate>", "95% interval>", "true value>", "n>"), rows)
    for line in generate_latest(traffic.registry).decode().splitlines():
        if _SCRAPED.match(line) and not line.endswith(" 0.0"):
            series, _, value = line.rpartition(" ")
            written = Text(f"{series} {figure(float(value))}", style="dim")
            output.out.print(written, soft_wrap=True)


def _show_next(output: Output, folder: Path) -> None:
    output.heading("Next")
    for line in (
        f'ctxguard query --index {folder} "wait for the first of several tasks"',
        "ctxguard index CORPUS --out FOLDER    for a corpus of your own",
        "ctxguard demo --serve                 to look at /metrics",
    ):
        output.out.print(f"  {line}", soft_wrap=True)
