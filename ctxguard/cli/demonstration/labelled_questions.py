"""The demonstration's labelled questions.

``questions.jsonl`` has one question per line: its text, its graded answers and known distractors by
qualified name, and every other passage that was judged and found irrelevant.
"""

import json
from importlib.resources import files

from calibration.data.dataset import Dataset, Query
from ctxguard.cli.demonstration.corpus import passages

QUESTIONS = "questions.jsonl"


def questions() -> Dataset:
    """Load the labelled questions, restricted to passages that the running Python has.

    A question without any answer left is left out too: it is no longer the one that was labelled.
    """
    present = {passage.passage_id for passage in passages()}
    queries, qrels, distractors = [], {}, {}
    absent: set[str] = set()
    n_unanswered = 0
    lines = files(__package__).joinpath(QUESTIONS).read_text(encoding="utf-8").splitlines()
    for record in map(json.loads, lines):
        query_id, grades = record["query_id"], record["grades"]
        judged = {**grades, **dict.fromkeys([*record["distractors"], *record["irrelevant"]], 0)}
        absent.update(judged.keys() - present)
        if grades and not present & grades.keys():
            n_unanswered += 1
            continue
        queries.append(Query(query_id, record["text"], {"topic": record["topic"]}))
        qrels[query_id] = {name: grade for name, grade in judged.items() if name in present}
        distractors[query_id] = {
            name: "distractor" for name in record["distractors"] if name in present
        }
    notes = []
    if absent:
        notes.append(f"labelled names left out because this Python lacks them: {len(absent)}")
    if n_unanswered:
        notes.append(f"questions left out because this Python has no answer: {n_unanswered}")
    return Dataset(
        name="python standard library",
        queries=tuple(queries),
        qrels=qrels,
        distractors=distractors,  # type: ignore[arg-type]
        notes=tuple(notes),
    )
