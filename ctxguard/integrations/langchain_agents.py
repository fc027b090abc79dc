"""Gives LangChain agents a guarded search as a tool, and a guard over other tools' results.

Needs ``langchain``; ``ctxguard.integrations.langchain`` does with ``langchain-core``. Calls the
tools and the guard, and logs.
"""

import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from ctxguard._support.extras import require
from ctxguard.errors import ConfigurationError
from ctxguard.guard.context_guard import ContextGuard
from ctxguard.guard.wrapped_retriever import describe
from ctxguard.integrations.documents import filtered
from ctxguard.integrations.langchain import GuardedRetriever, documents_of, ranking_by_metadata

require("langchain.agents.middleware", "langchain")

from langchain.agents.middleware import AgentMiddleware
from langchain_core.callbacks import Callbacks
from langchain_core.documents import Document
from langchain_core.messages import ToolMessage
from langchain_core.tools import StructuredTool

_logger = logging.getLogger(__name__)

_UNFILTERED = "[This text was not filtered: the tool returned it without separate documents.]"
"""A note for the model, placed before an output that has no documents to filter."""


def retriever_tool(retriever: GuardedRetriever, name: str, description: str) -> Any:
    """Make an agent's tool, with the argument ``query``, from a guarded search.

    The model reads the passages as the guard's ``assembly`` renders them; the tool message's
    ``artifact`` has them as documents with their decisions.
    """

    def search(query: str, callbacks: Callbacks = None) -> tuple[str, list[Document]]:
        documents = retriever.invoke(query, {"callbacks": callbacks})
        return retriever.render(documents), documents

    async def asearch(query: str, callbacks: Callbacks = None) -> tuple[str, list[Document]]:
        documents = await retriever.ainvoke(query, {"callbacks": callbacks})
        return retriever.render(documents), documents

    return StructuredTool.from_function(
        search, asearch, name=name, description=description, response_format="content_and_artifact"
    )


class GuardedTools(AgentMiddleware):  # type: ignore[misc]
    """Agent middleware that filters the documents that other tools retrieve.

    A tool returns its documents as the artifact of its message, as a retriever's tool does with
    ``response_format="content_and_artifact"``. They are filtered, and the message's content is
    rendered again. A message without documents passes with a note that it was not filtered, which
    is logged once per tool. Error messages pass unchanged.

    Args:
        guard: Decides; it needs no retriever. Its ``score_kind`` is the kind of the scores.
        tools: The names of the tools whose documents are filtered.
        query_argument: The name of these tools' query argument.
        score_key: Where the score is in a document's metadata; None if only the order counts.
    """

    def __init__(
        self,
        guard: ContextGuard,
        *,
        tools: Collection[str],
        query_argument: str = "query",
        score_key: str | None = None,
    ) -> None:
        super().__init__()
        if isinstance(tools, str) or not tools:
            raise ConfigurationError(f"tools {tools!r} must be a list of tool names")
        self._guard = guard
        self._names = frozenset(tools)
        self._logged: set[str] = set()
        self._query_argument = query_argument
        self._score_key = score_key

    def wrap_tool_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        """Call the tool, and filter its documents.

        Raises:
            ConfigurationError: the tool did not return a message, or its call had no query.
        """
        return self._filtered(request.tool_call, handler(request))

    async def awrap_tool_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """``wrap_tool_call`` without blocking the event loop."""
        return self._filtered(request.tool_call, await handler(request))

    def _filtered(self, call: dict[str, Any], result: Any) -> Any:
        name = call["name"]
        if name not in self._names or getattr(result, "status", None) == "error":
            return result
        if not isinstance(result, ToolMessage):
            raise ConfigurationError(
                f"the tool {name!r} returned {describe(result)}, but only a message can be "
                "filtered: leave the tool out of tools"
            )
        documents = result.artifact
        if not isinstance(documents, list | tuple):
            return self._passed_with_a_note(name, result)
        query = call["args"].get(self._query_argument)
        if query is None:
            raise ConfigurationError(
                f"the tool {name!r} was called without the argument {self._query_argument!r}: set "
                "query_argument to the name of the argument that holds the query"
            )
        # The call's id is not a request id: some models begin again at 0 in every conversation.
        ranking = ranking_by_metadata(self._guard, documents, self._score_key)
        context = filtered(self._guard, query, ranking)
        return result.model_copy(
            update={"content": context.text, "artifact": documents_of(context)}
        )

    def _passed_with_a_note(self, name: str, message: ToolMessage) -> ToolMessage:
        if name not in self._logged:
            self._logged.add(name)
            _logger.warning(
                "the tool %r returns no documents as its artifact, so its answer is not filtered: "
                'make the tool with response_format="content_and_artifact"',
                name,
            )
        content = message.content
        noted: Any = (
            f"{_UNFILTERED}\n{content}"
            if isinstance(content, str)
            else [{"type": "text", "text": _UNFILTERED}, *content]
        )
        return message.model_copy(update={"content": noted})
