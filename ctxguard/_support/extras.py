"""Imports optional libraries, and names the command that installs a missing one.

A checkout has no release to install from, so the command names the source of this installation.
Reads the metadata of installed distributions, and on import tells onnxruntime, by the environment,
to report nothing.
"""

import json
import os
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ctxguard.errors import MissingExtraError

_NAME = "ctxguard-rag"
_FOREIGN = "ctxguard"
"""Another project's distribution, which installs the same import name and command."""
_ABOVE_PACKAGE = Path(__file__).parents[2]

# onnxruntime, which reading documents brings too, reports to its makers unless it finds this set.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def require(module: str, extra: str) -> Any:
    """Import an optional module that this extra installs.

    Raises:
        MissingExtraError: it, or a library that it needs, is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtraError(error.name or module, extra, install_line(extra)) from error


def install_line(extras: str) -> str:
    """Return the command that adds extras, separated by commas, to this installation."""
    source, constraints = installed_from()
    name, at, url = source.partition(" @ ")
    return f'pip install {constraints}"{name}[{extras}]{at}{url}"'


@cache
def installed_from() -> tuple[str, str]:
    """Return pip's source of this distribution, and the option that pins versions."""
    try:
        origin = json.loads(distribution(_NAME).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {"url": _ABOVE_PACKAGE.as_uri()} if _is_checkout(_ABOVE_PACKAGE) else {}
    url = str(origin.get("url", ""))
    if "vcs_info" in origin:
        return f"{_NAME} @ {origin['vcs_info']['vcs']}+{url}", ""
    if url.startswith("file:"):
        path = Path(unquote(urlsplit(url).path))
        if path.suffix == ".whl" or _is_checkout(path):
            fixed = path / "constraints.txt"
            return str(path), f'-c "{fixed}" ' if fixed.is_file() else ""
    return _NAME, ""


def _is_checkout(folder: Path) -> bool:
    return (folder / "pyproject.toml").is_file()


def foreign_distribution() -> str | None:
    """Describe a clash with the other distribution and how to resolve it; None if there is none.

    Both write into one folder, so whichever was installed last has replaced files of the other, and
    removing either takes files of both away.
    """
    try:
        found = distribution(_FOREIGN)
    except PackageNotFoundError:
        return None
    return (
        f"{_FOREIGN} {found.version} is installed, which is another project with the same import "
        "name: files of the two have replaced each other. Mend it: pip uninstall ctxguard, then "
        f'pip install --force-reinstall --no-deps "{installed_from()[0]}"'
    )
