"""The benchmark of conflicts: which pairs count as told, and which as told wrongly."""

import json
from pathlib import Path

from benchmarks.conflicts import answers_in, measure_pairs

PAGE = (
    "The parish of Saint Augustine in Kalamazoo was founded in {}, its church was completed in "
    "{}, and it has been the seat of the bishop since the diocese was made."
)


def write(file: Path, rows: list[dict[str, object]]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def test_wrong_passages_and_pairs_of_equal_answers_are_counted(tmp_path: Path) -> None:
    texts = {
        "right": PAGE.format(1856, 1951),
        "wrong": PAGE.format(1900, 1951),
        "same": PAGE.format(1856, 1964),
        "elsewhere": "Some say that the parish is of 1900.",
        "plain": "The parish of Saint Augustine was founded in 1856.",
    }
    answers = {"gold_answers": ["1856"], "wrong_answers": ["1900"]}
    question = "When was the parish founded?"
    write(tmp_path / "corpus.jsonl", [{"_id": name, "text": text} for name, text in texts.items()])
    write(tmp_path / "queries.jsonl", [{"_id": "q", "text": question, "metadata": answers}])
    write(tmp_path / "pools.jsonl", [{"query_id": "q", "passage_ids": list(texts)}])
    (tmp_path / "qrels").mkdir()
    grades = {"right": 2, "same": 2, "plain": 2, "wrong": 0, "elsewhere": 0}
    (tmp_path / "qrels/test.tsv").write_text(
        "query-id\tcorpus-id\tscore\n" + "".join(f"q\t{n}\t{g}\n" for n, g in grades.items())
    )
    (tmp_path / "distractors.tsv").write_text(
        "query-id\tcorpus-id\tkind\nq\twrong\tdistractor\nq\telsewhere\tdistractor\n"
    )

    found = measure_pairs(tmp_path, "test")

    assert (found.wrong, found.paired, found.named) == (2, 1, 1)
    # Two right passages differ in when the church was completed.
    assert (found.equal, found.equal_flagged) == (3, 1)


def test_an_answer_is_in_a_text_by_whole_words() -> None:
    assert answers_in("It had 14,411 people; 4,411 in the town.", ["4,411", "11", "town"]) == {0, 2}
