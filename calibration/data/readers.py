"""Reads labelled data: BEIR folders, TREC qrels and runs, JSONL.

Every error names the file, the 1-based line and the value. Repairable input is repaired,
counted and listed in ``Dataset.notes`` (DESIGN.md §9). Reads files; only `write_trec_run` writes.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TypeVar, cast

from calibration.data.dataset import Dataset, DistractorKind, Query
from calibration.data.documents.folder import SUFFIXES, LeftOut, read_documents
from calibration.data.text_files import (
    Record,
    clean,
    notes_of,
    read_columns,
    read_records,
    shown,
)
from ctxguard._support.atomic_write import atomic_write
from ctxguard._support.checks import check_at_least
from ctxguard.core.scores import is_opposed
from ctxguard.core.types import Hit, Passage
from ctxguard.errors import DataError

Label = TypeVar("Label", int, DistractorKind)

_Key = TypeVar("_Key", bound=Hashable)

# A label and its line number, by (query id, passage id).
Labels = dict[tuple[str, str], tuple[Label, int]]
_Grades = dict[str, dict[str, int]]

_QUERY_ID = ("query_id", "_id", "id")
_PASSAGE_ID = ("_id", "id", "passage_id")
_KINDS = ("hard_negative", "distractor")
_GRADE_HEADERS = {
    *("score", "grade", "relevance", "rel", "label", "relevancy", "relevant", "rating", "qrel"),
    *("judgment", "judgement", "relevance_score", "relevance-score", "relevance score"),
}
_LABEL_FORM = (
    "write three, separated by tabs: query id, passage id, and the label; or four as TREC does, "
    "with the iteration, 0, after the query id"
)
_DECIMALS = re.compile(r",0+\Z")
_RUN_FORM = "a TREC run line has six: query, Q0, passage, rank, score, tag"


def _grade(record: Record, value: object) -> int:
    # Spreadsheets in many countries write 2.0 as 2,0.
    written = _DECIMALS.sub("", value) if isinstance(value, str) else value
    return record.whole_number(written, "grade")


def _relevant_from(least: int, written: _Grades, counts: Counter[str], path: Path) -> _Grades:
    """Read grades below ``least`` as 0, including negative ones, which some tracks give to spam."""
    check_at_least(1, relevant_from=least)
    every = [grade for grades in written.values() for grade in grades.values()]
    highest = max(every, default=0)
    if 0 < highest < least:
        raise DataError(
            f"no grade reaches relevant-from = {least}: the highest is {highest}", path=path
        )
    for what, n in (
        ("negative grades read as 0, judged not relevant", sum(each < 0 for each in every)),
        (
            f"grades below relevant-from = {least} count as not relevant",
            sum(0 < each < least for each in every),
        ),
    ):
        if n:
            counts[what] = n
    return {
        query_id: {name: grade if grade >= least else 0 for name, grade in grades.items()}
        for query_id, grades in written.items()
    }


def _kind(record: Record, value: object) -> DistractorKind:
    if value not in _KINDS:
        raise record.error(f"kind {shown(value)} is unknown; use {' or '.join(_KINDS)}")
    return cast(DistractorKind, value)


def _read_table(
    path: Path,
    parse: Callable[[Record, object], Label],
    headers: Container[str],
    counts: Counter[str],
) -> "Labels[Label]":
    """Read labels by query and passage; skip a first line that ends in a header."""
    labels: Labels[Label] = {}
    for place, (record, cells) in enumerate(read_columns(path, (3, 4), _LABEL_FORM, counts)):
        query_id, *iteration, passage_id, value = cells
        if iteration and iteration[0].upper() not in ("0", "Q0"):
            raise record.error(f"{shown(iteration[0])} is not a TREC iteration: {_LABEL_FORM}")
        if place == 0 and value.casefold() in headers:
            continue
        label = parse(record, value)
        earlier, line = labels.setdefault((query_id, passage_id), (label, record.line))
        if earlier != label:
            raise record.error(
                f"query {shown(query_id)}, passage {shown(passage_id)} is labelled {label} here "
                f"and {earlier} on line {line}"
            )
        if line != record.line:
            counts[f"rows of {path.name} repeat another"] += 1
    return labels


def _by_query(labels: "Labels[Label]") -> dict[str, dict[str, Label]]:
    """Group labels by query id and then passage id, in the order of the file."""
    grouped: dict[str, dict[str, Label]] = {}
    for (query_id, passage_id), (value, _) in labels.items():
        grouped.setdefault(query_id, {})[passage_id] = value
    return grouped


class Corpus(Iterator[Passage]):
    """Passages that are read one at a time: from a JSONL file, or as sections of documents.

    Attributes:
        path: Their file, or the folder of documents.
        are_documents: Whether they are sections of documents, of any length.
        left_out: The parts of the folder left out so far.
    """

    def __init__(self, path: Path, *, are_documents: bool) -> None:
        self.path, self.are_documents = path, are_documents
        self.left_out: list[LeftOut] = []
        self._counts: Counter[str] = Counter()
        self._passages = (
            read_documents(path, self._counts, self.left_out)
            if are_documents
            else _passages(path, self._counts)
        )

    def __next__(self) -> Passage:
        return next(self._passages)

    @property
    def notes(self) -> tuple[str, ...]:
        """Repairs and oddities in the lines read so far, one readable line each."""
        return notes_of(self._counts)


def read_corpus(path: Path | str) -> Corpus:
    """Read passages from a JSONL file, a BEIR folder's corpus.jsonl, or documents.

    A folder without ``corpus.jsonl``, and a file that is named like a document, is read by
    `read_documents`. JSONL has ``_id`` (or ``id``, ``passage_id``), ``text``, and optionally
    ``title`` and ``metadata``. Lone surrogates become U+FFFD. A passage with neither title nor
    text is kept and counted.

    Raises:
        DataError: no such folder or file, or no document in it. While iterating: broken JSON, a
            missing field, a byte that is not UTF-8, the id of an earlier line, or no passage at
            all.
        MissingExtraError: documents need the extra ``documents``.
    """
    path = Path(path)
    lines = path / "corpus.jsonl" if path.is_dir() else path
    if (path.is_dir() and not lines.exists()) or (
        path.is_file() and path.suffix.lower() in SUFFIXES
    ):
        return Corpus(path, are_documents=True)
    if not lines.is_file():
        raise DataError(
            "there is no such file; give a folder of documents, a JSONL file with one passage per "
            "line (_id and text), or a BEIR folder (with corpus.jsonl)",
            path=lines,
        )
    return Corpus(lines, are_documents=False)


def _passages(path: Path, counts: Counter[str]) -> Iterator[Passage]:
    first_line: dict[str, int] = {}
    for record in read_records(path, counts):
        passage_id = record.identifier(*_PASSAGE_ID)
        _refuse_repeat(record, "passage", passage_id, first_line)
        title, text = record.text("title", default=""), record.text("text")
        if not title.strip() and not text.strip():
            counts["passages have neither title nor text"] += 1
        yield Passage(passage_id, text, title, record.metadata())
    if not first_line:
        raise DataError("contains no passages; a corpus needs at least one", path=path)


def _refuse_repeat(record: Record, what: str, key: _Key, first_line: dict[_Key, int]) -> None:
    """Add the record's line to ``first_line``; raise if its key already has one."""
    if key in first_line:
        raise record.error(
            f"{what} id {shown(key)} is already on line {first_line[key]}; ids must be distinct"
        )
    first_line[key] = record.line


def splits(folder: Path | str) -> tuple[str, ...]:
    """Return the splits of a BEIR folder: the names in ``qrels/``, sorted.

    Raises:
        DataError: no such folder, or none of its files is a split.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError("there is no such folder", path=folder)
    names = tuple(sorted([file.stem for file in (folder / "qrels").glob("*.tsv")]))
    if not names:
        raise DataError("contains no splits: there is no file qrels/SPLIT.tsv", path=folder)
    return names


def default_split(folder: Path | str, preferred: str) -> tuple[str, tuple[str, ...]]:
    """Choose a split if none is named: ``preferred``, or else the only one, with a note."""
    names = splits(folder)
    if preferred in names:
        return preferred, ()
    if len(names) > 1:
        raise DataError(
            f"there is no split {preferred!r}; name the file of one: "
            f"{', '.join(f'qrels/{name}.tsv' for name in names)}",
            path=Path(folder),
        )
    return names[0], (
        f"{folder} has no split {preferred!r}; its only split, {names[0]!r}, is used",
    )


def read_beir(folder: Path | str, split: str = "test", *, relevant_from: int = 1) -> Dataset:
    """Read one split of a BEIR folder.

    A query belongs to the split whose qrels name it, even with a grade of 0: a question without
    an answer takes part if its judged passages are listed. A query that only
    ``distractors.tsv`` names belongs to the split if the folder has just one. Labels of queries
    missing from ``queries.jsonl`` are left out and counted.

    Args:
        folder: Holds ``queries.jsonl`` (``_id``, ``text``), ``qrels/SPLIT.tsv`` (query id,
            passage id, grade; a header is allowed) and optionally ``distractors.tsv`` (query id,
            passage id, ``hard_negative`` or ``distractor``).
        split: A name in ``qrels/``.
        relevant_from: The least grade of a relevant passage, such as 2 for the passages of TREC;
            lower ones are read as 0.

    Raises:
        DataError: an unknown split, a missing or empty file, a line that cannot be read, a
            repeated id, or labels that contradict each other.
    """
    folder = Path(folder)
    names = splits(folder)
    if split not in names:
        raise DataError(
            f"there is no split {split!r}; the folder has {', '.join(names)}", path=folder
        )
    counts: Counter[str] = Counter()
    qrels_file, kinds_file = folder / "qrels" / f"{split}.tsv", folder / "distractors.tsv"
    grades = _read_table(qrels_file, _grade, _GRADE_HEADERS, counts)
    if not grades:
        raise DataError("contains no labels", path=qrels_file)
    qrels = _relevant_from(relevant_from, _by_query(grades), counts, qrels_file)
    kinds: Labels[DistractorKind] = {}
    if kinds_file.exists():
        kinds = _read_table(kinds_file, _kind, {"kind"}, counts)
    for (query_id, passage_id), (kind, line) in kinds.items():
        if (grade := qrels.get(query_id, {}).get(passage_id, 0)) > 0:
            raise DataError(
                f"query {shown(query_id)}, passage {shown(passage_id)} is a {kind} here but has "
                f"grade {grade} in {qrels_file}, line {grades[query_id, passage_id][1]}",
                path=kinds_file,
                line=line,
            )
    distractors = _by_query(kinds)
    members = qrels.keys() | (distractors.keys() if len(names) == 1 else ())
    every = _queries(folder / "queries.jsonl", counts, "text")
    queries = [query for _, query in every if query.query_id in members]
    if not queries:
        raise DataError(f"names no query of {folder / 'queries.jsonl'}", path=qrels_file)
    present = {query.query_id for query in queries}
    if unknown := sorted(members - present):
        what = f"labelled queries are not in queries.jsonl and are left out, such as {unknown[0]!r}"
        counts[what] = len(unknown)
    return Dataset(
        name=f"{folder.resolve().name}/{split}",
        queries=tuple(queries),
        qrels={name: own for name, own in qrels.items() if name in present},
        distractors={name: own for name, own in distractors.items() if name in present},
        notes=notes_of(counts),
    )


def read_jsonl(path: Path | str, *, relevant_from: int = 1) -> Dataset:
    """Read a data set from one file, one object per query.

    Fields: ``query_id`` (or ``_id``, ``id``), ``text`` (or ``query``), ``relevant`` (passage
    ids with grades, or a list of ids, which are relevant; empty if no passage of the corpus
    answers, which calls every candidate irrelevant) or ``keywords`` (words and phrases that an
    answer needs) or both, and optionally ``distractors`` (ids with kinds, or a list of ids) and
    ``metadata``. ``relevant`` is in every row or in none: a query without it would count as one
    without an answer.

    Raises:
        DataError: as ``read_beir``, whose ``relevant_from`` is meant too.
    """
    path = Path(path)
    counts: Counter[str] = Counter()
    lines: dict[str, int] = {}
    queries, keywords = list[Query](), dict[str, tuple[str, ...]]()
    qrels, distractors = dict[str, dict[str, int]](), dict[str, dict[str, DistractorKind]]()
    for record, query in _queries(path, counts, "text", "query"):
        queries.append(query)
        lines[query.query_id] = record.line
        if words := record.texts("keywords"):
            keywords[query.query_id] = words
        elif record.fields.get("relevant") is None:
            raise record.error(
                "the fields relevant and keywords are missing; write relevant: [] if nothing "
                "answers the query"
            )
        if record.fields.get("relevant") is None:
            continue
        qrels[query.query_id] = {
            passage_id: _grade(record, grade)
            for passage_id, grade in _labelled(record, "relevant", relevant_from)
        }
        if kinds := _labelled(record, "distractors", "distractor"):
            distractors[query.query_id] = {name: _kind(record, kind) for name, kind in kinds}
    qrels = _relevant_from(relevant_from, qrels, counts, path)
    for query_id, own in distractors.items():
        for passage_id in own:
            if qrels[query_id].get(passage_id, 0) > 0:
                raise DataError(
                    f"passage {shown(passage_id)} is both relevant and a distractor",
                    path=path,
                    line=lines[query_id],
                )
    unlabelled = [query.query_id for query in queries if query.query_id not in qrels]
    if qrels and unlabelled:
        raise DataError(
            f"query {shown(unlabelled[0])} has only keywords, but others have the field relevant; "
            "write it in every row or in none",
            path=path,
            line=lines[unlabelled[0]],
        )
    return Dataset(
        path.stem, tuple(queries), qrels, distractors, keywords=keywords, notes=notes_of(counts)
    )


def read_trec_run(path: Path | str) -> dict[str, tuple[Hit, ...]]:
    """Read a TREC run file, ``query Q0 passage rank score [tag]``: rankings by query.

    Orders by score, as TREC's own tools do. The ranks of the file break ties, and order a query's
    passages where they contradict its scores, for a replay to refuse; they are renumbered from 1,
    since some tools write them from 0.

    Raises:
        DataError: a line without five or six columns, a score that is not a finite number, a
            rank that is not a whole number, a passage twice for one query, or an empty file.
    """
    first_line: dict[tuple[str, str], int] = {}
    rankings: dict[str, list[tuple[float, int, str]]] = {}
    for record, cells in read_columns(Path(path), (5, 6), _RUN_FORM, Counter()):
        query_id, _, passage_id, rank, value = cells[:5]
        _refuse_repeat(record, "query and passage", (query_id, passage_id), first_line)
        try:
            score = float(value)
        except ValueError:
            score = math.nan
        if not math.isfinite(score):
            raise record.error(f"score {shown(value)} is not a finite number")
        place = record.whole_number(rank, "rank")
        rankings.setdefault(query_id, []).append((-score, place, passage_id))
    if not rankings:
        raise DataError("contains no line of a run", path=Path(path))
    for entries in rankings.values():
        entries.sort()
        if is_opposed([-negated for negated, _, _ in entries], [rank for _, rank, _ in entries]):
            entries.sort(key=itemgetter(1))
    return {
        query_id: tuple(
            [Hit(name, -each, rank=at) for at, (each, _, name) in enumerate(entries, 1)]
        )
        for query_id, entries in rankings.items()
    }


def write_trec_run(path: Path | str, run: Mapping[str, Sequence[Hit]]) -> None:
    """Write rankings as a TREC run file, ``query Q0 passage rank score ctxguard``.

    ``read_trec_run`` reads the same rankings back, with scores exact to the last bit.

    A query without candidates has no line. A reader of the file never sees half of it.

    Args:
        run: Rankings by query id, best first.

    Raises:
        DataError: an id contains white space, which the format cannot carry, or there is no id.
    """
    path = Path(path)
    lines = []
    for query_id, entries in run.items():
        for entry in entries:
            for name in (query_id, entry.passage_id):
                if name.split() != [name]:
                    raise DataError(
                        f"{shown(name)} cannot be written to a TREC run, whose columns are "
                        "separated by white space; use an id without any",
                        path=path,
                    )
            lines.append(
                f"{query_id} Q0 {entry.passage_id} {entry.rank} {entry.score!r} ctxguard\n"
            )
    with atomic_write(path) as stream:
        stream.write("".join(lines).encode())


def _queries(path: Path, counts: Counter[str], *text_names: str) -> Iterator[tuple[Record, Query]]:
    first_line: dict[str, int] = {}
    for record in read_records(path, counts):
        query = Query(record.identifier(*_QUERY_ID), record.text(*text_names), record.metadata())
        if not query.text.strip():
            raise record.error(f"query {shown(query.query_id)} has no text")
        _refuse_repeat(record, "query", query.query_id, first_line)
        yield record, query
    if not first_line:
        raise DataError("contains no queries", path=path)


def _labelled(record: Record, name: str, default: object) -> list[tuple[str, object]]:
    """Pair passage ids with labels: those in an object, or ``default`` for ids in a list."""
    value = record.fields.get(name)
    if value is None:
        return []
    if isinstance(value, dict):
        return [(clean(key, record.counts), label) for key, label in value.items()]
    return [(passage_id, default) for passage_id in record.identifiers(name)]
