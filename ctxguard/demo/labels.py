"""The demonstration's passages, and its labelled questions as a data set.

``questions.jsonl`` holds one question per line: its text, the graded answers and the known
distractors by qualified name, and every other passage that was judged and found irrelevant.
"""

import json
from collections.abc import Iterator
from importlib.resources import files

from calibration.labelling.labels import Dataset, Query
from ctxguard.demo import corpus
from ctxguard.types import Passage

QUESTIONS = "questions.jsonl"


def passages() -> Iterator[Passage]:
    """One passage per documented public name of the listed modules, of the running Python."""
    for entry in corpus.passages():
        yield Passage(entry.qualified_name, entry.text, entry.title)


def questions() -> Dataset:
    """The labelled questions, restricted to passages that the running Python has.

    Labels of names that this version lacks are left out and counted in the notes; a question
    whose every answer is lacking would no longer be the question that was labelled, and is left
    out whole, counted as well.
    """
    present = {entry.qualified_name for entry in corpus.passages()}
    queries, qrels, distractors = [], {}, {}
    absent, dropped = set(), 0
    lines = files(__package__).joinpath(QUESTIONS).read_text(encoding="utf-8").splitlines()
    for record in map(json.loads, lines):
        query_id, grades = record["query_id"], record["grades"]
        labelled = [*grades, *record["distractors"], *record["irrelevant"]]
        absent.update(set(labelled) - present)
        if grades and not present & grades.keys():
            dropped += 1
            continue
        queries.append(Query(query_id, record["text"], {"topic": record["topic"]}))
        qrels[query_id] = {
            name: grade
            for name, grade in (
                *grades.items(),
                *((name, 0) for name in (*record["distractors"], *record["irrelevant"])),
            )
            if name in present
        }
        distractors[query_id] = {
            name: "distractor" for name in record["distractors"] if name in present
        }
    notes = []
    if absent:
        notes.append(f"{len(absent)} labelled names are not in this Python and are left out")
    if dropped:
        notes.append(f"{dropped} questions have no answer in this Python and are left out")
    return Dataset(
        name="python standard library",
        queries=tuple(queries),
        qrels=qrels,
        distractors=distractors,  # type: ignore[arg-type]
        notes=tuple(notes),
    )
