"""What docs/integrations.md shows runs, in the order of the page."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")
for module in ("langchain.agents", "llama_index.core", "haystack"):
    pytest.importorskip(module)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"


def test_the_snippets_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "snippet"}
    text = PAGE.read_text(encoding="utf-8")
    for code in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(compile(code, str(PAGE), "exec"), names)  # noqa: S102
    shown = capsys.readouterr().out
    assert shown.count("'request_id'") >= 3
    assert '<passage rank="1" id="d3">' in shown
    assert names["answer"]["documents"][0].id == "a"
