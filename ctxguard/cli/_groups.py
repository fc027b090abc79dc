"""Groups of commands, each of which is imported when it is used or its own help is asked for."""

from collections.abc import Collection
from functools import cache
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

COMMANDS: set[str] = set()
"""The name of every command, which is that of its table in a settings file too."""


class Group(TyperGroup):
    """A group whose help shows the whole summary of each command, not its first words."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, imported; None if there is none of this name."""
        command = super().get_command(ctx, cmd_name)
        return command.load() if isinstance(command, _Later) else command

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - overridden
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.help) for name, each in self.commands.items()])


class _Later(TyperCommand):
    """The place of a command that is not imported yet."""

    load: Any


def add_command(
    app: typer.Typer, name: str, summary: str, *, place: str = "", **fields: Collection[str]
) -> None:
    """Add a command.

    Args:
        app: The application or the group, of class `Group`.
        name: The command's name.
        summary: The first sentence of its help.
        place: Its function, as ``module:function`` of this package; both are the name by default.
        **fields: ``options``, ``keys`` and ``without`` of `ctxguard.cli._settings.command_of`.
    """
    COMMANDS.add(name)

    @cache
    def load() -> Any:
        from ctxguard.cli._settings import command_of

        own = name.replace("-", "_")
        module, _, function = (place or f"{own}:{own}").partition(":")
        run = getattr(import_module(f"{__package__}.{module}"), function)
        return typer.main.get_command(command_of(run, name, **fields))

    app.command(name, cls=type("Later", (_Later,), {"load": staticmethod(load)}), help=summary)(
        lambda: None
    )


def add_group(app: typer.Typer, name: str, text: str) -> typer.Typer:
    """Add a group of commands."""
    group = typer.Typer(name=name, cls=Group, help=text, no_args_is_help=True)
    app.add_typer(group)
    return group
