"""The command line as a process: its start, its end, its streams."""

import json
import os
import re
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
from running import Run, every_command, refused

from ctxguard import __version__
from ctxguard.cli import GROUPS
from ctxguard.cli import _console as console
from ctxguard.cli._console import Output
from ctxguard.core.render import one_line
from tests.command import Invoked, invoke
from tests.timing import PATIENCE_SECONDS


def process(*arguments: object, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ctxguard", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "100", **settings},
    )


COMMANDS = every_command()
PAGES = ["", *GROUPS, *COMMANDS]


def help_of(name: str, columns: int = 80) -> str:
    printed = invoke([*name.split(), "--help"], columns=str(columns))
    assert printed.exit_code == 0
    return printed.stdout


@pytest.mark.parametrize("name", PAGES)
def test_help_fits_the_terminal(name: str) -> None:
    """A page has at most 60 lines of 80 columns; only that of the application has --json."""
    for columns in (60, 80):
        printed = help_of(name, columns)
        assert max(map(len, printed.splitlines())) <= columns
        parts = printed.partition("Options:")[2]
        # No type names for metavars, no bounds in symbols, no default in brackets of its own.
        for mystery in ("...", "<", "x>=", "default: ("):
            assert mystery not in parts, mystery
    assert len(printed.splitlines()) <= 60
    assert ("  --json " in printed) is (name == "")


def test_five_commands_come_first() -> None:
    first, more = help_of("").split("\nCommands:\n")[1].split("\nMore:\n")
    names = re.findall(r"^  (\S+)  ", first, re.MULTILINE)
    assert names == ["index", "calibrate", "serve", "monitor", "label"]
    assert "evaluate" in more


def test_keys_are_a_file_to_fill(run: Run, tmp_path: Path) -> None:
    printed = run.ok("keys", "golden", "hard-negatives").stdout
    assert "[hard_negatives]" in printed or "[hard-negatives]" in printed
    assert all(line.startswith(("#", "[")) for line in printed.splitlines() if line)
    for name, command in COMMANDS.items():
        if command.keys:
            printed = run.ok("keys", *name.split()).stdout
            assert max(map(len, printed.splitlines())) <= 80
            for table, keys in command.sections().items():
                assert f"[{table}]" in printed or not table
                assert all(f"# {key} =" in printed for key, _ in keys)
    run.refused("keys", "frobnicate", says="there is no command 'frobnicate'")
    run.refused("keys", "doctor", says="takes only options")


def imported(code: str, *arguments: str) -> set[str]:
    """What a program imports; ``app`` is the application."""
    code = f"import sys\n{code}\nprint(*sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", code, *arguments]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stderr.split())


HELP = """
from ctxguard.cli import main
for words in sys.argv[1:]: main(words.split())
"""


def test_applications_help_imports_little() -> None:
    names = imported(HELP, "--help")
    assert not {"argparse", "numpy", "pydantic", "rich"} & names
    assert len([name for name in names if name.startswith("ctxguard")]) <= 7


def test_commands_help_imports_little() -> None:
    names = imported(HELP, *[f"{name} --help" for name in PAGES])
    assert "ctxguard.cli.calibrate" in names
    heavy = {"asyncio", "faiss", "httpx", "prometheus_client", "scipy", "sqlalchemy", "torch"}
    ours = ("calibration", "guard", "integrations", "monitor.store", "profile.schema", "request")
    heavy |= {f"ctxguard.{each}" for each in (*ours, "resilience", "retrieval.hybrid")}
    assert not heavy & names
    assert len([name for name in names if name.startswith("ctxguard")]) <= 80


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("evalute", "there is no command 'evalute'; did you mean evaluate?"),
        ("golden chek", "there is no command 'golden chek'; did you mean golden check?"),
        ("labl export", "there is no command 'labl'; did you mean label?"),
        ("label frobnicate", "there is no argument for 'frobnicate'; see ctxguard label --help"),
        ("frobnicate", "there is no command 'frobnicate'"),
        ("--frob", "there is no command '--frob'"),
        ("query", "give QUESTION"),
        ("index x --frob", "there is no option --frob"),
        ("label --frob", "there is no option --frob"),
        ("", "name a command; see ctxguard --help"),
        ("index", "give CORPUS"),
        ("label import --store s", "give FILE"),
        ("metrics", "give rules|dashboard"),
        ("index a b", "there is no argument for 'b'; see ctxguard index --help"),
        ("keys serv", "there is no command 'serv'; did you mean serve?"),
    ],
)
def test_a_wrong_command_is_named(run: Run, words: str, said: str) -> None:
    assert run.refused(*words.split(), says=said).stdout == ""


def test_version_is_printed(run: Run) -> None:
    assert run("--version").stdout.strip() == __version__


@pytest.mark.parametrize("words", ["--json metrics x", "metrics --json x", "metrics x --json"])
def test_json_stands_anywhere(run: Run, words: str) -> None:
    result = run.refused(*words.split(), says="what 'x': should be")
    assert json.loads(result.stdout)["error"]["type"] == "ConfigurationError"


WORK = """
import signal, time
from ctxguard import cli
class Working:
    def run(self, words, output): {work}
cli.named = lambda name: Working()
"""


def test_unexpected_error_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An unexpected error is one line with a hint and a traceback for who asks."""
    monkeypatch.delenv("CTXGUARD_DEBUG", raising=False)

    def failing(error: Exception) -> Invoked:
        broken = mock.Mock(side_effect=error)
        monkeypatch.setattr("ctxguard.cli.metrics.MetricsCommand.__call__", broken)
        return invoke(["metrics", "rules"])

    result = refused(failing(PermissionError(13, "Permission denied", "/data/profile.json")))
    assert result.stderr == "error: /data/profile.json: Permission denied\n"
    result = refused(failing(ZeroDivisionError("by\x1b zero")))
    assert result.stderr.startswith("error: unexpected ZeroDivisionError: by zero (set CTXGUARD_")
    assert result.stderr.count("\n") == 1
    result = refused(failing(MemoryError()))
    assert "this machine has run out of memory" in result.stderr
    (tmp_path / "of_a_user.py").write_text("def search(*_):\n    raise KeyError('score')\n")
    monkeypatch.syspath_prepend(tmp_path)
    broken = mock.Mock(side_effect=import_module("of_a_user").search)
    monkeypatch.setattr("ctxguard.cli.metrics.MetricsCommand.__call__", broken)
    result = refused(invoke(["metrics", "rules"]))
    assert f"KeyError in {tmp_path}/of_a_user.py, line 2: 'score' (in your code" in result.stderr
    monkeypatch.setenv("CTXGUARD_DEBUG", "1")
    assert isinstance(failing(ZeroDivisionError("by zero")).exception, ZeroDivisionError)


def test_interrupt_ends_quietly_with_130() -> None:
    # What a shell starts in the background ignores the signal, and so would what that starts.
    waiting = "print('ready', flush=True); time.sleep(30)"
    ignored = "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code = WORK.format(work=waiting) + ignored + "cli.main(['demo'])"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout.readline() == "ready\n"
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=PATIENCE_SECONDS)
    assert running.returncode == 130
    assert errors == ""


def test_short_progress_shows_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Progress that is soon over is shown once where it is not a terminal."""
    with Output().passes() as begin:
        known, unknown = begin("encoding", 3_000), begin("reading", None)
        known(1_000)
        unknown(7)
        known(2_000)
    said = capsys.readouterr().err
    assert said.count("encoding") == said.count("3000/3000") == said.count("7/7") == 1


def test_long_work_writes_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long work writes a line now and then where it is not a terminal."""
    monkeypatch.setattr(console, "_LINE_SECONDS", 0.0)
    with Output().passes() as begin:
        encoding = begin("encoding", 3_000)
        encoding(1_000)
        encoding(1_500)
        assert capsys.readouterr().err.splitlines() == [
            "encoding: 1,000 of 3,000, about 1 min left",
            "encoding: 2,500 of 3,000, about 1 min left",
        ]
        begin("reading", None)(7)
        assert capsys.readouterr().err == "reading: 7 so far\n"
        tell = console.by_total(begin, "chunking")
        tell(0, 500)
        assert capsys.readouterr().err == "chunking: 0 of 500\n"
        tell(500, 500)
    assert "500/500" in capsys.readouterr().err


def test_terminal_text_is_one_plain_line() -> None:
    assert one_line("a\x1b[31m\r\nb\u2028c\u202ed\x9b\udc80") == "a[31m b cd\ufffd"


def test_leaving_reader_ends_command_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    for printing in ("print('answer')", "output.out.print('answer')"):
        code = WORK.format(work=printing) + "cli.main(['demo'])"
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (1, "")
    os.close(writing)


@pytest.mark.model
def test_process_prints_in_any_encoding(index: Path) -> None:
    """No chatter of libraries, and a question mark for a character that the encoding lacks."""
    done = process("query", "--index", index, "clean a violin", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"score [\d.]+ \? r [\d.]+", done.stdout)
    assert "note: uncalibrated: no profile" in done.stdout
