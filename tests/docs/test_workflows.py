"""The workflows of GitHub run the project's own commands, on every Python that it supports."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
TARGETS = set(
    re.findall(
        r"^([a-z][a-z-]*(?: [a-z-]+)*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M
    )
)
CONFIGURATIONS = sorted([*ROOT.glob(".github/**/*.yml"), ROOT / ".pre-commit-config.yaml"], key=str)
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md",
]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def jobs() -> Iterator[dict[str, Any]]:
    for path in ROOT.glob(".github/workflows/*.yml"):
        yield from read(path)["jobs"].values()


def commands() -> Iterator[str]:
    """What the workflows run, with every value of a matrix in its place."""
    for job in jobs():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            run = step.get("run", "")
            if name := re.search(r"\$\{\{ matrix\.(\w+) \}\}", run):
                yield from [run.replace(name[0], value) for value in matrix[name[1]]]
            elif run:
                yield run


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.name)
def test_a_configuration_is_valid_yaml(path: Path) -> None:
    assert isinstance(read(path), dict)


def test_workflows_run_make_targets_alone() -> None:
    found = list(commands())
    assert {"make test", "make lint demo", "make test-portable", "make test-clients"} <= set(found)
    for command in found:
        program, *words = command.split()
        # Programs that some tests run, and skip without.
        if (program, *words[:1]) != ("sudo", "apt-get"):
            assert program == "make"
            assert words
            assert set(words) <= TARGETS


@pytest.mark.parametrize("path", [*PAGES, ROOT / ".pre-commit-config.yaml"], ids=lambda p: p.name)
def test_named_make_targets_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = re.findall(r"(?:`|^|entry: )make ((?:[a-z][a-z-]*(?: |\b))+)", text, re.M)
    assert {name for names in named for name in names.split()} <= TARGETS


def test_ci_runs_every_supported_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = [
        each.rpartition(" ")[2]
        for each in project["classifiers"]
        if each.startswith("Programming Language")
    ]
    matrices = [
        job["strategy"]["matrix"]["python"]
        for job in jobs()
        if "python" in job.get("strategy", {}).get("matrix", {})
    ]
    assert matrices == [versions, versions]  # the tests, and the installation


def test_actions_are_pinned_and_jobs_bounded() -> None:
    for path in ROOT.glob(".github/workflows/*.yml"):
        assert read(path)["permissions"] == {"contents": "read"}
    for job in jobs():
        assert job["timeout-minutes"] <= 240
        for step in job["steps"]:
            assert "run" in step or re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"])
