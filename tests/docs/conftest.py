"""A small labelled collection in BEIR's form, for the commands that the pages show."""

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
