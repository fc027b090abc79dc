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
    calibrate,
    compare,
    demo,
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
    serve,
    utilities,
)
from ctxguard.cli._console import BAD_INPUT, Command, Group, print_warning

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


for _module in (
    demo,
    index,
    calibrate,
    evaluate,
    query,
    compare,
    serve,
    mcp,
    monitor,
    explain,
    label,
    recalibrate,
    metrics,
    utilities,
    golden,
    fit_ranker,
    hard_negatives,
):
    _module.register(app)
for _group in app.registered_groups:
    _group.cls = Group
_groups = [group.typer_instance for group in app.registered_groups if group.typer_instance]
for _command in [command for part in (app, *_groups) for command in part.registered_commands]:
    if not issubclass(_command.cls or object, Command):
        _command.cls = Command


def main() -> None:
    """Run the command line on the arguments of the process.

    Exits with 2 where another distribution has replaced the package's own ``__init__``.
    """
    if clash := foreign_distribution():
        print_warning(clash)
        if not hasattr(ctxguard, "ContextGuard"):
            sys.exit(BAD_INPUT)
    app()
