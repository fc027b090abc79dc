"""The recipes of docs/integrations/agent_frameworks.md, in agents that call the tool once."""

import asyncio
import linecache
import re
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from snippets import FOLDER

SECTIONS = re.split(
    r"^## ", (FOLDER / "agent_frameworks.md").read_text(encoding="utf-8"), flags=re.MULTILINE
)
QUERY = "how long does a kettle take"
KEPT = '<passage rank="1" id="k1">'


@pytest.fixture(autouse=True)
def _event_loop() -> Iterator[None]:
    """One for the agents' synchronous calls, which would leave one of their own open."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


def section(title: str, **given: Any) -> dict[str, Any]:
    """The names that the start of the page and one section leave behind."""
    names: dict[str, Any] = {"__name__": "snippet", **given}
    for text in (SECTIONS[0], *[each for each in SECTIONS if each.startswith(f"{title}\n")]):
        (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        file = f"<{text[:20]!r}>"
        # smolagents reads the source of a tool.
        linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
        exec(compile(code, file, "exec"), names)  # noqa: S102
    return names


def pydantic_ai() -> str:
    from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart, ToolReturnPart
    from pydantic_ai.models.function import AgentInfo, FunctionModel

    read: list[str] = []

    def respond(messages: list[Any], info: AgentInfo) -> ModelResponse:
        assert info.function_tools[0].description.startswith("Search our documentation.")
        parts = [part for each in messages for part in each.parts]
        read.extend(part.content for part in parts if isinstance(part, ToolReturnPart))
        if not read:
            return ModelResponse([ToolCallPart("search_docs", {"query": QUERY})])
        return ModelResponse([TextPart("done")])

    section("pydantic-ai", model=FunctionModel(respond))
    return read[0]


def smolagents() -> str:
    from smolagents.models import (
        ChatMessage,
        ChatMessageToolCall,
        ChatMessageToolCallFunction,
        MessageRole,
        Model,
    )

    class Scripted(Model):
        read: str = ""

        def generate(self, messages: list[Any], **_: Any) -> ChatMessage:
            name, arguments = "search_docs", {"query": QUERY}
            if KEPT in str(messages[-1].content):
                self.read = str(messages[-1].content)
                name, arguments = "final_answer", {"answer": "done"}
            call = ChatMessageToolCall(
                function=ChatMessageToolCallFunction(arguments, name), id="1", type="function"
            )
            return ChatMessage(MessageRole.ASSISTANT, "", tool_calls=[call])

    model = Scripted()
    names = section("smolagents", model=model)
    assert "Search our documentation" in names["agent"].tools["search_docs"].description
    return model.read


def agents() -> str:
    from agents import Model, ModelResponse, Usage, set_tracing_disabled
    from openai.types.responses import (
        ResponseFunctionToolCall,
        ResponseOutputMessage,
        ResponseOutputText,
    )

    set_tracing_disabled(True)
    asked = count()

    class Scripted(Model):
        read: str = ""

        async def get_response(self, *_: Any, **asked_with: Any) -> ModelResponse:
            if next(asked) == 0:
                arguments = f'{{"query": "{QUERY}"}}'
                call = ResponseFunctionToolCall(
                    arguments=arguments, call_id="1", name="search_docs", type="function_call"
                )
                return ModelResponse(output=[call], usage=Usage(), response_id=None)
            self.read = asked_with["input"][-1]["output"]
            text = ResponseOutputText(annotations=[], text="done", type="output_text")
            message = ResponseOutputMessage(
                id="1", content=[text], role="assistant", status="completed", type="message"
            )
            return ModelResponse(output=[message], usage=Usage(), response_id=None)

        def stream_response(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

    model = Scripted()
    section("OpenAI Agents SDK", model=model)
    return model.read


@pytest.mark.parametrize("framework", [pydantic_ai, smolagents, agents])
def test_agent_reads_what_guard_kept(
    framework: Callable[[], str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(framework.__name__)
    read = framework()
    assert KEPT in read
    assert "A kettle boils in three minutes." in read
    assert "done" in capsys.readouterr().out
