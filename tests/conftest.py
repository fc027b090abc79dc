"""What tests share: where the labelled collections lie, and the bundled model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Nothing is timed in the tests: a busy machine is no failure.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Exported models are kept with the tests' other files, not in the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


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
