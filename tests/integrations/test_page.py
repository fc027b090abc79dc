"""What the pages of docs/integrations/ show runs, each page by itself."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "integrations"


def ran(name: str) -> dict[str, Any]:
    """The names that the snippets of a page leave behind.

    The test is skipped where a library that they import is absent.
    """
    page = FOLDER / f"{name}.md"
    text = page.read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert snippets
    for module in re.findall(
        r"^(?:from|import) (?!ctxguard)(\w+)", "".join(snippets), re.MULTILINE
    ):
        pytest.importorskip(module)
    names: dict[str, Any] = {"__name__": "snippet"}
    for code in snippets:
        exec(compile(code, str(page), "exec"), names)  # noqa: S102
    return names


def test_langchain(capsys: pytest.CaptureFixture[str]) -> None:
    names = ran("langchain")
    shown = capsys.readouterr().out
    assert '<passage rank="1" id="d3">' in shown
    assert "'request_id'" in shown
    assert names["legs"].retrieve("Document 3.", depth=5).legs.keys() == {"dense", "lexical"}


def test_agents(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("langchain.agents")
    ran("agents")
    assert '<passage rank="1" id="d3">' in capsys.readouterr().out


def test_llamaindex(capsys: pytest.CaptureFixture[str]) -> None:
    ran("llamaindex")
    assert "'request_id'" in capsys.readouterr().out


def test_haystack() -> None:
    assert ran("haystack")["answer"]["documents"][0].id == "a"
