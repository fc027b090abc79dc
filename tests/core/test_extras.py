"""What an error says of an extra that is missing: a command that installs it here."""

import ast
import json
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from ctxguard._support import extras
from ctxguard._support.extras import install_line, require
from ctxguard.errors import MissingExtraError

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(autouse=True)
def _looked_up_anew() -> Iterator[None]:
    extras.installed_from.cache_clear()
    yield
    extras.installed_from.cache_clear()


def installed(monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | None) -> None:
    class Distribution:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if origin is None else json.dumps(origin)

    monkeypatch.setattr(extras, "distribution", lambda name: Distribution())


def checkout(folder: Path) -> Path:
    folder.mkdir()
    for name in ("pyproject.toml", "constraints.txt"):
        (folder / name).touch()
    return folder


WHEEL = {"url": "file:///w/ctxguard_rag-0.1.0-py3.whl", "archive_info": {}}
GIT = {"url": "https://host/c.git", "vcs_info": {"vcs": "git", "commit_id": "0"}}
GONE = {"url": "file:///no/such/checkout", "dir_info": {}}


@pytest.mark.parametrize(
    ("origin", "named"),
    [
        (None, "ctxguard-rag[serve]"),
        (GONE, "ctxguard-rag[serve]"),
        (WHEEL, "/w/ctxguard_rag-0.1.0-py3.whl[serve]"),
        (GIT, "ctxguard-rag[serve] @ git+https://host/c.git"),
    ],
    ids=["a release", "a checkout that is gone", "a wheel", "a repository"],
)
def test_source_of_the_installation_is_named(
    origin: dict[str, Any] | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, origin)
    assert install_line("serve") == f'pip install "{named}"'


def test_checkout_is_named_with_its_versions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = checkout(tmp_path / "ctx guard")
    installed(monkeypatch, {"url": folder.as_uri(), "dir_info": {"editable": True}})
    line = f'pip install -c "{folder}/constraints.txt" "{folder}[judge,mcp]"'
    assert install_line("judge,mcp") == line


def test_uninstalled_checkout_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", absent)
    assert install_line("serve").endswith(f'"{ROOT}[serve]"')


def test_error_names_library_extra_and_command() -> None:
    with pytest.raises(MissingExtraError) as caught:
        require("no_such_library", "serve")
    said = (
        f"no_such_library is not installed; it comes with the extra serve: {install_line('serve')}"
    )
    assert str(caught.value) == said


def named_extras() -> set[str]:
    """The extras that the sources name where they require a module or print how to install one."""
    found = set()
    for folder in ("ctxguard", "calibration"):
        for file in (ROOT / folder).rglob("*.py"):
            for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                    last = call.args[-1] if call.args else None
                    if call.func.id in {"require", "install_line"} and isinstance(
                        last, ast.Constant
                    ):
                        found.add(str(last.value))
    return found - {"NAME"}


def test_every_extra_in_a_message_exists() -> None:
    named = named_extras()
    assert len(named) > 10
    assert named <= PROJECT["optional-dependencies"].keys()


FOR_DEVELOPERS = {"clients", "dev", "docs", "image"}


def test_every_extra_stands_in_the_table() -> None:
    readme = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = [line for line in readme.splitlines() if line.startswith("| `")]
    named = {name.strip("` ") for row in rows for name in row.split("|")[1].split(",")}
    assert PROJECT["optional-dependencies"].keys() - FOR_DEVELOPERS <= named
