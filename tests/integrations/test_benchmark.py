"""The benchmark of the integrations runs and says whether its promises hold."""

import json
from pathlib import Path

import pytest

pytest.importorskip("langchain_core")
pytest.importorskip("llama_index.core")

from benchmarks.integrations import main


def test_it_writes_every_case_and_promise(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    assert main(["--rounds", "1", "--calls", "2", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert len(figures["timings"]) == 8
    assert [set(bar) for bar in figures["bars"]] == [{"promise", "measured", "limit"}] * 2
