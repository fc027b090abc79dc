"""Writes and reads frozen golden sets: BEIR folders identified by a digest.

Reads and writes the folder of the set.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from calibration.data.dataset import Dataset, Query
from calibration.data.text_files import new_folder, read_model, shown, write_lines
from ctxguard._support.regular_file import open_regular
from ctxguard.errors import ConfigurationError, DataError

SNAPSHOT = "snapshot.json"
QUERIES = "queries.jsonl"
DEFAULT_SPLIT = "train"
"""The default split, which `ctxguard calibrate` prefers too."""

_MAX_SNAPSHOT_BYTES = 16 * 2**20


class Snapshot(BaseModel):
    """The identity of a frozen set: the content of ``snapshot.json``.

    Attributes:
        digest: SHA-256 of ``split`` and ``files``.
        split: Name of the file in ``qrels/``.
        files: SHA-256 of every other file, by its name in the folder.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["ctxguard golden set"] = "ctxguard golden set"
    schema_version: Literal[1] = 1
    digest: str
    split: str
    files: dict[str, str]


def freeze(dataset: Dataset, folder: Path | str, split: str = DEFAULT_SPLIT) -> Snapshot:
    """Write labelled queries as a set that is identified by its digest.

    Equal labels give equal files, whatever order they came in: neither clock nor path enters.
    ``read_beir`` reads the folder like any other. Keywords are left out: the format has no place
    for them.

    Args:
        dataset: The queries and their labels.
        folder: New folder for ``queries.jsonl``, ``qrels/SPLIT.tsv``, ``distractors.tsv`` and
            ``snapshot.json``.
        split: Name of the file in ``qrels/``.

    Raises:
        ConfigurationError: the folder is not empty, or the split is not a file name.
        DataError: the format cannot store an id, a query or a label.
    """
    if not split or Path(split).name != split or split != split.strip():
        raise ConfigurationError(f"split {split!r} cannot be used as a file name")
    with new_folder(Path(folder)) as staged:
        _write_beir(dataset, staged, split)
        files = _file_digests(staged)
        snapshot = Snapshot(digest=_set_digest(split, files), split=split, files=files)
        text = json.dumps(snapshot.model_dump(mode="json"), indent=2, ensure_ascii=False)
        write_lines(staged / SNAPSHOT, [text])
    return snapshot


def read_snapshot(folder: Path | str) -> Snapshot:
    """Read the ``snapshot.json`` of a frozen set.

    Raises:
        DataError: it is missing, or this release cannot read it.
    """
    path = Path(folder) / SNAPSHOT
    if not path.exists():
        raise DataError(
            "there is no such file; a frozen set is made by `ctxguard golden freeze`", path=path
        )
    return read_model(Snapshot, path, _MAX_SNAPSHOT_BYTES, "the snapshot of a golden set")


def changes(folder: Path | str) -> tuple[str, ...]:
    """List how a frozen set differs from its snapshot, one readable line for each difference.

    Raises:
        DataError: as ``read_snapshot``, or a file cannot be read.
    """
    snapshot = read_snapshot(folder)
    then, now = snapshot.files, _file_digests(Path(folder))
    lines = []
    for name in sorted(then.keys() | now.keys()):
        if name not in now:
            lines.append(f"{name} is gone")
        elif name not in then:
            lines.append(f"{name} was added")
        elif now[name] != then[name]:
            lines.append(f"{name} was changed")
    if snapshot.digest != _set_digest(snapshot.split, then):
        lines.append(f"{SNAPSHOT} has been changed: its digest does not match its content")
    return tuple(lines)


def _set_digest(split: str, files: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps([split, files], sort_keys=True).encode()).hexdigest()


def _file_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file except the snapshot, by its name in the folder."""
    digests = {}
    try:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and name != SNAPSHOT:
                with open_regular(path) as file:
                    digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=folder) from None
    return digests


def _write_beir(dataset: Dataset, folder: Path, split: str) -> None:
    """Write queries, qrels and distractors in the order of their ids.

    A distractor has grade 0 too, so that tools that read only qrels see that it is judged. A query
    without any label is in ``queries.jsonl`` and in no split: BEIR has no place for it.
    """
    lines, qrels = list[str](), ["query-id\tcorpus-id\tscore"]
    distractors = ["query-id\tcorpus-id\tkind"]
    for query in sorted(dataset.queries, key=lambda query: query.query_id):
        kinds = dataset.distractors.get(query.query_id, {})
        grades = dict.fromkeys(kinds, 0) | dict(dataset.qrels.get(query.query_id, {}))
        lines.append(_query_line(query, sorted(grades)))
        for rows, labels in ((qrels, grades), (distractors, kinds)):
            rows += [
                f"{_cell(query.query_id)}\t{_cell(passage_id)}\t{label}"
                for passage_id, label in sorted(labels.items())
            ]
    write_lines(folder / QUERIES, lines)
    (folder / "qrels").mkdir()
    write_lines(folder / "qrels" / f"{split}.tsv", qrels)
    if len(distractors) > 1:
        write_lines(folder / "distractors.tsv", distractors)


def _cell(name: str) -> str:
    """Quote an id that holds a quote or a carriage return, as table readers expect."""
    is_plain = '"' not in name and "\r" not in name
    return name if is_plain else '"{}"'.format(name.replace('"', '""'))


def _query_line(query: Query, passage_ids: list[str]) -> str:
    """Return a query as JSON; refuse values that the format cannot store."""
    fields: dict[str, object] = {"_id": query.query_id, "text": query.text}
    if query.metadata is not None:
        fields["metadata"] = dict(query.metadata)
    ids = [query.query_id, *passage_ids]
    for value in ids:
        if not value or value != value.strip() or "\t" in value or "\n" in value:
            raise DataError(
                f"id {shown(value)} cannot be written to a table: it is empty, or has white "
                "space at its ends, or a tab or a line end"
            )
    try:
        "".join([*ids, query.text]).encode()
        return json.dumps(fields, ensure_ascii=False, allow_nan=False)
    except UnicodeEncodeError:
        raise DataError(
            f"query {shown(query.query_id)} or its labels hold a lone surrogate, which UTF-8 "
            "cannot encode"
        ) from None
    except (TypeError, ValueError) as error:
        raise DataError(f"{shown(fields)} cannot be written as JSON: {error}") from None
