"""Names of a package that are imported when they are first used."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, own: dict[str, Any], exports: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make ``__getattr__`` and ``__dir__`` of a package with these ``globals()``.

    ``exports`` has the names of each module, separated by spaces.
    """
    module_of = {name: module for module, names in exports.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = own[name] = getattr(import_module(module_of[name]), name)
        return value

    return get, lambda: sorted({*own, *module_of})
