"""A small labelled collection in which every question has near misses."""

import csv
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

SUBJECTS = (
    *("bicycle", "kettle", "violin", "tractor", "lantern", "compass", "telescope", "blanket"),
    *("ladder", "umbrella", "piano", "camera"),
)
TASKS = {
    "clean": "wipe the {} with a damp cloth and mild soap, then let it dry in the shade",
    "store": "keep the {} in a dry room away from frost, wrapped in cotton, over the winter",
    "repair": "take the {} apart, replace what is worn or broken, and test each joint",
}


def write_jsonl(file: Path, rows: Iterable[dict[str, object]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write_log(file: Path, questions: Iterable[str]) -> Path:
    """A log of questions as CSV."""
    with file.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows([["query"], *([text] for text in questions)])
    return file


def grade_file(file: Path, is_relevant: Callable[[dict[str, str]], bool]) -> list[dict[str, str]]:
    """Fill in the column grade of a CSV file with 3 or 0; return its rows."""
    with file.open(encoding="utf-8-sig", newline="") as stream:
        rows = [
            {**row, "grade": "3" if is_relevant(row) else "0"} for row in csv.DictReader(stream)
        ]
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return rows


def write_collection(folder: Path, *, copies: int = 1) -> Path:
    """A BEIR folder: a passage for each subject and task, a question for each passage.

    The split ``train`` asks of the first eight subjects, ``test`` of the others; each has one
    question that nothing answers.
    """
    (folder / "qrels").mkdir(parents=True)
    pairs = [(subject, task) for subject in SUBJECTS for task in TASKS]
    write_jsonl(
        folder / "corpus.jsonl",
        (
            {
                "_id": f"{task}-{subject}",
                "title": f"How to {task} a {subject}",
                "text": f"To {task} it, {TASKS[task].format(subject)}.",
            }
            for subject, task in pairs
        ),
    )
    questions: list[dict[str, object]] = []
    rows: dict[str, list[str]] = {"train": [], "test": []}
    for copy in range(copies):
        for subject, task in pairs:
            query_id = f"q-{task}-{subject}-{copy}"
            text = f"what is the right way to {task} my {subject}" + "?" * copy
            questions.append({"_id": query_id, "text": text, "metadata": {"task": task}})
            split = "train" if subject in SUBJECTS[:8] else "test"
            rows[split].append(f"{query_id}\t{task}-{subject}\t2")
    for split, lines in rows.items():
        questions.append({"_id": f"q-none-{split}", "text": f"who paints a submarine in {split}"})
        lines.append(f"q-none-{split}\tclean-piano\t0")
        text = "\n".join(["query-id\tcorpus-id\tscore", *lines, ""])
        (folder / "qrels" / f"{split}.tsv").write_text(text)
    write_jsonl(folder / "queries.jsonl", questions)
    return folder
