"""The files of a part of a saved index, as they are read: into memory, or mapped if they are large.

What is in memory cannot be altered under a search. A mapped file can: compiled loops use no number
that they read from one as a row, a word or a piece before they compared it with how many there are,
and whoever is about to read asks first whether the file is still whole, because reading behind the
end of a file that was cut would end the process.
"""

import json
import mmap
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.regular_file import open_regular, read_regular
from ctxguard.errors import IndexFolderError

Maps = Mapping[Path, mmap.mmap]
"""Each mapped file and its map."""


ALTERED = (
    "was altered while the index was in use; save the index again and reload it, and never write "
    "into the files of one that is in use"
)


class Lines(Protocol):
    """A block of bytes: ``bytes``, a mapped file, or two blocks as one."""

    def __getitem__(self, part: slice, /) -> bytes:
        """A copy of a part."""
        ...


class PartFiles:
    """Reads the files of one part.

    Args:
        folder: The part's folder.
        mapped: Whether the files whose size grows with the texts are mapped.

    Attributes:
        folder: As given.
        maps: The files that were mapped so far.
    """

    def __init__(self, folder: Path, *, mapped: bool = False) -> None:
        self.folder = folder
        self.maps: dict[Path, mmap.mmap] = {}
        self._mapped = mapped

    def __contains__(self, name: str) -> bool:
        return (self.folder / name).exists()

    def array(self, name: str) -> NDArray[Any]:
        """An array in memory.

        Raises:
            ValueError, OSError: the file holds no array.
        """
        with open_regular(self.folder / name, sys.maxsize) as stream:
            array: NDArray[Any] = np.load(stream, allow_pickle=False)
        return array

    def large_array(self, name: str) -> NDArray[Any]:
        """An array whose size grows with the texts; errors as for `array`."""
        if not self._mapped:
            return self.array(name)
        file = self.folder / name
        array: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
        self.maps[file] = cast(mmap.mmap, array.base)
        return array

    def lines(self, name: str) -> tuple[Lines, int]:
        """A block of bytes, and how many."""
        file = self.folder / name
        # An empty file cannot be mapped.
        if not self._mapped or file.stat().st_size == 0:
            content = read_regular(file, sys.maxsize)
            return content, len(content)
        with open_regular(file, sys.maxsize) as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self.maps[file] = mapped
        return _MappedLines(file, mapped), len(mapped)

    def texts(self, name: str) -> list[str]:
        """A JSON list of texts.

        Raises:
            ValueError, OSError: the file holds something else.
        """
        texts: list[str] = json.loads(read_regular(self.folder / name, sys.maxsize))
        if type(texts) is not list or set(map(type, texts)) - {str}:
            raise ValueError(f"{name} is no list of texts")
        return texts


class _MappedLines:
    """A mapped block of bytes, read at any time after a search too."""

    def __init__(self, file: Path, lines: mmap.mmap) -> None:
        self._maps = {file: lines}
        self._lines = lines

    def __getitem__(self, part: slice, /) -> bytes:
        require_whole(self._maps)
        return self._lines[part]


def require_whole(maps: Maps) -> None:
    """Refuse to go on where a mapped file was cut. Costs a system call a file.

    Raises:
        IndexFolderError: it was.
    """
    for file, mapped in maps.items():
        if mapped.size() < len(mapped):
            raise IndexFolderError(f"{file} {ALTERED}")
