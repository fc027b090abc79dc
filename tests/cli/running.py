"""What a finished command leaves, and what runs one: the types of the fixtures here."""

from collections.abc import Callable
from typing import Protocol


class Result(Protocol):
    """What a finished command left."""

    @property
    def exit_code(self) -> int: ...
    @property
    def stdout(self) -> str: ...
    @property
    def stderr(self) -> str: ...


Run = Callable[..., Result]
