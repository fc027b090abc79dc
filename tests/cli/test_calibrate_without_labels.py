"""``ctxguard calibrate --queries``: from questions alone to a profile in shadow, and to grades."""

import csv
import json
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from chat_endpoint import Answer, ChatEndpoint, grade_by_words
from running import Run

from calibration.judged_route import JUDGED_DEPTH
from ctxguard import ContextGuard
from ctxguard.profile.schema import Profile
from ctxguard.retrieval import HybridRetriever


class StrictEndpoint(ChatEndpoint):
    """Says yes only where three words of the question are in the passage."""

    def answer(self, path: str, headers: Message, request: dict[str, Any]) -> Answer:
        self.requests.append(request)
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
    assert "judging takes" in words
    assert "million tokens" in words
    assert "add --judge" in words
    assert not out.exists()


def test_from_a_log_to_a_profile_in_shadow_and_to_graded_questions(
    run: Run, index: Path, queries: Path, tmp_path: Path, chat: ChatEndpoint
) -> None:
    out = tmp_path / "p.json"
    asked = (
        *("calibrate", "--index", index, "--queries", queries, "--out", out),
        *("--judge", "llm", "--model", "stand-in"),
    )
    system = {"calibrate": {"base-url": chat.url, "prices": [2.0, 8.0]}}
    first = run.ok(*asked, system=system)
    assert "at the price given" in " ".join(first.stdout.split())
    assert "shadow" in first.stdout
    profile = Profile.load(out)
    assert profile.verdict is not None
    assert profile.verdict.decision == "shadow"
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
    rows = list(csv.DictReader(to_grade.read_text(encoding="utf-8").splitlines()))
    assert len({row["query_id"] for row in rows}) == 20
    for row in rows:
        row["grade"] = "1" if set(row["question"].split()) & set(row["text"].split()) else "0"
    with to_grade.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)

    second = run.ok(*asked, "--json", system=system)
    assert len(chat.requests) == calls, "verdicts are kept"
    document = json.loads(second.stdout)
    assert document["graded"] == 20
    assert document["verdict"] == "shadow"
    assert document["routes"]["hybrid"]["gain"] is not None


def test_a_judge_needs_questions_and_questions_replace_labels(
    run: Run, index: Path, queries: Path, collection: Path, tmp_path: Path
) -> None:
    given = ("calibrate", "--index", index, "--out", tmp_path / "p.json")
    neither = run.refused(*given)
    assert "either --data" in " ".join(neither.stderr.split())
    run.refused(*given, "--queries", queries, "--data", collection)
    judged = run(*given, "--data", collection, "--judge", "llm")
    assert "--judge needs --queries" in " ".join(judged.stderr.split())
