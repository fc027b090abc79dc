"""``ctxguard demo``: index, calibrate, guard and monitor on this Python's own documentation."""

import platform
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.text import Text

from ctxguard._support.cache_folder import cache_folder
from ctxguard._support.settings import SettingsModel, setting
from ctxguard.cli import _options
from ctxguard.cli._console import Output, interval, number, one_line, print_json, table
from ctxguard.cli._summary import print_summary
from ctxguard.cli._tables import Rows
from ctxguard.core.types import Mode, Route
from ctxguard.profile.describe import describe_policy

if TYPE_CHECKING:
    from calibration.calibrate import Calibration
    from ctxguard.cli.demonstration.loop import BeforeAfter, MonitoredTraffic
    from ctxguard.core.context import Context
    from ctxguard.profile.schema import Evidence, Verdict

_SCRAPED = (
    "ctxguard_requests_total",
    "ctxguard_dropped_candidates_total",
    'ctxguard_estimate{metric="recall",window="recent"',
    'ctxguard_estimate{metric="mrr",window="recent"',
    'ctxguard_estimate{metric="udcg",window="recent"',
)
_GRADES = {
    2: Text("answers", style="green"),
    1: Text("helps", style="green"),
    0: Text("irrelevant", style="dim"),
    -1: Text("distractor", style="red"),
}


class Demo(SettingsModel):
    """Settings of ``ctxguard demo``."""

    index: Annotated[
        Path | None,
        setting(
            "Index folder to open, or to build on the first run.",
            "FOLDER",
            default="ctxguard/demo-index in the user's cache folder",
        ),
    ] = None
    serve: Annotated[bool, setting("Serve the metrics over HTTP until Ctrl-C.")] = False
    as_json: _options.AsJson = False


def demo(settings: Demo) -> None:
    """Index, calibrate, guard and monitor on real text, in a minute or two.

    The text is the documentation of the Python that runs this command; the questions were written
    and labelled by hand. Nothing is downloaded.
    """
    from ctxguard.cli.demonstration import loop, questions

    output = Output(as_json=settings.as_json)
    folder = settings.index or cache_folder() / "demo-index"
    labelled = questions()
    with output.passes() as passes:
        retriever, built = loop.open_index(folder, passes)
        # Of one step: the first time on a machine it takes many seconds.
        compiled = passes("compiling the search", 1)
        retriever.warm_up()
        compiled(1)
        calibration = loop.calibrate_demo(retriever, labelled, passes)
        orders = loop.orders(retriever, calibration)
        question = loop.before_and_after(retriever, calibration)
        traffic = loop.monitor_traffic(retriever, calibration, passes)
    with _metrics_endpoint(traffic) as url:
        if settings.as_json:
            print_json(_document(calibration, orders, question, traffic))
        else:
            how = "built" if built else "opened"
            _show_setup(output, calibration, f"{len(retriever):,} passages, {how} in {folder}")
            _show_orders(output, orders)
            _show_question(output, question, calibration.profile.verdict)
            _show_traffic(output, traffic, _scrape(url))
            _show_next(output, folder)
        if settings.serve:
            output.note(f"metrics are served at {url} until Ctrl-C")
            threading.Event().wait()


@contextmanager
def _metrics_endpoint(traffic: "MonitoredTraffic") -> Iterator[str]:
    """Serve the metrics on a free port of the loopback interface; yields the URL."""
    from prometheus_client import start_http_server

    server, thread = start_http_server(0, addr="127.0.0.1", registry=traffic.registry)
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _scrape(url: str) -> list[str]:
    """Some of the lines that Prometheus would read."""
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - our own endpoint
        lines = answer.read().decode().splitlines()
    return [line for line in lines if line.startswith(_SCRAPED) and not line.endswith(" 0.0")]


def _show_setup(output: Output, calibration: "Calibration", corpus: str) -> None:
    dataset, routes = calibration.dataset, calibration.profile.routes
    output.heading(f"1. Corpus: the documentation of Python {platform.python_version()}")
    questions = f"{len(dataset)}, {len(dataset.answerable)} of them answerable; half are held out"
    output.facts([("corpus", corpus), ("questions", questions)])
    output.notes(dataset.notes)
    output.heading("2. Calibration: keep the recall of the first 5, with less harm")
    verdict = calibration.profile.verdict
    output.facts([("verdict", "" if verdict is None else verdict.statement)])
    print_summary(Route.HYBRID, calibration, output, show_all=True)
    others = [route for route in routes if route is not Route.HYBRID]
    output.heading("when a stage is down")
    output.facts([(route.value, describe_policy(routes[route].policy)) for route in others])


def _show_orders(output: Output, orders: "dict[str, Evidence]") -> None:
    """What signals bring before anything is calibrated."""
    metrics = next(iter(orders.values())).metrics
    rows = table("the first 5 by", *(f"{name}>" for name in metrics))
    for name, evidence in orders.items():
        cells = [f"{number(one.value)} {interval(one)}" for one in evidence.metrics.values()]
        rows.add_row(name.replace("_", " "), *cells)
    output.heading("what signals bring before calibration, held-out questions")
    output.out.print(rows)


def _show_question(output: Output, question: "BeforeAfter", verdict: "Verdict | None") -> None:
    in_shadow = verdict is not None and verdict.mode is Mode.SHADOW
    kept = "what the policy would keep" if in_shadow else "what the guard keeps"
    output.heading("3. Guard: the held-out question of median gain, before and after")
    output.facts([("question", question.query.text)])
    for title, context in (
        ("before: the retriever's top 5", question.bare),
        (f"after: {kept}", question.guarded),
    ):
        output.out.print(_passages(title, question, context))


def _passages(title: str, question: "BeforeAfter", context: "Context") -> Rows:
    title = f"{title} (strict UDCG {question.udcg(context):+.2f})"
    rows = table("#>", "passage", "label", title=title)
    for rank, passage in enumerate(context.passages, start=1):
        grade = question.labels.get(passage.passage_id, 0)
        rows.add_row(str(rank), one_line(passage.title), _GRADES[grade])
    return rows


def _show_traffic(output: Output, traffic: "MonitoredTraffic", scraped: list[str]) -> None:
    output.heading(
        f"4. Monitor: {traffic.requests} requests, {traffic.sampled} of them sampled and judged"
    )
    rows = table("metric", "estimate>", "95% interval>", "true value>", "n>")
    for metric, truth in traffic.truth.items():
        estimate = traffic.estimates[metric]
        figures = (number(estimate.value), interval(estimate), number(truth), str(estimate.n))
        rows.add_row(metric.value, *figures)
    output.out.print(rows)
    output.heading("The same at /metrics, for Prometheus")
    for line in scraped:
        output.out.print(Text(line, style="dim"), soft_wrap=True)


def _show_next(output: Output, folder: Path) -> None:
    output.heading("Next")
    for line in (
        f'ctxguard query --index {folder} "wait for the first of several tasks"',
        "ctxguard index CORPUS --out FOLDER    for a corpus of your own",
        "ctxguard demo --serve                 to look at /metrics",
    ):
        output.out.print(f"  {line}", soft_wrap=True)


def _document(
    calibration: "Calibration",
    orders: "dict[str, Evidence]",
    question: "BeforeAfter",
    traffic: "MonitoredTraffic",
) -> dict[str, object]:
    from calibration.report import summarise

    return {
        "profile": calibration.profile.model_dump(mode="json"),
        "summary": summarise(
            calibration.outcomes[Route.HYBRID], calibration.settings, held_out=True
        ).model_dump(),
        "orders": {name: evidence.model_dump() for name, evidence in orders.items()},
        "question": {
            "text": question.query.text,
            "before": question.bare.to_dict(),
            "after": question.guarded.to_dict(),
        },
        "traffic": {
            "requests": traffic.requests,
            "sampled": traffic.sampled,
            "estimates": {
                metric.value: {
                    "value": estimate.value,
                    "lower": estimate.lower,
                    "upper": estimate.upper,
                    "n": estimate.n,
                    "truth": traffic.truth.get(metric),
                }
                for metric, estimate in traffic.estimates.items()
            },
        },
    }
