"""The command line: the application and its commands.

Exit codes: 0 for success; 1 for a finding, such as a promise that cannot be certified; 2 for wrong
usage or bad input. Nothing of a command is imported before it is used.
"""

import sys
from typing import Annotated

import typer

import ctxguard
from ctxguard._support.foreign_distribution import foreign_distribution
from ctxguard.cli._groups import Group, add_command, add_group

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


add_command(app, "demo", "Index, calibrate, guard and monitor on real text, in a minute or two.")
add_command(
    app, "doctor", "Say for each part of a deployment whether it works, and how to mend it."
)
add_command(app, "index", "Index a corpus for lexical and dense search.")
add_command(
    app,
    "calibrate",
    "Choose and certify a policy for each route, and measure it on held-out queries.",
    keys=["serving_k"],
)
add_command(
    app,
    "evaluate",
    "Measure a profile, or the first k passages, on labelled queries.",
    options=["gain"],
    keys=["route", "write_run"],
)
add_command(
    app,
    "query",
    "Show what the guard keeps and drops for one query, and why.",
    keys=["retriever", "route"],
    without=["run", "preset", "utility", "gain"],
)
add_command(
    app,
    "compare",
    "Compare ways to rank and to cut on the same labelled queries, with paired intervals.",
)
add_command(
    app,
    "answers",
    "Ask a reader each labelled question twice: with today's context and with the guard's.",
    keys=["engine", "retriever"],
    without=["run", "preset", "utility", "gain"],
)
add_command(
    app,
    "serve",
    "Serve the rerank protocol with calibrated decisions, or decisions alone, over HTTP.",
    options=["rerank_upstream", "rerank_protocol", "rerank_model"],
)
add_command(
    app,
    "mcp",
    "Serve an index to agents over the Model Context Protocol, with the tools search and fetch.",
    keys=["k"],
)
add_command(app, "monitor", "Judge sampled requests, and serve live estimates to Prometheus.")
add_command(
    app,
    "explain",
    "Show what was served and dropped for one sampled request, and how it was judged.",
)
add_command(
    app, "recalibrate", "Calibrate on judged traffic, and compare with the profile in force."
)
add_command(app, "rollback", "List the profiles that a file held before, or return to one of them.")
add_command(
    app,
    "metrics",
    "Print the recording and alerting rules for Prometheus, or the dashboard for Grafana.",
)

_label = add_group(
    app, "label", "Export samples for people to label; import their labels, and users' feedback."
)
add_command(
    _label,
    "export",
    "Write a file of passages for people to grade, of judged requests picked at random.",
    place="label:export",
)
add_command(_label, "import", "Import the labels of one annotator.", place="label:import_")
add_command(
    _label,
    "feedback",
    "Import users' reactions. They are counted by kind, and enter no estimate.",
    place="label:feedback",
)

_golden = add_group(
    app, "golden", "Labels with provenance, frozen by digest; their coverage and hard negatives."
)
add_command(
    _golden,
    "freeze",
    "Merge the labels of all sources into one per passage, and freeze them under a digest.",
    place="golden:freeze",
)
add_command(
    _golden,
    "check",
    "Show what a frozen set holds, and verify that it is unchanged; exit code 1 if it is not.",
    place="golden:check",
)
add_command(
    _golden,
    "coverage",
    "Measure how much of what is retrieved has a label: an unlabelled passage may be relevant.",
    place="golden:coverage",
    keys=["route", "profile"],
)
add_command(
    _golden,
    "hard-negatives",
    "Write passages that are ranked high but labelled not relevant, as training triplets.",
)

_fit = add_group(app, "fit", "Fit a ranker, or the utilities of a reader, to labels.")
add_command(
    _fit,
    "ranker",
    "Fit the ranker that orders an index's candidates to labelled queries.",
    place="fit_ranker:fit_ranker",
    without=["reranker", "ranker"],
)
add_command(
    _fit,
    "utilities",
    "Fit the utilities of passages for one reader, from answers marked right or wrong.",
    place="utilities:fit_utilities",
)


def main() -> None:
    """Run the command line on the arguments of the process.

    Exits with 2 where another distribution has replaced the package's own ``__init__``.
    """
    if clash := foreign_distribution():
        from ctxguard.cli._console import BAD_INPUT, print_warning

        print_warning(clash)
        if not hasattr(ctxguard, "ContextGuard"):
            sys.exit(BAD_INPUT)
    app()
