"""What docs/integrations/postgresql.md shows runs, in the order of the page."""

import re
from pathlib import Path
from typing import Any

import pytest

psycopg = pytest.importorskip("psycopg", reason="the driver of PostgreSQL is not installed")
pytest.importorskip("psycopg_pool", reason="the driver of PostgreSQL is not installed")

from ctxguard.integrations.engines import retriever
from ctxguard.testing import WordHashEmbedder

PAGE = Path(__file__).resolve().parents[3] / "docs" / "integrations" / "postgresql.md"
TEXTS = {"a1": "Boiling water in a kettle.", "a2": "Boiling water in a pan.", "a3": "Bread."}


def _embed(text: str) -> list[float]:
    return [float(each) for each in WordHashEmbedder().encode_query(text)]


def _make_own_table(connection: Any) -> None:
    connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
    connection.execute(
        "CREATE TABLE articles (id text, tenant text, text text, "
        f"embedding vector({WordHashEmbedder().dimension}), "
        "words tsvector GENERATED ALWAYS AS (to_tsvector('english', text)) STORED)"
    )
    for key, text in TEXTS.items():
        connection.execute(
            "INSERT INTO articles VALUES (%s, %s, %s, %s)",
            [key, "b" if key == "a2" else "a", text, str(_embed(text))],
        )


def test_the_snippets_run(
    postgresql_server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(retriever, "SentenceTransformerEmbedder", WordHashEmbedder)
    names: dict[str, Any] = {"__name__": "snippet", "embed": _embed}
    text = PAGE.read_text(encoding="utf-8")
    text = re.sub(r"postgresql://\w+@host/database", lambda _: postgresql_server, text)
    with psycopg.connect(postgresql_server, autocommit=True) as connection:
        _make_own_table(connection)
        try:
            for code in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
                exec(compile(code, str(PAGE), "exec"), names)  # noqa: S102
        finally:
            if "pool" in names:
                names["pool"].close()
            connection.execute("DROP TABLE articles")
            connection.execute("DROP SCHEMA IF EXISTS handbook CASCADE")
    shown = capsys.readouterr().out
    assert '<passage rank="1" id="k1">' in shown
    assert "k2" not in shown
    assert "('a1', 'a3')" in shown
