"""``ctxguard calibrate --queries``: from questions alone to a profile in shadow, and to grades."""

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_endpoint import Answer, ChatEndpoint, grade_by_words
from live_traffic import read_rows
from running import Run
from tiny_cross_encoder import make_cross_encoder

from calibration.judged_route import JUDGED_DEPTH
from ctxguard import ContextGuard
from ctxguard.monitor.sampling.writer import sample_to
from ctxguard.monitor.store import LabelRow, SampleStore
from ctxguard.profile.schema import Profile
from ctxguard.retrieval import HybridRetriever
from tests.rerank_endpoint import RerankEndpoint


class StrictEndpoint(ChatEndpoint):
    """Says yes only where three words of the question are in the passage."""

    def answer(self, path: str, request: dict[str, Any]) -> Answer:
        return Answer(json.dumps({"grade": max(grade_by_words(request["messages"]) - 2, 0)}))


@pytest.fixture
def chat() -> Iterator[ChatEndpoint]:
    pytest.importorskip("openai")
    endpoint = StrictEndpoint()
    yield endpoint
    endpoint.close()


@pytest.fixture
def queries(collection: Path, tmp_path: Path) -> Path:
    """The questions of a labelled collection, as a log would have them."""
    lines = (collection / "queries.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    file = tmp_path / "log.csv"
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["query_id", "query"])
        writer.writerows([row["_id"], row["text"]] for row in rows)
    return file


def test_without_a_judge_it_says_what_judging_takes(
    run: Run, index: Path, queries: Path, tmp_path: Path
) -> None:
    out = tmp_path / "p.json"
    result = run.ok("calibrate", "--index", index, "--queries", queries, "--out", out)
    words = " ".join(result.stdout.split())
    assert re.search(r"judging [\d,]+ passages of [\d,]+ questions takes [\d,]+ calls", words)
    assert re.search(r"reads about [\d,]+00 tokens, instructions included", words)
    assert "add --judge" in words
    assert not out.exists()


def test_the_cost_of_one_question_is_said_in_the_singular(
    run: Run, index: Path, tmp_path: Path
) -> None:
    one = tmp_path / "one.csv"
    one.write_text("query_id,query\nq1,how do I clean a lantern\n", encoding="utf-8")
    result = run.ok("calibrate", "--index", index, "--queries", one, "--out", tmp_path / "p.json")
    words = " ".join(result.stdout.split())
    assert re.search(r"of 1 question takes \d+ calls and reads about [\d,]+ tokens", words)


def test_from_a_log_to_a_table_by_k_and_by_grades_to_a_profile_in_shadow(
    run: Run, index: Path, queries: Path, tmp_path: Path, chat: ChatEndpoint
) -> None:
    out, page = tmp_path / "p.json", tmp_path / "report.html"
    figures = tmp_path / "figures.json"
    asked = (
        *("calibrate", "--index", index, "--queries", queries, "--out", out),
        *("--judge", "llm", "--model", "stand-in", "--report", page, "--report", figures),
    )
    system = {"calibrate": {"base-url": chat.url, "prices": [2.0, 8.0]}}
    first = run(*asked, system=system)
    assert first.exit_code == 1
    words = " ".join(first.stdout.split())
    assert "at the prices given" in words
    assert "the judge's own view, uncorrected" in words
    assert re.search(r"have people grade the \d+ passages of \S+", words)
    assert re.search(r"about \d+ minutes", words)
    assert not out.exists(), "what a judge alone promises is not there"
    assert "own view, uncorrected" in page.read_text(encoding="utf-8")
    rows = json.loads(figures.read_text(encoding="utf-8"))["by_k"]["rows"]
    assert [row["k"] for row in rows] == [1, 3, 5, 10, 20]
    assert {row["precision"]["lower"] for row in rows} == {None}
    calls = len(chat.requests)
    assert calls > 0
    guard = ContextGuard(HybridRetriever.load(index), k=JUDGED_DEPTH)
    log = csv.DictReader(queries.read_text(encoding="utf-8").splitlines())
    texts = {row["query_id"]: row["query"] for row in log}
    for line in (tmp_path / "p.verdicts.jsonl").read_text(encoding="utf-8").splitlines():
        verdicts = json.loads(line)
        served = guard.retrieve(texts[verdicts["query_id"]]).passages
        assert verdicts["grades"].keys() == {passage.passage_id for passage in served}

    to_grade = tmp_path / "p.to-grade.csv"
    assert grade(to_grade) == 20

    second = run.ok(*asked, "--json", system=system)
    assert len(chat.requests) == calls, "verdicts are kept"
    assert "no call is left" in second.stderr
    assert Profile.load(out).verdict.decision == "shadow"
    assert "corrected by people" in page.read_text(encoding="utf-8")
    document = json.loads(second.stdout)
    assert document["graded"] == 20
    assert all(row["precision"]["lower"] is not None for row in document["by_k"]["rows"])
    assert document["verdict"] == "shadow"
    assert document["routes"]["hybrid"]["gain"] is not None
    assert "20 questions graded whole: from 50" in " ".join(document["notes"])
    assert grade(to_grade) > 20, "more are asked for once all are graded"


def grade(file: Path) -> int:
    """Fill in the column grade by shared words; return how many questions the file has."""
    with file.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    for row in rows:
        row["grade"] = "3" if set(row["question"].split()) & set(row["text"].split()) else "0"
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return len({row["query_id"] for row in rows})


def test_the_store_gives_the_questions_and_what_people_graded_of_them(
    run: Run, index: Path, collection: Path, tmp_path: Path, chat: ChatEndpoint
) -> None:
    texts = [
        json.loads(line)["text"]
        for line in (collection / "queries.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    url = f"sqlite:///{tmp_path / 'samples.db'}"
    writer = sample_to(url, rate=1.0)
    guard = ContextGuard(HybridRetriever.load(index), k=3, sampler=writer.sampler)
    for number, text in enumerate((*texts[:30], texts[0])):
        guard.retrieve(text, request_id=f"r{number}")
    writer.stop()
    served = guard.retrieve(texts[0]).passages[0].passage_id
    with SampleStore.open(url) as store:
        store.add_labels([LabelRow("r0", served, 2, None, "ann", 1.0)])
    out = tmp_path / "p.json"
    run(
        *("calibrate", "--index", index, "--out", out, "--json"),
        *("--judge", "llm", "--model", "stand-in"),
        system={"calibrate": {"base-url": chat.url, "store": url}},
    )
    rows = read_rows(tmp_path / "p.questions.jsonl")
    questions = [row for row in rows if "passage_id" not in row]
    assert {row["query"]: row["count"] for row in questions}[texts[0]] == 2
    assert len(questions) == 30
    assert [(row["passage_id"], row["grade"]) for row in rows if "passage_id" in row] == [
        (served, 2)
    ]


def test_without_questions_the_model_writes_some_and_says_so(
    run: Run, index: Path, tmp_path: Path
) -> None:
    class Writer(ChatEndpoint):
        """Asks about a passage's last words, and says yes where it finds them."""

        def answer(self, path: str, request: dict[str, Any]) -> Answer:
            lines = request["messages"][-1]["content"].split("\n")
            if "question" in request["response_format"]["json_schema"]["schema"]["properties"]:
                return Answer(json.dumps({"question": f"What about {lines[-2][-40:]}?"}))
            asked = lines[1].removeprefix("What about ").removesuffix("?").strip()
            return Answer(json.dumps({"grade": int(asked in "\n".join(lines[3:]))}))

    chat = Writer()
    out = tmp_path / "p.json"
    asked = ("calibrate", "--index", index, "--out", out, "--judge", "llm", "--model", "stand-in")
    system = {"calibrate": {"base-url": chat.url, "questions": 25}}
    try:
        result = run(*asked, system=system)
        calls = len(chat.requests)
        again = run(*asked, system=system)
    finally:
        chat.close()
    words = " ".join(result.stdout.split())
    assert "writing 25 questions takes 25 calls" in words
    assert "easier than those of people" in words
    assert "writing 25" not in again.stdout
    assert "no call is left" in again.stdout
    [first, *_] = read_rows(tmp_path / "p.questions.jsonl")
    assert first["note"].startswith("written from passage")
    assert calls > 25
    assert len(chat.requests) == calls, "questions and verdicts are kept"


def test_a_reranker_at_a_server_judges(
    run: Run, index: Path, queries: Path, tmp_path: Path
) -> None:
    pytest.importorskip("httpx2")
    endpoint = RerankEndpoint()
    out = tmp_path / "p.json"
    asked = ("calibrate", "--index", index, "--queries", queries, "--out", out)
    try:
        run.refused(*asked, "--judge", "reranker", says="name it as base-url")
        result = run(
            *asked,
            *("--judge", "reranker", "--model", "stand-in"),
            system={"calibrate": {"base-url": endpoint.url, "min-score": 0.3}},
        )
    finally:
        endpoint.close()
    n_questions = len(read_rows(tmp_path / "p.verdicts.jsonl"))
    assert f"{n_questions} questions takes {n_questions} calls" in " ".join(result.stdout.split())
    assert len(endpoint.requests) == n_questions
    assert {row["judge"] for row in read_rows(tmp_path / "p.verdicts.jsonl")} == {
        "reranker cohere stand-in score>=0.3"
    }


@pytest.mark.model
def test_a_cross_encoder_judges_what_a_function_retrieves(
    run: Run, queries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The retriever is a plain function that returns texts with scores."""
    model = make_cross_encoder(tmp_path / "model", seed=0)
    (tmp_path / "shop.py").write_text(FUNCTION, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "p.json"
    asked = (
        *("calibrate", "--retriever", "shop:search", "--queries", queries, "--out", out),
        *("--judge", "cross-encoder", "--model", model),
    )
    system = {"score-kind": "cosine", "calibrate": {"min-score": -0.5}}
    first = run(*asked, system=system)
    assert first.exit_code == 1, first.stderr
    grade(tmp_path / "p.to-grade.csv")
    run.ok(*asked, system=system)
    profile = Profile.load(out)
    assert profile.verdict.decision == "shadow"
    assert list(profile.routes) == ["external"]


FUNCTION = """
from ctxguard import Hit

TEXTS = ["A red fox lives three years.", "The train leaves at noon.", "The kettle boils water.",
         "Vacation is requested on a form.", "A harp has strings.", "The lamp takes one bulb."]

def search(query, *, depth):
    words = set(query.lower().split())
    found = [Hit(f"p{n}", len(words & set(text.lower().split())) / 10 + n / 100, text)
             for n, text in enumerate(TEXTS)]
    return sorted(found, key=lambda hit: -hit.score)[:depth]
"""
