"""Saves an index as a folder: a manifest with the names, sizes and digests of a generation's files.

    INDEX/manifest.json          names the generation that is in force
    INDEX/generation-XXXXXXXX/   its files, all of plain formats

A save writes a generation beside the one in force and then replaces the manifest, in one step, so
that a failed save loses nothing and a reader sees one generation or the other. Of concurrent saves
the last to finish wins. A generation is never modified.

A save holds a lock on its generation until the manifest names it. So a generation that can be
locked and that the manifest, read afterwards, does not name was replaced or interrupted, and is
deleted. A reader that has opened its files keeps them; one that has not finds the manifest changed
and opens the next generation. Reads, writes, locks and clears that folder; generations have random
names.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

from ctxguard._support.atomic_write import PRIVATE, PRIVATE_FOLDER, atomic_write, lock
from ctxguard._support.regular_file import read_regular
from ctxguard.errors import IndexFolderError

SCHEMA_VERSION = 9

_MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 2**20
_FORMAT = "ctxguard index"
_GENERATION = re.compile(r"generation-[0-9a-f]{8}")
_TEMPORARY = re.compile(r"\.manifest\.json\.[a-z0-9_]{8}")
_FILE = re.compile(r"\w[\w.]*")
"""Matches the name of a file, and nothing that leaves the generation's folder."""

_REBUILD = (
    "copy the whole index to a new folder and open that, or build it again with `ctxguard index`; "
    "never write into the files of an index that is in use"
)


def save(folder: Path, content: Mapping[str, object], write: Callable[[Path], None]) -> None:
    """Save a generation, replacing the current one.

    Safe to call from several processes and threads at once. Once it returns, the index survives a
    power loss. Only the owner can read its files, which ``write`` puts into the folder it is given;
    ``content`` goes into the manifest. Refuses a folder of other files, or that cannot be written.
    """
    try:
        check_destination(folder)
        folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        with _new_generation(folder) as generation:
            write(generation)
            manifest = {
                "format": _FORMAT,
                "schema_version": SCHEMA_VERSION,
                "generation": generation.name,
                **content,
                "files": {file.name: _describe(file) for file in sorted(generation.iterdir())},
            }
            _sync(generation)
            with atomic_write(manifest_file(folder)) as stream:
                stream.write(json.dumps(manifest, indent=2).encode())
        _sync(folder)
    except OSError as error:
        raise IndexFolderError(
            f"{folder}: the index could not be saved ({error}); any existing index is "
            "left unchanged"
        ) from error
    # The index is saved; what cannot be deleted now is deleted after another save.
    with suppress(OSError, IndexFolderError):
        for entry in list(folder.iterdir()):
            if _GENERATION.fullmatch(entry.name):
                with suppress(OSError):
                    _delete_unless_in_force(entry)


@contextmanager
def _new_generation(folder: Path) -> Iterator[Path]:
    """Create a generation, locked until the block ends and deleted if it raises."""
    while True:
        generation = folder / f"generation-{token_hex(4)}"
        generation.mkdir(mode=PRIVATE_FOLDER)
        with suppress(FileNotFoundError), ExitStack() as opened:
            descriptor = opened.enter_context(_opened(generation))
            is_locked = descriptor is None or lock(descriptor)
            # Another save may have taken it for abandoned before it was locked.
            if is_locked and generation.is_dir():
                held = opened.pop_all()
                break
    with held:
        try:
            yield generation
        except BaseException:
            # Unless the manifest names it already; else the next save deletes what is left.
            with suppress(OSError, IndexFolderError):
                if _in_force(folder) != generation.name:
                    shutil.rmtree(generation, ignore_errors=True)
            raise


@contextmanager
def _opened(folder: Path) -> Iterator[int | None]:
    """Open a folder and yield its descriptor; None on a system that cannot open folders."""
    descriptor = None if sys.platform == "win32" else os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _delete_unless_in_force(generation: Path) -> None:
    with _opened(generation) as descriptor:
        is_free = descriptor is None or lock(descriptor)
        # Read only now: see the head of this module.
        if is_free and _in_force(generation.parent) != generation.name:
            shutil.rmtree(generation, ignore_errors=True)


def _in_force(folder: Path) -> str | None:
    """Return the name of the generation that the manifest names; None without a manifest."""
    if not manifest_file(folder).exists():
        return None
    name: str | None = _read_manifest(folder, any_version=True).get("generation")
    return name


def _sync(folder: Path) -> None:
    """Make a folder's entries durable, if the system supports it."""
    with _opened(folder) as descriptor:
        if descriptor is not None:
            os.fsync(descriptor)


def _describe(file: Path) -> dict[str, object]:
    with file.open("rb+") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        os.fsync(stream.fileno())
    file.chmod(PRIVATE)
    return {"bytes": file.stat().st_size, "sha256": digest}


def check_destination(folder: Path) -> None:
    """Refuse a path that is a file, or a folder with files that are not part of an index."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise IndexFolderError(f"{folder} is a file; an index is a folder")
    foreign = sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.name != _MANIFEST
        and not _GENERATION.fullmatch(entry.name)
        and not _TEMPORARY.fullmatch(entry.name)
    )
    if foreign:
        raise IndexFolderError(
            f"{folder} holds files that are not part of an index ({foreign[0]!r}, {len(foreign)} "
            "in all); give the index a folder of its own"
        )
    if manifest_file(folder).exists():
        _read_manifest(folder, any_version=True)


def manifest_file(folder: Path) -> Path:
    """Return the path of the manifest, which a save replaces last and atomically."""
    return folder / _MANIFEST


def load(folder: Path) -> tuple[dict[str, Any], Path]:
    """Check every file of a saved index by its digest; return the manifest and files' folder."""
    manifest = _read_manifest(folder)
    try:
        generation = manifest["generation"]
        files = {name: (at["bytes"], at["sha256"]) for name, at in manifest["files"].items()}
        is_whole = bool(_GENERATION.fullmatch(generation)) and bool(files)
        is_whole = is_whole and all(_FILE.fullmatch(name) for name in files)
    except (KeyError, TypeError, AttributeError):
        is_whole = False
    if not is_whole:
        raise IndexFolderError(f"{manifest_file(folder)} is damaged; {_REBUILD}")
    try:
        for name, (size, digest) in files.items():
            _check_file(folder / generation / name, size, digest)
        # What is read must have been written by that save.
        unlisted = {file.name for file in (folder / generation).iterdir()} - files.keys()
    except OSError as error:
        # A save deletes the generation that it replaced, perhaps while it is checked here.
        raise IndexFolderError(
            f"{folder} cannot be read ({error.strerror or type(error).__name__}); {_REBUILD}"
        ) from error
    if unlisted:
        raise IndexFolderError(
            f"{folder / generation / min(unlisted)} is not in {_MANIFEST}: it has been added since "
            f"the index was saved; {_REBUILD}"
        )
    return manifest, folder / generation


def _read_manifest(folder: Path, *, any_version: bool = False) -> dict[str, Any]:
    file = manifest_file(folder)
    if not folder.is_dir():
        raise IndexFolderError(f"{folder} is not a folder; build an index with `ctxguard index`")
    if not file.is_file():
        raise IndexFolderError(
            f"{folder} has no {_MANIFEST}: it is not an index, or an incomplete one; {_REBUILD}"
        )
    try:
        manifest = json.loads(read_regular(file, _MAX_MANIFEST_BYTES))
    except (ValueError, OSError, RecursionError) as error:
        raise IndexFolderError(f"{file} cannot be read ({error}); {_REBUILD}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise IndexFolderError(f"{file} was not written by ctxguard; use another folder")
    version = manifest.get("schema_version")
    if version != SCHEMA_VERSION and not any_version:
        raise IndexFolderError(
            f"{file} has schema version {version!r}, but this release reads {SCHEMA_VERSION}; "
            "build the index again with `ctxguard index`"
        )
    return manifest


def _check_file(file: Path, size: int, digest: str) -> None:
    if not file.is_file():
        raise IndexFolderError(f"{file} is missing; {_REBUILD}")
    n_bytes = file.stat().st_size
    if n_bytes != size:
        raise IndexFolderError(f"{file} has {n_bytes} bytes instead of {size}; {_REBUILD}")
    with file.open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != digest:
            raise IndexFolderError(
                f"{file} has been changed or damaged since it was saved: its SHA-256 does not "
                f"match the manifest; {_REBUILD}"
            )
