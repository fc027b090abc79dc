"""Import of optional libraries, with a message that names the extra to install."""

from importlib import import_module
from typing import Any

from ctxguard.errors import MissingExtraError


def require(module: str, extra: str) -> Any:
    """Import an optional module.

    Args:
        module: Its import name, such as ``faiss``.
        extra: The extra of this distribution that brings it.

    Raises:
        MissingExtraError: it, or a library that it needs, is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtraError(error.name or module, extra) from error
