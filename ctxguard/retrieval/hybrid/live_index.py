"""The index that answers now, and its replacement while requests run.

An index never changes. Updates and reloads build another one and replace one reference, which a
request reads once, so each request uses a single generation.
"""

from pathlib import Path
from threading import Lock

from ctxguard._support.file_version import FileVersion, file_version
from ctxguard._support.fork_safety import OfProcess
from ctxguard.errors import ConfigurationError, IndexFolderError
from ctxguard.resilience import Stage
from ctxguard.resilience.stage import WORKERS
from ctxguard.resilience.threads import processors
from ctxguard.retrieval.analysers import own_analyser
from ctxguard.retrieval.hybrid.candidates import DENSE, LEXICAL
from ctxguard.retrieval.index import storage
from ctxguard.retrieval.index.hybrid_index import HybridIndex, check_embedder
from ctxguard.retrieval.protocols import Analyser, Embedder

_MAX_OPENINGS = 20


def leg_threads() -> int:
    """Return the number of threads of each leg with a time limit.

    With `HybridRetriever.concurrency` that makes two threads more than processors: further numpy
    threads would only delay each other and the event loop.
    """
    return max(1, (processors() + 2) // 4)


class LiveIndex:
    """The state that all views of one retriever share: the index in use, and the legs' stages.

    Attributes:
        index: The index that answers now.
        folder: The folder that it was opened from; None if it was built in memory.
        version: The version of that folder's manifest; None if it could not be read.
        legs: The legs' threads and circuit breakers, which the next index takes over.
        writing: Held while the index is replaced.
    """

    writing = OfProcess(Lock)

    def __init__(self, index: HybridIndex) -> None:
        self.index = index
        self.folder: Path | None = None
        self.version: FileVersion | None = None
        self.legs = {
            leg: Stage(leg, workers=leg_threads(), spare=WORKERS) for leg in (LEXICAL, DENSE)
        }

    def reload(self, folder: Path | None, *, embedder: Embedder) -> bool:
        """Replace the index by the one in a folder; see ``HybridRetriever.reload``."""
        folder = self.folder if folder is None else folder
        if folder is None:
            raise ConfigurationError(
                "this retriever was built in memory, so there is no folder to reload; pass one"
            )
        with self.writing:
            if folder == self.folder and _version_of(folder) == self.version is not None:
                return False
            index, version = open_index(folder, own_analyser(self.index.lexical.analyser))
            check_embedder(index.embedder, index.embedder_weights, embedder)
            self.swap(index)
            self.folder, self.version = folder, version
        return True

    def swap(self, index: HybridIndex) -> None:
        """Answer from another index from now on."""
        # The fields in use are read before the index answers, so that no request waits for them.
        index.passages.metadata_rows.prepare(self.index.passages.metadata_rows.fields)
        self.index = index


def open_index(folder: Path, analyser: Analyser | None) -> tuple[HybridIndex, FileVersion | None]:
    """Open the index in a folder, and retry if a save replaces it meanwhile.

    Args:
        folder: Where it was saved.
        analyser: See `HybridIndex.load`.

    Returns:
        The index, and the version of its manifest.

    Raises:
        IndexFolderError: the folder is not a saved index, or is incomplete or damaged.
    """
    for _ in range(_MAX_OPENINGS):
        version = _version_of(folder)
        try:
            return HybridIndex.load(folder, analyser=analyser), version
        except IndexFolderError:
            # Saving deletes the previous generation, perhaps while it is being read here.
            if _version_of(folder) == version:
                raise
    raise IndexFolderError(
        f"{folder} was saved again {_MAX_OPENINGS} times while it was being opened; save less often"
    )


def _version_of(folder: Path) -> FileVersion | None:
    return file_version(storage.manifest_file(folder))
