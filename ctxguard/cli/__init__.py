"""The command line: the application and its commands.

Exit codes: 0 for success; 1 for a finding, such as a promise that cannot be certified; 2 for wrong
usage or bad input. Nothing of a command is imported before it, or its own help, is asked for.
"""

import sys
from collections.abc import Collection
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import ctxguard
from ctxguard._support.foreign_distribution import foreign_distribution

_COMMANDS = {
    "index": "Index a corpus for lexical and dense search.",
    "calibrate": "Choose by labels, or judged requests, what the guard keeps, and whether to "
    "serve it.",
    "serve": "Serve the rerank protocol with calibrated decisions, or decisions alone, over HTTP.",
    "monitor": "Judge sampled requests, and serve live estimates to Prometheus.",
    "label export": "Write a file of passages for people to grade, of judged requests picked at "
    "random.",
    "label import": "Import the labels of one annotator.",
    "judge": "Have a model judge the passages of a log's questions, as samples of a store.",
    "demo": "Index, calibrate, guard and monitor on real text, in a minute or two.",
    "doctor": "Say for each part of a deployment whether it works, and how to mend it.",
    "evaluate": "Measure a profile, or the first k passages, on labelled queries.",
    "query": "Show what the guard keeps and drops for one query, and why.",
    "compare": "Compare ways to rank and to cut on the same labelled queries, with paired "
    "intervals.",
    "answers": "Ask a reader each labelled question twice: with today's context and with the "
    "guard's.",
    "mcp": "Serve an index to agents over the Model Context Protocol, with the tools search and "
    "fetch.",
    "explain": "Show what was served and dropped for one sampled request, and how it was judged.",
    "keys": "Print a system file of a command to fill in, each key with its meaning.",
    "metrics": "Print the recording and alerting rules for Prometheus, or the dashboard for "
    "Grafana.",
    "golden freeze": "Freeze labelled queries under a digest.",
    "golden check": "Show what a frozen set holds, and verify that it is unchanged; exit code 1 "
    "if it is not.",
    "golden hard-negatives": "Write passages that are ranked high but labelled not relevant, as "
    "training triplets.",
}
"""The first sentence of each command's help. ``golden hard-negatives`` is the class
`HardNegativesCommand` of the module ``golden``; ``demo`` is `DemoCommand` of ``demo``."""

_FIELDS: dict[str, dict[str, Collection[str]]] = {
    "calibrate": {"options": ["profile", "score_kind", "store"], "keys": ["serving_k", "judge"]},
    "evaluate": {"keys": ["route", "write_run"]},
    "query": {
        "keys": ["mode", "retriever", "route"],
        "without": ["run", "preset", "utility", "gain"],
    },
    "answers": {"keys": ["engine", "retriever"], "without": ["run", "preset", "utility", "gain"]},
    "serve": {"options": ["rerank_upstream", "rerank_model"], "keys": ["workers"]},
    "mcp": {"keys": ["k", "where"]},
    "index": {"keys": ["lexical", "signals"]},
    "judge": {"keys": ["engine", "serving_k"], "without": ["run", "preset", "utility", "gain"]},
}
"""The fields that are other than elsewhere; see `ctxguard.cli._settings.command_of`."""

_FIRST = ("index", "calibrate", "serve", "monitor", "label")
"""What everybody needs; the help shows the others after them."""

_GROUPS = {
    "label": "Export samples for people to label; import their labels.",
    "golden": "Freeze labels by digest; check them; write hard negatives.",
}
COMMANDS = {name.split()[-1] for name in _COMMANDS}
"""The name of every command, which is that of its table in a settings file too."""


_JSON = "--json"


class _Group(TyperGroup):
    """A group whose help shows the whole summary of each command, not its first words.

    A command is imported when it is used or its own help is asked for.
    """

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, imported; None if there is none of this name."""
        words = f"{self.name} {cmd_name}" if self.name in _GROUPS else cmd_name
        return command_named(words) or super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - overridden
        rows = {name: (name, each.help) for name, each in self.commands.items()}
        first = [rows.pop(name) for name in _FIRST if name in rows]
        for title, some in (("Commands", first), ("More" if first else "Commands", rows.values())):
            if some:
                with formatter.section(title):
                    formatter.write_dl(list(some))


class _Application(_Group):
    """The commands, and the options that may stand before or after any of them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read ``--json`` wherever it stands, but not after ``--``."""
        end = args.index("--") if "--" in args else len(args)
        if _JSON in args[:end]:
            args = [_JSON, *(one for one in args[:end] if one != _JSON), *args[end:]]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="ctxguard",
    cls=_Application,
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
    as_json: Annotated[
        bool, typer.Option(_JSON, help="Print the result of a command as one JSON document.")
    ] = False,
) -> None:
    pass


@cache
def command_named(words: str) -> Any:
    """Import and return a command; None if there is none of this name."""
    if words not in _COMMANDS:
        return None
    from ctxguard.cli._settings import command_of

    module, _, own = words.partition(" ")
    name = own or module
    settings = f"{name.replace('-', ' ').title().replace(' ', '')}Command"
    model = getattr(import_module(f"{__name__}.{module}"), settings)
    made = command_of(model, name, _COMMANDS[words], words=words, **_FIELDS.get(words, {}))
    return typer.main.get_command(made)


_groups = {"": app}
for _name, _help in _GROUPS.items():
    _groups[_name] = typer.Typer(name=_name, cls=_Group, help=_help, no_args_is_help=True)
    app.add_typer(_groups[_name])
for _words, _help in _COMMANDS.items():
    _group, _, _name = _words.rpartition(" ")
    _groups[_group].command(_name, help=_help)(lambda: None)  # the place of one


def main() -> None:
    """Run the command line on the arguments of the process.

    Exits with 2 where another distribution has replaced the package's own ``__init__``.
    """
    if clash := foreign_distribution():
        from ctxguard.cli._console import BAD_INPUT, print_labelled

        print_labelled("warning", "bold yellow", clash)
        if not hasattr(ctxguard, "ContextGuard"):
            sys.exit(BAD_INPUT)
    app()
