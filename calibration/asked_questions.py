"""Questions where no file holds any: those of a store's requests, or written from passages.

Both are rows as `calibration.data.questions.read_questions` reads them.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calibration.data.dataset import folded
from calibration.data.text_files import write_lines
from calibration.replay import Progress
from ctxguard.core.types import Passage
from ctxguard.errors import DataError
from ctxguard.monitor.labels.human import human_verdicts
from ctxguard.monitor.redaction import is_hash
from ctxguard.monitor.sampling.record import SampleRecord

if TYPE_CHECKING:
    from ctxguard.monitor.judges import LLMJudge
    from ctxguard.monitor.store import SampleStore

DEFAULT_QUESTIONS = 100
_MOST_SAMPLES = 50_000
_PAGE = 500
_BATCH = 20

Row = dict[str, object]


def questions_of_store(store: "SampleStore", n: int = DEFAULT_QUESTIONS) -> list[Row]:
    """Draw questions from the requests of a store, with what people graded of them.

    The texts are as samples hold them, redacted. Each question counts how often it was asked. Of
    more than ``n``, those of lowest hash are taken, so that a later call finds most of them again.

    Args:
        store: The samples; the newest 50,000 are read.
        n: The most questions.

    Raises:
        DataError: no sample has a question in words.
    """
    asked: dict[str, Row] = {}
    graded: dict[str, list[Row]] = {}
    for record, grades in _samples(store):
        text = record.query
        if not text or not text.strip() or is_hash(text):
            continue
        row = asked.setdefault(folded(text), {"query": text, "count": 0, "source": "traffic"})
        row["count"] = int(str(row["count"])) + 1
        graded.setdefault(folded(text), []).extend(
            {"query": text, "passage_id": name, "grade": grade, "source": "human"}
            for name, grade in grades.items()
        )
    if not asked:
        raise DataError("the store has no sample with a question in words")
    chosen = sorted(asked, key=_order)[:n]
    return [row for key in chosen for row in (asked[key], *graded[key])]


def _samples(store: "SampleStore") -> Iterator[tuple[SampleRecord, Mapping[str, int]]]:
    """Yield the samples whose text is kept, newest first, with the grades of people by passage."""
    before: int | None = None
    for _ in range(_MOST_SAMPLES // _PAGE):
        page = store.newest_samples(_PAGE, before=before)
        if not page:
            return
        before = page[-1].sample_id
        payloads = store.payloads([one.sample_id for one in page])
        people = human_verdicts(store.labels(list(payloads)))
        for sample_id, payload in payloads.items():
            verdicts = people[sample_id].by_passage if sample_id in people else {}
            grades = {name: verdict.grade for name, verdict in verdicts.items()}
            yield SampleRecord.from_bytes(payload), grades


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    """Write rows as JSONL."""
    write_lines(file, [json.dumps(row, ensure_ascii=False) for row in rows])


def passages_to_ask_about(passage_ids: Sequence[str], n: int = DEFAULT_QUESTIONS) -> list[str]:
    """Draw the ids of the passages that questions are written from, by their hashes."""
    return sorted(passage_ids, key=_order)[:n]


def write_questions(
    passages: Sequence[Passage], model: "LLMJudge", file: Path, progress: Progress | None = None
) -> None:
    """Have a language model write a question from each passage, unless the file holds one.

    Such questions are easier than those of people: they ask what the corpus answers, in words
    near to its own. Each batch is written when it is there, so that a run goes on where it ended.

    Raises:
        StageUnavailableError: the endpoint answered for none of a batch.
        DataError: no question was written.
    """
    lines = _lines(file)
    waiting = unwritten(passages, file)
    for first in range(0, len(waiting), _BATCH):
        batch = waiting[first : first + _BATCH]
        for passage, question in zip(batch, model.questions(batch), strict=True):
            row = {"query": question, "source": "llm", "annotator": model.model}
            if question is not None:
                lines.append(json.dumps({**row, "note": _note(passage)}, ensure_ascii=False))
        write_lines(file, lines)
        if progress is not None:
            progress(len(batch))
    if not lines:
        raise DataError(
            f"{model.model} wrote no valid question: see its replies, or give --queries"
        )


def unwritten(passages: Sequence[Passage], file: Path) -> list[Passage]:
    """List the passages from which the file holds no question yet."""
    there = {json.loads(line)["note"] for line in _lines(file)}
    return [passage for passage in passages if _note(passage) not in there]


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def _note(passage: Passage) -> str:
    return f"written from passage {passage.passage_id}"


def _order(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()
