"""The saved index folder: a manifest that names, sizes and digests the files of one generation.

    INDEX/manifest.json          written last, by one atomic rename
    INDEX/generation-XXXXXXXX/   the files, all of plain formats

A folder without a manifest is half-written or foreign. Saving again writes a second generation
beside the first and then replaces the manifest, so that a failed save loses nothing.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any

from ctxguard.errors import IndexFolderError

SCHEMA_VERSION = 2
VERIFY_LIMIT_BYTES = 256 * 2**20
"""Digests are checked on every load up to this size in all, which takes a fraction of a second."""

_MANIFEST = "manifest.json"
_PARTIAL_MANIFEST = "manifest.partial"
_FORMAT = "ctxguard index"
_GENERATION = re.compile(r"generation-[0-9a-f]{8}")
_REBUILD = "copy the whole folder again, or build the index anew with `ctxguard index`"


def save(folder: Path, content: Mapping[str, object], write: Callable[[Path], None]) -> None:
    """Save an index, replacing one that is there.

    Args:
        folder: Made where it is absent; otherwise empty or a saved index.
        content: What the manifest says beside the list of files; JSON values.
        write: Writes every file into the folder that it is given.

    Raises:
        IndexFolderError: the folder holds something else, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_foreign(folder)
        generation = folder / f"generation-{token_hex(4)}"
        generation.mkdir()
        try:
            write(generation)
            files = {file.name: _describe(file) for file in sorted(generation.iterdir())}
            _commit(folder, generation, content, files)
        except BaseException:
            shutil.rmtree(generation, ignore_errors=True)
            raise
    except OSError as error:
        raise IndexFolderError(
            f"{folder}: the index could not be saved ({error}); an index that was there before "
            "is untouched"
        ) from error
    for other in folder.glob("generation-*"):
        if other.name != generation.name and _GENERATION.fullmatch(other.name):
            shutil.rmtree(other, ignore_errors=True)


def manifest_file(folder: Path) -> Path:
    """The file that a new generation replaces, last of all and in one step."""
    return folder / _MANIFEST


def _refuse_foreign(folder: Path) -> None:
    ours = {_MANIFEST, _PARTIAL_MANIFEST}
    foreign = sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.name not in ours and not _GENERATION.fullmatch(entry.name)
    )
    if foreign:
        raise IndexFolderError(
            f"{folder} holds files that are no part of an index ({foreign[0]!r}, {len(foreign)} in "
            "all); save into a folder of its own"
        )
    if (folder / _MANIFEST).exists():
        _read_manifest(folder, any_version=True)


def _commit(
    folder: Path, generation: Path, content: Mapping[str, object], files: Mapping[str, Any]
) -> None:
    manifest = {
        "format": _FORMAT,
        "schema_version": SCHEMA_VERSION,
        "generation": generation.name,
        **content,
        "files": files,
    }
    partial = folder / _PARTIAL_MANIFEST
    with partial.open("w", encoding="utf-8") as stream:
        json.dump(manifest, stream, indent=2)
        stream.flush()
        os.fsync(stream.fileno())
    # Another save into the same folder may have cleared this generation away.
    _check_files(folder, manifest, verify=False)
    partial.replace(folder / _MANIFEST)


def _describe(file: Path) -> dict[str, object]:
    with file.open("rb+") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        os.fsync(stream.fileno())
    return {"bytes": file.stat().st_size, "sha256": digest}


def load(folder: Path, *, verify: bool | None = None) -> tuple[dict[str, Any], Path]:
    """Check a saved index and say where its files are.

    Args:
        folder: What ``save`` wrote.
        verify: Whether every file's digest is checked, beside its size, which always is. None:
            up to `VERIFY_LIMIT_BYTES` in all.

    Returns:
        The manifest, and the folder of its generation.

    Raises:
        IndexFolderError: it is not a saved index, of another version, incomplete or damaged.
    """
    manifest = _read_manifest(folder)
    try:
        _check_files(folder, manifest, verify=verify)
    except OSError as error:
        # Saving clears the generation before it away, perhaps while it is being checked here.
        raise IndexFolderError(
            f"{folder} cannot be read ({error.strerror or type(error).__name__}); {_REBUILD}"
        ) from error
    return manifest, folder / manifest["generation"]


def _read_manifest(folder: Path, *, any_version: bool = False) -> dict[str, Any]:
    file = folder / _MANIFEST
    if not folder.is_dir():
        raise IndexFolderError(f"{folder} is not a folder; build an index with `ctxguard index`")
    if not file.is_file():
        raise IndexFolderError(
            f"{folder} has no {_MANIFEST}: it is not an index, or only half of one; {_REBUILD}"
        )
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise IndexFolderError(f"{file} cannot be read ({error}); {_REBUILD}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise IndexFolderError(f"{file} was not written by ctxguard; save or load elsewhere")
    version = manifest.get("schema_version")
    if version != SCHEMA_VERSION and not any_version:
        raise IndexFolderError(
            f"{file} has schema version {version!r}, this release reads {SCHEMA_VERSION}; build "
            "the index anew with `ctxguard index`"
        )
    return manifest


def _check_files(folder: Path, manifest: Mapping[str, Any], *, verify: bool | None) -> None:
    try:
        generation = manifest["generation"]
        files = {name: (at["bytes"], at["sha256"]) for name, at in manifest["files"].items()}
        known = bool(_GENERATION.fullmatch(generation)) and bool(files)
        known = known and all(Path(name).name == name for name in files)
        total = sum(size for size, _ in files.values())
    except (KeyError, TypeError, AttributeError):
        known = False
    if not known:
        raise IndexFolderError(f"{folder / _MANIFEST} is damaged; {_REBUILD}")
    if verify is None:
        verify = total <= VERIFY_LIMIT_BYTES
    for name, (size, digest) in files.items():
        file = folder / generation / name
        if not file.is_file():
            raise IndexFolderError(f"{file} is missing; {_REBUILD}")
        found = file.stat().st_size
        if found != size:
            raise IndexFolderError(f"{file} has {found} bytes instead of {size}; {_REBUILD}")
        if verify:
            check_digest(file, digest)


def check_digest(file: Path, expected: str) -> None:
    """Compare a file with its digest in the manifest.

    Raises:
        IndexFolderError: it was changed since it was saved.
    """
    with file.open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != expected:
            raise IndexFolderError(
                f"{file} was changed or damaged since it was saved: its sha256 is not the "
                f"manifest's; {_REBUILD}"
            )
