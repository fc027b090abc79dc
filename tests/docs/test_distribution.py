"""The package is distributed as ctxguard-rag: ``ctxguard`` on PyPI is another project."""

import os
import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
OURS = "ctxguard-rag"
FOREIGN_INSTALL = re.compile(r"pip3? install[^`\n]*?[ \"'](ctxguard)(?![-\w])|\bctxguard\[[a-z{]")
"""Installs the other project, or names an extra of it."""

SHIPPED_TEXT = [
    path
    for pattern in ("*.md", "*.toml", "Dockerfile", "Makefile", "**/*.md", "**/*.py", "**/*.yml")
    for path in ROOT.glob(pattern)
    if not {".venv", ".venv-clients", ".venv-docs", "build", ".git"} & set(path.parts)
    and path != Path(__file__)
]


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> str:
    assert wheel.name.startswith("ctxguard_rag-")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        return archive.read(name).decode()


def test_wheel_requires_nothing_foreign(metadata: str) -> None:
    headers = Parser().parsestr(metadata)
    assert headers["Name"] == OURS
    requirements = [Requirement(text) for text in headers.get_all("Requires-Dist", [])]
    assert "ctxguard" not in {each.name for each in requirements}


def test_wheels_readme_installs_this_project(metadata: str) -> None:
    assert 'pip install -c constraints.txt ".[all]"' in metadata
    assert not FOREIGN_INSTALL.search(metadata)


def test_nothing_installs_the_other_project() -> None:
    assert len(SHIPPED_TEXT) > 300
    for line in ("pip install ctxguard", "it comes with `ctxguard[fast]`"):
        assert FOREIGN_INSTALL.search(line)
    assert not FOREIGN_INSTALL.search('pip install "ctxguard-rag[serve]" lancedb')
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in SHIPPED_TEXT
        for match in FOREIGN_INSTALL.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_no_page_installs_absent_release() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    release = re.compile(rf"pip install[^\n]*{OURS}")
    assert [page.name for page in pages if release.search(page.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("page", ["postgresql", "milvus", "qdrant"])
def test_engines_page_installs_its_needs(page: str) -> None:
    text = (ROOT / f"docs/integrations/{page}.md").read_text(encoding="utf-8")
    [extras] = re.findall(r'pip install "\.\[([a-z,]+)\]"', text)
    assert "ctxguard index" in text
    assert {"embedded", "model", "calibrate"} < set(extras.split(","))


def run_beside_the_other_project(folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run ``ctxguard --version`` where a folder before the checkout holds the other project."""
    metadata = folder / "ctxguard-0.1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: ctxguard\nVersion: 0.1.0\n")
    script = "from ctxguard.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", script, "--version"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
        check=False,
        capture_output=True,
        text=True,
    )


def test_command_warns_beside_other_project(tmp_path: Path) -> None:
    done = run_beside_the_other_project(tmp_path)
    assert done.returncode == 0
    assert done.stderr.startswith("warning: ctxguard 0.1.0 is installed, which is another project")
    assert "pip uninstall ctxguard" in done.stderr


def test_command_stops_under_foreign_import(tmp_path: Path) -> None:
    package = tmp_path / "ctxguard"
    package.mkdir()
    for entry in (ROOT / "ctxguard").iterdir():
        if entry.name not in ("__init__.py", "__main__.py", "__pycache__"):
            (package / entry.name).symlink_to(entry)
    (package / "__init__.py").write_text('__version__ = "0.1.0"\n')
    done = run_beside_the_other_project(tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "pip uninstall ctxguard" in done.stderr
