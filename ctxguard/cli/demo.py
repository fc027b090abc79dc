"""``ctxguard demo``: index, calibrate, guard and monitor on this Python's own documentation.

Loads the model, and writes the index folder. With --serve it serves metrics on a port.
"""

import platform
import re
import threading
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ctxguard._support.cache_folder import cache_folder
from ctxguard._support.settings import SettingsModel, optional, setting
from ctxguard._support.words import figure
from ctxguard.cli._console import Output
from ctxguard.cli._results import differences_shown
from ctxguard.cli._store import IN_WORDS, tokens_in_words
from ctxguard.cli._tables import TextTable, bounds, facts, heading, number, remark
from ctxguard.core.render import one_line
from ctxguard.core.types import Route

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from calibration.calibrate import Calibration
    from calibration.pools import LabelledPools
    from calibration.report.before_after import BeforeAfter
    from ctxguard.measure.metrics import Metric
    from ctxguard.measure.rows import IntArray
    from ctxguard.monitor.service import Report
    from ctxguard.retrieval.hybrid.retriever import HybridRetriever

_SCRAPED = re.compile(r'ctxguard_estimate\{.*metric="udcg",window="recent"|ctxguard_requests_total')
_METRICS = ("recall", "udcg", "kept", "tokens")


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
        from calibration.report.before_after import BeforeAfter
        from ctxguard.cli.demonstration import loop
        from ctxguard.cli.demonstration.labelled_questions import questions
        from ctxguard.monitor.estimation.live import Window

        folder = self.index or cache_folder() / "demo-index"
        labelled = questions()
        with output.passes() as passes:
            retriever, built = loop.open_index(folder, passes)
            calibration = loop.calibrate_demo(retriever, labelled, passes)
            counted = BeforeAfter.of(calibration.outcomes[Route.HYBRID])
            report, truth, registry = loop.monitor_traffic(retriever, calibration, passes)
        document = {
            "summary": summarise(calibration.outcomes[Route.HYBRID]),
            "answers": counted.answers,
            "misleading": counted.misleading,
            "irrelevant": counted.irrelevant,
            "requests": loop.REQUESTS,
            "sampled": report.accounts.sampled,
            "estimates": report.estimates[Window.ALL_RETAINED],
            "truth": truth,
        }
        corpus = f"{len(retriever):,} passages ({'built' if built else 'opened'})"
        shown = chain(
            _setup_shown(calibration, corpus),
            _questions_shown(retriever, calibration, counted),
            _traffic_shown(report, truth, registry),
            _next_shown(folder),
        )
        output.result(document, shown)
        if self.serve:
            server, _ = start_http_server(0, addr="127.0.0.1", registry=registry)
            url = f"http://127.0.0.1:{server.server_port}/metrics"
            output.note(f"metrics are served at {url} until Ctrl-C")
            threading.Event().wait()


def _setup_shown(calibration: "Calibration", corpus: str) -> Iterator[RenderableType]:
    from calibration.report import summarise

    dataset, verdict = calibration.dataset, calibration.profile.verdict
    questions = f"{len(dataset)} labelled questions, {len(dataset.answerable)} answerable"
    k = calibration.settings.serving_k
    summary = summarise(calibration.outcomes[Route.HYBRID])
    yield facts(
        ("verdict", "" if verdict is None else verdict.short),
        ("in short", summary.in_short),
        ("corpus", f"the documentation of Python {platform.python_version()}: {corpus}"),
        ("", questions),
        ("today", f"the first {k} of BM25 and of vectors, fused by rank"),
    )
    yield from differences_shown(Route.HYBRID, summary, _METRICS)


def _questions_shown(
    retriever: "HybridRetriever", calibration: "Calibration", counted: "BeforeAfter"
) -> Iterator[RenderableType]:
    answers, misleading, irrelevant = counted.answers, counted.misleading, counted.irrelevant
    yield heading("Before and after, over all questions (✓ relevant, ✗ misleads)")
    yield facts(
        ("the answer", "{kept} keep it, {gained} gain it, {lost} lose it".format(**answers)),
        ("misleading", "{:,} before, {:,} after".format(*misleading)),
        ("not relevant", "{:,} before, {:,} after".format(*irrelevant)),
    )
    if misleading[1] >= misleading[0]:
        yield remark(
            "a scorer sees only similarity, so misleading passages stay; a model that reads can "
            "tell the difference: calibrate with --ask (how much near misses fool real models is "
            "not known)"
        )
    outcome = calibration.outcomes[Route.HYBRID]
    texts = {query.query_id: query.text for query in calibration.dataset.queries}
    pools = outcome.route.measured
    for name, row in counted.shown().items():
        yield ""
        text = one_line(texts[pools.query_ids[row]])
        yield Text(f"{name}: {text}", no_wrap=True, overflow="ellipsis")
        contexts = Table.grid(padding=(0, 2))
        for when, option in (("today", outcome.today), ("guard", outcome.chosen)):
            served = option.order[row][option.kept[row]]
            names = _passages(retriever, pools, row, served)
            contexts.add_row(f"  {when}", str(len(served)), names)
        yield contexts


def _passages(
    retriever: "HybridRetriever", pools: "LabelledPools", row: int, served: "IntArray"
) -> Text:
    """Name a context's marked passages, and say how many others it holds."""
    names = []
    for at in served:
        if pools.misleading[row, at] or pools.relevant[row, at]:
            mark, style = ("✗", "red") if pools.misleading[row, at] else ("✓", "green")
            # ``http.client.HTTPConnection.request (method)`` is too long for a list.
            title = one_line(retriever.passage(pools.passage_ids[row][at]).title)
            name = ".".join(title.partition(" (")[0].split(".")[-2:])
            names.append(Text(f"{mark} {name}", style=style))
    if others := len(served) - len(names):
        names.append(Text(f"{others} other{'s' * (others > 1)}", style="dim"))
    return Text(", ").join(names)


def _traffic_shown(
    report: "Report", truth: "Mapping[Metric, float]", registry: "CollectorRegistry"
) -> Iterator[RenderableType]:
    from prometheus_client import generate_latest

    from ctxguard.cli.demonstration.loop import REQUESTS
    from ctxguard.monitor.estimation.live import Window

    sampled = report.accounts.sampled
    yield heading(f"Monitoring: {REQUESTS} requests, {sampled} of them sampled and judged")
    yield facts(*tokens_in_words(report.counts))
    rows = []
    for metric, true_value in truth.items():
        estimate = report.estimates[Window.ALL_RETAINED][metric]
        figures = (number(estimate.value), bounds(estimate), number(true_value), str(estimate.n))
        rows.append((IN_WORDS.get(metric.value, metric.value), *figures))
    yield TextTable(("metric", "estimate>", "95% interval>", "true value>", "n>"), rows)
    for line in generate_latest(registry).decode().splitlines():
        if _SCRAPED.match(line) and not line.endswith(" 0.0"):
            series, _, value = line.rpartition(" ")
            yield _unwrapped(f"{series} {figure(float(value))}", "dim")


def _next_shown(folder: Path) -> Iterator[RenderableType]:
    yield heading("Next")
    for line in (
        f'ctxguard query --index {folder} "wait for the first of several tasks"',
        "ctxguard index CORPUS --out FOLDER    for a corpus of your own",
        "ctxguard demo --serve                 to look at /metrics",
    ):
        yield _unwrapped(f"  {line}")


def _unwrapped(line: str, style: str = "") -> Text:
    return Text(line, style, no_wrap=True, overflow="ignore")
