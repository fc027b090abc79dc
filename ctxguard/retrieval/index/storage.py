"""The saved index folder: a manifest that names, sizes and digests the files of one generation.

    INDEX/manifest.json                 names the generation that is in force
    INDEX/generation-XXXXXXXX/PART/     the files of each of its parts, all of plain formats
    INDEX/generation-XXXXXXXX.partial   the manifest of a generation that is being saved

A save writes a generation beside the one in force and then renames its own partial manifest to
``manifest.json``, in one step. A failed save loses nothing. Of several saves into one folder at
once, the last to finish is in force.

A part never changes, and has an id. Where the generation in force has it already, its files are
linked into the new one instead of written, so that each generation is whole by itself, and a small
change costs little beside a large part.

Files that the manifest names are never deleted. A generation comes into force at most once, when
its partial manifest is renamed. So one without a partial manifest that is not named by the manifest
that is read afterwards was replaced and will never be named again. One that has a partial manifest
is being saved, unless that is a day old: then the save is taken for interrupted, and the partial
manifest is deleted first, without which the generation cannot come into force.
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

from ctxguard._support.atomic_write import PRIVATE, PRIVATE_FOLDER
from ctxguard._support.regular_file import read_regular
from ctxguard.errors import IndexFolderError

SCHEMA_VERSION = 5
VERIFY_LIMIT_BYTES = 256 * 2**20
"""An index of at most so much is read into memory, and its digests checked, before it answers.

That takes a fraction of a second. A larger one is mapped, and checked while it answers.
"""

_MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 2**20
_FORMAT = "ctxguard index"
_GENERATION = re.compile(r"generation-[0-9a-f]{8}")
_PARTIAL = re.compile(r"generation-[0-9a-f]{8}\.partial")
_FILE = re.compile(r"\w+/[\w.]+")
"""A part and the name of a file of its; nothing that leaves the generation's folder."""

_INTERRUPTED_SECONDS = 24 * 60 * 60
"""Age of a partial manifest from which its save is taken for interrupted."""

_REBUILD = (
    "copy the whole index to a new folder and open that, or build it anew with `ctxguard index`; "
    "never write into the files of an index that is in use"
)


class SavedIndex(NamedTuple):
    """A saved index that was checked.

    Attributes:
        manifest: Its manifest.
        files: The folder of its generation.
        is_large: Whether it is over `VERIFY_LIMIT_BYTES`, so that its files are mapped.
        unchecked: Files whose digests are still to be checked, by ``check_digest``.
    """

    manifest: dict[str, Any]
    files: Path
    is_large: bool
    unchecked: dict[Path, str]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an index, in a folder of its own.

    Attributes:
        part_id: Parts with one id have the same files.
        write: Writes every file of the part into the folder that it is given.
    """

    part_id: str
    write: Callable[[Path], None]


_Files = dict[str, dict[str, object]]
"""Size and digest of each file, by its path in the generation."""


def save(folder: Path, content: Mapping[str, object], parts: Mapping[str, Part]) -> None:
    """Save an index, replacing one that is there.

    Safe to call from several processes and threads at once. When it returns, the index would
    survive a loss of power. Its files are for their owner alone.

    Args:
        folder: Created where it does not exist; otherwise empty or a saved index.
        content: The manifest's entries beside the lists of parts and files; JSON values.
        parts: By the name of its folder.

    Raises:
        IndexFolderError: the folder holds something else, or cannot be written.
    """
    try:
        check_destination(folder)
        folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        generation = folder / f"generation-{token_hex(4)}"
        _partial(generation).touch(mode=PRIVATE, exist_ok=False)
        try:
            generation.mkdir(mode=PRIVATE_FOLDER)
            files: _Files = {}
            for name, part in parts.items():
                files |= _link(generation, name, part.part_id) or _write(generation, name, part)
            _sync(generation)
            part_ids = {name: part.part_id for name, part in parts.items()}
            _commit(generation, {**content, "parts": part_ids, "files": files})
        except BaseException:
            _abandon(generation)
            raise
        _sync(folder)
    except OSError as error:
        raise IndexFolderError(
            f"{folder}: the index could not be saved ({error}); an index that was there before "
            "is untouched"
        ) from error
    # The index is saved; old files that cannot be deleted now are deleted after another save.
    with suppress(OSError, IndexFolderError):
        _delete_old(folder)


def _write(generation: Path, name: str, part: Part) -> _Files:
    """Write a part."""
    files = generation / name
    files.mkdir(mode=PRIVATE_FOLDER)
    part.write(files)
    described = {f"{name}/{file.name}": _describe(file) for file in sorted(files.iterdir())}
    _sync(files)
    return described


def _link(generation: Path, name: str, part_id: str) -> _Files:
    """Link a part of the generation in force.

    Returns:
        Its files; empty where that generation does not have the part, was replaced meanwhile, or
        the file system has no links.
    """
    try:
        manifest = _read_manifest(generation.parent)
        if manifest["parts"].get(name) != part_id:
            return {}
        files: _Files = {
            file: described
            for file, described in manifest["files"].items()
            if file.startswith(f"{name}/")
        }
        (generation / name).mkdir(mode=PRIVATE_FOLDER)
        for file in files:
            os.link(generation.parent / manifest["generation"] / file, generation / file)
    except (OSError, IndexFolderError, KeyError, AttributeError, TypeError):
        shutil.rmtree(generation / name, ignore_errors=True)
        return {}
    _sync(generation / name)
    return files


def _sync(folder: Path) -> None:
    """Make a folder's entries durable, where the system can."""
    with suppress(PermissionError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_destination(folder: Path) -> None:
    """Refuse a folder that an index cannot be saved into.

    Raises:
        IndexFolderError: it is a file, or holds files that are no part of an index.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise IndexFolderError(f"{folder} is a file; an index is a folder")
    foreign = sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.name != _MANIFEST
        and not _GENERATION.fullmatch(entry.name)
        and not _PARTIAL.fullmatch(entry.name)
    )
    if foreign:
        raise IndexFolderError(
            f"{folder} holds files that are no part of an index ({foreign[0]!r}, {len(foreign)} in "
            "all); give a folder of its own"
        )
    if (folder / _MANIFEST).exists():
        _read_manifest(folder, any_version=True)


def manifest_file(folder: Path) -> Path:
    """Return the file that a new generation replaces, last of all and in one step."""
    return folder / _MANIFEST


def _partial(generation: Path) -> Path:
    return generation.with_name(f"{generation.name}.partial")


def _commit(generation: Path, content: Mapping[str, object]) -> None:
    """Put a generation in force.

    Raises:
        FileNotFoundError: another save took this one for interrupted.
    """
    manifest = {
        "format": _FORMAT,
        "schema_version": SCHEMA_VERSION,
        "generation": generation.name,
        **content,
    }
    # Not "w", which would create again what another save has deleted.
    with _partial(generation).open("r+", encoding="utf-8") as stream:
        json.dump(manifest, stream, indent=2)
        stream.flush()
        os.fsync(stream.fileno())
    _partial(generation).replace(manifest_file(generation.parent))


def _abandon(generation: Path) -> None:
    """Delete a generation that is not in force yet, and see to it that it never will be."""
    try:
        _partial(generation).unlink()
    except FileNotFoundError:
        # In force after all, or deleted already.
        return
    shutil.rmtree(generation, ignore_errors=True)


def _delete_old(folder: Path) -> None:
    """Delete the generations that were replaced, and those of interrupted saves."""
    entries = list(folder.iterdir())
    once_in_force = [
        entry
        for entry in entries
        if _GENERATION.fullmatch(entry.name) and not _partial(entry).exists()
    ]
    # Read only now: see the head of this module.
    in_force = _read_manifest(folder, any_version=True)["generation"]
    for generation in once_in_force:
        if generation.name != in_force:
            shutil.rmtree(generation, ignore_errors=True)
    for entry in entries:
        if _PARTIAL.fullmatch(entry.name):
            with suppress(FileNotFoundError):
                if time.time() - entry.stat().st_mtime > _INTERRUPTED_SECONDS:
                    _abandon(entry.with_suffix(""))


def _describe(file: Path) -> dict[str, object]:
    with file.open("rb+") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        os.fsync(stream.fileno())
    file.chmod(PRIVATE)
    return {"bytes": file.stat().st_size, "sha256": digest}


def load(
    folder: Path,
    *,
    verify: bool | None = None,
    opened: Collection[str] = (),
    defer: bool = False,
) -> "SavedIndex":
    """Check a saved index and find its files.

    Args:
        folder: A saved index.
        verify: Whether every file's digest is checked, beside its size, which always is. None:
            without those of ``opened``.
        opened: Ids of parts that are open already.
        defer: Whether, with None, digests of more than `VERIFY_LIMIT_BYTES` are left to the caller.

    Raises:
        IndexFolderError: it is not a saved index, of another version, incomplete or damaged.
    """
    manifest = _read_manifest(folder)
    try:
        is_large, unchecked = _check_files(
            folder, manifest, verify=verify, opened=opened, defer=defer
        )
    except OSError as error:
        # A save deletes the generation that it replaced, perhaps while it is checked here.
        raise IndexFolderError(
            f"{folder} cannot be read ({error.strerror or type(error).__name__}); {_REBUILD}"
        ) from error
    return SavedIndex(manifest, folder / manifest["generation"], is_large, unchecked)


def _read_manifest(folder: Path, *, any_version: bool = False) -> dict[str, Any]:
    file = folder / _MANIFEST
    if not folder.is_dir():
        raise IndexFolderError(f"{folder} is not a folder; build an index with `ctxguard index`")
    if not file.is_file():
        raise IndexFolderError(
            f"{folder} has no {_MANIFEST}: it is not an index, or only half of one; {_REBUILD}"
        )
    try:
        manifest = json.loads(read_regular(file, _MAX_MANIFEST_BYTES))
    except (ValueError, OSError, RecursionError) as error:
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


def _check_files(
    folder: Path,
    manifest: Mapping[str, Any],
    *,
    verify: bool | None,
    opened: Collection[str],
    defer: bool,
) -> tuple[bool, dict[Path, str]]:
    """Check sizes, and digests as far as asked for.

    Returns:
        Whether the index is large, and the digests that are left to check.
    """
    try:
        generation, parts = manifest["generation"], manifest["parts"]
        files = {name: (at["bytes"], at["sha256"]) for name, at in manifest["files"].items()}
        is_whole = bool(_GENERATION.fullmatch(generation)) and bool(files)
        is_whole = is_whole and all(_FILE.fullmatch(name) for name in files)
        known = tuple(f"{name}/" for name, part_id in parts.items() if part_id in opened)
        unknown = {name for name in files if verify or not name.startswith(known)}
        is_large = sum(size for size, _ in files.values()) > VERIFY_LIMIT_BYTES
    except (KeyError, TypeError, AttributeError):
        is_whole = False
    if not is_whole:
        raise IndexFolderError(f"{folder / _MANIFEST} is damaged; {_REBUILD}")
    later = verify is None and defer and is_large
    unchecked = {}
    for name, (size, digest) in files.items():
        file = folder / generation / name
        if not file.is_file():
            raise IndexFolderError(f"{file} is missing; {_REBUILD}")
        n_bytes = file.stat().st_size
        if n_bytes != size:
            raise IndexFolderError(f"{file} has {n_bytes} bytes instead of {size}; {_REBUILD}")
        if later and name in unknown:
            unchecked[file] = digest
        elif verify is not False and name in unknown:
            check_digest(file, digest)
    # What is read must have been written by that save.
    there = (folder / generation).rglob("*")
    unlisted = {
        file.relative_to(folder / generation).as_posix() for file in there if not file.is_dir()
    } - files.keys()
    if unlisted:
        raise IndexFolderError(
            f"{folder / generation / min(unlisted)} is not in {_MANIFEST}: it was put there since "
            f"the index was saved; {_REBUILD}"
        )
    return is_large, unchecked


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
