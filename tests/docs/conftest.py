"""A small labelled collection in BEIR's form, for the commands that the pages show."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.household import write_collection
from tests.opened_once import open_models_once  # noqa: F401  a fixture for all tests here


@pytest.fixture(scope="session")
def beir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The household collection, with each question asked twice."""
    return write_collection(tmp_path_factory.mktemp("data") / "beir", copies=2)


@pytest.fixture(scope="session")
def made_before(beir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of the collection and a profile calibrated on it, as pages take them for granted."""
    from calibration.calibrate import calibrate
    from calibration.data.readers import read_beir, read_corpus
    from ctxguard import HybridRetriever

    folder = tmp_path_factory.mktemp("made")
    retriever = HybridRetriever.build(read_corpus(beir))
    retriever.save(folder / "index")
    calibrate(retriever, read_beir(beir, "train")).profile.save(folder / "profile.json")
    return folder


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's own wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, capture_output=True)
    [made] = folder.glob("*.whl")
    return made
