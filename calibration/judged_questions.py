"""A judge's verdicts on the first candidates of questions, in a file that a run can go on with."""

import csv
import hashlib
import io
import json
import os
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calibration.data.dataset import Dataset, Query
from calibration.data.text_files import read_records
from calibration.judged_route import JUDGED_DEPTH, Judged
from calibration.replay import Progress
from calibration.retrievers import Replayable
from ctxguard._support.atomic_write import atomic_write
from ctxguard.core.decision import candidate_order
from ctxguard.core.types import DEFAULT_DEPTH, Passage
from ctxguard.errors import DataError, QueryError

if TYPE_CHECKING:
    from ctxguard.monitor.judges.protocol import Judge

TO_GRADE = 20
"""Questions that people grade whole."""

_COLUMNS = ("query_id", "question", "passage_id", "title", "text", "source", "grade")
_CHARACTERS_PER_TOKEN = 4


ToJudge = tuple[Query, Sequence[Passage]]
"""One question, and its first candidates."""


def questions_to_judge(
    retriever: Replayable,
    queries: Iterable[Query],
    *,
    first: int = JUDGED_DEPTH,
    depth: int = DEFAULT_DEPTH,
) -> list[ToJudge]:
    """Find the first candidates of each question, as they are served; leave out those without any.

    Args:
        retriever: Finds them.
        first: Candidates of each question to judge.
        depth: Candidates to retrieve, as many as the guard does: they are scored relative to one
            another, so another depth is another order.
    """
    found: list[ToJudge] = []
    for query in queries:
        try:
            ranking = retriever.retrieve(query.text, depth=max(first, depth))
        except QueryError:
            continue
        passages = [ranking.passages[row] for row in list(candidate_order(ranking)[0])[:first]]
        if passages:
            found.append((query, passages))
    return found


def tokens_of(questions: Iterable[ToJudge]) -> int:
    """Estimate the tokens that a judge reads if it is asked about one passage at a time."""
    characters = sum(
        len(query.text) + len(passage.title or "") + len(passage.text)
        for query, passages in questions
        for passage in passages
    )
    return characters // _CHARACTERS_PER_TOKEN


def read_verdicts(file: Path, judge: str | None) -> dict[str, dict[str, int]]:
    """Read the verdicts that `judge_questions` wrote; none if there is no such file.

    Args:
        judge: Its name and version; None for those of any.

    Raises:
        DataError: the file is of another judge or another version, or cannot be read.
    """
    found: dict[str, dict[str, int]] = {}
    if not file.exists():
        return found
    for record in read_records(file, Counter()):
        own = record.text("judge")
        if judge is not None and own != judge:
            raise DataError(
                f"the verdicts are of {own!r}, and the judge is {judge!r}: one file, one judge",
                path=file,
                line=record.line,
            )
        grades = record.fields.get("grades")
        if not isinstance(grades, Mapping) or not all(
            grade is None or isinstance(grade, int) for grade in grades.values()
        ):
            raise record.error("grades must be numbers, or null, by passage id")
        found[record.identifier("query_id")] = _given(grades)
    return found


def judge_questions(
    questions: Sequence[ToJudge], judge: "Judge", file: Path, progress: Progress | None = None
) -> dict[str, dict[str, int]]:
    """Ask the judge about every question that the file lacks, and add its verdicts to the file.

    Each question is written when it is judged, so that an interrupted run loses one question.

    Returns:
        The grade of each passage, by question and passage; passages on which the judge gave no
        valid verdict are absent.

    Raises:
        DataError: the file is of another judge.
        Exception: as ``judge``, if it could not be called at all.
    """
    name = f"{judge.name} {judge.version}"
    leave_out_half_a_line(file)
    found = read_verdicts(file, name)
    with file.open("a", encoding="utf-8") as stream:
        for query, passages in questions:
            if query.query_id not in found:
                given = judge.judge(query.text, passages)
                grades = {
                    passage.passage_id: None if verdict is None else verdict.grade
                    for passage, verdict in zip(passages, given, strict=True)
                }
                row = {"query_id": query.query_id, "judge": name, "grades": grades}
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
                stream.flush()
                found[query.query_id] = _given(grades)
            if progress is not None:
                progress(1)
    return found


def write_to_grade(
    questions: Sequence[ToJudge], file: Path, *, n: int = TO_GRADE, seed: int = 0
) -> int:
    """Write whole questions for people to grade, as CSV that the readers of labels read.

    The questions are drawn by a hash of their ids, whatever their verdicts; the passages of each
    stand in random order, so that a list graded halfway favours none. A file whose rows are all
    graded gets ``n`` further questions; one with an empty grade stays as it is.

    Returns:
        How many questions were added.
    """

    def place(query: Query) -> bytes:
        return hashlib.sha256(f"{seed} {query.query_id}".encode()).digest()

    rows: list[dict[str, str]] = []
    if file.exists():
        with file.open(encoding="utf-8-sig", newline="") as opened:
            rows = list(csv.DictReader(opened))
    if any(not (row.get("grade") or "").strip() for row in rows):
        return 0
    there = {row.get("query_id") for row in rows}
    candidates = {query: list(own) for query, own in questions if query.query_id not in there}
    chosen = sorted(candidates, key=place)[:n]
    for query in chosen:
        passages = candidates[query]
        random.Random(f"{seed} {query.query_id}").shuffle(passages)  # noqa: S311
        rows += [
            {
                "query_id": query.query_id,
                "question": _shown_as_text(query.text),
                "passage_id": passage.passage_id,
                "title": _shown_as_text(passage.title or ""),
                "text": _shown_as_text(passage.text),
                "source": "human",
            }
            for passage in passages
        ]
    stream = io.StringIO(newline="")
    columns = dict.fromkeys([*_COLUMNS, *(name for row in rows for name in row)])
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    if chosen:
        with atomic_write(file) as written:
            written.write(stream.getvalue().encode())
    return len(chosen)


def rows_to_grade(file: Path) -> int:
    """Count the passages of `write_to_grade` without a grade."""
    if not file.exists():
        return 0
    with file.open(encoding="utf-8-sig", newline="") as opened:
        return sum(not (row.get("grade") or "").strip() for row in csv.DictReader(opened))


def graded_by_people(dataset: Dataset, verdicts: Judged) -> dict[str, dict[str, int]]:
    """Return what people graded of the passages that the judge was asked about."""
    graded = {}
    for query_id, said in verdicts.items():
        misleading = dict.fromkeys(dataset.distractors.get(query_id, {}), 0)
        grades = misleading | dict(dataset.qrels.get(query_id, {}))
        known = {name: grades[name] for name in said if name in grades}
        if known:
            graded[query_id] = known
    return graded


def graded_whole(grades: Judged, verdicts: Judged) -> list[str]:
    """Return the questions of which people graded every passage that the judge was asked about."""
    return [name for name, known in grades.items() if known.keys() == verdicts[name].keys()]


def _given(grades: Mapping[str, int | None]) -> dict[str, int]:
    return {name: grade for name, grade in grades.items() if grade is not None}


def _shown_as_text(cell: str) -> str:
    """Write a cell that no spreadsheet takes for a formula; nobody reads it back."""
    return f"'{cell}" if cell.lstrip()[:1] in ("=", "+", "-", "@") else cell


def leave_out_half_a_line(file: Path) -> None:
    """Cut what a killed run began to write."""
    if file.exists() and (content := file.read_bytes()) and not content.endswith(b"\n"):
        os.truncate(file, content.rfind(b"\n") + 1)
