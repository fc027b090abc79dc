"""Commands from their settings: options from the fields, and keys of a file for the rest.

A command is a `SettingsModel` that can be called. Each field is an option, an argument, or a key of
the TOML file that ``--system`` names. The file describes the system at its top level, and each
command's own settings in the table of its name. An option wins over a key.
"""

import tomllib
from collections.abc import Collection, Mapping
from inspect import Parameter, Signature, cleandoc
from pathlib import Path
from types import MappingProxyType
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
from ctxguard.cli import COMMANDS, options_of_all
from ctxguard.cli._console import Command, Output, check_writable, print_labelled
from ctxguard.cli._system import SOURCES, System
from ctxguard.errors import ConfigurationError, DataError

Fields = Mapping[str, FieldInfo]

_SYSTEM = "system"
_CONTEXT = "typer_context"
"""The parameter that typer fills in; a setting may be called `context`."""
_MAX_TOML_BYTES = 2**20


class _WithFile(SettingsModel):
    system: Path | None = optional(
        "TOML file with the keys below, and options by their names; relative paths start from its "
        "folder. An option wins over a key.",
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
        context = given[_CONTEXT]
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
        for each, field in fields.items():
            if about(field)["writes"]:
                files = getattr(settings, each)
                flag = key_of(each, field) if each in in_file else flags_of(each, field)[0]
                shown = about(field)["metavar"] if about(field)["argument"] else flag
                for file in files if isinstance(files, list) else [files]:
                    check_writable(file, shown)
        settings(Output(as_json=getattr(settings, "as_json", False)))

    context = Parameter(_CONTEXT, Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters.insert(0, context)
    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    call.__doc__ = f"{summary}\n\n{cleandoc(model.__call__.__doc__ or '')}"
    about_command = {
        "words": words or name,
        "keys": _sections(in_file, name),
        "settings": fields,
        "of_system": fields.keys() & System.model_fields.keys(),
    }
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name, cls=type("Command", (Command,), about_command))(call)
    return alone


def _option(name: str, field: FieldInfo, *, in_file: bool = False) -> Parameter:
    """A field as a parameter that typer makes an option or an argument of.

    Args:
        name: The field's name.
        field: The field.
        in_file: Whether a file may give it, so that typer cannot tell that it is missing.
    """
    extra, bounds, kind = about(field), bounds_of(field), field.annotation
    item: Any = next(iter(get_args(kind)), None)
    if get_origin(item) is Annotated:  # a list whose items have a range
        kind = list[item.__origin__]
    if extra["argument"]:
        info: Any = typer.Argument(metavar=extra["metavar"], help=field.description)
    else:
        info = typer.Option(
            *flags_of(name, field),
            metavar=extra["metavar"],
            help=field.description,
            envvar=extra["env"],
            min=bounds.get("ge"),
            max=bounds.get("le"),
        )
    return Parameter(
        name,
        Parameter.KEYWORD_ONLY,
        default=_default(field, in_file=in_file and not extra["argument"]),
        annotation=Annotated[kind, info],
    )


def _default(field: FieldInfo, *, in_file: bool) -> Any:
    if field.is_required():
        return None if in_file else Parameter.empty
    return field.get_default(call_default_factory=True)


def _sections(keys: Fields, command: str) -> dict[str, list[tuple[str, str]]]:
    """The keys that a command reads, with their help, by table; the system's stand in none."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for name, field in sorted(keys.items(), key=lambda item: item[0] not in System.model_fields):
        table = "" if name in System.model_fields else command
        sections.setdefault(table, []).append((key_of(name, field), help_of(field)))
    return sections


def _settings_in(file: Path, command: str, fields: Fields) -> dict[str, Any]:
    """The settings of a command that a file holds.

    At its top level stands what several commands share: the system, and options but for those that
    name files to write. What another command alone knows is left to it.

    Raises:
        DataError: the file cannot be read, or it has a key that no command knows.
    """
    document, tables = _tables_of(file)
    shared = {
        name: field
        for name, field in fields.items()
        if name in System.model_fields or not (about(field)["key"] or about(field)["writes"])
    }
    own = {name: field for name, field in fields.items() if name not in System.model_fields}
    system = named(document, shared, file, others=_known(document))
    if _SYSTEM in fields:  # each file describes a candidate: its source is not the command's
        system = {name: value for name, value in system.items() if name not in SOURCES}
    else:
        _note_unused_source(system, command, fields)
    table = named(tables.get(command, {}), own, file, f"[{command}] ")
    return {**{name: value for name, value in system.items() if name in shared}, **table}


def _note_unused_source(system: Mapping[str, Any], command: str, fields: Fields) -> None:
    sources = [name for name in SOURCES if name in system]
    takes_several = len(fields.keys() & SOURCES) > 1
    if takes_several and sources and not fields.keys() & sources:
        key = key_of(sources[0], System.model_fields[sources[0]])
        print_labelled("note", "yellow", f"`ctxguard {command}` makes no use of {key}")


def _known(document: Mapping[str, Any]) -> dict[str, FieldInfo]:
    """The keys that may stand at the top of a file: the system's, and options of any command."""
    known = dict(System.model_fields)
    if not document.keys() <= {key_of(name, field) for name, field in known.items()}:
        known = options_of_all() | known
    return known


def read_system(file: Path) -> dict[str, Any]:
    """The settings of the system that a file describes.

    Raises:
        DataError: the file cannot be read, or it has a key that no command knows.
    """
    document, _ = _tables_of(file)
    found = named(document, System.model_fields, file, others=_known(document))
    return {name: value for name, value in found.items() if name in System.model_fields}


def _tables_of(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A file without its tables for single commands, and those."""
    document = read_toml(file)
    tables = {
        name: document.pop(name)
        for name in COMMANDS & document.keys()
        # ``ranker`` is a key of the system as well.
        if name not in System.model_fields or isinstance(document[name], dict)
    }
    return document, tables


def read_toml(file: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        DataError: it cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(read_regular(file, _MAX_TOML_BYTES).decode("utf-8"))
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=file) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"is no TOML: {error}", path=file) from None


def named(
    table: Mapping[str, Any],
    fields: Fields,
    file: Path,
    where: str = "",
    others: Fields = MappingProxyType({}),
) -> dict[str, Any]:
    """The values of a table by the names of fields; paths start from the file's folder.

    Args:
        table: The table.
        fields: What its keys may be.
        file: The file.
        where: The table's name, for errors.
        others: What its keys may be too, and what an error does not list.

    Raises:
        DataError: a key is none of the fields'.
    """
    if not isinstance(table, Mapping):
        raise DataError(f"{where}is no table", path=file)
    known = {**others, **fields}
    names = {key_of(name, field): name for name, field in known.items()}
    values = {}
    for key, value in table.items():
        if key not in names:
            listed = ", ".join(key_of(name, field) for name, field in fields.items())
            raise DataError(f"{where}has no key {key!r}; its keys are {listed}", path=file)
        is_path = "Path" in str(known[names[key]].annotation) and isinstance(value, str)
        values[names[key]] = file.parent / value if is_path else value
    return values
