"""The demonstration corpus: the docstrings of the Python standard library.

One passage per documented public module, class, function, method and property of `MODULES`, read
from the running interpreter, so nothing is downloaded and nothing is bundled. The corpus therefore
differs a little between Python versions and platforms; most names are shared.

An object that several listed modules export is listed under the module whose name is the longest
prefix of the object's ``__module__``, else under the first in `MODULES`. Of two names for one
object in the same module, the first one listed there is used. A function that is also a method
(``random.choice`` is ``random.Random.choice``) is listed as the function. Builtin classes belong to
no module and are left out.

A member is listed under the public class that defines it. A member inherited from a base that is
not in the corpus and only implements the class is listed under the class: ``_socket.socket.bind``
is ``socket.socket.bind``.

Under ``python -OO`` there are no docstrings to read.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Final, TypeAlias

from ctxguard.core.types import Passage

# Present in every build on every platform from 3.11 to 3.13, and not deprecated.
_MODULE_NAMES: Final = """
argparse ast asyncio base64 bisect calendar collections collections.abc concurrent.futures
configparser contextlib copy csv dataclasses datetime decimal difflib email.message enum fractions
functools glob gzip hashlib heapq hmac html http.client http.server importlib inspect io ipaddress
itertools json logging logging.handlers math multiprocessing operator os os.path pathlib pickle
queue random re secrets shlex shutil signal smtplib socket socketserver sqlite3 statistics string
struct subprocess sys tarfile tempfile textwrap threading time timeit traceback types typing
unittest unittest.mock urllib.parse urllib.request uuid warnings weakref xml.etree.ElementTree
zipfile zoneinfo
"""
MODULES: Final = tuple(_MODULE_NAMES.split())

MAX_CHARACTERS: Final = 1000
"""Longest text of a passage in characters; a longer one is cut after a line or sentence."""

# `socket.socket` inherits its documentation from this alias, which users do not write.
_HIDDEN: Final = frozenset({"socket.SocketType"})

# Docstrings without content, of namesakes of documented objects.
_BOILERPLATE: Final = (
    "Alias for field number",
    "A generic version of",
    "An enumeration.",
    "The base class of the class hierarchy.",
    "Deprecated AST node class",
)


Export: TypeAlias = tuple[str, str, object]
"""The module that lists an object, its name there, and the object."""


class _Elided:
    def __repr__(self) -> str:
        return "..."


def passages() -> Iterator[Passage]:
    """Yield the corpus, in the same order at every call on the same interpreter.

    Modules come in the order of `MODULES`; in each, the module itself, then its exports in the
    order it lists them, each class followed by its members in the order they are defined.

    Yields:
        One passage per documented public object. Its id is the name that a user writes, such as
        ``asyncio.Queue.get``; its title adds the kind; its text is the signature, if Python knows
        it, and the docstring, at most `MAX_CHARACTERS` characters.
    """
    modules = {name: importlib.import_module(name) for name in MODULES}
    exports = _owned_exports(modules)
    values = [value for owned in exports.values() for _, _, value in owned]
    public = {value for value in values if isinstance(value, type)}
    seen = {id(_identity(value)) for value in values}
    for module_name, module in modules.items():
        yield from _passage(module_name, "module", "", module.__doc__)
        for _, name, value in exports[module_name]:
            qualified_name = f"{module_name}.{name}"
            if isinstance(value, type):
                lineage = _lineage(value, public)
                yield from _describe_class(qualified_name, value, lineage)
                yield from _members(qualified_name, value, lineage, seen)
            else:
                yield from _describe(qualified_name, value)


def _owned_exports(modules: dict[str, types.ModuleType]) -> dict[str, list[Export]]:
    """Return each module's own exports, every object under exactly one module and name."""
    claims: dict[int, list[Export]] = {}
    for module_name, module in modules.items():
        for name, value in _exported(module):
            claims.setdefault(id(_identity(value)), []).append((module_name, name, value))
    owned: dict[str, list[Export]] = {name: [] for name in modules}
    for claim in claims.values():
        # `max` keeps the first of equals, which is the order of `MODULES` and of `__all__`.
        owner = max(claim, key=lambda export: _shared_prefix(modules[export[0]], export[2]))
        owned[owner[0]].append(owner)
    return owned


def _shared_prefix(module: types.ModuleType, value: object) -> int:
    """Return the length of the prefix of the object's ``__module__`` that the name covers."""
    home = f"{getattr(value, '__module__', '')}."
    return len(module.__name__) if home.startswith(f"{module.__name__}.") else 0


def _exported(module: types.ModuleType) -> Iterator[tuple[str, object]]:
    listed: Iterable[str] | None = getattr(module, "__all__", None)
    names = list(vars(module)) if listed is None else list(listed)
    for name in names:
        if name.startswith("_") or f"{module.__name__}.{name}" in _HIDDEN:
            continue
        # `concurrent.futures` lists names that only its module-level `__getattr__` can provide.
        value = vars(module)[name] if name in vars(module) else getattr(module, name)
        # `sys` keeps what it had at first of the hooks that programs replace, such as typer.
        value = vars(module).get(f"__{name}__", value) if module is sys else value
        if inspect.ismodule(value) or _is_builtin_class(value) or _is_foreign(value):
            continue
        if listed is None and not _is_home_of(module, value):
            continue
        yield name, value


def _is_foreign(value: object) -> bool:
    """Tell whether another library added the object, such as a method of loggers."""
    home = getattr(value, "__module__", None)
    return isinstance(home, str) and home.partition(".")[0] not in sys.stdlib_module_names


def _is_builtin_class(value: object) -> bool:
    return isinstance(value, type) and vars(builtins).get(value.__name__) is value


def _is_home_of(module: types.ModuleType, value: object) -> bool:
    """Tell whether a module without ``__all__`` defines the object rather than imports it."""
    accelerator = f"_{module.__name__}"
    return _shared_prefix(module, value) > 0 or getattr(value, "__module__", None) == accelerator


def _identity(value: object) -> object:
    """Return the function behind a bound, static or class method; any other object unchanged."""
    if isinstance(value, types.MethodType | staticmethod | classmethod):
        return value.__func__
    if isinstance(value, types.BuiltinMethodType):
        bound_to = value.__self__
        if bound_to is not None and not isinstance(bound_to, types.ModuleType | type):
            return getattr(type(bound_to), value.__name__, value)
    return value


def _describe(qualified_name: str, value: object) -> Iterator[Passage]:
    """Yield the passage of an export that is not a class; nothing for a constant."""
    docstring = getattr(value, "__doc__", None)
    if inspect.isroutine(value) or hasattr(value, "__wrapped__"):
        yield from _passage(qualified_name, "function", _signature(value), docstring)
    elif docstring != type(value).__doc__:
        # `typing.Optional` and the like; a mere constant has only its type's docstring.
        yield from _passage(qualified_name, "object", "", docstring)


def _lineage(owner: type, public: set[type]) -> list[type]:
    """Return the class and those of its bases that belong to it and to no public base."""
    bases = owner.__mro__[1:]
    elsewhere = {part for base in bases if base in public for part in base.__mro__}
    own_bases = [base for base in bases if base not in elsewhere and _implements(base, owner)]
    return [owner, *own_bases]


def _implements(base: type, owner: type) -> bool:
    """Tell whether a base is private or of the same package, and thus no class in its own right."""
    path = base.__module__.split(".")
    return (
        base.__name__.startswith("_")
        or any(part.startswith("_") for part in path)
        or path[0] == owner.__module__.split(".")[0]
    )


def _describe_class(qualified_name: str, owner: type, lineage: list[type]) -> Iterator[Passage]:
    class_docstring = _first_docstring(vars(part).get("__doc__") for part in lineage)
    if _is_autogenerated(owner.__name__, class_docstring):
        return
    # If the constructor has a docstring, its arguments are explained there.
    constructors = (vars(part).get("__init__") for part in lineage)
    constructor_docstring = _first_docstring(
        constructor.__doc__ for constructor in constructors if inspect.isfunction(constructor)
    )
    docstring = "\n\n".join(filter(None, (class_docstring, constructor_docstring)))
    yield from _passage(qualified_name, "class", _signature(owner), docstring)


def _first_docstring(docstrings: Iterable[object]) -> str:
    texts = (inspect.cleandoc(docstring) for docstring in docstrings if isinstance(docstring, str))
    return next(texts, "")


def _is_autogenerated(class_name: str, docstring: str) -> bool:
    """Tell whether the docstring only repeats the constructor, as for named tuples and nodes."""
    return re.fullmatch(rf"{re.escape(class_name)}(\([^()]*\))?", docstring) is not None


def _members(
    class_name: str, owner: type, lineage: list[type], seen: set[int]
) -> Iterator[Passage]:
    """Yield the class's documented members, adding each to `seen`."""
    overridden: set[str] = set()
    for part in owner.__mro__:
        for name, value in vars(part).items():
            if name in overridden:
                continue
            overridden.add(name)
            identity = _identity(value)
            if part not in lineage or name.startswith("_") or id(identity) in seen:
                continue
            if _is_foreign(identity):
                continue
            kind, signature = _member_kind(owner, name, value)
            if not kind:
                continue
            seen.add(id(identity))
            docstring = getattr(identity, "__doc__", None)
            yield from _passage(f"{class_name}.{name}", kind, signature, docstring)


def _member_kind(owner: type, name: str, value: object) -> tuple[str, str]:
    """Return the member's kind and signature, or two empty strings for a constant."""
    if isinstance(value, staticmethod):
        return "static method", _signature(value.__func__)
    if isinstance(value, classmethod | types.ClassMethodDescriptorType):
        return "class method", _signature(getattr(owner, name))
    if isinstance(value, property | cached_property) or inspect.isdatadescriptor(value):
        return "property", ""
    if inspect.isroutine(value):
        return "method", _signature(value, bound=True)
    return "", ""


def _signature(value: object, *, bound: bool = False) -> str:
    """Return the call signature as written by a caller, or "" if Python does not know it.

    Args:
        value: A callable.
        bound: Whether to leave out the first parameter, which is ``self``.
    """
    if not callable(value):
        return ""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = [_printable(parameter) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=parameters[1:] if bound else parameters))


def _printable(parameter: inspect.Parameter) -> inspect.Parameter:
    """Elide a default like ``<object object at 0x7f...>``, which changes with every run."""
    default = parameter.default
    if default is inspect.Parameter.empty or "<" not in repr(default):
        return parameter
    return parameter.replace(default=_Elided())


def _passage(
    qualified_name: str, kind: str, signature: str, docstring: object
) -> Iterator[Passage]:
    """Yield the passage; nothing if there is no docstring with content."""
    if not isinstance(docstring, str):
        return
    described = inspect.cleandoc(docstring).strip()
    if not described or described.startswith(_BOILERPLATE):
        return
    text = f"{qualified_name}{signature}\n\n{described}" if signature else described
    yield Passage(qualified_name, _cut(text), f"{qualified_name} ({kind})")


def _cut(text: str) -> str:
    """Cut a text longer than `MAX_CHARACTERS` after its last whole line, sentence or word."""
    if len(text) <= MAX_CHARACTERS:
        return text
    head = text[: MAX_CHARACTERS + 1]
    for boundary, kept in (("\n", 0), (". ", 1), (" ", 0)):
        # A boundary in the first half would throw away more than it tidies.
        if (end := head.rfind(boundary)) > MAX_CHARACTERS // 2:
            return head[: end + kept].rstrip()
    return text[:MAX_CHARACTERS]
