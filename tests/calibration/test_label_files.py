"""Files of questions, labels and answers, and whether labels belong to an index."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from calibration.answers import AnswerFile
from calibration.asked_questions import asked_questions
from calibration.data.dataset import Dataset, Query
from calibration.data.label_check import check_ids, check_texts
from calibration.data.label_file import LabelFile, listed_questions
from calibration.data.readers import read_jsonl
from ctxguard.core.types import Passage
from ctxguard.errors import ConfigurationError, DataError
from ctxguard.measure.worth import Negative
from ctxguard.monitor.judges import Judgment
from tests.documents import write_lines

QUESTIONS = ["How is a kettle descaled?", "Who repairs harps?"]


def opened(tmp_path: Path, *questions: str) -> LabelFile:
    return LabelFile(tmp_path / "labels.jsonl", questions or QUESTIONS)


def test_grades_are_labels_that_calibration_reads(tmp_path: Path) -> None:
    file = opened(tmp_path)
    kettle, harp = file.queries
    assert not file.path.exists()
    file.put(kettle, "a", Judgment("a", 1))
    file.put(kettle, "b", Judgment("b", 0, Negative.HARD_NEGATIVE))
    assert len(read_jsonl(file.path)) == 1  # nobody has looked at the other one
    file.mark(harp, no_answer=True)
    read = read_jsonl(file.path)
    assert [query.text for query in read.queries] == QUESTIONS
    assert read.qrels == {kettle.query_id: {"a": 1, "b": 0}, harp.query_id: {}}
    assert read.distractors == {kettle.query_id: {"b": "hard_negative"}}
    assert '"relevant": []' in file.path.read_text(encoding="utf-8")


def test_another_run_goes_on(tmp_path: Path) -> None:
    """The questions may stand in another order, and in other spelling."""
    file = opened(tmp_path)
    file.put(file.queries[0], "a", Judgment("a", 1))
    file.mark(file.queries[1], no_answer=True)
    again = opened(tmp_path, "who  repairs HARPS?", *QUESTIONS, "Which bulb fits?")
    assert [query.text for query in again.queries] == [*QUESTIONS, "Which bulb fits?"]
    assert again.judgments(again.queries[0].query_id)["a"].grade == 1
    assert again.has_no_answer(again.queries[1].query_id)
    assert again.n_answerable == 1
    again.put(again.queries[2], "c", Judgment("c", 0))
    assert len(read_jsonl(file.path)) == 3


def test_withdrawn_leaves_no_line(tmp_path: Path) -> None:
    file = opened(tmp_path)
    kettle, harp = file.queries
    file.put(kettle, "a", Judgment("a", 1))
    file.put(kettle, "a", None)
    assert file.path.read_text(encoding="utf-8") == ""
    file.put(harp, "a", Judgment("a", 0))
    file.mark(harp, no_answer=True)
    file.mark(harp, no_answer=False)
    assert read_jsonl(file.path).qrels == {harp.query_id: {"a": 0}}
    file.mark(harp, no_answer=True)
    file.put(harp, "b", Judgment("b", 1))
    assert read_jsonl(file.path).qrels == {harp.query_id: {"a": 0, "b": 1}}


def test_other_fields_and_lines_stay(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"query_id": 7, "query": "Was kostet Öl?", "documents": ["x"], "relevant": ["a"]},
        {"_id": "q2", "text": QUESTIONS[1], "relevant": {"b": 2}, "metadata": {"topic": "harp"}},
        {"_id": "q3", "text": "half \ud800 pair", "relevant": []},
    ]
    path = tmp_path / "labels.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    file = LabelFile(path)
    file.put(file.queries[0], "c", Judgment("c", 0))
    written = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert written[0] == {**rows[0], "relevant": {"a": 1, "c": 0}}
    assert written[1] == rows[1]
    assert written[2]["relevant"] == []
    assert "Öl" in path.read_text(encoding="utf-8")
    assert file.max_grade == 2


def test_labels_given_are_begun_with(tmp_path: Path) -> None:
    given = Dataset(
        "beir",
        (Query("q1", QUESTIONS[0]), Query("q2", QUESTIONS[1])),
        {"q1": {"a": 1}, "q2": {"z": 0}},
        {"q2": {"y": "distractor"}},
    )
    file = LabelFile(tmp_path / "labels.jsonl", labelled=given)
    file.put(file.queries[0], "b", Judgment("b", 0))
    read = read_jsonl(file.path)
    assert read.qrels == {"q1": {"a": 1, "b": 0}, "q2": {"y": 0, "z": 0}}
    assert read.distractors == {"q2": {"y": "distractor"}}


def test_a_relevant_passage_forbids_no_answer(tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.put(file.queries[0], "a", Judgment("a", 1))
    with pytest.raises(DataError, match="withdraw that passage's grade"):
        file.mark(file.queries[0], no_answer=True)
    assert not file.has_no_answer(file.queries[0].query_id)


@pytest.mark.parametrize("is_there", [True, False])
def test_changed_file_is_not_overwritten(tmp_path: Path, is_there: bool) -> None:
    file = opened(tmp_path)
    kettle = file.queries[0]
    if is_there:
        file.put(kettle, "a", Judgment("a", 1))
    file.path.write_text('{"_id": "x", "text": "of another", "relevant": []}\n', encoding="utf-8")
    with pytest.raises(DataError, match="changed by another program"):
        file.put(kettle, "b", Judgment("b", 1))
    assert "b" not in file.judgments(kettle.query_id)
    assert "of another" in file.path.read_text(encoding="utf-8")


def test_unwritable_grade_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = opened(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("calibration.data.label_file.write_lines", full)
    with pytest.raises(DataError, match="No space left"):
        file.put(file.queries[0], "a", Judgment("a", 1))
    assert file.judgments(file.queries[0].query_id) == {}
    assert file.n_answerable == 0


def test_keywords_alone_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_text('{"_id": "q", "text": "Which bulb?", "keywords": ["E27"]}\n', encoding="utf-8")
    with pytest.raises(ConfigurationError, match="keywords"):
        LabelFile(path)


@pytest.mark.parametrize("text", ["", " \n\n"])
def test_no_question_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "questions.txt").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match="one per line"):
        listed_questions(tmp_path / "questions.txt")


def test_jsonl_and_csv_say_the_same(tmp_path: Path) -> None:
    rows = write_lines(
        tmp_path / "a.jsonl", {"query": "Why?"}, {"query": " why? "}, {"query": "Who?"}
    )
    table = write_lines(tmp_path / "a.csv", "id,query", "1,Why?", "2,why?", "3,Who?")
    assert asked_questions(rows) == asked_questions(table) == {"Why?": 2, "Who?": 1}


def test_row_counts_as_it_says(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.csv", "query,count", "Why?,3", "why?,", "Who?,2")
    assert asked_questions(file) == {"Why?": 4, "Who?": 2}


@pytest.mark.parametrize("mark", [";", "\t"])
def test_another_separator_is_read(tmp_path: Path, mark: str) -> None:
    file = write_lines(tmp_path / "a.csv", f"id{mark}query", f'1{mark}"Why, then?"')
    assert asked_questions(file) == {"Why, then?": 1}


@pytest.mark.parametrize(
    ("rows", "line", "fault"),
    [
        ([{"frage": "Why?"}], 1, "its fields are frage"),
        (
            [{"query": "Why?"}, {"query": "Who?", "count": 0.5}],
            2,
            "count 0.5 must be a whole number ≥ 1",
        ),
        ([{"query": "Why?", "count": -1}], 1, "count -1 must be a whole number ≥ 1"),
        ([{"query": 3}], 1, "query is 3; it must be a string"),
        ([], None, "contains no questions"),
    ],
)
def test_a_fault_names_its_line(
    tmp_path: Path, rows: list[object], line: int | None, fault: str
) -> None:
    with pytest.raises(DataError, match=fault) as caught:
        asked_questions(write_lines(tmp_path / "a.jsonl", *rows))
    assert caught.value.line == line


@pytest.mark.parametrize("name", ["query_id", "pipeline", "reader", "context_digest"])
def test_nameless_row_is_refused_by_line(tmp_path: Path, name: str) -> None:
    file = tmp_path / "answers.jsonl"
    row = {"query_id": "q", "pipeline": "guard", "reader": "r", "context_digest": "0"}
    file.write_text("\n".join(map(json.dumps, (row, {**row, name: ["x"]}))))
    with pytest.raises(DataError) as caught:
        AnswerFile(file, "r")
    assert caught.value.line == 2


def test_other_tools_row_stays(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text('{"query_id": 7, "note": "ours"}\n')
    AnswerFile(file, "r").save()
    assert json.loads(file.read_text()) == {"query_id": 7, "note": "ours"}


IDS = [f"d{number}" for number in range(30)]


def labels(*passage_ids: str) -> Dataset:
    return Dataset("mine/test", (Query("q", "?"),), {"q": dict.fromkeys(passage_ids, 1)})


def corpus(folder: Path, texts: Mapping[str, str]) -> Path:
    rows = [{"_id": one, "text": text} for one, text in texts.items()]
    return write_lines(folder / "corpus.jsonl", *rows)


def indexed(passage_id: str) -> Passage:
    return Passage(passage_id, f"text of {passage_id}")


def test_missing_part_is_noted() -> None:
    assert check_ids(labels("d0", "d1"), set(IDS)) == check_ids(labels(), set(IDS)) == ()
    (note,) = check_ids(labels("d0", "d1", "gone"), set(IDS))
    assert "1 of 3 labelled passages are not in the index, such as 'gone'" in note


def test_mostly_missing_labels_are_refused() -> None:
    with pytest.raises(
        DataError, match=r"holds only 1 of the 3 labelled passages \('x' is missing"
    ):
        check_ids(labels("d0", "x", "y"), set(IDS))


@pytest.mark.parametrize(("named", "compared"), [(("d3", "d4"), 2), ((), 30)])
def test_colliding_ids_are_refused(named: tuple[str, ...], compared: int, tmp_path: Path) -> None:
    """Other passages are compared where no labelled one is at hand."""
    file = corpus(tmp_path, {one: f"something about {one}" for one in IDS})
    says = rf"{compared} of {compared} passages .* a different corpus with the same ids"
    with pytest.raises(DataError, match=says):
        check_texts(labels(*named), file, set(IDS), indexed)


@pytest.mark.parametrize(
    "texts",
    [{one: f"text  of\n{one}" for one in IDS}, {"elsewhere": "a text"}, {}, None],
    ids=["other white space", "not in the index", "no passage", "no file"],
)
def test_equal_or_unreadable_says_nothing(texts: dict[str, str] | None, tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl" if texts is None else corpus(tmp_path, texts)
    assert check_texts(labels("d3", "elsewhere"), file, set(IDS), indexed) == ()


def test_some_changed_texts_are_a_note(tmp_path: Path) -> None:
    texts = {one: indexed(one).text for one in IDS} | {"d5": "revised"}
    (note,) = check_texts(labels(*IDS), corpus(tmp_path, texts), set(IDS), indexed)
    assert "1 of 30 passages" in note
    assert "such as 'd5'" in note
