"""Settings: each is described once, and becomes an option or a key of the file of a system."""

import os
import re
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from pydantic import field_validator
from running import as_toml, every_command, refused
from typer.testing import CliRunner

from ctxguard._support.settings import SettingsModel, key_of, setting
from ctxguard.cli import app
from ctxguard.cli._console import Output
from ctxguard.cli._settings import command_of
from ctxguard.cli._system import System
from ctxguard.errors import ConfigurationError

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


APPLICATION = every_command()["ctxguard"]
COMMANDS = {
    name.removeprefix("ctxguard "): command
    for name, command in every_command().items()
    if not hasattr(command, "commands")
}


def options_of(command: Any) -> dict[str, Any]:
    return {each.name: each for each in command.params if each.param_type_name == "option"}


def test_there_are_at_most_110_options_in_20_commands() -> None:
    assert len(COMMANDS) == 20
    shared = [flag for each in options_of(APPLICATION).values() for flag in each.opts]
    assert shared == ["--version", "--json"]
    assert sum(len(options_of(command)) for command in COMMANDS.values()) <= 109


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_argument_and_key_comes_from_a_field(name: str) -> None:
    command = COMMANDS[name]
    fields = command.settings
    given = {each.name: each for each in command.params} | {"system": None}
    keys = {key for records in command.keys.values() for key, _ in records}
    for each, param in given.items():
        if param is not None and each not in {"system", "help"}:
            assert param.help == fields[each].description
    for each, field in fields.items():
        assert (each in given) is not (key_of(each, field) in keys), each


OTHERS = ("pip ", "--figure ", "python -m ", "examples/")
"""What stands on lines with options that are not of `ctxguard`."""
OF_ALL = {"--help", "--json"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_shows_a_command_with_options_that_it_has(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    flags = {
        name: {flag for each in options_of(command).values() for flag in each.opts} | OF_ALL
        for name, command in COMMANDS.items()
    }
    for words in re.findall(r"\bctxguard ([a-z-]+[^`#|;\n]*)", text.replace("\\\n", " ")):
        first, *rest = words.split()
        name = first if first in COMMANDS else " ".join([first, *rest[:1]])
        if name in COMMANDS:
            options = re.findall(r"(?<!\S)--?[a-z][a-z-]*", " ".join(rest))
            assert set(options) <= flags[name], f"ctxguard {words}"
    for line in text.splitlines():
        if not any(other in line for other in OTHERS):
            options = re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)
            assert set(options) <= set().union(*flags.values()), line


class Show(SettingsModel):
    """Settings of a command, which prints them."""

    n: Annotated[int, setting("A number.", "N", ge=0)] = 1
    file: Annotated[Path | None, setting("A file.", "FILE", key=True)] = None
    share: Annotated[float, setting("A share of something.", "SHARE", key=True, gt=0, lt=1)] = 0.5
    index: Annotated[Path | None, setting("A folder.", "FOLDER")] = None
    engine: Annotated[str | None, setting("An engine.", "URL")] = None

    def __call__(self, _: Output) -> None:
        typer.echo(self.model_dump_json())


class Need(SettingsModel):
    """A command with an option that must be given, and a file."""

    store: Annotated[str, setting("A store.", "URL")]
    out: Annotated[Path | None, setting("A file to write.", "FILE", writes=True)] = None
    seed: Annotated[int, setting("A number.", "N", key=True)] = 0

    def __call__(self, _: Output) -> None:
        typer.echo(self.model_dump_json())


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command with a file that holds a document."""

    def run(
        document: dict[str, Any] | None, *options: str, model: type[SettingsModel] = Show
    ) -> Any:
        name, file = model.__name__.lower(), tmp_path / "system.toml"
        monkeypatch.setattr("ctxguard.cli._settings.COMMANDS", {name, "monitor"})
        if document is not None:
            file.write_text(as_toml(document), encoding="utf-8")
            options = ("--system", str(file), *options)
        return CliRunner().invoke(command_of(model, name, "Shows the settings."), options)

    return run


class EvenSettings(SettingsModel):
    """Settings that a check of their own may refuse."""

    n: int = setting("An even number.", "N")

    @field_validator("n")
    @classmethod
    def _check(cls, n: int) -> int:
        if n % 2:
            raise ValueError("is odd")
        return n


def test_a_refused_value_is_told_in_the_words_of_the_check() -> None:
    with pytest.raises(ConfigurationError, match=r"^n 1: is odd$"):
        EvenSettings(n=1)


@pytest.mark.parametrize(
    ("document", "options", "expected"),
    [
        # A key replaces a default, and an option a key.
        ({"show": {"share": 0.25, "n": 2}}, (), ('"n":2,', '"share":0.25')),
        ({"show": {"share": 0.25, "n": 2}}, ("--n", "1"), ('"n":1,', '"share":0.25')),
        # What the command does not need, of the system or in another's table, is no fault.
        ({"index": "i", "depth": 7, "score-kind": "rank"}, (), ('"n":1,',)),
        ({"profile": "p", "store": "s", "monitor": {"port": 5}, "show": {"n": 2}}, (), ('"n":2,',)),
    ],
)
def test_a_file_gives_what_no_option_gives(
    shown: Any, document: dict[str, Any], options: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    result = shown(document, *options)
    assert result.exit_code == 0
    assert all(each in result.output for each in expected)


def test_a_relative_path_starts_from_the_folder_of_the_file(shown: Any, tmp_path: Path) -> None:
    output = shown({"index": "i", "show": {"file": "/a"}}).output
    assert str(tmp_path / "i") in output
    assert '"file":"/a"' in output


@pytest.mark.parametrize("document", [{"store": "s"}, {"need": {"store": "s"}}])
def test_an_option_that_must_be_given_may_stand_in_the_file(
    shown: Any, document: dict[str, Any]
) -> None:
    assert '"store":"s"' in shown(document, model=Need).output
    missing = refused(shown(None, model=Need))
    assert "give --store URL, or store in a file --system" in missing.stderr


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"show": {"shares": 1}}, "[show] has no key 'shares'; its keys are n, file, share"),
        ({"sho": {"share": 1}}, "has no key 'sho'"),
        ({"n": 2}, "has no key 'n'"),
        ({"score_kind": "rank"}, "has no key 'score_kind'"),
        ({"show": {"share": 1}}, "share 1: should be less than 1"),
        ({"show": {"share": "much"}}, "share 'much': should be a valid number"),
        ({"show": 3}, "has no key 'show'"),
    ],
)
def test_a_key_that_cannot_be_used_is_named(
    shown: Any, document: dict[str, Any], said: str
) -> None:
    result = refused(shown(document))
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize("content", [b"index = \xff", b"index = " + 3_000 * b"["])
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "system.toml"
    file.write_bytes(content)
    result = refused(CliRunner().invoke(app, ["query", "q", "--system", str(file)]))
    assert "system.toml: is no TOML" in " ".join(result.output.split())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes")
def test_a_pipe_is_no_file_of_settings(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "system.toml")
    result = refused(
        CliRunner().invoke(app, ["query", "q", "--system", str(tmp_path / "system.toml")])
    )
    assert "system.toml: cannot be read" in " ".join(result.output.split())


def test_the_docstring_of_settings_describes_each_field() -> None:
    for name, field in System.model_fields.items():
        assert f"{name}: {field.description}" in str(System.__doc__)


def test_a_password_in_a_setting_is_neither_shown_nor_said() -> None:
    system = System(engine="postgresql://u:secret@h/d#i")
    assert "secret" not in repr(system)
