"""``ctxguard mcp``: the guarded index as an MCP server for agents."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer

from ctxguard._support.extras import require
from ctxguard.cli import _options
from ctxguard.cli._console import Output
from ctxguard.cli._inputs import open_index
from ctxguard.core.metadata_filter import Where
from ctxguard.core.types import DEFAULT_DEPTH, DEFAULT_K

_LOOPBACK = "127.0.0.1"


class Transport(StrEnum):
    """How a client reaches the server."""

    STDIO = "stdio"
    HTTP = "http"


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("mcp")(mcp)


def mcp(
    *,
    index: _options.IndexFolder,
    profile: _options.ProfileFile = None,
    k: Annotated[
        int,
        typer.Option(
            "--k",
            "-k",
            metavar="N",
            min=1,
            help="Passages to find where no calibrated policy applies.",
        ),
    ] = DEFAULT_K,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE",
            help="Find only passages whose metadata has this text, such as tenant=a; of a field "
            "that is named again, any of its texts. Repeatable.",
            show_default=False,
        ),
    ] = None,
    reranker: _options.Reranker = None,
    ranker: _options.RankerFile = None,
    transport: Annotated[
        Transport,
        typer.Option(
            metavar="TRANSPORT",
            help="Standard input and output (stdio), or streamable HTTP on this machine (http).",
        ),
    ] = Transport.STDIO,
    port: Annotated[
        int, typer.Option(metavar="PORT", min=1, max=65535, help="Port of --transport http.")
    ] = 8766,
) -> None:
    """Serve an index to agents over the Model Context Protocol, with the tools search and fetch.

    Search leaves out what the profile drops. Fetch returns passages that search
    has found, and no others.
    """
    require("mcp", "mcp")
    from ctxguard.guard import ContextGuard
    from ctxguard.profile.schema import Profile
    from ctxguard.server.mcp import create_server

    conditions = _where(where or ())
    loaded = None if profile is None else Profile.load(profile)
    # Standard output is the protocol's.
    output = Output(as_json=True)
    guard = ContextGuard(
        open_index(index, reranker=reranker, ranker=ranker),
        profile=loaded,
        k=k,
        depth=max(k, DEFAULT_DEPTH if loaded is None else loaded.provenance.depth),
    )
    for line in guard.differences:
        output.note(f"the profile was calibrated on another system: {line}")
    server = create_server(guard, conditions)
    if transport is Transport.STDIO:
        server.run("stdio")
    else:
        output.note(f"serving on http://{_LOOPBACK}:{port}/mcp")
        server.run("streamable-http", host=_LOOPBACK, port=port)


def _where(conditions: Sequence[str]) -> Where | None:
    allowed: dict[str, list[str | int | bool]] = {}
    for condition in conditions:
        field, equals, value = condition.partition("=")
        if not field or not equals:
            raise typer.BadParameter(
                f"{condition!r} is not FIELD=VALUE, such as tenant=a", param_hint="--where"
            )
        allowed.setdefault(field, []).append(value)
    return Where(allowed) if allowed else None
