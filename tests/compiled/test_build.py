"""The build of the compiled module: from these sources, into a wheel, with any compiler or none."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

import hatch_build
from ctxguard._support import _compiled
from ctxguard._support._compiled import kernels
from ctxguard.cli import app
from ctxguard.guard import ContextGuard
from ctxguard.guard.context_guard import _say_computation
from ctxguard.request.telemetry import Telemetry

ROOT = Path(__file__).parents[2]

needs_module = pytest.mark.skipif(kernels is None, reason="the compiled module is absent")


def python(code: str, **environment: str) -> str:
    """What a program prints in a process of its own."""
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return ran.stdout.strip()


def wheel(folder: Path, **environment: str) -> zipfile.ZipFile:
    """The wheel of this checkout, built as `pip wheel` does."""
    arguments = ["--no-deps", "--no-build-isolation", "-q", "-w", str(folder), str(ROOT)]
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", *arguments],
        check=True,
        env=os.environ | environment,
    )
    return zipfile.ZipFile(next(folder.glob("*.whl")))


@needs_module
def test_the_module_is_built_from_these_sources() -> None:
    assert kernels is not None
    assert kernels.sources == hatch_build.sources_digest(), "run `make .venv/.run`"


@needs_module
def test_a_variable_limits_the_instructions_or_switches_the_module_off() -> None:
    shown = (
        "from ctxguard._support import _compiled as c\n"
        "print(getattr(c.kernels, 'processor', c.absent))"
    )
    assert python(shown, CTXGUARD_PROCESSOR="plain") == "plain"
    assert python(shown, CTXGUARD_PROCESSOR="none") == "switched off by CTXGUARD_PROCESSOR=none"


@needs_module
def test_a_wheel_brings_the_module_to_every_python_that_is_supported(tmp_path: Path) -> None:
    made = wheel(tmp_path)
    names = made.namelist()
    assert "ctxguard/_support/_compiled/_kernels.abi3.so" in names
    assert not [name for name in names if name.endswith((".c", ".h"))]
    assert "-cp311-abi3-" in str(made.filename)
    made.extractall(tmp_path / "unpacked")
    shown = (
        "from ctxguard._support._compiled import kernels; print(kernels.__file__, kernels.sources)"
    )
    file, sources = python(shown, PYTHONPATH=str(tmp_path / "unpacked")).split()
    assert file.startswith(str(tmp_path))
    assert sources == hatch_build.sources_digest()


def test_an_install_without_a_compiler_succeeds(tmp_path: Path) -> None:
    made = wheel(tmp_path, CC="false", PATH=str(tmp_path))
    assert not [name for name in made.namelist() if name.endswith(".so")]
    assert "-py3-none-any" in str(made.filename)


def test_a_build_asks_for_a_compiler_where_none_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(hatch_build, "find_spec", lambda _name: None)
    monkeypatch.setattr(hatch_build.platform, "machine", lambda: "x86_64")
    assert hatch_build.CustomBuildHook.dependencies(None) == [hatch_build.COMPILER]  # type: ignore[arg-type]
    with pytest.raises(hatch_build.BuildError, match="no C compiler"):
        hatch_build.build(tmp_path / "module.so")


def test_where_the_module_is_absent_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_compiled, "kernels", None)
    monkeypatch.setattr(_compiled, "absent", "switched off")
    _say_computation.cache_clear()
    for _ in range(2):
        ContextGuard(telemetry=Telemetry(CollectorRegistry()))
    (said,) = caplog.messages
    assert "numpy computes, several times more slowly" in said
    assert "switched off" in said
    ran = CliRunner().invoke(app, ["doctor", "--json"])
    findings = {each["part"]: each for each in json.loads(ran.stdout)["findings"]}
    assert findings["computation"]["status"] == "note"
    assert findings["computation"]["text"] == said
