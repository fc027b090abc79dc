"""Settings as typed fields: each has its default, its range and its help in one place.

`ctxguard.cli._settings` makes options of the fields, and keys of a settings file. Pure; a class of
settings gets its fields into its docstring when it is defined.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from ctxguard._support.error_text import reason_of
from ctxguard.errors import ConfigurationError, CtxguardError

_MAX_SHOWN_CHARACTERS = 80


def setting(
    help: str,  # noqa: A002 - as an option calls it
    metavar: str | None = None,
    *flags: str,
    default: str | None = None,
    env: str | None = None,
    key: bool = False,
    own: bool = False,
    argument: bool = False,
    writes: bool = False,
    value: Any = ...,
    **constraints: Any,
) -> Any:
    """Describe a field of `SettingsModel`: its value, or metadata in ``Annotated``.

    Args:
        help: Its meaning, for people.
        metavar: Its value in one word; None for a switch.
        flags: Names of its option, in place of one made from the field's name.
        default: Its default in words, where that is not the field's own.
        env: Environment variable that gives it.
        key: Whether it stands in a settings file only, and is not an option.
        own: Whether the top of a settings file, which all commands read, does not give it.
        argument: Whether it is a positional argument.
        writes: Whether it names files to write, which is tried before the work.
        value: Its default, copied for each model; none unless given, so that it is required.
        **constraints: Range (``ge``, ``gt``, ``le``, ``lt``) and ``repr``, as pydantic takes them.
    """
    extra: dict[str, Any] = {
        "metavar": metavar,
        "flags": flags,
        "default": default,
        "env": env,
        "key": key,
        "own": own,
        "argument": argument,
        "writes": writes,
    }
    if value is not ...:
        constraints["default"] = value
    return Field(description=help, json_schema_extra=extra, **constraints)


optional = partial(setting, value=None)
"""Describe a field that is None unless it is given; see `setting`."""
key = partial(setting, key=True)
"""Describe a field that stands in a settings file only."""
optional_key = partial(optional, key=True)
"""Describe a field of a settings file that is None unless it is given."""


class SettingsModel(BaseModel):
    """Frozen settings whose fields `setting` describes.

    Raises:
        ConfigurationError: a setting is out of range or unknown, or two contradict each other.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        defer_build=True,
        hide_input_in_errors=True,
    )

    if not TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            self._validate(values)

    @classmethod
    def named(cls, values: Mapping[str, Any], name_of: Callable[[str], str]) -> Self:
        """Make settings whose errors name fields by ``name_of``, such as ``--serving-k``."""
        made = cls.__new__(cls)
        made._validate(values, name_of)
        return made

    def _validate(self, values: Mapping[str, Any], name_of: Callable[[str], str] = str) -> None:
        try:
            self.__pydantic_validator__.validate_python(values, self_instance=self)
        except ValidationError as error:
            raise _in_words(error, type(self), name_of) from None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Add the fields and their help to the docstring."""
        super().__pydantic_init_subclass__(**kwargs)
        lines = [f"    {name}: {field.description}" for name, field in cls.model_fields.items()]
        cls.__doc__ = "\n".join([cls.__doc__ or "", "", "Attributes:", *lines])


def about(field: FieldInfo) -> dict[str, Any]:
    """Return the description of a field by `setting`; empty if it has none."""
    extra = field.json_schema_extra
    return extra if isinstance(extra, dict) else {}


def flags_of(name: str, field: FieldInfo) -> tuple[str, ...]:
    """Return the names of a field's option, such as ``--rerank-model``."""
    return about(field)["flags"] or (f"--{name.replace('_', '-')}",)


def key_of(name: str, field: FieldInfo) -> str:
    """Return the name of a field in a settings file: that of its option, without dashes."""
    return max(flags_of(name, field), key=len).lstrip("-")


def _in_words(
    error: ValidationError, model: type[BaseModel], name_of: Callable[[str], str]
) -> CtxguardError:
    """Convert pydantic's first error to one with the field, the reason, and the value if short."""
    fault = error.errors(include_url=False)[0]
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, CtxguardError):
        return cause
    first, *rest = fault["loc"] or (model.__name__,)
    name = ".".join([name_of(str(first)), *map(str, rest)])
    field = model.model_fields.get(str(first))
    value = repr(fault["input"])
    if field is not None and field.repr and len(value) <= _MAX_SHOWN_CHARACTERS:
        name = f"{name} {value}"
    reason = reason_of(fault["msg"].removeprefix("Input "))
    return ConfigurationError(f"{name}: {reason[:1].lower()}{reason[1:]}")
