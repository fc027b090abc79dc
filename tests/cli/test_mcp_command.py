"""The command for agents, asked by the MCP SDK's own client over pipes and over HTTP."""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.timing import PATIENCE_SECONDS, until

mcp = pytest.importorskip("mcp")

QUERY = "what is the right way to clean my kettle"


@pytest.fixture
def words(index: Path, tmp_path: Path) -> list[str]:
    """A server that keeps three passages."""
    system = tmp_path / "system.toml"
    system.write_text("[mcp]\nk = 3", encoding="utf-8")
    return ["-m", "ctxguard", "mcp", "--index", str(index), "--system", str(system)]


async def searched(client: Any) -> list[str]:
    """The passages found, after each was fetched by its id."""
    found = json.loads((await client.call_tool("search", {"query": QUERY})).content[0].text)
    for each in found["results"]:
        fetched = await client.call_tool("fetch", {"id": each["id"]})
        assert json.loads(fetched.content[0].text)["text"] == each["text"]
    return [each["id"] for each in found["results"]]


def test_agent_searches_over_standard_streams(words: list[str]) -> None:
    """From an index's folder to what an agent reads; nothing else is on standard output."""
    command = mcp.StdioServerParameters(command=sys.executable, args=words)

    async def ask() -> list[str]:
        async with mcp.Client(mcp.stdio_client(command)) as client:
            return await searched(client)

    ids = asyncio.run(asyncio.wait_for(ask(), PATIENCE_SECONDS))
    assert len(ids) == 3
    assert ids[0] == "clean-kettle"


@pytest.fixture
def served(words: list[str]) -> Iterator[int]:
    """The port of a server over HTTP."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    options = [*words, "--http", str(port)]
    process = subprocess.Popen(
        [sys.executable, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def answers() -> bool:
        assert process.poll() is None
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    try:
        until(answers, "the server")
        yield port
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)


def test_agent_searches_over_http(served: int) -> None:
    httpx2 = pytest.importorskip("httpx2")

    async def ask() -> list[str]:
        async with mcp.Client(f"http://127.0.0.1:{served}/mcp") as client:
            return await searched(client)

    assert asyncio.run(asyncio.wait_for(ask(), PATIENCE_SECONDS))[0] == "clean-kettle"
    refused = httpx2.post(
        f"http://127.0.0.1:{served}/mcp", json={}, headers={"Host": "rebound.example"}
    )
    assert refused.status_code == 421
