"""`--json` of every command: one document on standard output, in one style."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from household import write_jsonl
from running import Run

pytestmark = pytest.mark.model

SNAKE = re.compile(r"[a-z0-9_]+")


@pytest.fixture
def golden(run: Run, collection: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "golden"
    assert run("golden", "freeze", collection, "--out", folder, "--source", "human").exit_code == 0
    return folder


@pytest.fixture
def answers(collection: Path, tmp_path: Path) -> Path:
    qrels = (collection / "qrels" / "test.tsv").read_text().splitlines()[1:]
    rows: list[dict[str, object]] = [
        {"query_id": query, "passage_ids": context, "correct": bool(n % 4) is (context[0] == own)}
        for n, (query, own, _) in enumerate(line.split("\t") for line in qrels)
        for context in ([own], [own, "store-kettle"], ["store-kettle", "store-violin"])
    ]
    return write_jsonl(tmp_path / "answers.jsonl", rows)


def numbers(value: object) -> Iterator[float]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from numbers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers(inner)
    elif isinstance(value, float):
        yield value


def estimates(value: object) -> Iterator[dict[str, object]]:
    """The objects that give a value with its bounds."""
    if isinstance(value, list):
        for inner in value:
            yield from estimates(inner)
    elif isinstance(value, dict):
        if "lower" in value or "upper" in value:
            yield value
        for inner in value.values():
            yield from estimates(inner)


COMMANDS: dict[str, tuple[str, ...]] = {
    "index": ("DATA", "--out", "NEW/index"),
    "calibrate": ("--index", "INDEX", "--data", "DATA", "--out", "NEW/p.json"),
    "evaluate": ("--index", "INDEX", "--data", "DATA", "--profile", "PROFILE", "-k", "5"),
    "query": ("clean a violin", "--index", "INDEX", "--profile", "PROFILE"),
    "compare": ("--index", "INDEX", "--data", "DATA", "--profile", "PROFILE"),
    "golden freeze": ("DATA", "--source", "human", "--out", "NEW/frozen"),
    "golden check": ("GOLDEN",),
    "golden coverage": ("--index", "INDEX", "--data", "DATA"),
    "golden hard-negatives": (
        *("--index", "INDEX", "--data", "DATA", "--out", "NEW/t.jsonl", "--system", "MARGIN"),
    ),
    "fit utilities": ("--answers", "ANSWERS", "--data", "DATA"),
}
WITHOUT_MEASUREMENTS = (
    *("golden freeze", "golden check", "golden hard-negatives", "fit utilities"),
)


@pytest.fixture
def places(
    *, index: Path, collection: Path, profile: Path, golden: Path, answers: Path
) -> dict[str, Path]:
    """What the words in capitals stand for."""
    margin = golden.parent / "margin.toml"
    margin.write_text("[hard-negatives]\nunjudged-margin = 0.05\n")
    return {
        "MARGIN": margin,
        "INDEX": index,
        "DATA": collection,
        "PROFILE": profile,
        "GOLDEN": golden,
        "ANSWERS": answers,
        "NEW": golden.parent,
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_one_document_in_one_style(run: Run, places: dict[str, Path], command: str) -> None:
    words = [re.sub("^[A-Z]+", lambda w: str(places[w[0]]), word) for word in COMMANDS[command]]
    document = run.read(*command.split(), *words, "--json")
    assert all(SNAKE.fullmatch(key) for key in document)
    assert isinstance(document["notes"], list)
    for estimate in estimates(document):
        assert {"value", "lower", "upper"} <= set(estimate)
        assert (estimate["lower"] is None) is (estimate["upper"] is None)
    # A figure that is rounded for a person is not the figure.
    exact = [number for number in numbers(document) if round(number, 4) != number]
    assert exact or command in WITHOUT_MEASUREMENTS


def test_an_error_is_a_document_too(run: Run, index: Path, tmp_path: Path) -> None:
    result = run.refused("evaluate", "--index", index, "--data", tmp_path / "gone", "--json")
    assert set(json.loads(result.stdout)) == {"error"}
