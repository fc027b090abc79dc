"""README's installation lines in empty environments, and README's blocks on what they install.

Minutes, and gigabytes: `make test-install` runs it, `make test-install PYTHONS="python3.11
python3.12"` on other Pythons than the tests' own.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.monitor.chat_endpoint import ChatEndpoint
from tests.rerank_endpoint import RerankEndpoint
from tests.timing import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST_HOUR = (ROOT / "docs" / "first_hour.md").read_text(encoding="utf-8")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

PYTHONS = os.environ.get("PYTHONS", sys.executable).split()

pytestmark = pytest.mark.slow

MY_ENGINE = """
from types import SimpleNamespace
class Engine:
    def search(self, query, limit):
        rows = [SimpleNamespace(id="a", score=0.9, text=query),
                SimpleNamespace(id="b", score=0.1, text="b")]
        return rows[:limit]
my_engine = Engine()
"""


def blocks(language: str) -> list[str]:
    """The README's code blocks of a language, without those of the checkout's own make."""
    return [
        code for name, code in _BLOCK.findall(README) if name == language and "make " not in code
    ]


def line_with(words: str, page: str = README) -> str:
    """A page's command that begins with some words, on one line and without its comment."""
    joined = page.replace("\\\n", " ")
    [line] = {each for each in joined.splitlines() if each.startswith(words)}
    return line.partition("#")[0].strip()


class Environment:
    """An environment that a README line made."""

    def __init__(self, python: str, folder: Path, work: Path) -> None:
        self.bin, self._work = folder / "bin", work
        subprocess.run([python, "-m", "venv", str(folder)], check=True)

    def shell(self, commands: str, **settings: str) -> "subprocess.CompletedProcess[str]":
        hidden = {"PYTHONPATH", "VIRTUAL_ENV"}
        kept = {name: value for name, value in os.environ.items() if name not in hidden}
        path = f"{self.bin}:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],  # noqa: S607
            cwd=self._work,
            env={**kept, "PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **settings},
            capture_output=True,
            text=True,
            check=False,
        )

    def ok(self, commands: str, **settings: str) -> str:
        done = self.shell(commands, **settings)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done.stdout

    def python(self, code: str) -> str:
        (self._work / "block.py").write_text(code, encoding="utf-8")
        return self.ok("python -W error::SyntaxWarning block.py")


@pytest.fixture
def work(tmp_path: Path, made_before: Path) -> Path:
    """The folder of a user who has an index and a profile."""
    folder = tmp_path / "work"
    folder.mkdir()
    shutil.copy(made_before / "profile.json", folder)
    return folder


@pytest.fixture
def empty(python: str, tmp_path: Path, work: Path) -> Iterator[Environment]:
    """An environment with nothing in it, whose gigabytes go when the test ends."""
    yield Environment(python, tmp_path / "environment", work)
    shutil.rmtree(tmp_path / "environment")


def from_wheel(line: str, wheel: Path) -> str:
    """A README line with the wheel in place of the checkout, which would be built again."""
    fixed = line.replace("constraints.txt", str(ROOT / "constraints.txt"))
    return f"{re.sub(r'[.](?=[^.]*$)', str(wheel), fixed, count=1)} --quiet"


def test_line_works_in_namesake_folder(tmp_path: Path) -> None:
    """In a folder named like the other project the line installs this one."""
    folder = tmp_path / "ctxguard"
    for name in ("ctxguard", "calibration", "haystack_integrations"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder)
    for extra in ("all", "serve"):
        line = line_with(f'pip install -c constraints.txt ".[{extra}]"')
        command = [sys.executable, "-m", *shlex.split(line), "--dry-run", "--no-deps"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "Would install ctxguard-rag-" in done.stdout
        assert not re.search(r"\bctxguard-\d", done.stdout)


@pytest.mark.parametrize("python", PYTHONS)
def test_the_core_guards_a_retriever(empty: Environment, wheel: Path) -> None:
    empty.ok(from_wheel("pip install -c constraints.txt .", wheel))
    empty.python(MY_ENGINE + blocks("python")[0])
    done = empty.shell("ctxguard serve --rerank-upstream http://127.0.0.1:9")
    assert done.returncode == 2
    assert f'pip install "{wheel}[serve]"' in done.stderr


@pytest.mark.parametrize("python", PYTHONS)
def test_serve_has_service_and_monitor(
    empty: Environment, wheel: Path, work: Path, made_before: Path
) -> None:
    empty.ok(from_wheel(line_with('pip install -c constraints.txt ".[serve]"'), wheel))
    code = "\n".join(blocks("python")[:2])
    empty.python(f"{MY_ENGINE}{code}\nguard.retrieve('q')\nsamples.stop()\n")
    monitor = line_with("ctxguard monitor")
    with closing(ChatEndpoint()) as chat:
        settings = {"OPENAI_BASE_URL": chat.url, "OPENAI_API_KEY": "k"}
        alone = monitor.replace(" --index index", "").replace(" --profile profile.json", "")
        empty.ok(f"{alone} --once", **settings)
        shutil.copytree(made_before / "index", work / "index")
        done = empty.shell(f"{monitor} --once", **settings)
    assert done.returncode == 2
    assert f'pip install "{wheel}[embedded]"' in done.stderr
    assert empty.shell("ctxguard monitor --store postgresql://h/d").returncode == 2
    empty.ok("python -c 'import psycopg, httptools'")
    with closing(RerankEndpoint()) as reranker:
        _serves(empty, line_with("ctxguard serve", FIRST_HOUR), reranker.url)


@pytest.mark.parametrize("python", PYTHONS)
def test_all_runs_pages_commands(empty: Environment, wheel: Path, work: Path, beir: Path) -> None:
    # As the page says, this line is left out where its index cannot be reached.
    torch = line_with("pip install -r locks/torch.txt").replace("locks/", f"{ROOT}/locks/")
    empty.shell(f"{torch} --quiet")
    empty.ok(from_wheel(line_with('pip install -c constraints.txt ".[all]"'), wheel))
    code = "\n".join(blocks("python")[:2])
    empty.python(f"{MY_ENGINE}{code}\nguard.retrieve('q')\nsamples.stop()\n")
    empty.ok("\n".join(blocks("sh")), DATA=str(beir))
    assert (work / "report.html").is_file()
    with closing(ChatEndpoint()) as chat:
        settings = {"OPENAI_BASE_URL": chat.url, "OPENAI_API_KEY": "k"}
        empty.ok(f"{line_with('ctxguard monitor')} --once", **settings)


def _serves(environment: Environment, line: str, upstream: str) -> None:
    """Start the service by the page's line, wait until it is ready, and end it."""
    command = line.replace("http://localhost:8080", upstream)
    script = f"""
{command} --port 0 > log 2>&1 &
for _ in $(seq {PATIENCE_SECONDS:g}); do
  address=$(grep -om1 "http://[0-9.:]*" log || true)
  if [ -n "$address" ] && python -c "
import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + '/readyz')" $address; then
    break
  fi
  sleep 1
done
kill %1; wait %1 || true; cat log; [ -n "$address" ]
"""
    environment.ok(script)
