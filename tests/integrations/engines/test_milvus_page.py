"""What docs/integrations/milvus.md shows runs, in the order of the page."""

import re
from pathlib import Path
from typing import Any

import pytest

pymilvus = pytest.importorskip("pymilvus")
lite = pytest.importorskip("milvus_lite.server_manager").server_manager_instance

from ctxguard.integrations.engines import retriever
from ctxguard.testing import WordHashEmbedder

PAGE = Path(__file__).resolve().parents[3] / "docs" / "integrations" / "milvus.md"


def _make_own_collection(path: Path) -> None:
    types = pymilvus.DataType
    client = pymilvus.MilvusClient(str(path))
    schema = client.create_schema()
    schema.add_field("id", types.VARCHAR, is_primary=True, max_length=100)
    schema.add_field("tenant", types.VARCHAR, max_length=100)
    schema.add_field("text", types.VARCHAR, max_length=1_000, enable_analyzer=True)
    schema.add_field("vector", types.FLOAT_VECTOR, dim=WordHashEmbedder().dimension)
    schema.add_field("sparse", types.SPARSE_FLOAT_VECTOR)
    bm25 = pymilvus.FunctionType.BM25
    schema.add_function(pymilvus.Function("bm25", bm25, ["text"], ["sparse"]))
    indexes = client.prepare_index_params()
    indexes.add_index("vector", index_type="AUTOINDEX", metric_type="COSINE")
    indexes.add_index("sparse", index_type="SPARSE_INVERTED_INDEX", metric_type="BM25")
    client.create_collection("articles", schema=schema, index_params=indexes)
    texts = {"a1": "Boiling water in a kettle.", "a2": "Boiling water in a pan.", "a3": "Bread."}
    rows = [
        {"id": each, "tenant": "b" if each == "a2" else "a", "text": text, "vector": vector}
        for (each, text), vector in zip(
            texts.items(), WordHashEmbedder().encode_passages(list(texts.values())), strict=True
        )
    ]
    client.insert("articles", rows)
    client.close()


def test_the_snippets_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(retriever, "SentenceTransformerEmbedder", WordHashEmbedder)
    _make_own_collection(tmp_path / "own.db")
    names: dict[str, Any] = {"__name__": "snippet", "embed": WordHashEmbedder().encode_query}
    text = PAGE.read_text(encoding="utf-8").replace("/srv/", f"{tmp_path}/")
    try:
        for code in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            exec(compile(code, str(PAGE), "exec"), names)  # noqa: S102
    finally:
        lite.release_all()
    shown = capsys.readouterr().out
    assert '<passage rank="1" id="k1">' in shown
    assert "k2" not in shown
    assert "('a1', 'a3')" in shown
