"""The names of a settings field: as an option, as a key of a file, and in help."""

from typing import get_args

from pydantic.fields import FieldInfo

from ctxguard._support.settings import about


def flags_of(name: str, field: FieldInfo) -> tuple[str, ...]:
    """Return the names of a field's option, such as ``--rerank-model``."""
    return about(field)["flags"] or (f"--{name.replace('_', '-')}",)


def key_of(name: str, field: FieldInfo) -> str:
    """Return the name of a field in a settings file: that of its option, without dashes."""
    return max(flags_of(name, field), key=len).lstrip("-")


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
