"""What tests share: where the labelled collections lie, and the bundled model."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The labelled collections beside the checkout; absent elsewhere, and then skipped."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the shared labelled collections are not beside this checkout")
    return folder


@pytest.fixture(scope="session")
def golden() -> Path:
    """The worked examples with known answers, beside the checkout."""
    file = Path(__file__).resolve().parents[2] / "shared" / "golden" / "worked_examples.json"
    if not file.is_file():
        pytest.skip("the worked examples are not beside this checkout")
    return file
