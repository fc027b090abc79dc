"""A ranker's file: what is written is read, and nothing else is."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ctxguard.errors import DataError
from ctxguard.retrieval.signals.ranker import INPUTS, Ranker

FLAT = Ranker(dict.fromkeys(INPUTS, 0.5), ("a", "b"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ranker.json"
    FLAT.save(path)
    return path


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_what_is_saved_is_loaded(file: Path) -> None:
    assert Ranker.load(file) == FLAT
    assert Ranker.load(str(file)).digest() == FLAT.digest()


def test_the_shipped_ranker_names_its_collections_and_is_read_once() -> None:
    shipped = Ranker.default()
    assert shipped is Ranker.default()
    assert shipped.trained_on


def test_the_digest_is_that_of_the_weights_alone() -> None:
    assert Ranker(FLAT.weights).digest() == FLAT.digest()
    other = Ranker({**FLAT.weights, "dense.z": 0.25})
    assert other.digest() != FLAT.digest()


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is no ranker"),
        ("{}", "is no ranker"),
        ('{"policies": []}', "is no ranker"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: str | bytes, fault: str) -> None:
    file = tmp_path / "other.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=fault) as error:
        Ranker.load(file)
    assert error.value.path == file
    assert "benchmarks.ranker" in str(error.value)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"format": 1}, "has format 1; this release reads 2"),
        ({"weights": []}, "is no ranker"),
        ({"trained_on": "a"}, "is no ranker"),
        ({"more": 1}, "is no ranker"),
        ({"weights": {}}, "the ranker lacks dense.z, lexical.z"),
        ({"weights": {**FLAT.weights, "rank.z": 1.0}}, "has the unknown 'rank.z'"),
        *[
            (
                {"weights": {**FLAT.weights, "dense.z": weight}},
                f"weight of dense.z, {weight!r}, is no fin",
            )
            for weight in ("1", True, None, math.nan, math.inf)
        ],
        ({"weights": {**FLAT.weights, "dense.z": 10**400}}, "weight of dense.z"),
    ],
)
def test_a_damaged_ranker_is_refused(file: Path, fields: dict[str, Any], fault: str) -> None:
    change(file, **fields)
    with pytest.raises(DataError, match=fault):
        Ranker.load(file)


@pytest.mark.parametrize("name", [".", "absent.json"])
def test_a_folder_or_a_file_that_is_not_there_is_no_ranker(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        Ranker.load(tmp_path / name)
