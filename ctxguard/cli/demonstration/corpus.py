"""The demonstration corpus: the docstrings of the Python standard library.

One passage per documented public module, class, function, method and property of `MODULES`, read
from the running interpreter: nothing is downloaded or bundled, and Python versions and platforms
differ a little. Under ``python -OO`` there are no docstrings to read.

An object that several listed modules export is listed under the first in `MODULES`. A function that
is also a method (``random.choice`` is ``random.Random.choice``) is listed as the function. A member
is listed under the class that defines it; one of a private base or of C under the class that users
know: ``_socket.socket.bind`` is ``socket.socket.bind``. Builtin classes belong to no module and are
left out. Imports these modules; touches nothing else.
"""

import builtins
import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterator
from typing import Final

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
"""Longest text of a passage in characters; a longer one is cut after a line."""

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


def passages() -> Iterator[Passage]:
    """Yield the corpus, in the same order at every call on the same interpreter.

    A passage's id is the name that a user writes, such as ``asyncio.Queue.get``; its title adds the
    kind; its text is the signature, if Python knows it, and the docstring.
    """
    modules = {name: importlib.import_module(name) for name in MODULES}
    exports = {name: list(_exported(name, module)) for name, module in modules.items()}
    values = [value for of_module in exports.values() for _, value in of_module]
    public = {value for value in values if isinstance(value, type)}
    known, listed = {id(_function(value)) for value in values}, set[int]()
    for module_name, module in modules.items():
        yield from _passage(module_name, "module", "", module.__doc__)
        for own_name, value in exports[module_name]:
            name, identity = f"{module_name}.{own_name}", id(_function(value))
            if identity in listed:
                continue
            listed.add(identity)
            if isinstance(value, type):
                lineage = _lineage(value, public)
                yield from _class(name, value, lineage)
                for member, kind in _members(value, lineage):
                    function = _function(member.object)
                    if id(function) not in known:
                        known.add(id(function))
                        signature = ""
                        if kind != "property":
                            of_class = getattr(value, member.name)
                            signature = _signature(of_class, is_method=kind == "method")
                        docstring = getattr(function, "__doc__", None)
                        yield from _passage(f"{name}.{member.name}", kind, signature, docstring)
            elif inspect.isroutine(value) or hasattr(value, "__wrapped__"):
                yield from _passage(name, "function", _signature(value), value.__doc__)
            elif value.__doc__ != type(value).__doc__:
                # `typing.Optional` and the like; a mere constant has only its type's docstring.
                yield from _passage(name, "object", "", value.__doc__)


def _exported(name: str, module: types.ModuleType) -> Iterator[tuple[str, object]]:
    """Yield the public names of a module: those it lists, or else those it defines."""
    listed = getattr(module, "__all__", None)
    for attribute in listed or vars(module):
        value = getattr(module, attribute)
        # `sys` keeps what it had at first of the hooks that programs replace, such as typer.
        value = vars(module).get(f"__{attribute}__", value) if module is sys else value
        is_own = getattr(value, "__module__", None) in (name, f"_{name}")
        is_builtin = isinstance(value, type) and vars(builtins).get(value.__name__) is value
        is_public = not attribute.startswith("_") and f"{name}.{attribute}" not in _HIDDEN
        is_left_out = is_builtin or inspect.ismodule(value) or _is_foreign(value)
        if is_public and not is_left_out and (listed or is_own):
            yield attribute, value


def _is_foreign(value: object) -> bool:
    """Return whether another library added the object, such as a method of loggers."""
    home = getattr(value, "__module__", None)
    return isinstance(home, str) and home.partition(".")[0] not in sys.stdlib_module_names


def _function(value: object) -> object:
    """Return the function behind a bound, static or class method; any other object unchanged."""
    if isinstance(value, types.MethodType | staticmethod | classmethod):
        return value.__func__
    if isinstance(value, types.BuiltinMethodType):
        bound_to = value.__self__
        if bound_to is not None and not isinstance(bound_to, types.ModuleType | type):
            return getattr(type(bound_to), value.__name__, value)
    return value


def _lineage(owner: type, public: set[type]) -> list[type]:
    """Return the class and its private or same-package bases, except those of a public base."""
    bases = owner.__mro__[1:]
    elsewhere = {part for base in bases if base in public for part in base.__mro__}
    lineage, package = [owner], owner.__module__.split(".")[0]
    for base in bases:
        path = [*base.__module__.split("."), base.__name__]
        is_private = any(part.startswith("_") for part in path)
        if base not in elsewhere and (is_private or path[0] == package):
            lineage.append(base)
    return lineage


def _members(owner: type, lineage: list[type]) -> Iterator[tuple[inspect.Attribute, str]]:
    """Yield the public members that the lineage defines, with their kinds; no constants."""
    by_name = {each.name: each for each in inspect.classify_class_attrs(owner)}
    # In the order in which they are defined.
    names = dict.fromkeys(name for part in owner.__mro__ for name in vars(part))
    for each in filter(None, map(by_name.get, names)):
        kind, value = str(each.kind), each.object
        if inspect.isdatadescriptor(value):
            kind = "property"
        is_own = each.defining_class in lineage and not _is_foreign(_function(value))
        if is_own and kind != "data" and not each.name.startswith("_"):
            yield each, kind


def _class(full: str, owner: type, lineage: list[type]) -> Iterator[Passage]:
    """Yield the passage of a class, with its constructor's docstring, which explains arguments."""
    own = next(filter(None, (_cleaned(vars(part).get("__doc__")) for part in lineage)), "")
    # As of named tuples and of nodes, which only repeat the constructor.
    if re.fullmatch(rf"{re.escape(owner.__name__)}(\([^()]*\))?", own):
        return
    constructors = [vars(part).get("__init__") for part in lineage]
    explained = [_cleaned(each.__doc__) for each in constructors if inspect.isfunction(each)]
    more = next(filter(None, explained), "")
    yield from _passage(full, "class", _signature(owner), "\n\n".join(filter(None, (own, more))))


def _signature(value: object, *, is_method: bool = False) -> str:
    """Return the call signature without a method's ``self``; "" if it is unknown."""
    try:
        signature = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    own = list(signature.parameters.values())[is_method:]
    # A default like ``<object object at 0x7f...>`` changes with every run.
    return re.sub(
        r"['\[]?<(?:[^<>]|<[^<>]*>)*>['\]]?", "...", str(signature.replace(parameters=own))
    )


def _cleaned(docstring: object) -> str:
    return inspect.cleandoc(docstring) if isinstance(docstring, str) else ""


def _passage(full: str, kind: str, signature: str, docstring: object) -> Iterator[Passage]:
    """Yield the passage; yield nothing if its docstring is missing or empty."""
    described = _cleaned(docstring).strip()
    if described and not described.startswith(_BOILERPLATE):
        text = f"{full}{signature}\n\n{described}" if signature else described
        if len(text) > MAX_CHARACTERS:
            text = text[: text.rfind("\n", 0, MAX_CHARACTERS + 1)].rstrip()
        yield Passage(full, text, f"{full} ({kind})")
