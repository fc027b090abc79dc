"""`ctxguard report`."""

import json
from pathlib import Path

import pytest
import typer
from household import write_collection
from running import Result
from typer.testing import CliRunner

from ctxguard.cli import report
from ctxguard.cli._console import Command

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def application() -> typer.Typer:
    """The command by itself."""
    pytest.importorskip("plotly")
    made = typer.Typer()
    report.register(made)
    for command in made.registered_commands:
        command.cls = Command
    return made


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_collection(tmp_path_factory.mktemp("many") / "household", copies=2)


def run(application: typer.Typer, *arguments: object) -> Result:
    result = CliRunner(env={"COLUMNS": "100"}).invoke(application, [str(a) for a in arguments])
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def test_the_same_figures_are_written_as_a_page_and_as_json(
    application: typer.Typer, index: Path, many: Path, cache: Path, tmp_path: Path
) -> None:
    page, figures = tmp_path / "report.html", tmp_path / "report.json"
    result = run(
        application,
        *("--index", index, "--data", many, "--out", page, "--json-out", figures),
        *("--cache", cache),
    )
    assert result.exit_code == 0, result.stderr
    data = json.loads(figures.read_text())
    assert [route["route"] for route in data["routes"]] == ["hybrid", "lexical", "dense"]
    assert data["routes"][0]["certificate"]["delta"] == 0.1
    text = page.read_text(encoding="utf-8")
    assert data["profile_id"] in text
    assert "How to clean a" in text
    assert data["profile_id"] in result.stdout


def test_a_promise_that_cannot_be_kept_is_a_finding_and_the_report_says_why(
    application: typer.Typer, index: Path, many: Path, cache: Path, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    result = run(
        application,
        *("--index", index, "--data", many, "--out", page, "--alpha", "0.01", "--cache", cache),
    )
    assert result.exit_code == 1
    assert "finding: no certificate for route hybrid" in result.stderr
    assert "mean recall loss ≤ 0.01 with probability 0.9" in page.read_text(encoding="utf-8")


def test_a_report_path_that_cannot_be_written_is_refused_before_any_work(
    application: typer.Typer, tmp_path: Path
) -> None:
    result = run(
        application,
        *("--index", tmp_path / "none", "--data", tmp_path / "none", "--out", tmp_path),
    )
    assert result.exit_code == 2
    assert "--out" in result.stderr
    assert "name a file" in result.stderr


def test_segments_need_a_promise(application: typer.Typer, tmp_path: Path) -> None:
    result = run(
        application,
        *("--index", tmp_path, "--data", tmp_path, "--out", tmp_path / "r.html"),
        *("--segment-by", "task"),
    )
    assert result.exit_code == 2
    assert "--alpha" in result.stderr
