"""The index that answers now, and its replacement while requests run.

An index never changes. Adding, deleting and reloading make another one and swap one reference, so
that a request that took the reference once is answered from one generation alone.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock, Thread

from ctxguard._support.file_version import FileVersion, file_version
from ctxguard._support.fork_safety import OfProcess
from ctxguard.errors import ConfigurationError, IndexFolderError
from ctxguard.resilience import Stage
from ctxguard.retrieval.analysers import own_analyser
from ctxguard.retrieval.hybrid.candidates import DENSE, LEXICAL
from ctxguard.retrieval.index import storage
from ctxguard.retrieval.index.hybrid_index import Changes, HybridIndex
from ctxguard.retrieval.index.part_files import require_whole
from ctxguard.retrieval.protocols import Analyser, Embedder

_log = logging.getLogger(__name__)

_MAX_OPENINGS = 20


class LiveIndex:
    """The state that all views of one retriever share: the index in use, and the legs' stages.

    Attributes:
        index: The index that answers now.
        folder: The folder it was opened from; None if it was built in memory.
        version: The version of that folder's manifest; None if it could not be read.
        legs: The legs' thread pools and circuit breakers, which outlive the index.
        damage: A fault of the index's files, found while it answered; None without one. With
            one it must not answer any more.
    """

    _writing = OfProcess(Lock)
    _checking = OfProcess[Thread | None](lambda: None)

    def __init__(self, index: HybridIndex) -> None:
        self.index = index
        self.folder: Path | None = None
        self.version: FileVersion | None = None
        self.damage: str | None = None
        self.legs = {leg: Stage(leg) for leg in (LEXICAL, DENSE)}
        self._unchecked: Mapping[Path, str] = {}

    def _resume_after_fork(self) -> None:
        if self._unchecked:
            self._start_checking()

    def opened_from(self, folder: Path, version: FileVersion | None) -> None:
        """Note the index's folder, and check the digests that are left to check."""
        self.folder, self.version = folder, version
        self._unchecked = self.index.unchecked
        if self._unchecked:
            self._start_checking()

    def require_sound(self, index: HybridIndex) -> None:
        """Refuse to go on with an index whose files are damaged.

        Raises:
            IndexFolderError: they are.
        """
        if self.damage is not None:
            raise IndexFolderError(self.damage)
        require_whole(index.maps)

    def _start_checking(self) -> None:
        # A daemon, so that no process waits for it to end.
        self._checking = Thread(target=self._check, name="ctxguard-index-check", daemon=True)
        try:
            self._checking.start()
        except RuntimeError:  # no thread can be started: before it answers, then
            self._checking = None
            self._check()

    def _check(self) -> None:
        """Check digests beside serving: those of a large index take longer than opening it."""
        try:
            for file, digest in self._unchecked.items():
                storage.check_digest(file, digest)
        except FileNotFoundError:
            _log.info("%s was replaced before its digests were checked", self.folder)
        except (IndexFolderError, OSError) as error:
            self.damage = str(error)
            _log.error("the index answers no more: %s", error)
        self._unchecked = {}

    def change(self, changed: Callable[[HybridIndex], tuple[HybridIndex, Changes]]) -> Changes:
        """Replace the index by what ``changed`` returns for it.

        Raises:
            Exception: whatever ``changed`` raises; the index stays then.
        """
        with self._writing:
            self.require_sound(self.index)
            index, changes = changed(self.index)
            self._swap(index)
        return changes

    def reload(self, folder: Path | None, *, embedder: Embedder, verify: bool | None) -> bool:
        """Replace the index by what a folder holds now; see ``HybridRetriever.reload``."""
        folder = self.folder if folder is None else folder
        if folder is None:
            raise ConfigurationError(
                "this retriever was built in memory, so there is no folder to reload; give one"
            )
        with self._writing:
            if folder == self.folder and _version_of(folder) == self.version is not None:
                return False
            if self._checking is not None:
                self._checking.join()
            analyser = own_analyser(self.index.lexical.analyser)
            # What is not checked yet is checked now, while the former index answers.
            known = self.index if self.damage is None else None
            index, version = open_index(folder, analyser, verify, known)
            index.check_embedder(embedder)
            self._swap(index)
            self.folder, self.version, self.damage = folder, version, None
        return True

    def _swap(self, index: HybridIndex) -> None:
        # The fields in use are read before the index answers, so that no request waits for them.
        index.passages.metadata_rows.prepare(self.index.passages.metadata_rows.fields)
        self.index = index


def open_index(
    folder: Path,
    analyser: Analyser | None,
    verify: bool | None,
    opened: HybridIndex | None = None,
    *,
    defer: bool = False,
) -> tuple[HybridIndex, FileVersion | None]:
    """Open the index of a folder, again if another is saved over it meanwhile.

    Args:
        folder: Where it was saved.
        analyser: As for `HybridIndex.load`, like the others.

    Returns:
        The index, and the version of the manifest that it was opened by.

    Raises:
        IndexFolderError: not a saved index, or one that is incomplete or damaged.
    """
    for _ in range(_MAX_OPENINGS):
        version = _version_of(folder)
        try:
            index = HybridIndex.load(
                folder, analyser=analyser, verify=verify, opened=opened, defer=defer
            )
            return index, version
        except IndexFolderError:
            # Saving deletes the previous generation, perhaps while it is being read here.
            if _version_of(folder) == version:
                raise
    raise IndexFolderError(
        f"{folder} was saved again {_MAX_OPENINGS} times while it was being opened; save less often"
    )


def _version_of(folder: Path) -> FileVersion | None:
    return file_version(storage.manifest_file(folder))
