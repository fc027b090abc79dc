"""The command line: the application, its commands, its one entry point.

Exit codes: 0; 1 for a finding, such as a promise that could not be certified; 2 for bad usage or
bad input. Only what is light is imported here: each command imports what it works with.
"""

from typing import Annotated

import typer

from ctxguard import __version__
from ctxguard.cli import (
    alarms,
    calibrate,
    compare,
    demo,
    evaluate,
    golden,
    index,
    label,
    metrics,
    monitor,
    query,
    recalibrate,
    report,
    train,
    utilities,
)
from ctxguard.cli._console import Command

app = typer.Typer(
    name="ctxguard",
    help="Clean, calibrated and certified context between a retriever and a language model.",
    epilog="Exit codes: 0; 1 for a finding; 2 for bad usage or bad input.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _application(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


_COMMANDS = (
    demo,
    index,
    calibrate,
    evaluate,
    query,
    compare,
    report,
    monitor,
    alarms,
    label,
    recalibrate,
    metrics,
    utilities,
    golden,
    train,
)

for _module in _COMMANDS:
    _module.register(app)
_groups = [group.typer_instance for group in app.registered_groups if group.typer_instance]
for _command in [command for part in (app, *_groups) for command in part.registered_commands]:
    _command.cls = Command


def main() -> None:
    """Run the command line on the process's arguments."""
    app()
