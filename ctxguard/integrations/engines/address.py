"""Parses the URL of an index in an engine: the engine's address, and the index's name there.

Reads the environment variable of the engine's key.
"""

import os
import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from ctxguard._support.postgresql_url import SCHEMES, own_options
from ctxguard.errors import ConfigurationError

DEFAULT_NAME = "ctxguard"
KEY_VARIABLE = "CTXGUARD_ENGINE_KEY"

ENGINES = {
    "postgresql": "ctxguard.integrations.engines.postgresql:PostgresEngine",
    "postgres": "ctxguard.integrations.engines.postgresql:PostgresEngine",
    "qdrant": "ctxguard.integrations.engines.qdrant:QdrantEngine",
    "qdrant+https": "ctxguard.integrations.engines.qdrant:QdrantEngine",
    "milvus": "ctxguard.integrations.engines.milvus:MilvusEngine",
    "milvus+https": "ctxguard.integrations.engines.milvus:MilvusEngine",
}
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,47}")


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """The location of an index.

    ``SCHEME://[USER:PASSWORD@]HOST[:PORT][/DATABASE][?OPTIONS][#NAME]``, or
    ``SCHEME:///PATH[#NAME]`` for an engine that keeps its data in a file or folder of this machine.

    Attributes:
        url: The URL without its fragment and its option ``timeout``. It may hold a password: do not
            print it.
        scheme: The engine.
        name: The index's name in the engine: lower-case letters, digits and underscores.
        key: A key for the engine's API; None without one.
        timeout_seconds: Maximum duration of a search: the URL's option ``timeout``.
    """

    url: str = field(repr=False)
    scheme: str
    name: str = DEFAULT_NAME
    key: str | None = field(default=None, repr=False)
    timeout_seconds: float = 10.0

    @classmethod
    def parse(cls, url: str, *, key: str | None = None) -> "EngineAddress":
        """Parse a URL; a key that is not given is read from the environment variable.

        Raises:
            ConfigurationError: the engine is unknown, the index's name has invalid
                characters, or the timeout is not a number of seconds above 0.
        """
        try:
            parts = urlsplit(url)
            parts.port  # noqa: B018  raises where it is not a number
        except ValueError:
            # Its message may quote a part of the password.
            raise _unreadable() from None
        if parts.scheme not in ENGINES:
            given = repr(parts.scheme) if parts.scheme else "a URL without a scheme"
            raise ConfigurationError(
                f"{given} is not an engine's scheme; use one of {', '.join(ENGINES)}, as in "
                "postgresql://user@host/database#name"
            )
        name = parts.fragment or DEFAULT_NAME
        if "@" in name or (parts.netloc and "@" in parts.path):
            raise _unreadable()
        if _NAME.fullmatch(name) is None:
            raise ConfigurationError(
                f"the index's name {name!r} must be at most 48 lower-case letters, digits and "
                "underscores"
            )
        options = parse_qsl(parts.query, keep_blank_values=True)
        others = [each for each in options if each[0] != "timeout"]
        others = own_options(others) if parts.scheme in SCHEMES else others
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
        """The engine's file or folder on this machine; None if the URL has a host."""
        parts = urlsplit(self.url)
        return None if parts.netloc else parts.path

    @property
    def http_url(self) -> str:
        """The URL without options, for HTTP clients."""
        scheme = "https" if self.scheme.endswith("+https") else "http"
        return f"{scheme}://{self.url.partition('://')[2].partition('?')[0]}"

    @property
    def shown(self) -> str:
        """The URL without user, password and options, which may be printed."""
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port else ""
        return f"{self.scheme}://{host}{port}{parts.path}#{self.name}"


def _unreadable() -> ConfigurationError:
    return ConfigurationError(
        "the engine's URL cannot be read: its port must be a number, and in a user or password "
        "characters such as # / : ? @ [ must be written as %23 %2F %3A %3F %40 %5B"
    )


def _seconds(given: str) -> float:
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise ConfigurationError(
            f"the URL's timeout {given!r} must be a positive number of seconds"
        )
    return seconds


def nothing_there(address: EngineAddress) -> ConfigurationError:
    """Build the error for a missing index."""
    return ConfigurationError(
        f"{address.shown}: there is no index with that name; build it with `ctxguard index CORPUS "
        "--engine URL`"
    )
