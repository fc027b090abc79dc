"""`ctxguard answers`: from labelled questions and a reader to the paired difference."""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from household import SUBJECTS, TASKS, read_rows, write_jsonl
from running import Run, figures

from ctxguard.core.policies import RatioPolicy
from ctxguard.profile.schema import Profile
from tests.monitor.chat_endpoint import Answer, ChatEndpoint

pytestmark = pytest.mark.model

READER = "reader-2026-01-01"


class Reader(ChatEndpoint):
    """Answers with its first source; marks by whether the reference is in the answer."""

    failing = 0
    marks_nothing = False

    def answer(self, path: str, request: dict[str, Any]) -> Answer:
        if self.failing:
            self.failing -= 1
            return Answer(status=400, body='{"error": {"message": "too long"}}')
        content = request["messages"][-1]["content"]
        reference = re.search(r"<reference>\n(.*?)\n</reference>.*<answer>(.*)", content, re.DOTALL)
        if reference is not None and self.marks_nothing:
            return Answer("no mark")
        if reference is not None:
            return Answer(json.dumps({"correct": reference[1] in reference[2]}))
        return Answer(content[:300])


@pytest.fixture
def reader() -> Iterator[Reader]:
    with closing(Reader()) as endpoint:
        yield endpoint


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Questions whose answers are words of the passage that is relevant."""
    return write_jsonl(
        tmp_path / "questions.jsonl",
        [
            {
                "query_id": f"{task}-{subject}",
                "text": f"how do I {task} a {subject}",
                "relevant": [f"{task}-{subject}"],
                "metadata": {"answers": [TASKS[task].format(subject)], "wrong_answers": ["acid"]},
            }
            for task in TASKS
            for subject in SUBJECTS[:4]
        ],
    )


@pytest.fixture
def asked(index: Path, profile: Path, questions: Path, tmp_path: Path) -> tuple[object, ...]:
    """The command, by a profile of this system that keeps fewer passages than are served today."""
    calibrated, fewer = Profile.load(profile), tmp_path / "profile.json"
    routes = {
        name: route.model_copy(update={"policy": RatioPolicy(k=2)})
        for name, route in calibrated.routes.items()
    }
    calibrated.model_copy(update={"routes": routes}).save(fewer)
    return (
        *("answers", tmp_path / "answers.jsonl", "--index", index, "--profile", fewer),
        *("--data", questions, "--model", READER),
    )


def test_answers_are_marked_and_compared(
    run: Run, asked: tuple[object, ...], reader: Reader, tmp_path: Path
) -> None:
    document = run.read(*asked, "--reader", reader.url)
    today, guard = (figures(document, name) for name in ("today", "guard"))
    assert guard["correct"]["mean"]["n"] == guard["correct"]["difference"]["n"] == 12
    assert today["kept"]["mean"]["value"] > guard["kept"]["mean"]["value"]
    assert guard["tokens"]["mean"]["value"] == 300.0
    assert (document["irrelevant"]["value"], document["irrelevant"]["n"]) == (None, 12)
    rows = read_rows(tmp_path / "answers.jsonl")
    right = {(row["query_id"], row["pipeline"]): row["correct"] for row in rows}
    assert len(right) == len(rows) == 24
    of_guard = [mark for (_, pipeline), mark in right.items() if pipeline == "guard"]
    assert guard["correct"]["mean"]["value"] == pytest.approx(sum(of_guard) / 12)
    assert {row["reader"] for row in rows} == {READER}


def test_second_run_asks_only_failures(
    run: Run, asked: tuple[object, ...], reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    """A second run asks nothing and a failed answer is asked again."""
    reader.failing = 1
    said = " ".join(run.ok(*asked, "--reader", reader.url).output.split())
    assert "1 context got no valid answer: 127.0.0.1" in said
    assert "answered 400: it refuses the request" in said
    assert "the next run asks again" in said
    assert "set by hand" not in caplog.text, "the command runs both modes itself"
    n_requests = len(reader.requests)
    run.ok(*asked, "--reader", reader.url)
    assert len(reader.requests) == n_requests + 1
    result = run.ok(*asked)
    assert len(reader.requests) == n_requests + 1
    assert "0 answers to ask for" in result.output
    assert "correct" in result.stdout


def test_without_reader_it_names_cost(run: Run, asked: tuple[object, ...]) -> None:
    result = run.ok(*asked, system={"answers": {"prices": [2, 8]}})
    said = " ".join(result.output.split())
    assert re.search(r"\d+ answers to ask for: about [\d,]+ tokens to read, about 0\.\d+", said)
    assert "add --reader URL" in said
    assert "difference" not in said


def test_judge_marks_by_relevant_passages(
    run: Run, asked: tuple[object, ...], reader: Reader, questions: Path
) -> None:
    """Without known answers nothing else can mark."""
    write_jsonl(questions, [{**row, "metadata": {}} for row in read_rows(questions)])
    mend = "list known answers under `answers` in each question's metadata"
    run.finding(*asked, "--reader", reader.url, says=mend)
    judged = {"answers": {"mark-by": "judge", "judge-model": "marker", "prices": [2, 8]}}
    reader.marks_nothing = True
    run.finding(
        *asked,
        "--reader",
        reader.url,
        system=judged,
        says="24 answers got no valid mark from the judge",
    )
    reader.marks_nothing = False
    document = run.read(*asked, "--reader", reader.url, system=judged)
    assert figures(document, "guard")["correct"]["mean"]["n"] == 12
    assert figures(document, "guard")["cost_per_1000"]["mean"]["value"] == pytest.approx(
        (2 * 300 + 8 * 8) / 1000
    )
    assert {request["model"] for request in reader.requests} == {READER, "marker"}


def test_marks_of_another_tool_are_compared(
    run: Run, asked: tuple[object, ...], reader: Reader, tmp_path: Path
) -> None:
    run.ok(*asked, "--reader", reader.url)
    file = tmp_path / "answers.jsonl"
    rows = read_rows(file)
    faithful = {"today": 0.7, "guard": 0.9}
    write_jsonl(file, [{**row, "faithfulness": faithful[row["pipeline"]]} for row in rows])
    marks = {"answers": {"mark": "faithfulness"}}
    run.finding(*asked, system={"answers": {"mark": "tone"}}, says="add a value of 'tone'")
    document = run.read(*asked, system=marks)
    difference = figures(document, "guard")["faithfulness"]["difference"]
    assert (difference["value"], difference["outcome"]) == (pytest.approx(0.2), "better")
    write_jsonl(file, [{**row, "faithfulness": "high"} for row in rows])
    run.refused(*asked, system=marks, says="faithfulness is 'high'")


def test_unusable_reader_is_one_line(run: Run, asked: tuple[object, ...], reader: Reader) -> None:
    """A reader without a URL or that refuses the key is one line."""
    run.refused(*asked, "--reader", "localhost:8000", says=("not http://HOST", "'localhost:8000'"))
    reader.script.extend([Answer(status=401, body="{}")] * 24)
    says = ("does not accept the key", "the next run resumes there")
    run.refused(*asked, "--reader", reader.url, says=says)
