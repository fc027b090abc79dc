"""The generation of an index that answers, and how another takes its place while it does.

A generation never changes. Adding, deleting and reloading make another and swap one reference, so
that a request that took the reference once is answered from one generation alone.
"""

from collections.abc import Callable
from pathlib import Path
from threading import Lock

from ctxguard.errors import ConfigurationError, IndexFolderError
from ctxguard.forks import start_afresh_in_children
from ctxguard.retrieval import storage
from ctxguard.retrieval.index import HybridIndex
from ctxguard.retrieval.legs import LegStages
from ctxguard.retrieval.protocols import Embedder
from ctxguard.stamps import Stamp, file_stamp

_MAX_OPENINGS = 20


class LiveIndex:
    """What every view of one retriever shares: the generation that answers, and the legs' stages.

    Attributes:
        index: The generation that answers now.
        folder: Where the last one that was opened came from; None for what was built in memory.
        stamp: Of that folder's manifest when it was opened; None where it could not be looked at.
        legs: Their pools and circuits outlive the generations.
    """

    def __init__(self, index: HybridIndex) -> None:
        self.index = index
        self.folder: Path | None = None
        self.stamp: Stamp | None = None
        self.legs = LegStages()
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Take a new lock: another thread may have held it when this process was forked."""
        self._writing = Lock()

    def change(self, changed: Callable[[HybridIndex], HybridIndex]) -> None:
        """Answer from what ``changed`` makes of the generation that answers now.

        Raises:
            Exception: what ``changed`` raises; nothing is changed then.
        """
        with self._writing:
            self._swap(changed(self.index))

    def reload(self, folder: Path | None, *, embedder: Embedder, verify: bool | None) -> bool:
        """Answer from what a folder holds now; see ``HybridRetriever.reload``."""
        known = self.folder if folder is None else folder
        if known is None:
            raise ConfigurationError(
                "this retriever was built in memory, so there is no folder to reload; give one"
            )
        with self._writing:
            if known == self.folder and _stamp_of(known) == self.stamp is not None:
                return False
            index, stamp = open_index(known, verify)
            index.check_embedder(embedder)
            self._swap(index)
            self.folder, self.stamp = known, stamp
        return True

    def _swap(self, index: HybridIndex) -> None:
        # Read before it answers, so that no request pays for it.
        index.passages.metadata_rows.prepare(self.index.passages.metadata_rows.fields)
        self.index = index


def open_index(folder: Path, verify: bool | None) -> tuple[HybridIndex, Stamp | None]:
    """The index of a folder, looked for again where another was saved over it meanwhile.

    Returns:
        The index, and the stamp of the manifest that it was opened by.

    Raises:
        IndexFolderError: not a saved index, or one that is incomplete or damaged.
    """
    for _ in range(_MAX_OPENINGS):
        stamp = _stamp_of(folder)
        try:
            return HybridIndex.load(folder, verify=verify), stamp
        except IndexFolderError:
            # Saving clears the generation before it away, perhaps while it was being read here.
            if _stamp_of(folder) == stamp:
                raise
    raise IndexFolderError(
        f"{folder} was saved again {_MAX_OPENINGS} times while it was being opened; save less often"
    )


def _stamp_of(folder: Path) -> Stamp | None:
    return file_stamp(storage.manifest_file(folder))
