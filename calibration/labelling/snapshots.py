"""Frozen golden sets: a BEIR folder with provenance, which its digest holds to what it was."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calibration.labelling.golden import RULES, Asked, Judgment, Merged
from calibration.labelling.goldenfiles import PROVENANCE
from calibration.labelling.writers import new_folder, write_lines, write_split
from ctxguard.errors import DataError

SNAPSHOT = "snapshot.json"

_FORMAT = "ctxguard golden set"
_SCHEMA_VERSION = 1
_DIGESTED = {"split": str, "dataset_digest": str, "counts": dict, "rules": list, "files": dict}
"""What the digest is of, and its types: the notes are left out, they speak of the sources."""


def freeze(merged: Merged, folder: Path | str, split: str = "test") -> dict[str, Any]:
    """Write a golden set that can be told from any other by its digest.

    Equal labels give equal files, whatever files and order they came in: no clock and no path
    enters them.

    Args:
        merged: The set with one label for each passage.
        folder: Made by this: ``queries.jsonl``, ``qrels/SPLIT.tsv``, ``distractors.tsv``,
            ``provenance.jsonl`` (every label, those that disagree too) and ``snapshot.json``.
        split: The name of the file in ``qrels/``.

    Returns:
        What ``snapshot.json`` says.

    Raises:
        ConfigurationError: the folder holds something already.
        DataError: an id, a text or a label that the format cannot carry.
    """
    with new_folder(Path(folder)) as staged:
        write_split(merged.dataset, staged, split)
        given: tuple[Judgment | Asked, ...] = (*merged.golden.judgments, *merged.golden.asked)
        write_lines(staged / PROVENANCE, map(_provenance, given))
        content = {
            "split": split,
            "dataset_digest": merged.dataset.digest(),
            "counts": merged.counts(),
            "rules": list(RULES),
            "files": _digests(staged),
        }
        snapshot = {
            "format": _FORMAT,
            "schema_version": _SCHEMA_VERSION,
            "digest": _digest_of(content),
            **content,
            "notes": list(merged.golden.notes),
        }
        text = json.dumps(snapshot, indent=2, ensure_ascii=False)
        write_lines(staged / SNAPSHOT, [text])
    return snapshot


def read_snapshot(folder: Path | str) -> dict[str, Any]:
    """What the ``snapshot.json`` of a frozen set says.

    Raises:
        DataError: there is none, or it is not one that this release reads.
    """
    path = Path(folder) / SNAPSHOT
    try:
        snapshot = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            "there is no such file; a frozen set is made by `ctxguard golden freeze`", path=path
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read: {error}", path=path) from None
    if not isinstance(snapshot, dict) or snapshot.get("format") != _FORMAT:
        raise DataError(f"is not the snapshot of a golden set: no format {_FORMAT!r}", path=path)
    if snapshot.get("schema_version") != _SCHEMA_VERSION:
        raise DataError(
            f"has schema version {snapshot.get('schema_version')!r}; this release reads "
            f"{_SCHEMA_VERSION}",
            path=path,
        )
    for name, kind in {"digest": str, "notes": list, **_DIGESTED}.items():
        if not isinstance(snapshot.get(name), kind):
            raise DataError(f"its {name} is missing or broken", path=path)
    return snapshot


def changes(folder: Path | str) -> tuple[str, ...]:
    """How a frozen set differs from what was frozen, one readable line each; empty where not.

    Raises:
        DataError: as ``read_snapshot``, or a file that cannot be read.
    """
    folder = Path(folder)
    snapshot = read_snapshot(folder)
    then: Mapping[str, object] = snapshot["files"]
    now = _digests(folder)
    lines = []
    for name in sorted(then.keys() | now.keys()):
        if name not in now:
            lines.append(f"{name} is gone")
        elif name not in then:
            lines.append(f"{name} was added")
        elif now[name] != then[name]:
            lines.append(f"{name} was changed")
    if snapshot["digest"] != _digest_of({name: snapshot[name] for name in _DIGESTED}):
        lines.append(f"{SNAPSHOT} was changed: its digest is not that of what it says")
    return tuple(lines)


def _provenance(item: Judgment | Asked) -> str:
    fields: dict[str, object] = {"query_id": item.query_id}
    if isinstance(item, Asked):
        fields["count"] = item.count
    else:
        fields["passage_id"] = item.passage_id
        fields["grade" if isinstance(item.value, int) else "distractor"] = item.value
    fields["source"] = item.source
    for name in ("annotator", "date", "note"):
        if getattr(item, name) is not None:
            fields[name] = getattr(item, name)
    return json.dumps(fields, ensure_ascii=False)


def _digests(folder: Path) -> dict[str, str]:
    """sha256 of every file but the snapshot's own, by its name in the folder."""
    digests = {}
    try:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and name != SNAPSHOT:
                digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=folder) from None
    return digests


def _digest_of(content: Mapping[str, object]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
