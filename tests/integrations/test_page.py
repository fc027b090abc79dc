"""What the pages of docs/integrations/ show runs, each page by itself."""

import os

import pytest
from snippets import ran

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")


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
