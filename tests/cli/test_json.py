"""`--json` of every command: one document on standard output, in one style."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Result, Run, read

pytestmark = pytest.mark.model

SNAKE = re.compile(r"[a-z0-9_]+")


@pytest.fixture
def golden(run: Run, collection: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "golden"
    assert run("golden", "freeze", collection, "--out", folder).exit_code == 0
    return folder


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
    "evaluate": ("--index", "INDEX", "--data", "DATA", "--profile", "PROFILE", "-k", "5"),
    "query": ("clean a violin", "--index", "INDEX", "--profile", "PROFILE"),
    "compare": ("--index", "INDEX", "--data", "DATA", "--profile", "PROFILE"),
    "golden freeze": ("DATA", "--out", "NEW/frozen"),
    "golden check": ("GOLDEN",),
    "golden hard-negatives": (
        *("--index", "INDEX", "--data", "DATA", "--out", "NEW/t.jsonl", "--system", "MARGIN"),
    ),
}
WITHOUT_MEASUREMENTS = ("golden freeze", "golden check", "golden hard-negatives")


@pytest.fixture
def places(*, index: Path, collection: Path, profile: Path, golden: Path) -> dict[str, Path]:
    """What the words in capitals stand for."""
    margin = golden.parent / "margin.toml"
    margin.write_text("[hard-negatives]\nunjudged-margin = 0.05\n")
    return {
        "MARGIN": margin,
        "INDEX": index,
        "DATA": collection,
        "PROFILE": profile,
        "GOLDEN": golden,
        "NEW": golden.parent,
    }


@pytest.mark.parametrize("command", [*COMMANDS, "index", "calibrate"])
def test_json_is_one_document_in_one_style(
    run: Run, places: dict[str, Path], index_made: Result, profile_made: Result, command: str
) -> None:
    if command in COMMANDS:
        words = [re.sub("^[A-Z]+", lambda w: str(places[w[0]]), word) for word in COMMANDS[command]]
        document = run.read(*command.split(), *words, "--json")
    else:
        document = read({"index": index_made, "calibrate": profile_made}[command])
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
