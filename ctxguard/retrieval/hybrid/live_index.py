"""The index that answers now, and its replacement while requests run.

An index never changes. Adding, deleting and reloading make another one and swap one reference, so
that a request that took the reference once is answered from one generation alone.
"""

from collections.abc import Callable
from pathlib import Path
from threading import Lock

from ctxguard._support.file_version import FileVersion, file_version
from ctxguard._support.fork_safety import reset_in_children
from ctxguard.errors import ConfigurationError, IndexFolderError
from ctxguard.retrieval.analysers import own_analyser
from ctxguard.retrieval.hybrid.stages import LegStages
from ctxguard.retrieval.index import storage
from ctxguard.retrieval.index.hybrid_index import Changes, HybridIndex
from ctxguard.retrieval.protocols import Analyser, Embedder

_MAX_OPENINGS = 20


class LiveIndex:
    """What all views of one retriever share: the index that answers now, and the legs' stages.

    Attributes:
        index: The index that answers now.
        folder: The folder it was opened from; None for an index built in memory.
        version: The version of that folder's manifest; None where it could not be read.
        legs: The legs' thread pools and circuit breakers, which outlive the index.
    """

    def __init__(self, index: HybridIndex) -> None:
        self.index = index
        self.folder: Path | None = None
        self.version: FileVersion | None = None
        self.legs = LegStages()
        self._reset_after_fork()
        reset_in_children(self)

    def _reset_after_fork(self) -> None:
        """Take a new lock: another thread may have held it when this process was forked."""
        self._writing = Lock()

    def change(self, changed: Callable[[HybridIndex], tuple[HybridIndex, Changes]]) -> Changes:
        """Replace the index by what ``changed`` returns for it.

        Raises:
            Exception: whatever ``changed`` raises; the index stays then.
        """
        with self._writing:
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
            analyser = own_analyser(self.index.lexical.analyser)
            index, version = open_index(folder, analyser, verify, opened=self.index)
            index.check_embedder(embedder)
            self._swap(index)
            self.folder, self.version = folder, version
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
) -> tuple[HybridIndex, FileVersion | None]:
    """Open the index of a folder, again if another is saved over it meanwhile.

    Args:
        folder: Where it was saved.
        analyser: As for `HybridIndex.load`.
        verify: As for `HybridIndex.load`.
        opened: As for `HybridIndex.load`.

    Returns:
        The index, and the version of the manifest that it was opened by.

    Raises:
        IndexFolderError: not a saved index, or one that is incomplete or damaged.
    """
    for _ in range(_MAX_OPENINGS):
        version = _version_of(folder)
        try:
            index = HybridIndex.load(folder, analyser=analyser, verify=verify, opened=opened)
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
