"""Settings: each is described once, and becomes an option or a key of the file of a system."""

import os
import re
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import field_validator
from running import Result, as_toml, every_command, refused

from ctxguard._support.settings import SettingsModel, flags_of, setting
from ctxguard.cli import help_of
from ctxguard.cli._console import Output
from ctxguard.cli._settings import Command
from ctxguard.cli._system import System
from ctxguard.errors import ConfigurationError
from tests.command import invoke

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]

COMMANDS = every_command()


def flags(command: Any) -> set[str]:
    return {flag for each in command.options.items() for flag in flags_of(*each)}


def test_options_are_about_120() -> None:
    assert len(COMMANDS) <= 20
    assert re.findall(r"^  (--\w+)", help_of(), re.MULTILINE) == ["--version", "--json", "--help"]
    assert sum(len(command.options) for command in COMMANDS.values()) <= 120


@pytest.mark.parametrize("name", COMMANDS)
def test_a_field_has_one_place(name: str) -> None:
    """Each field is an argument, an option or a key, and help says what its description says."""
    command = COMMANDS[name]
    places = [command.arguments, command.options, command.keys]
    in_help = "".join(command.help().split())
    in_keys = "".join(text for rows in command.sections().values() for row in rows for text in row)
    for field in [each for place in places[:2] for each in place.values()]:
        assert "".join(str(field.description).split()) in in_help
    for field in command.keys.values():
        assert str(field.description) in in_keys
    assert all(sum(each in place for place in places) == 1 for each in command.fields)


OTHERS = ("pip ", "--figure ", "python -m ", "examples/")
"""What stands on lines with options that are not of `ctxguard`."""
OF_ALL = {"--help", "--json"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_show_existing_options(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    known = {name: flags(command) | OF_ALL for name, command in COMMANDS.items()}
    for words in re.findall(r"\bctxguard ([a-z-]+[^`#|;\n]*)", text.replace("\\\n", " ")):
        first, *rest = words.split()
        pair = " ".join([first, *rest[:1]])
        name = pair if pair in COMMANDS else first
        if name in COMMANDS:
            options = re.findall(r"(?<!\S)--?[a-z][a-z-]*", " ".join(rest))
            assert set(options) <= known[name], f"ctxguard {words}"
    for line in text.splitlines():
        if not any(other in line for other in OTHERS):
            options = re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)
            assert set(options) <= set().union(*known.values()), line


class Printed(SettingsModel):
    """Settings of a command, which prints them."""

    def __call__(self, output: Output) -> None:
        output.text(self.model_dump_json())


class Show(Printed):
    """Options and keys."""

    n: Annotated[int, setting("A number.", "N", ge=0)] = 1
    file: Annotated[Path | None, setting("A file.", "FILE", key=True)] = None
    share: Annotated[float, setting("A share of something.", "SHARE", key=True, gt=0, lt=1)] = 0.5
    index: Annotated[Path | None, setting("A folder.", "FOLDER")] = None
    engine: Annotated[str | None, setting("An engine.", "URL")] = None


class Need(Printed):
    """A command with an option that must be given, and a file."""

    store: Annotated[str, setting("A store.", "URL")]
    out: Annotated[Path | None, setting("A file to write.", "FILE", writes=True)] = None
    reports: list[Path] = setting("Files.", "FILES", key=True, writes=True, value=[])
    seed: Annotated[int, setting("A number.", "N", key=True)] = 0


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command with a file that holds a document."""

    def run(
        document: dict[str, Any] | None, *options: str, model: type[SettingsModel] = Show
    ) -> Result:
        name, file = model.__name__.lower(), tmp_path / "system.toml"
        monkeypatch.setattr("ctxguard.cli.COMMANDS", {name: ""})
        monkeypatch.setattr("ctxguard.cli.named", lambda _: Command(name, "Shows settings.", model))
        monkeypatch.setattr("ctxguard.cli._settings._TABLES", {name, "monitor"})
        if document is not None:
            file.write_text(as_toml(document), encoding="utf-8")
            options = ("--system", str(file), *options)
        return invoke([name, *options])

    return run


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--frob", "1"), "there is no option --frob; see ctxguard show --help"),
        (("--share=1",), "--share is a key, not an option: write it into the --system file"),
        (("--indx", "i"), "there is no option --indx; did you mean --index?"),
        (("--n", "x"), "--n 'x': should be a valid integer"),
        (("--n", "-1"), "--n '-1': should be greater than or equal to 0"),
        (("--n",), "--n: expected one argument"),
        (("index",), "there is no argument for 'index'; see ctxguard show --help"),
        (("--file", "f"), "--file is a key, not an option"),
    ],
)
def test_a_refused_word_is_named(shown: Any, words: tuple[str, ...], said: str) -> None:
    """An option that is unknown, without a value or out of range, with the nearest or the mend."""
    assert said in " ".join(refused(shown(None, *words)).stderr.split())


class Both(Printed):
    """A command whose profile is another than the one at the top of a file."""

    profile: Path | None = setting("A profile.", "FILE", own=True, value=None)
    seed: int = setting("A number.", "N", key=True, value=0)


def test_field_may_be_the_commands(shown: Any, tmp_path: Path) -> None:
    """The top of a file does not give it; its table and its option do."""
    assert '"profile":null' in shown({"profile": "p", "both": {"seed": 1}}, model=Both).output
    in_table = shown({"profile": "p", "both": {"profile": "q"}}, model=Both)
    assert f'"profile":"{tmp_path / "q"}"' in in_table.output
    assert '"profile":"r"' in shown({"profile": "p"}, "--profile", "r", model=Both).output


class EvenSettings(SettingsModel):
    """Settings that a check of their own may refuse."""

    n: int = setting("An even number.", "N")

    @field_validator("n")
    @classmethod
    def _check(cls, n: int) -> int:
        if n % 2:
            raise ValueError("is odd")
        return n


def test_refused_value_keeps_checks_words() -> None:
    with pytest.raises(ConfigurationError, match=r"^n 1: is odd$"):
        EvenSettings(n=1)


@pytest.mark.parametrize(
    ("document", "options", "expected"),
    [
        # A key replaces a default, and an option a key.
        ({"show": {"share": 0.25, "n": 2}}, (), ('"n":2,', '"share":0.25')),
        ({"show": {"share": 0.25, "n": 2}}, ("--n", "1"), ('"n":1,', '"share":0.25')),
        # What the command does not need, of the system or in another's table, is not a fault.
        ({"index": "i", "depth": 7, "score-kind": "rank"}, (), ('"n":1,',)),
        ({"profile": "p", "store": "s", "monitor": {"port": 5}, "show": {"n": 2}}, (), ('"n":2,',)),
    ],
)
def test_file_gives_unset_options(
    shown: Any, document: dict[str, Any], options: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    result = shown(document, *options)
    assert result.exit_code == 0
    assert all(each in result.output for each in expected)


def test_relative_path_starts_from_file(shown: Any, tmp_path: Path) -> None:
    """One path, or each of a list, starts from the folder of the file that names it."""
    output = shown({"index": "i", "show": {"file": "/a"}}).output
    assert str(tmp_path / "i") in output
    assert '"file":"/a"' in output
    several = shown({"store": "s", "need": {"reports": ["a", "/b"]}}, model=Need).output
    assert f'"reports":["{tmp_path / "a"}","/b"]' in several


@pytest.mark.parametrize("given", [{"out": "."}, {"reports": ["a", "."]}, {"out": "made"}])
def test_output_file_is_tried_first(shown: Any, tmp_path: Path, given: dict[str, object]) -> None:
    """An option or a key that names a folder, alone or in a list, is refused before the work."""
    (tmp_path / "made").mkdir()
    said = refused(shown({"store": "s", "need": given}, model=Need)).stderr
    assert "is a directory; name a file" in said
    assert said.startswith(f"error: {next(iter(given))} ")
    assert "--out" in refused(shown({"store": "s"}, "--out", str(tmp_path), model=Need)).stderr


@pytest.mark.parametrize("document", [{"store": "s"}, {"need": {"store": "s"}}])
def test_required_option_may_be_filed(shown: Any, document: dict[str, Any]) -> None:
    assert '"store":"s"' in shown(document, model=Need).output
    missing = refused(shown(None, model=Need))
    assert "give --store URL, or store in the --system file" in missing.stderr


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"show": {"shares": 1}}, "[show] has no key 'shares'; did you mean share?"),
        ({"show": {"x": 1}}, "[show] has no key 'x'; its keys are n, file, share"),
        ({"sho": {"share": 1}}, "has no key 'sho'; its keys are "),
        ({"n": 2}, "has no key 'n'"),
        ({"score_kind": "rank"}, "has no key 'score_kind'; did you mean score-kind?"),
        ({"show": {"share": 1}}, "share 1: should be less than 1"),
        ({"show": {"share": "much"}}, "share 'much': should be a valid number"),
        ({"show": 3}, "has no key 'show'"),
    ],
)
def test_unusable_key_is_named(shown: Any, document: dict[str, Any], said: str) -> None:
    result = refused(shown(document))
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize("content", [b"index = \xff", b"index = " + 3_000 * b"["])
def test_file_without_toml_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "system.toml"
    file.write_bytes(content)
    result = refused(invoke(["query", "q", "--system", file]))
    assert "system.toml: is not TOML" in " ".join(result.output.split())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes")
def test_pipe_is_no_settings_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "system.toml")
    result = refused(invoke(["query", "q", "--system", tmp_path / "system.toml"]))
    assert "system.toml: cannot be read" in " ".join(result.output.split())


def test_docstring_describes_each_field() -> None:
    for name, field in System.model_fields.items():
        assert f"{name}: {field.description}" in str(System.__doc__)


def test_password_is_never_shown() -> None:
    system = System(engine="postgresql://u:secret@h/d#i")
    assert "secret" not in repr(system)
