"""The URL of an index in an engine: where the engine is, and the index's name there."""

import os
import re
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol, cast
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from ctxguard.errors import ConfigurationError
from ctxguard.integrations.engines.engine import Engine, IndexSettings

DEFAULT_NAME = "ctxguard"
KEY_VARIABLE = "CTXGUARD_ENGINE_KEY"

_ENGINES = {
    "postgresql": "ctxguard.integrations.engines.postgresql:PostgresEngine",
    "qdrant": "ctxguard.integrations.engines.qdrant:QdrantEngine",
    "qdrant+https": "ctxguard.integrations.engines.qdrant:QdrantEngine",
    "milvus": "ctxguard.integrations.engines.milvus:MilvusEngine",
    "milvus+https": "ctxguard.integrations.engines.milvus:MilvusEngine",
}
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,47}")


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an index is.

    ``SCHEME://[USER:PASSWORD@]HOST[:PORT][/DATABASE][?OPTIONS][#NAME]``, or
    ``SCHEME:///PATH[#NAME]`` for an engine that keeps its data in a file or folder of this machine.

    Attributes:
        url: The URL without the fragment and without the option ``timeout``. Holds what it was
            given, a password too: do not print it.
        scheme: The engine.
        name: The index's name in the engine: lower-case letters, digits and underscores.
        key: A key for the engine's API; None for none.
        timeout_seconds: The longest that a search may take: the URL's option ``timeout``.
    """

    url: str = field(repr=False)
    scheme: str
    name: str = DEFAULT_NAME
    key: str | None = field(default=None, repr=False)
    timeout_seconds: float = 10.0

    @classmethod
    def parse(cls, url: str, *, key: str | None = None) -> "EngineAddress":
        """The address that a URL gives.

        Args:
            url: The URL. Its fragment is the index's name, ``ctxguard`` where there is none.
            key: A key for the engine's API; None for that of the environment variable
                CTXGUARD_ENGINE_KEY, if it is set.

        Raises:
            ConfigurationError: it is no URL of a known engine, the name has other characters, or
                the timeout is no number of seconds above 0.
        """
        try:
            parts = urlsplit(url)
            parts.port  # noqa: B018  raises where it is no number
        except ValueError:
            # Its message may quote a part of the password.
            raise _unreadable() from None
        if parts.scheme not in _ENGINES:
            given = repr(parts.scheme) if parts.scheme else "a URL without a scheme"
            raise ConfigurationError(
                f"{given} names no engine; write {', '.join(_ENGINES)}, as in "
                "postgresql://user@host/database#name"
            )
        name = parts.fragment or DEFAULT_NAME
        if "@" in name or (parts.netloc and "@" in parts.path):
            raise _unreadable()
        if _NAME.fullmatch(name) is None:
            raise ConfigurationError(
                f"the index's name {name!r} must be lower-case letters, digits and underscores, at "
                "most 48"
            )
        options = parse_qsl(parts.query, keep_blank_values=True)
        others = [each for each in options if each[0] != "timeout"]
        return cls(
            # An empty host must stay: urlunsplit would drop its slashes.
            f"{url.partition('#')[0].partition('?')[0]}{'?' if others else ''}"
            f"{urlencode(others, quote_via=quote)}",
            parts.scheme,
            name,
            key or os.environ.get(KEY_VARIABLE) or None,
            _seconds(dict(options).get("timeout", "10")),
        )

    @property
    def path(self) -> str | None:
        """The file or folder of an engine on this machine; None for one that has a host."""
        parts = urlsplit(self.url)
        return None if parts.netloc else parts.path

    @property
    def http_url(self) -> str:
        """The engine's URL, without options, for clients that speak HTTP."""
        scheme = "https" if self.scheme.endswith("+https") else "http"
        return f"{scheme}://{self.url.partition('://')[2].partition('?')[0]}"

    @property
    def shown(self) -> str:
        """The URL as it may be printed: without user, password and options."""
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port else ""
        return f"{self.scheme}://{host}{port}{parts.path}#{self.name}"


def _unreadable() -> ConfigurationError:
    return ConfigurationError(
        "the engine's URL cannot be read: its port must be a number, and in a user or password "
        "such signs as # / : ? @ [ are written as %23 %2F %3A %3F %40 %5B"
    )


def _seconds(given: str) -> float:
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise ConfigurationError(f"the URL's timeout {given!r} must be a number of seconds above 0")
    return seconds


class EngineClass(Protocol):
    """The class of an engine's adapter."""

    def open(self, address: EngineAddress, /) -> Engine:
        """Open an index that is there.

        Raises:
            ConfigurationError: there is none of that name, or the credentials are refused.
            DataError: it is not one that this release can read.
            StageUnavailableError: the engine cannot be reached.
        """
        ...

    def create(self, address: EngineAddress, settings: IndexSettings, /) -> Engine:
        """Make an empty index.

        Raises:
            ConfigurationError: one of that name is there, or the credentials are refused.
            StageUnavailableError: the engine cannot be reached.
        """
        ...


def engine_class(address: EngineAddress) -> EngineClass:
    """The adapter of the engine that an address names.

    Raises:
        MissingExtraError: its client is not installed.
    """
    module, _, name = _ENGINES[address.scheme].partition(":")
    found: Any = getattr(import_module(module), name)
    return cast(EngineClass, found)


def nothing_there(address: EngineAddress) -> ConfigurationError:
    """The error of an index that is not there."""
    return ConfigurationError(
        f"{address.shown}: there is no index of that name; build it with `ctxguard index CORPUS "
        "--engine URL`"
    )


def already_there(address: EngineAddress) -> ConfigurationError:
    """The error of an index that is there and would have to be replaced."""
    return ConfigurationError(
        f"{address.shown}: there is an index of that name; --update brings it up to date, and "
        "another name after # in the URL makes another one"
    )
