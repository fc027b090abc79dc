"""Another project's distribution, ``ctxguard``, that installs the same import name and command."""

from importlib.metadata import PackageNotFoundError, distribution

_FOREIGN = "ctxguard"
"""Ours is ``ctxguard-rag``."""


def foreign_distribution() -> str | None:
    """Describe a clash with the other distribution and how to end it; None without one.

    Both write into one folder, so whichever was installed last has replaced files of the other, and
    removing either takes files of both away.
    """
    try:
        found = distribution(_FOREIGN)
    except PackageNotFoundError:
        return None
    from ctxguard._support.extras import installed_from

    return (
        f"{_FOREIGN} {found.version} is installed, which is another project with the same import "
        "name: files of the two have replaced each other. Mend it: pip uninstall ctxguard, then "
        f'pip install --force-reinstall --no-deps "{installed_from()[0]}"'
    )
