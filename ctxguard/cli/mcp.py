"""``ctxguard mcp``: the guarded index as an MCP server for agents.

Opens the index, and serves standard input and output or a port. Needs the extra `mcp`.
"""

from collections.abc import Sequence

import ctxguard
from ctxguard._support.extras import require
from ctxguard._support.settings import key, optional
from ctxguard.cli import _options
from ctxguard.cli._console import Output
from ctxguard.core.metadata_filter import Where
from ctxguard.core.types import DEFAULT_DEPTH, DEFAULT_K
from ctxguard.errors import ConfigurationError
from ctxguard.server.system import IndexSystem

_LOOPBACK = "127.0.0.1"


class McpCommand(IndexSystem):
    profile: _options.ProfileFile = None
    k: int = key("Passages to find where no calibrated policy applies.", ge=1, value=DEFAULT_K)
    where: list[str] = key(
        "Find only passages whose metadata has this text, such as tenant=a; of a field that is "
        "named again, any of its texts.",
        value=[],
    )
    http: int | None = optional(
        "Serve streamable HTTP on this port of this machine.",
        "PORT",
        default="standard input and output",
        ge=1,
        le=65535,
    )

    def __call__(self, _: Output) -> None:
        """Search leaves out the passages that the profile drops.

        Fetch returns passages that search has found, and no others.
        """
        require("mcp", "mcp")
        from ctxguard.server.mcp import create_server

        conditions = _where(self.where)
        profile = None if self.profile is None else ctxguard.Profile.load(self.profile)
        output = Output(as_json=True)  # standard output is the protocol's
        depth = DEFAULT_DEPTH if profile is None else profile.provenance.depth
        guard = ctxguard.ContextGuard(
            self.open_index(), profile=profile, k=self.k, depth=max(self.k, depth)
        )
        for line in guard.differences:
            output.note(f"the profile was calibrated on another system: {line}")
        server = create_server(guard, conditions)
        if self.http is None:
            server.run("stdio")
        else:
            output.note(f"serving on http://{_LOOPBACK}:{self.http}/mcp")
            server.run("streamable-http", host=_LOOPBACK, port=self.http)


def _where(conditions: Sequence[str]) -> Where | None:
    allowed: dict[str, list[str | int | bool]] = {}
    for condition in conditions:
        field, equals, value = condition.partition("=")
        if not field or not equals:
            raise ConfigurationError(f"where {condition!r} is not FIELD=VALUE, such as tenant=a")
        allowed.setdefault(field, []).append(value)
    return Where(allowed) if allowed else None
