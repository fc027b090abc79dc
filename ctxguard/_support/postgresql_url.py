"""Separates PostgreSQL's own options in a URL from those of other clients.

Pure; needs psycopg.
"""

from collections.abc import Iterable

from ctxguard._support.extras import require
from ctxguard.errors import ConfigurationError

SCHEMES = ("postgresql", "postgres")
_OF_OTHERS = {"pgbouncer", "statement_cache_size", "prepared_statement_cache_size"}
"""Options of other clients that only turn off server-side statements, which are not used here."""


def own_options(options: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the options of a URL that PostgreSQL's own client accepts.

    Raises:
        ConfigurationError: an option belongs to another client; the message says how to fix it.

    >>> own_options([("pgbouncer", "true"), ("schema", "public"), ("sslmode", "require")])
    [('sslmode', 'require')]
    """
    defaults = require("psycopg", "postgres").pq.Conninfo.get_defaults()
    known = {each.keyword.decode() for each in defaults}
    taken = []
    for name, value in options:
        if name in _OF_OTHERS or (name, value) == ("schema", "public"):
            continue
        if name == "schema":
            raise ConfigurationError(
                f"PostgreSQL's own client does not accept the URL's option schema={value}: leave "
                f"it out, and set it for the role: ALTER ROLE … SET search_path = {value}"
            )
        if name not in known:
            raise ConfigurationError(
                f"PostgreSQL's own client does not accept the URL's option {name!r}: leave it out"
            )
        taken.append((name, value))
    return taken
