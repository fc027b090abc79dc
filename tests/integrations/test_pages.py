"""What the pages of docs/integrations/ show runs, in the order of each page."""

import os
from pathlib import Path

import pytest
from snippets import SMALL_MODEL, ran

from ctxguard.integrations.engines import retriever
from tests.doubles import WordHashEmbedder

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")

MODEL = WordHashEmbedder()
TEXTS = {"a1": "Boiling water in a kettle.", "a2": "Boiling water in a pan.", "a3": "Bread."}
ROWS = [
    {"id": each, "tenant": "b" if each == "a2" else "a", "text": text, "vector": vector.tolist()}
    for (each, text), vector in zip(
        TEXTS.items(), MODEL.encode_passages(list(TEXTS.values())), strict=True
    )
]


def test_qdrant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran("qdrant", SMALL_MODEL, folder=tmp_path)
    assert capsys.readouterr().out.splitlines() == ["('fox',)", "('0', '1')"]


def assert_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """The own index answered with its kettle, and the articles of tenant a were found."""
    shown = capsys.readouterr().out
    assert '<passage rank="1" id="k1">' in shown
    assert "k2" not in shown
    assert "('a1', 'a3')" in shown


@pytest.fixture
def _small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retriever, "SentenceTransformerEmbedder", WordHashEmbedder)


@pytest.mark.usefixtures("_small_model")
def test_milvus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pymilvus = pytest.importorskip("pymilvus")
    lite = pytest.importorskip("milvus_lite.server_manager").server_manager_instance
    types = pymilvus.DataType
    client = pymilvus.MilvusClient(str(tmp_path / "own.db"))
    schema = client.create_schema()
    schema.add_field("id", types.VARCHAR, is_primary=True, max_length=100)
    schema.add_field("tenant", types.VARCHAR, max_length=100)
    schema.add_field("text", types.VARCHAR, max_length=1_000, enable_analyzer=True)
    schema.add_field("vector", types.FLOAT_VECTOR, dim=MODEL.dimension)
    schema.add_field("sparse", types.SPARSE_FLOAT_VECTOR)
    bm25 = pymilvus.FunctionType.BM25
    schema.add_function(pymilvus.Function("bm25", bm25, ["text"], ["sparse"]))
    indexes = client.prepare_index_params()
    indexes.add_index("vector", index_type="AUTOINDEX", metric_type="COSINE")
    indexes.add_index("sparse", index_type="SPARSE_INVERTED_INDEX", metric_type="BM25")
    client.create_collection("articles", schema=schema, index_params=indexes)
    client.insert("articles", ROWS)
    client.close()
    try:
        ran("milvus", {"/srv/": f"{tmp_path}/"}, embed=MODEL.encode_query)
    finally:
        lite.release_all()
    assert_shown(capsys)


@pytest.mark.usefixtures("_small_model")
def test_postgresql(postgresql_server: str, capsys: pytest.CaptureFixture[str]) -> None:
    psycopg = pytest.importorskip("psycopg", reason="the driver of PostgreSQL is not installed")
    pytest.importorskip("psycopg_pool", reason="the driver of PostgreSQL is not installed")

    def embed(text: str) -> list[float]:
        return [float(each) for each in MODEL.encode_query(text)]

    url = "postgresql://{}@host/database"
    servers = {url.format(user): postgresql_server for user in ("reader", "writer")}
    with psycopg.connect(postgresql_server, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        connection.execute(
            "CREATE TABLE articles (id text, tenant text, text text, "
            f"embedding vector({MODEL.dimension}), "
            "words tsvector GENERATED ALWAYS AS (to_tsvector('english', text)) STORED)"
        )
        for row in ROWS:
            values = [*list(row.values())[:3], str(row["vector"])]
            connection.execute("INSERT INTO articles VALUES (%s, %s, %s, %s)", values)
        try:
            ran("postgresql", servers, embed=embed)["pool"].close()
        finally:
            connection.execute("DROP TABLE articles")
            connection.execute("DROP SCHEMA IF EXISTS handbook CASCADE")
    assert_shown(capsys)


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
