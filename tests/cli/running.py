"""What a finished command leaves, and what runs one: the types of the fixtures here."""

import json
from collections.abc import Callable
from typing import Any, Protocol


class Result(Protocol):
    """What a finished command left."""

    @property
    def exit_code(self) -> int: ...
    @property
    def stdout(self) -> str: ...
    @property
    def stderr(self) -> str: ...


Run = Callable[..., Result]


def as_toml(document: dict[str, Any]) -> str:
    """A document of values and of tables of values as TOML."""
    own = [f"{key} = {json.dumps(each)}" for key, each in document.items() if not _is_table(each)]
    tables = [f"[{key}]\n{as_toml(each)}" for key, each in document.items() if _is_table(each)]
    return "\n".join([*own, *tables])


def _is_table(value: object) -> bool:
    return isinstance(value, dict)
