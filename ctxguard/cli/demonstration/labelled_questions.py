"""The demonstration's labelled questions.

``questions.jsonl`` has one question per line: its text, its graded answers and known distractors by
qualified name, and every other passage that was judged and found irrelevant. Reads that file, and
imports the modules of the corpus.
"""

import json
from importlib.resources import files
from typing import Any

from calibration.data.dataset import Dataset, Query
from ctxguard.cli.demonstration.corpus import passages


def records() -> list[dict[str, Any]]:
    """Read the lines of the file."""
    lines = files(__package__).joinpath("questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def questions() -> Dataset:
    """Load the labelled questions, restricted to passages that exist in the running Python.

    A question without any answer left is left out too: it is no longer the one that was labelled.
    """
    present = {passage.passage_id for passage in passages()}
    queries, qrels, distractors = [], {}, {}
    for record in records():
        query_id, grades = record["query_id"], record["grades"]
        judged = {**grades, **dict.fromkeys([*record["distractors"], *record["irrelevant"]], 0)}
        if grades and not present & grades.keys():
            continue
        queries.append(Query(query_id, record["text"], {"topic": record["topic"]}))
        qrels[query_id] = {name: grade for name, grade in judged.items() if name in present}
        distractors[query_id] = {
            name: "distractor" for name in record["distractors"] if name in present
        }
    return Dataset(
        name="python standard library",
        queries=tuple(queries),
        qrels=qrels,
        distractors=distractors,  # type: ignore[arg-type]
    )
