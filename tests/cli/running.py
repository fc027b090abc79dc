"""What a finished command leaves, and what runs one: the types of the fixtures here."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ctxguard.cli import COMMANDS, named
from tests.command import Invoked as Result
from tests.command import invoke


def ok(result: Result) -> Result:
    """A command that must have succeeded."""
    assert result.exit_code == 0, result.stderr
    return result


def read(result: Result) -> Any:
    """The JSON document of a command that must have succeeded, in the one style of all."""
    document = json.loads(ok(result).stdout)
    assert all(re.fullmatch("[a-z0-9_]+", key) for key in document)
    assert isinstance(document.get("notes", []), list)
    for each in _objects(document):
        if {"lower", "upper"} & set(each):
            assert {"value", "lower", "upper"} <= set(each)
            assert (each["lower"] is None) is (each["upper"] is None)
    return document


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            yield from _objects(inner)


def refused(result: Result, *said: str) -> Result:
    """A command that must have refused its input, and said all this."""
    assert result.exit_code == 2, result.stdout
    for words in said:
        assert words in " ".join(result.stderr.split())
    return result


def figures(document: dict[str, Any], policy: str | None = None) -> dict[str, dict[str, Any]]:
    """Rows of the table of results by metric: of a policy, or of the last one."""
    rows = document["results"]["rows"]
    policy = rows[-1]["policy"] if policy is None else policy
    return {row["metric"]: row for row in rows if row["policy"] == policy}


def every_command() -> dict[str, Any]:
    """The commands, by the words that name them."""
    return {name: named(name) for name in COMMANDS}


class Run:
    """Runs the command line in this process; whatever happens, no traceback may be shown.

    Args:
        folder: Makes a new folder for the file that ``system`` is written to.
    """

    def __init__(self, folder: Callable[[str], Path]) -> None:
        self._folder = folder

    def __call__(
        self, *arguments: object, columns: str = "100", system: dict[str, Any] | None = None
    ) -> Result:
        if system is not None:
            file = self._folder("system") / "system.toml"
            file.write_text(as_toml(system), encoding="utf-8")
            arguments = (*arguments, "--system", file)
        result = invoke(arguments, columns)
        assert "Traceback" not in result.output
        assert result.exception is None, result.exception
        return result

    def ok(self, *arguments: object, **options: Any) -> Result:
        return ok(self(*arguments, **options))

    def read(self, *arguments: object, **options: Any) -> Any:
        """Run a command that must succeed, and return its JSON document."""
        return read(self(*arguments, "--json", **options))

    def refused(self, *arguments: object, says: str | Sequence[str] = (), **options: Any) -> Result:
        return refused(self(*arguments, **options), *([says] if isinstance(says, str) else says))

    def finding(self, *arguments: object, says: str | Sequence[str] = (), **options: Any) -> Result:
        """Run a command that must end with a finding, and say all this."""
        result = self(*arguments, **options)
        assert result.exit_code == 1, result.output
        for words in [says] if isinstance(says, str) else says:
            assert words in " ".join(result.output.split())
        return result


def as_toml(document: dict[str, Any]) -> str:
    """A document of values and of tables of values as TOML."""
    own = [f"{key} = {json.dumps(each)}" for key, each in document.items() if not _is_table(each)]
    tables = [f"[{key}]\n{as_toml(each)}" for key, each in document.items() if _is_table(each)]
    return "\n".join([*own, *tables])


def _is_table(value: object) -> bool:
    return isinstance(value, dict)
