"""Each benchmark command that a page or a docstring names exists and takes its options."""

import argparse
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "benchmarks" / "README.md"
PAGES = [
    *(README, *sorted(ROOT.glob("benchmarks/tables/*.md"))),
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))),
]
_COMMAND = re.compile(r"(?:`|^ {4})python -m (benchmarks\.[a-z]\w*)([^`#]*)")
_VARIANT = re.compile(r"`(--[^`]+)`")


def published() -> set[tuple[str, str]]:
    """Modules and options of the commands, alone and with each variant of the same line.

    A page or docstring that gives no options only names the module.
    """
    found = set()
    for page in [*PAGES, *(ROOT / "benchmarks").glob("[a-z]*.py")]:
        for line in page.read_text(encoding="utf-8").splitlines():
            for module, options in _COMMAND.findall(line):
                variants = _VARIANT.findall(_COMMAND.sub("", line)) if page == README else []
                if options.strip() or page == README:
                    found |= {(module, f"{options} {variant}") for variant in ["", *variants]}
    return found


COMMANDS = sorted(published())
MODULES = sorted(
    f"benchmarks.{file.stem}"
    for file in (ROOT / "benchmarks").glob("[a-z]*.py")
    if "__main__" in file.read_text(encoding="utf-8")
)


class Parsed(BaseException):
    """Stops a benchmark once its options are read, before its work."""


def started(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    monkeypatch.delitem(sys.modules, module, raising=False)
    runpy.run_module(module, run_name="__main__")


@pytest.mark.parametrize("module", MODULES)
def test_published_benchmark_answers_help(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = README.read_text(encoding="utf-8")
    assert f"`python -m {module}" in page or module == "benchmarks.figures"
    with pytest.raises(SystemExit) as ended:
        started(module, ["--help"], monkeypatch)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


@pytest.mark.parametrize(("module", "options"), COMMANDS)
def test_a_published_command_takes_its_options(
    module: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, *given: object) -> None:
        parse(parser, *given)  # type: ignore[arg-type]
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    with pytest.raises(Parsed):
        started(module, shlex.split(options.replace("…", "")), monkeypatch)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_only_existing_benchmarks(page: Path) -> None:
    named = re.findall(r"\bbenchmarks[./](_?[a-z][a-z_]+)(?![\w/])", page.read_text("utf-8"))
    there = {file.stem for file in (ROOT / "benchmarks").iterdir()}
    assert set(named) <= there
