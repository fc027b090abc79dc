"""Builds commands from their settings: options from the fields, and file keys for the rest.

A command is a `SettingsModel` that can be called. Each field is an option, an argument, or a key of
the TOML file that ``--system`` names, as `setting` says where the field stands. The system, its
profile and its store stand at the top of the file; settings of a single command in the table of its
name. An option wins over a key. Reads that file and the environment, and looks whether the files
to write can be written.
"""

import os
import tomllib
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo

from ctxguard._support.regular_file import read_regular
from ctxguard._support.settings import SettingsModel, about, flags_of, key_of, optional
from ctxguard.cli import COMMANDS, commands_of, nearest
from ctxguard.cli._console import Output
from ctxguard.cli._help import page
from ctxguard.cli._system import SOURCES, LabelledSystem, System
from ctxguard.errors import ConfigurationError, DataError
from ctxguard.server.settings import ServiceSettings
from ctxguard.server.system import AssessorSettings

_SYSTEM = "system"
_TABLES = {name.split()[-1] for name in COMMANDS}
_MAX_TOML_BYTES = 2**20
_SYSTEM_FIELDS = {**AssessorSettings.model_fields, **LabelledSystem.model_fields}
_TOP = _SYSTEM_FIELDS | {
    name: ServiceSettings.model_fields[name] for name in ("all_metrics", "profile", "store")
}
"""The keys at the top of a file, for the system, its profile and its store."""

_FILE: FieldInfo = optional(
    "TOML file with the keys that `ctxguard keys COMMAND` prints, and in the command's table "
    "options by their names; relative paths start from its folder. An option wins over a key.",
    "FILE",
)


def help_of(field: FieldInfo) -> str:
    """Return the help of a field, with its default and its range in words.

    >>> from ctxguard._support.settings import setting
    >>> help_of(setting("Seed.", ge=0, value=5)), help_of(setting("Share.", ge=0, le=1))
    ('Seed.  [default: 5; at least 0]', 'Share.  [0 to 1; required]')
    """
    extra = about(field)
    item = next(iter(get_args(field.annotation)), None)
    of_items = getattr(item, "__metadata__", None)  # of a list whose items have a range
    bounds = {
        kind: getattr(each, kind)
        for each in (of_items[0].metadata if of_items else field.metadata)
        for kind in ("ge", "gt", "le", "lt")
        if hasattr(each, kind)
    }
    default = None if field.is_required() else field.default
    shown = extra["default"] or getattr(default, "value", default)
    parts = [f"env var: {extra['env']}"] if extra["env"] else []
    parts += [f"default: {shown}"] if shown and shown is not True else []
    if {"ge", "le"} <= bounds.keys():
        parts.append(f"{bounds['ge']:g} to {bounds['le']:g}")
    else:
        words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
        parts += [f"{words[kind]} {bound:g}" for kind, bound in bounds.items()]
    parts += ["required"] * (field.is_required() and not extra["argument"])
    return f"{field.description}  [{'; '.join(parts)}]" if parts else str(field.description)


class Command:
    """A command made from its settings, which run it when called with an `Output`.

    Its help is the summary, and the docstring of that call.
    """

    def __init__(self, name: str, summary: str, model: type[SettingsModel]) -> None:
        self._name, self._summary, self._model = name, summary, model
        self._table = name.rsplit(maxsplit=1)[-1]
        self.fields = {name: field for name, field in model.model_fields.items() if about(field)}
        self.arguments = self._those("argument")
        self.keys = self._those("key")
        taken = self.arguments.keys() | self.keys.keys()
        self.options = {name: each for name, each in self.fields.items() if name not in taken}
        if self.keys:
            self.options.setdefault(_SYSTEM, _FILE)

    def _those(self, kind: str) -> dict[str, FieldInfo]:
        return {name: field for name, field in self.fields.items() if about(field)[kind]}

    def help(self) -> str:
        """Write its help."""
        shown = [about(field)["metavar"] for field in self.arguments.values()]
        options = []
        for name, field in self.options.items():
            words = [", ".join(sorted(flags_of(name, field), key=len)), about(field)["metavar"]]
            options.append((" ".join(filter(None, words)), help_of(field)))
        return page(
            " ".join([self._name, "[OPTIONS]", *shown]),
            [self._summary, *cleandoc(self._model.__call__.__doc__ or "").split("\n\n")],
            {
                "Arguments": zip(shown, map(help_of, self.arguments.values()), strict=True),
                "Options": [*options, ("--help", "Show this message and exit.")],
                "Commands": commands_of(self._name),
            },
        )

    def run(self, words: Sequence[str], output: Output) -> None:
        """Run the command with these arguments and options, or print its help."""
        end = words.index("--") if "--" in words else len(words)
        if "--help" in words[:end]:
            output.text(self.help())
        else:
            settings: Any = self._settings(words)
            settings(output)

    def _settings(self, words: Sequence[str]) -> SettingsModel:
        given = self._given(words)
        files = given.get(_SYSTEM, [])
        values: dict[str, Any] = {}
        for file in files if isinstance(files, list) else [files]:
            values |= self._in_file(Path(file))
        values |= {name: value for name, value in given.items() if name in self.fields}

        def called(name: str) -> str:
            """Write a field as its user would: as an option, a key, or the name of an argument."""
            field = self.fields.get(name)
            if field is None or name in self.arguments:
                return name
            return flags_of(name, field)[0] if name in given else key_of(name, field)

        for name, field in self.options.items():
            if field.is_required() and name not in values:
                flag, metavar = flags_of(name, field)[0], about(field)["metavar"]
                in_file = f", or {key_of(name, field)} in the --system file"
                by_key = in_file if _SYSTEM in self.options else ""
                raise ConfigurationError(f"give {flag} {metavar}{by_key}")
        for name in self._those("writes").keys() & values.keys():
            _check_writable(values[name], called(name))
        return self._model.named(values, called)

    def _given(self, words: Sequence[str]) -> dict[str, Any]:
        """Read the values of arguments, options and environment variables, as they were written."""
        parser = _Parser(add_help=False, allow_abbrev=False, argument_default=SUPPRESS)
        for name, field in self.arguments.items():
            nargs = "*" if get_origin(field.annotation) is list else None
            parser.add_argument(name, nargs=nargs, metavar=about(field)["metavar"])
        for name, field in self.options.items():
            is_list = get_origin(field.annotation) is list
            action = "store_true" if field.annotation is bool else "append" if is_list else "store"
            parser.add_argument(*flags_of(name, field), dest=name, action=action)
        known, unknown = parser.parse_known_args(list(words))
        if unknown:
            raise ConfigurationError(self._unknown(unknown[0].partition("=")[0]))
        by_variable = {
            name: os.environ[variable]
            for name, field in self.options.items()
            if os.environ.get(variable := about(field)["env"] or "")
        }
        return {**by_variable, **vars(known)}

    def _unknown(self, word: str) -> str:
        """Suggest an alternative to an option or argument that the command lacks."""
        if not word.startswith("-"):
            return f"there is no argument for {word!r}; see ctxguard {self._name} --help"
        if word.lstrip("-") in [key_of(*each) for each in self.keys.items()]:
            return f"{word} is a key, not an option: write it into the --system file"
        flags = [flag for each in self.options.items() for flag in flags_of(*each)]
        meant = nearest(word, flags) or f"; see ctxguard {self._name} --help"
        return f"there is no option {word}{meant}"

    def _in_file(self, file: Path) -> dict[str, Any]:
        """Read the settings that a file holds."""
        top, tables = read_file(file)
        own = {name: each for name, each in self.fields.items() if name not in _SYSTEM_FIELDS}
        table = _named(tables.get(self._table, {}), own, file, f"[{self._table}] ")
        if _SYSTEM in self.fields:  # a command of several systems, which opens each by itself
            of_each = (SOURCES.keys() | System.model_fields.keys() | {"profile"}) - {"depth"}
            top = {name: value for name, value in top.items() if name not in of_each}
        taken = {
            name: value
            for name, value in top.items()
            if name in self.fields and not about(self.fields[name])["own"]
        }
        return taken | table

    def sections(self) -> dict[str, list[tuple[str, str]]]:
        """List the command's keys with their help, by table; the unnamed table is the system's."""
        found: dict[str, list[tuple[str, str]]] = {}
        for name, field in self.keys.items():
            table = "" if name in _SYSTEM_FIELDS else self._table
            found.setdefault(table, []).append((key_of(name, field), help_of(field)))
        return found


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        missing = message.removeprefix("the following arguments are required: ")
        raise ConfigurationError(
            message.removeprefix("argument ") if missing == message else f"give {missing}"
        )


def _check_writable(files: Any, called: str) -> None:
    """Refuse a file that cannot be written, before any work is done."""
    for file in files if isinstance(files, list) else [files]:
        if not isinstance(file, str | Path):
            continue  # validation names what it is
        if Path(file).is_dir():
            raise ConfigurationError(f"{called} {file}: is a directory; name a file")
        if Path(file).exists() and not os.access(file, os.W_OK):
            raise ConfigurationError(f"{called} {file}: is not writable; name another file")


def read_file(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the top of a file (the system, its profile and its store), and the tables of commands.

    The top is keyed by field names; a table stays as it is written.
    """
    try:
        document = tomllib.loads(read_regular(file, _MAX_TOML_BYTES).decode("utf-8"))
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=file) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not TOML: {error}", path=file) from None
    # ``index`` is a command, and a key of the system as well.
    named = [name for name in _TABLES & document.keys() if isinstance(document[name], dict)]
    tables = {name: document.pop(name) for name in named}
    return _named(document, _TOP, file), tables


def _named(
    table: dict[str, Any], fields: dict[str, FieldInfo], file: Path, where: str = ""
) -> dict[str, Any]:
    """Return a table's values by the names of fields; paths are relative to the file's folder."""
    names = {key_of(name, field): name for name, field in fields.items()}
    values = {}
    for key, value in table.items():
        if key not in names:
            meant = nearest(key, names)
            raise DataError(
                f"{where}has no key {key!r}{meant or '; its keys are ' + ', '.join(names)}",
                path=file,
            )
        is_path = "Path" in str(fields[names[key]].annotation)
        values[names[key]] = _placed(value, file.parent) if is_path else value
    return values


def _placed(value: Any, folder: Path) -> Any:
    """Resolve a path, or each in a list, against a folder; leave other values to validation."""
    if isinstance(value, list):
        return [_placed(each, folder) for each in value]
    return folder / value if isinstance(value, str) else value
