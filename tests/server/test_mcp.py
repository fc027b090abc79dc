"""The MCP server, asked in memory by the SDK's own client."""

import asyncio
import json
import re
from typing import Any

import pytest

from ctxguard.core.fusion import Fusion
from ctxguard.core.metadata_filter import Where
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Passage, Route
from ctxguard.errors import IndexFolderError
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.profile.schema import RouteProfile
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.server.mcp import create_server
from tests.doubles import WordHashEmbedder
from tests.profiles import profile_with

mcp = pytest.importorskip("mcp")

PASSAGES = [
    Passage("kettle", "Clean a kettle with vinegar.", "Kettles", {"tenant": "a"}),
    Passage(
        "piano", "Dust a piano with a dry cloth.", "", {"tenant": "a", "url": "https://p.example/1"}
    ),
    Passage("secret", "Clean a kettle with the secret recipe.", "Recipe", {"tenant": "b"}),
    *(Passage(f"other {n}", f"Something else entirely, number {n}.") for n in range(20)),
]
CONVEX = Fusion("convex")
QUERY = "clean a kettle with vinegar"


@pytest.fixture(scope="module")
def retriever() -> HybridRetriever:
    return HybridRetriever.build(PASSAGES, embedder=WordHashEmbedder())


def asked(guard: ContextGuard, *calls: tuple[str, Any], where: Where | None = None) -> list[Any]:
    """The tools of a guard's server, then the results of these calls."""

    async def connected() -> list[Any]:
        async with mcp.Client(create_server(guard, where)) as client:
            tools = (await client.list_tools()).tools
            return [tools, *[await client.call_tool(*call) for call in calls]]

    return asyncio.run(connected())


@pytest.fixture
def guarded(retriever: HybridRetriever) -> ContextGuard:
    return ContextGuard(retriever, k=2)


SEARCH = ("search", {"query": QUERY})
FETCH = ("fetch", {"id": "secret"})


def content(result: Any) -> Any:
    """The one text of a result, which is the structured content too, as clients expect."""
    assert not result.is_error, result.content
    assert [each.type for each in result.content] == ["text"]
    found = json.loads(result.content[0].text)
    assert found == result.structured_content
    return found


def test_search_and_fetch_suit_connectors(guarded: ContextGuard) -> None:
    tools, found, fetched = asked(guarded, SEARCH, ("fetch", {"id": "kettle"}))
    assert [(tool.name, tool.input_schema["required"]) for tool in tools] == [
        ("search", ["query"]),
        ("fetch", ["id"]),
    ]
    assert all(tool.annotations.read_only_hint for tool in tools)
    results = content(found)["results"]
    assert [each["id"] for each in results] == ["kettle", "secret"]
    assert results[0] == {
        "id": "kettle",
        "title": "Kettles",
        "url": "urn:ctxguard:kettle",
        "text": PASSAGES[0].text,
    }
    assert content(fetched) == {**results[0], "metadata": {"tenant": "a"}}


def test_agent_reads_how_to_use_tools(guarded: ContextGuard) -> None:
    """And nothing that is written for those who change the code."""
    [[search, fetch]] = asked(guarded)
    for part in ("empty list", "best first", "`sufficient`", "null"):
        assert part in search.description
    assert "search first" in fetch.description
    assert "id" in fetch.description
    for tool in (search, fetch):
        assert not re.search(r"Raises|Args|ToolError|``|\n", tool.description)
        described = tool.input_schema["properties"].values()
        assert all(each["description"] for each in described)


def test_dropped_is_neither_found_nor_fetched(retriever: HybridRetriever) -> None:
    """From a profile to an agent: a low threshold first, then a high one."""

    def kept(min_ratio: float) -> tuple[list[str], bool]:
        policy = RatioPolicy(k=10, min_ratio=min_ratio)
        route = RouteProfile(policy=policy, score_kind=CONVEX.kind)
        identity = retriever.with_fusion(CONVEX).fingerprint()
        profile = profile_with({Route.HYBRID: route}, fusion=CONVEX, fingerprint=identity)
        _, found, fetched = asked(ContextGuard(retriever, profile=profile), SEARCH, FETCH)
        return [each["id"] for each in content(found)["results"]], fetched.is_error

    assert "secret" in kept(0.01)[0]
    assert kept(0.01)[1] is False
    assert kept(1.0) == (["kettle"], True)


def test_filter_holds_for_both_tools(guarded: ContextGuard) -> None:
    _, found, fetched = asked(guarded, SEARCH, FETCH, where=Where(tenant="a"))
    results = content(found)["results"]
    assert {each["id"] for each in results} == {"kettle", "piano"}
    assert "https://p.example/1" in {each["url"] for each in results}
    assert fetched.is_error
    assert "no recent search has found the passage 'secret'" in fetched.content[0].text


@pytest.mark.parametrize(
    ("tool", "arguments", "says"),
    [
        ("search", {"query": "  "}, "empty"),
        ("search", {"query": "x" * 100_000}, "limit"),
        ("search", {}, "query"),
        ("fetch", {"id": "kettle"}, "search first"),
        ("fetch", {"id": 3}, "id"),
    ],
)
def test_unanswerable_call_is_tool_error(
    guarded: ContextGuard, tool: str, arguments: dict[str, object], says: str
) -> None:
    """A call that cannot be answered is an error of the tool."""
    _, result = asked(guarded, (tool, arguments))
    assert result.is_error
    assert says in result.content[0].text
    assert "Traceback" not in result.content[0].text


@pytest.mark.parametrize(
    "error", [ConnectionError("password=hunter2"), IndexFolderError("/home/hunter2: damaged")]
)
def test_outage_is_discreet_tool_error(error: Exception) -> None:
    def search(query: str, *, depth: int) -> list[Any]:
        raise error

    _, result = asked(ContextGuard(search), SEARCH)
    assert result.is_error
    assert "hunter2" not in result.content[0].text
