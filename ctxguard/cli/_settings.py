"""Commands from their settings: options from the fields, and keys of a file for the rest.

A command is a `SettingsModel` that can be called. Each field is an option, an argument, or a key of
the TOML file that ``--system`` names. The system, its profile and its store stand at the top of the
file, what one command alone needs in the table of its name. An option wins over a key.
"""

import tomllib
from collections.abc import Collection, Mapping
from inspect import Parameter, Signature, cleandoc
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from ctxguard._support.regular_file import read_regular
from ctxguard._support.settings import (
    SettingsModel,
    about,
    bounds_of,
    flags_of,
    help_of,
    key_of,
    optional,
)
from ctxguard.cli import COMMANDS
from ctxguard.cli._console import Command, Output, wants_json
from ctxguard.cli._options import ProfileFile, StoreUrl
from ctxguard.cli._system import SOURCES, System
from ctxguard.errors import ConfigurationError, DataError

Fields = Mapping[str, FieldInfo]

_SYSTEM = "system"
_CLICK = "click_context"
"""The parameter for the context of Click, which no option may be called."""
_MAX_TOML_BYTES = 2**20


class _Shared(System):
    """What stands at the top of a file."""

    profile: ProfileFile = None
    store: StoreUrl = ""


class _WithFile(SettingsModel):
    system: Path | None = optional(
        "TOML file with the keys that `ctxguard keys COMMAND` prints, and in the command's table "
        "options by their names; relative paths start from its folder. An option wins over a key.",
        "FILE",
    )


def command_of(
    model: type[SettingsModel],
    name: str,
    summary: str,
    *,
    words: str = "",
    options: Collection[str] = (),
    keys: Collection[str] = (),
    without: Collection[str] = (),
) -> typer.Typer:
    """Make the application of one command.

    Args:
        model: Its settings; called with an `Output`, they run it. The docstring of the call is the
            rest of its help.
        name: The command's name.
        summary: The first sentence of its help.
        words: The name with that of its group; the name alone unless given.
        options: Fields that are options of this command, though keys elsewhere.
        keys: Fields that are keys of this command, though options elsewhere.
        without: Fields that this command does not take.
    """
    fields = {
        each: field
        for each, field in model.model_fields.items()
        if each not in without and about(field)
    }
    in_file = {
        each: field
        for each, field in fields.items()
        if each in keys or (about(field)["key"] and each not in options)
    }
    has_file = bool(in_file) or _SYSTEM in fields
    parameters = [
        _option(each, field, in_file=has_file)
        for each, field in fields.items()
        if each not in in_file
    ]
    if has_file and _SYSTEM not in fields:
        parameters.append(_option(_SYSTEM, _WithFile.model_fields[_SYSTEM]))

    def call(**given: Any) -> None:
        context = given[_CLICK]
        chosen = {
            each: value
            for each, value in given.items()
            if (source := context.get_parameter_source(each)) and source.name != "DEFAULT"
        }
        files = chosen.get(_SYSTEM, []) if _SYSTEM in fields else [chosen.pop(_SYSTEM, None)]
        values: dict[str, Any] = {}
        for file in files:
            if file is not None:
                values |= _settings_in(file, name, fields)
        for each, field in fields.items():
            if field.is_required() and each not in values and each not in chosen:
                key = f", or {key_of(each, field)} in a file --system" if has_file else ""
                shown = about(field)["metavar"]
                raise ConfigurationError(f"give {flags_of(each, field)[0]} {shown}{key}")
        settings: Any = model(**{**values, **chosen})
        settings(Output(as_json=wants_json(context)))

    context = Parameter(_CLICK, Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters.insert(0, context)
    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    call.__doc__ = f"{summary}\n\n{cleandoc(model.__call__.__doc__ or '')}"
    about_command = {
        "words": words or name,
        "keys": _sections(in_file, name),
        "settings": fields,
    }
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name, cls=type("Command", (Command,), about_command))(call)
    return alone


def _option(name: str, field: FieldInfo, *, in_file: bool = False) -> Parameter:
    """Make a field a parameter that typer makes an option or an argument of.

    Args:
        name: The field's name.
        field: The field.
        in_file: Whether a file may give it, so that typer cannot tell that it is missing.
    """
    extra, bounds, kind = about(field), bounds_of(field), field.annotation
    item: Any = next(iter(get_args(kind)), None)
    if get_origin(item) is Annotated:  # a list whose items have a range
        kind = list[item.__origin__]
    default = field.get_default(call_default_factory=True)
    if field.is_required():
        default = None if in_file and not extra["argument"] else Parameter.empty
    # A file to write is tried before the work.
    shared = {
        "metavar": extra["metavar"],
        "help": field.description,
        **({"dir_okay": False, "writable": True} if extra["writes"] else {}),
    }
    if extra["argument"]:
        info: Any = typer.Argument(**shared)
    else:
        info = typer.Option(
            *flags_of(name, field),
            envvar=extra["env"],
            min=bounds.get("ge"),
            max=bounds.get("le"),
            **shared,
        )
    return Parameter(
        name,
        Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, info],
    )


def _sections(keys: Fields, command: str) -> dict[str, list[tuple[str, str]]]:
    """List the keys that a command reads, with their help, by table; the system's in none."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for name, field in sorted(keys.items(), key=lambda item: item[0] not in System.model_fields):
        table = "" if name in System.model_fields else command
        sections.setdefault(table, []).append((key_of(name, field), help_of(field)))
    return sections


def _settings_in(file: Path, command: str, fields: Fields) -> dict[str, Any]:
    """Read the settings of a command that a file holds.

    Raises:
        DataError: the file cannot be read, or it has a key that nobody knows.
    """
    shared, tables = _read(file)
    own = {name: field for name, field in fields.items() if name not in System.model_fields}
    if _SYSTEM in fields:  # each file describes a candidate, not the command's source or profile
        others = SOURCES.keys() | (_Shared.model_fields.keys() - System.model_fields.keys())
        shared = {name: value for name, value in shared.items() if name not in others}
    table = _named(tables.get(command, {}), own, file, f"[{command}] ")
    # A command may know another profile or store as a key of its own.
    shared = {
        name: value
        for name, value in shared.items()
        if name in fields and (name in System.model_fields or not about(fields[name])["key"])
    }
    return shared | table


def read_shared(file: Path) -> dict[str, Any]:
    """Read what the top of a file describes: the system, its profile and its store.

    Raises:
        DataError: the file cannot be read, or it has a key that nobody knows.
    """
    return _read(file)[0]


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read what the commands share, by the names of fields, and their tables."""
    try:
        document = tomllib.loads(read_regular(file, _MAX_TOML_BYTES).decode("utf-8"))
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=file) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"is no TOML: {error}", path=file) from None
    # ``index`` is a command, and a key of the system as well.
    named = [name for name in COMMANDS & document.keys() if isinstance(document[name], dict)]
    tables = {name: document.pop(name) for name in named}
    return _named(document, _Shared.model_fields, file), tables


def _named(table: dict[str, Any], fields: Fields, file: Path, where: str = "") -> dict[str, Any]:
    """Return the values of a table by the names of fields; paths start from the file's folder.

    Args:
        table: The table.
        fields: What its keys may be.
        file: The file.
        where: The table's name, for errors.

    Raises:
        DataError: a key is none of the fields'.
    """
    names = {key_of(name, field): name for name, field in fields.items()}
    values = {}
    for key, value in table.items():
        if key not in names:
            raise DataError(
                f"{where}has no key {key!r}; its keys are {', '.join(names)}", path=file
            )
        is_path = "Path" in str(fields[names[key]].annotation) and isinstance(value, str)
        values[names[key]] = file.parent / value if is_path else value
    return values
