"""Frozen golden sets: a BEIR folder with provenance, identified by a digest of its content."""

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from calibration.data.dataset import Dataset, Query
from calibration.data.golden import RULES, Annotation, GoldenSet
from calibration.data.golden_sources import DEFAULT_SPLIT, PROVENANCE, QUERIES
from calibration.data.text_files import new_folder, read_model, shown, write_lines
from ctxguard._support.regular_file import open_regular
from ctxguard.errors import ConfigurationError, DataError

SNAPSHOT = "snapshot.json"

_MAX_SNAPSHOT_BYTES = 16 * 2**20


class Snapshot(BaseModel):
    """The identity and the counts of a frozen set: the content of ``snapshot.json``.

    Attributes:
        digest: SHA-256 of the fields from ``split`` to ``files``.
        split: Name of the file in ``qrels/``.
        dataset_digest: Digest of the questions and their labels.
        counts: Counts from ``GoldenSet.counts``.
        rules: The rules that made one label of a passage's several.
        files: SHA-256 of every other file, by its name in the folder.
        notes: Notes of the sources that the set was made from.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["ctxguard golden set"] = "ctxguard golden set"
    schema_version: Literal[1] = 1
    digest: str
    split: str
    dataset_digest: str
    counts: dict[str, int]
    rules: tuple[str, ...]
    files: dict[str, str]
    notes: tuple[str, ...]

    def own_digest(self) -> str:
        """Compute the digest of its own fields."""
        fields = {"split", "dataset_digest", "counts", "rules", "files"}
        content = self.model_dump(mode="json", include=fields)
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def freeze(golden: GoldenSet, folder: Path | str, split: str = DEFAULT_SPLIT) -> Snapshot:
    """Write a golden set that is identified by its digest.

    Equal labels give equal files, whatever files and order they came in: neither clock nor path
    enters. ``read_beir`` reads the folder like any other.

    Args:
        golden: The set.
        folder: New folder for ``queries.jsonl``, ``qrels/SPLIT.tsv``, ``distractors.tsv``,
                ``provenance.jsonl`` (every label, even those that disagree) and ``snapshot.json``.
        split: Name of the file in ``qrels/``.

    Raises:
        ConfigurationError: the folder is not empty, or the split is not a file name.
        DataError: an id, a text or a label that the format cannot store.
    """
    if not split or Path(split).name != split or split != split.strip():
        raise ConfigurationError(f"split {split!r} cannot be the name of a file")
    dataset = golden.dataset()
    with new_folder(Path(folder)) as staged:
        _write_beir(dataset, staged, split)
        write_lines(staged / PROVENANCE, map(_provenance, golden.annotations))
        snapshot = Snapshot(
            digest="",
            split=split,
            dataset_digest=dataset.digest(),
            counts=golden.counts(),
            rules=RULES,
            files=_digests(staged),
            notes=golden.notes,
        )
        snapshot = snapshot.model_copy(update={"digest": snapshot.own_digest()})
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
    """List how a frozen set differs from its snapshot, one readable line each; empty if unchanged.

    Raises:
        DataError: as ``read_snapshot``, or a file cannot be read.
    """
    folder = Path(folder)
    snapshot = read_snapshot(folder)
    then, now = snapshot.files, _digests(folder)
    lines = []
    for name in sorted(then.keys() | now.keys()):
        if name not in now:
            lines.append(f"{name} is gone")
        elif name not in then:
            lines.append(f"{name} was added")
        elif now[name] != then[name]:
            lines.append(f"{name} was changed")
    if snapshot.digest != snapshot.own_digest():
        lines.append(f"{SNAPSHOT} was changed: its digest does not match its content")
    return tuple(lines)


def _provenance(item: Annotation) -> str:
    fields = asdict(item)
    value = fields.pop("value")
    if item.passage_id is not None:
        fields["grade" if isinstance(value, int) else "distractor"] = value
        del fields["count"]
    fields = {name: each for name, each in fields.items() if each is not None}
    return json.dumps(fields, ensure_ascii=False)


def _digests(folder: Path) -> dict[str, str]:
    """Return sha256 of every file but the snapshot itself, by its name in the folder."""
    digests = {}
    try:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and name != SNAPSHOT:
                with open_regular(path, sys.maxsize) as file:
                    digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=folder) from None
    return digests


def _write_beir(dataset: Dataset, folder: Path, split: str) -> None:
    """Write queries, qrels and distractors of a data set, without pools.

    A query without any label is in ``queries.jsonl`` and in no split: BEIR has no place for it.
    """
    write_lines(folder / QUERIES, [_query_line(dataset, query) for query in dataset.queries])
    (folder / "qrels").mkdir()
    tables: list[tuple[str, str, Mapping[str, Mapping[str, object]]]] = [
        (f"qrels/{split}.tsv", "score", dataset.qrels)
    ]
    if any(dataset.distractors.values()):
        tables.append(("distractors.tsv", "kind", dataset.distractors))
    for name, column, table in tables:
        rows = [
            f"{query.query_id}\t{passage_id}\t{label}"
            for query in dataset.queries
            for passage_id, label in table.get(query.query_id, {}).items()
        ]
        write_lines(folder / name, [f"query-id\tcorpus-id\t{column}", *rows])


def _query_line(dataset: Dataset, query: Query) -> str:
    """Return a query as JSON; refuse what the format cannot store, which files never hold."""
    fields: dict[str, object] = {"_id": query.query_id, "text": query.text}
    if query.metadata is not None:
        fields["metadata"] = dict(query.metadata)
    ids = [query.query_id, *dataset.qrels.get(query.query_id, {})]
    for value in ids:
        if not value or value != value.strip() or "\t" in value or "\n" in value:
            raise DataError(
                f"id {shown(value)} cannot stand in a table: it is empty, or has white space at "
                "its ends, or a tab or a line end"
            )
    try:
        "".join([*ids, query.text]).encode()
        return json.dumps(fields, ensure_ascii=False, allow_nan=False)
    except UnicodeEncodeError:
        raise DataError(
            f"query {shown(query.query_id)} or its labels hold a lone surrogate, which UTF-8 "
            "cannot hold"
        ) from None
    except (TypeError, ValueError) as error:
        raise DataError(f"{shown(fields)} cannot be written as JSON: {error}") from None
