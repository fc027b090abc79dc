"""What the pages of Qdrant and Elasticsearch show runs, in the order of each page."""

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs" / "integrations"


def run(page: str, **names: Any) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    for code in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(compile(code, page, "exec"), names)  # noqa: S102


def test_qdrant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("qdrant_client")
    run("qdrant.md", folder=tmp_path)
    assert capsys.readouterr().out.splitlines() == ["('fox',)", "('0', '1')"]


def test_elasticsearch(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("httpx2")
    from search_cluster import Cluster, response

    source = {"text": "A fox lives three years.", "metadata": {"tenant": "a"}}
    cluster = Cluster()
    cluster.answer = lambda body: response([{"_id": "fox", "_score": 0.9, "_source": source}])
    try:
        run("elasticsearch.md", url=cluster.url)
    finally:
        cluster.close()
    assert capsys.readouterr().out == "('fox',)\n"
