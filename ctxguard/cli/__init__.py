"""The command line: the application and its commands.

Exit codes: 0 for success; 1 for a finding, such as a promise that cannot be certified; 2 for wrong
usage or bad input. Nothing of a command is imported before it, or its own help, is asked for. A
command touches what its options name: files, a store, models, the network.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

import ctxguard
from ctxguard._support.extras import foreign_distribution

if TYPE_CHECKING:
    from ctxguard.cli._settings import Command

COMMANDS = {
    "index": "Index a corpus for lexical and dense search.",
    "calibrate": "Choose by labels, or judged requests, what the guard keeps, and whether to "
    "serve it.",
    "serve": "Serve the rerank protocol with calibrated decisions, or decisions alone, over HTTP.",
    "monitor": "Judge sampled requests, and serve live estimates to Prometheus.",
    "label": "Grade the passages that a retriever finds for questions, on a page; or export and "
    "import the labels of samples.",
    "label export": "Write a file of passages for people to grade, of judged requests picked at "
    "random.",
    "label import": "Import the labels of one annotator.",
    "judge": "Have a model judge the passages of a log's questions, as samples of a store.",
    "demo": "Index, calibrate, guard and monitor on real text, in a minute or two.",
    "doctor": "Say for each part of a deployment whether it works, and how to mend it.",
    "evaluate": "Measure a profile, or the first k passages, on labelled queries; or compare "
    "systems, and ways to rank and to cut.",
    "query": "Show what the guard keeps and drops for one query, and why.",
    "answers": "Ask a reader each labelled question twice: with today's context and with the "
    "guard's.",
    "mcp": "Serve an index to agents over the Model Context Protocol, with the tools search and "
    "fetch.",
    "explain": "Show the passages served and dropped for one sampled request, and their grades.",
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

GROUPS = {
    "golden": "Freeze labels by digest; check them; write hard negatives.",
}

_FIRST = ("index", "calibrate", "serve", "monitor", "label")
"""The commands everybody needs; the help shows the others after them."""

_INTERRUPTED = 130

_OPTIONS = {
    "--version": "Print the version and exit.",
    "--json": "Print the result of a command as one JSON document.",
    "--help": "Show this message and exit.",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line with these arguments, or with the process's own.

    Ends with `SystemExit` unless the exit code is 0.
    """
    if clash := foreign_distribution():
        from ctxguard.cli._console import BAD_INPUT, print_labelled

        print_labelled("warning", "bold yellow", clash)
        if not hasattr(ctxguard, "ContextGuard"):
            sys.exit(BAD_INPUT)
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    as_json = "--json" in words[:end]  # before or after the command
    words = [word for word in words[:end] if word != "--json"] + words[end:]
    group = words[0] if words and words[0] in GROUPS else ""
    n_words = 2 if group or " ".join(words[:2]) in COMMANDS else 1
    try:
        if words[:1] == ["--version"]:
            sys.stdout.write(f"{ctxguard.__version__}\n")
        elif "--help" in words[:n_words]:
            sys.stdout.write(f"{help_of(group)}\n")
        else:
            from ctxguard.cli._console import run

            name = " ".join(words[:n_words])
            run(lambda output: named(name).run(words[n_words:], output), as_json=as_json)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:  # the reader of standard output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


@cache
def named(name: str) -> "Command":
    """Import and return the command with this name, such as ``golden check``."""
    if name not in COMMANDS:
        from ctxguard.errors import ConfigurationError

        group = name.partition(" ")[0]
        see = f"; see ctxguard {f'{group} ' if group in GROUPS else ''}--help"
        if name in {"", *GROUPS}:
            raise ConfigurationError(f"name a command{see}")
        meant = nearest(name, [*COMMANDS, *GROUPS])
        raise ConfigurationError(f"there is no command {name!r}{meant or see}")
    from ctxguard.cli._settings import Command

    module, _, own = name.partition(" ")
    model = f"{(own or module).replace('-', ' ').title().replace(' ', '')}Command"
    found = getattr(import_module(f"{__name__}.{module}"), model)
    return Command(name, COMMANDS[name], found)


def help_of(group: str = "") -> str:
    """Write the help of the application, or of a group of commands."""
    from ctxguard.cli._help import page

    options = list(_OPTIONS.items())
    if group:
        sections = {"Options": options[-1:], "Commands": commands_of(group)}
        return page(f"{group} COMMAND [OPTIONS]", [GROUPS[group]], sections)
    rows = {name: text for name, text in COMMANDS.items() if " " not in name} | GROUPS
    return page(
        "COMMAND [OPTIONS]",
        [
            "Clean, calibrated and certified context between a retriever and a language model.",
            "Exit codes: 0 for success, 1 for a finding, 2 for wrong usage or bad input.",
        ],
        {
            "Options": options,
            "Commands": [(name, rows[name]) for name in _FIRST],
            "More": [row for row in rows.items() if row[0] not in _FIRST],
        },
    )


def commands_of(name: str) -> list[tuple[str, str]]:
    """List a group's commands by their second word, with the first sentence of help."""
    own = [(each.split(), text) for each, text in COMMANDS.items()]
    return [(words[1], text) for words, text in own if words[1:] and words[0] == name]


def nearest(name: str, among: Iterable[str]) -> str:
    """Ask whether the most similar of some names was meant; empty if none is similar.

    >>> nearest("polcy", ["policy", "seed"]), nearest("x", ["policy"])
    ('; did you mean policy?', '')
    """
    from difflib import get_close_matches

    found = get_close_matches(name, list(among), n=1)
    return f"; did you mean {found[0]}?" if found else ""
