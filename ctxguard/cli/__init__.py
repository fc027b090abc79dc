"""The command line: the application and its commands.

Exit codes: 0 for success; 1 for a finding, such as a promise that cannot be certified; 2 for wrong
usage or bad input. This module imports only what is light: each command imports what it needs.
"""

import sys
from typing import Annotated

import typer

import ctxguard
from ctxguard._support.foreign_distribution import foreign_distribution
from ctxguard.cli import (
    answers,
    calibrate,
    compare,
    demo,
    doctor,
    evaluate,
    explain,
    fit_ranker,
    golden,
    hard_negatives,
    index,
    label,
    mcp,
    metrics,
    monitor,
    query,
    recalibrate,
    rollback,
    serve,
    utilities,
)
from ctxguard.cli._console import BAD_INPUT, Group, print_warning
from ctxguard.cli._settings import add_command, add_group

app = typer.Typer(
    name="ctxguard",
    cls=Group,
    help="Clean, calibrated and certified context between a retriever and a language model.",
    epilog="Exit codes: 0 for success, 1 for a finding, 2 for wrong usage or bad input.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help: with rich's frames the texts of options have a third of a narrow terminal.
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(ctxguard.__version__)
        raise typer.Exit


@app.callback()
def _application(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


add_command(app, demo.demo, "demo")
add_command(app, doctor.doctor, "doctor")
add_command(app, index.index, "index")
add_command(app, calibrate.calibrate, "calibrate", keys=["serving_k"])
add_command(app, evaluate.evaluate, "evaluate", options=["gain"], keys=["route", "write_run"])
add_command(
    app,
    query.query,
    "query",
    keys=["retriever", "route"],
    without=["run", "preset", "utility", "gain"],
)
add_command(app, compare.compare, "compare")
add_command(
    app,
    answers.answers,
    "answers",
    keys=["engine", "retriever"],
    without=["run", "preset", "utility", "gain"],
)
add_command(
    app, serve.serve, "serve", options=["rerank_upstream", "rerank_protocol", "rerank_model"]
)
add_command(app, mcp.mcp, "mcp", keys=["k"])
add_command(app, monitor.monitor, "monitor")
add_command(app, explain.explain, "explain")
add_command(app, recalibrate.recalibrate, "recalibrate")
add_command(app, rollback.rollback, "rollback")
add_command(app, metrics.metrics, "metrics")

_label = add_group(
    app, "label", "Export samples for people to label; import their labels, and users' feedback."
)
add_command(_label, label.export, "export")
add_command(_label, label.import_, "import")
add_command(_label, label.feedback, "feedback")

_golden = add_group(
    app, "golden", "Labels with provenance, frozen by digest; their coverage and hard negatives."
)
add_command(_golden, golden.freeze, "freeze")
add_command(_golden, golden.check, "check")
add_command(_golden, golden.coverage, "coverage", keys=["route", "profile"])
add_command(_golden, hard_negatives.hard_negatives, "hard-negatives")

_fit = add_group(app, "fit", "Fit a ranker, or the utilities of a reader, to labels.")
add_command(_fit, fit_ranker.fit_ranker, "ranker", without=["reranker", "ranker"])
add_command(_fit, utilities.fit_utilities, "utilities")


def main() -> None:
    """Run the command line on the arguments of the process.

    Exits with 2 where another distribution has replaced the package's own ``__init__``.
    """
    if clash := foreign_distribution():
        print_warning(clash)
        if not hasattr(ctxguard, "ContextGuard"):
            sys.exit(BAD_INPUT)
    app()
