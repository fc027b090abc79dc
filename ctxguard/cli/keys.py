"""``ctxguard keys``: a system file of a command to fill in, each key with its meaning."""

import textwrap

import typer

from ctxguard._support.settings import SettingsModel, setting
from ctxguard.cli import command_named
from ctxguard.cli._console import Output
from ctxguard.errors import ConfigurationError

_WIDTH = 80


class KeysCommand(SettingsModel):
    words: list[str] = setting(
        "The command, such as serve or golden hard-negatives.", "COMMAND", argument=True
    )

    def __call__(self, _: Output) -> None:
        """Save it, and give it to the command as --system. One file serves all commands: the system
        stands at its top, with profile and store, and what one command alone needs in the table of
        its name. Options may stand in that table too, by their names.

        For example: ctxguard keys serve > system.toml
        """
        name = " ".join(self.words)
        command = command_named(name)
        if command is None:
            raise ConfigurationError(f"there is no command {name!r}; see ctxguard --help")
        if not command.keys:
            raise ConfigurationError(f"ctxguard {name} takes options alone; see its --help")
        for table, keys in command.keys.items():
            if table:
                typer.echo(f"[{table}]")
            for key, help_text in keys:
                lines = textwrap.wrap(help_text, _WIDTH - 2, break_on_hyphens=False)
                typer.echo("\n".join([*(f"# {line}" for line in lines), f"# {key} =", ""]))
