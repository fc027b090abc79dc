"""Every snippet of the README and of docs/ runs as shown, and every link leads somewhere."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.figures import pages, with_figures
from tests.command import invoke

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)")


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of one language on a page."""
    found = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return [code for name, code in found if name == language]


SEARCH = """
from ctxguard import Hit
def search(query, *, depth):
    return [Hit(row.id, row.score, row.text) for row in my_engine.search(query, limit=depth)]
"""

INDEX = """
from ctxguard import HybridRetriever
retriever = HybridRetriever.load("index")
"""

GIVEN = {
    "calibration.md": INDEX,
    "assessors.md": SEARCH,
    "monitoring.md": SEARCH,
    "production.md": SEARCH,
    "tracing.md": INDEX,
}
"""What the reader of a page has from the page before it."""

OF_LIBRARIES = ROOT / "docs" / "integrations"
"""Pages of libraries that `make test` may not install; tests/integrations runs them."""


class ReadersEngine:
    """The engine that the pages call ``my_engine``."""

    def search(self, query: str, limit: int) -> list[SimpleNamespace]:
        rows = [
            SimpleNamespace(id="a", score=0.9, text=query),
            SimpleNamespace(id="b", score=0.1, text="b"),
        ]
        return rows[:limit]


def in_words(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.model
@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p, "python") and p.parent != OF_LIBRARIES], ids=in_words
)
def test_snippets_run_in_page_order(
    page: Path, beir: Path, made_before: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(beir)
    for made in made_before.iterdir():
        (tmp_path / made.name).symlink_to(made)
    names: dict[str, Any] = {"my_engine": ReadersEngine(), "__name__": "snippet"}
    exec(GIVEN.get(page.name, ""), names)  # noqa: S102
    writers: list[Any] = []
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), names)  # noqa: S102
        writers.append(names.get("samples"))
    for writer in filter(None, writers):
        writer.stop()  # while the folder of its store is still there
        writer.store.close()


@pytest.mark.model
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "sh")], ids=in_words)
def test_commands_run_in_page_order(
    page: Path, beir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell writes the files and says what the commands are given; they run in this process."""
    noted = 'ctxguard() { printf "%q " "$@" >> commands; echo >> commands; }; touch commands\n'
    shown = [code for code in blocks(page, "sh") if "make " not in code and "pip" not in code]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATA", str(beir))
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = ["bash", "-euo", "pipefail", "-c", noted + "\n".join(shown)]
    subprocess.run(script, check=True)
    for line in (tmp_path / "commands").read_text(encoding="utf-8").splitlines():
        result = invoke(shlex.split(line))
        assert result.exit_code == 0, (line, result.stderr[-2000:])


def test_callable_is_served_in_15_lines() -> None:
    text = (ROOT / "examples" / "calibrate_a_callable.py").read_text(encoding="utf-8")
    docstring = ast.parse(text).body[0]
    code = "\n".join(filter(str.strip, text.splitlines()[docstring.end_lineno :]))
    assert len(code.splitlines()) <= 15
    assert all(word in code for word in ("calibrate(", "evidence", "ContextGuard("))


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"], ids=in_words
)
def test_links_lead_to_files(page: Path) -> None:
    targets = _LINK.findall(page.read_text(encoding="utf-8"))
    assert [t for t in targets if not (page.parent / t).exists()] == []


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as a site and GitHub make them."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each).lower().replace(" ", "-") for each in found}


@pytest.mark.parametrize("page", PAGES, ids=in_words)
def test_links_into_pages_lead_to_headings(page: Path) -> None:
    found = re.findall(r"\]\(((?!https?:)[^)#]*)#([^)]+)\)", page.read_text(encoding="utf-8"))
    led = [(page if not to else (page.parent / to).resolve(), anchor) for to, anchor in found]
    assert [each for each in led if each[1] not in headings(each[0])] == []


MOST_WORDS = {
    "docs/**/*.md": 29_500,
    "docs/DESIGN.md": 5_300,
    "README.md": 1_000,
    "benchmarks/README.md": 4_000,
}


@pytest.mark.parametrize("pattern", MOST_WORDS)
def test_pages_are_short_enough(pattern: str) -> None:
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in ROOT.glob(pattern))
    assert words <= MOST_WORDS[pattern]


@pytest.mark.parametrize("page", pages(), ids=in_words)
def test_quoted_figures_match_reports(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert with_figures(text) == text
