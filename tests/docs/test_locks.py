"""The lock files hold what pyproject.toml asks for: ``make lock`` writes them anew."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TORCH_INDEX = "--index-url https://download.pytorch.org/whl/cpu"


def locked(name: str) -> dict[str, tuple[str, int]]:
    """The version of each locked package, and the number of its files."""
    text = (ROOT / "locks" / f"{name}.txt").read_text(encoding="utf-8").replace("\\\n", "")
    lines = [line for line in text.splitlines() if line and not line.startswith(("#", "--"))]
    packages = {}
    for line in lines:
        pin = re.match(r"([\w.-]+)==(\S+)", line)
        assert pin, line
        n_files = len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", line))
        packages[str(canonicalize_name(pin[1]))] = (pin[2], n_files)
    return packages


def wanted(extra: str | None) -> Iterator[Requirement]:
    """What an extra installs, with the extras that it names."""
    given = PROJECT["project"]
    for text in [*given["dependencies"], *given["optional-dependencies"].get(extra, [])]:
        requirement = Requirement(text)
        if requirement.name != given["name"]:
            yield requirement
        else:
            for each in requirement.extras:
                yield from wanted(each)


@pytest.mark.parametrize("extra", ["all", "image", "dev", "clients", "docs"])
def test_every_dependency_is_locked(extra: str) -> None:
    packages = {**locked("torch"), **locked(extra)}
    build = map(Requirement, PROJECT["dependency-groups"]["build"])
    for requirement in [*wanted(extra), *build]:
        name = canonicalize_name(requirement.name)
        assert name in packages, f"{name} is not in locks/{extra}.txt: run `make lock`"
        assert requirement.specifier.contains(packages[name][0]), f"{name}: run `make lock`"


def test_versions_are_the_constraints() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    for extra in ("torch", "all", "image", "dev", "clients", "docs"):
        packages = locked(extra)
        for name, version in pins.items():
            if (locked_name := canonicalize_name(name)) in packages:
                assert packages[locked_name][0] == version, f"{name}: run `make lock`"


@pytest.mark.parametrize("name", ["torch", "all", "dev", "clients", "docs"])
def test_packages_have_hashes_without_place(name: str) -> None:
    packages = locked(name)
    assert packages
    assert all(n_files for _, n_files in packages.values())
    text = (ROOT / "locks" / f"{name}.txt").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if "://" in line] == (
        [TORCH_INDEX] if name == "torch" else []
    )


def test_torch_has_its_own_index() -> None:
    assert list(locked("torch")) == ["torch"]
    for extra in ("all", "dev", "clients", "docs"):
        assert not [each for each in locked(extra) if each.startswith(("torch", "nvidia", "cuda"))]
