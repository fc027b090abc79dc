"""Writing labelled data as BEIR folders that read back equal."""

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from calibration.labelling.labels import Dataset, Query
from calibration.labelling.textfiles import shown
from ctxguard.errors import ConfigurationError, DataError


def write_beir(dataset: Dataset, folder: Path | str, split: str = "test") -> None:
    """Write a data set as a BEIR folder with one split, without a corpus.

    ``read_beir`` reads back an equal one, but for its name and notes. A query without any label
    is in ``queries.jsonl`` and in no split: BEIR has no place for it.

    Args:
        dataset: What to write.
        folder: Made by this; where it is there already, it must be empty.
        split: The name of the file in ``qrels/``.

    Raises:
        ConfigurationError: the folder holds something, or the split's name is no file name.
        DataError: an id, a text or a label that the format cannot carry.
    """
    if not split or Path(split).name != split or split != split.strip():
        raise ConfigurationError(f"split {split!r} cannot be the name of a file")
    with new_folder(Path(folder)) as staged:
        write_split(dataset, staged, split)


def write_split(dataset: Dataset, folder: Path, split: str) -> None:
    """What ``write_beir`` writes, into a folder that is there."""
    _check(dataset)
    write_lines(folder / "queries.jsonl", (_line(_query(query)) for query in dataset.queries))
    (folder / "qrels").mkdir()
    _write_table(folder / "qrels" / f"{split}.tsv", "score", dataset, dataset.qrels)
    if any(dataset.distractors.values()):
        _write_table(folder / "distractors.tsv", "kind", dataset, dataset.distractors)
    if dataset.pools:
        rows = [
            {"query_id": query.query_id, "passage_ids": list(dataset.pools[query.query_id])}
            for query in dataset.queries
            if query.query_id in dataset.pools
        ]
        write_lines(folder / "pools.jsonl", map(_line, rows))


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes its name only when it is complete.

    Raises:
        ConfigurationError: the name is taken by a file, or by a folder that holds something.
        OSError: it cannot be made.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"{folder} is there already; name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield staged
        if folder.exists():
            folder.rmdir()
        # A temporary folder is its owner's alone; this one is to be read as any other.
        staged.chmod(folder.parent.stat().st_mode & 0o777)
        staged.rename(folder)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Lines of a UTF-8 file, each ended by a line feed on every platform."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for line in lines:
            file.write(line + "\n")


def _write_table(
    path: Path, column: str, dataset: Dataset, table: Mapping[str, Mapping[str, object]]
) -> None:
    rows = [
        f"{query.query_id}\t{passage_id}\t{label}"
        for query in dataset.queries
        for passage_id, label in table.get(query.query_id, {}).items()
    ]
    write_lines(path, [f"query-id\tcorpus-id\t{column}", *rows])


def _query(query: Query) -> dict[str, object]:
    fields: dict[str, object] = {"_id": query.query_id, "text": query.text}
    if query.metadata is not None:
        fields["metadata"] = dict(query.metadata)
    return fields


def _line(fields: Mapping[str, object]) -> str:
    try:
        return json.dumps(fields, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"{shown(fields)} cannot be written as JSON: {error}") from None


def _check(dataset: Dataset) -> None:
    for query in dataset.queries:
        _check_id("query", query.query_id)
        if not query.text.strip():
            raise DataError(f"query {shown(query.query_id)} has no text")
        _check_encodable(f"the text of query {shown(query.query_id)}", query.text)
        grades = dataset.qrels.get(query.query_id, {})
        kinds = dataset.distractors.get(query.query_id, {})
        for passage_id in (*grades, *kinds, *dataset.pools.get(query.query_id, ())):
            _check_id("passage", passage_id)
        for passage_id, grade in grades.items():
            where = f"query {shown(query.query_id)}, passage {shown(passage_id)}"
            if grade < 0:
                raise DataError(f"{where} has grade {grade}; a grade is at least 0")
            if grade > 0 and passage_id in kinds:
                raise DataError(f"{where} is relevant and a {kinds[passage_id]}")


def _check_id(what: str, value: str) -> None:
    if not value or value != value.strip() or "\t" in value or "\n" in value:
        raise DataError(
            f"{what} id {shown(value)} cannot stand in a table: it is empty, or has white space "
            "at its ends, or a tab or a line end"
        )
    _check_encodable(f"{what} id {shown(value)}", value)


def _check_encodable(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{what} holds a lone surrogate, which UTF-8 cannot carry") from None
