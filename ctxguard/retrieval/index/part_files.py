"""The files of a part of a saved index, as they are read: into memory, or mapped if they are large.

Memory cannot be altered under a search. A mapped file can: compiled loops use no number that they
read from one as a row, a word or a piece before they compared it with the number of those there
are, and every reader asks first whether the file is still whole, because reading behind the end of
a file that was cut would end the process.
"""

import json
import mmap
import sys
from collections.abc import Iterable, Mapping
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
    """A block of bytes: ``bytes``, a mapped file, or several blocks as one."""

    def __getitem__(self, part: slice, /) -> bytes:
        """Copy a part."""
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

    def array(self, name: str, *dtypes: str, ndim: int = 1) -> NDArray[Any]:
        """Read an array into memory.

        Args:
            name: The file's name.
            dtypes: The types that it may have.
            ndim: The number of its dimensions.

        Raises:
            ValueError, OSError: the file holds no such array.
        """
        with open_regular(self.folder / name, sys.maxsize) as stream:
            return _checked(name, np.load(stream, allow_pickle=False), dtypes, ndim)

    def large_array(self, name: str, *dtypes: str, ndim: int = 1) -> NDArray[Any]:
        """Read an array whose size grows with the texts; arguments and errors as for `array`."""
        if not self._mapped:
            return self.array(name, *dtypes, ndim=ndim)
        file = self.folder / name
        array = np.load(file, mmap_mode="r", allow_pickle=False)
        self.maps[file] = cast(mmap.mmap, array.base)
        return _checked(name, array, dtypes, ndim)

    def lines(self, name: str) -> tuple[Lines, int]:
        """Read a block of bytes; also return their number."""
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
        """Read a JSON list of texts.

        Raises:
            ValueError, OSError: the file holds something else.
        """
        texts: list[str] = json.loads(read_regular(self.folder / name, sys.maxsize))
        if type(texts) is not list or set(map(type, texts)) - {str}:
            raise ValueError(f"{name} is no list of texts")
        return texts

    def vocabulary(self, name: str) -> dict[str, int]:
        """Read the number of each text of a JSON list; errors as for `texts`."""
        return {text: number for number, text in enumerate(self.texts(name))}


def write_texts(file: Path, texts: Iterable[str]) -> None:
    """Write a JSON list of texts."""
    file.write_text(json.dumps(list(texts), ensure_ascii=False), encoding="utf-8")


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """View an array, perhaps a mapped one, so that it cannot be written to."""
    view = np.asarray(array).view(np.ndarray)
    view.flags.writeable = False
    return view


def check_starts(what: str, starts: NDArray[np.int64], n_parts: int, n_all: int) -> None:
    """Refuse starts with which compiled loops would read outside of an array.

    Digests are not checked on every load.

    Args:
        what: Name of the parts, for the error.
        starts: Part i is from ``starts[i]`` to ``starts[i + 1]``.
        n_parts: The number of parts.
        n_all: The length of the array that they divide.

    Raises:
        ValueError: the starts do not divide it into so many parts.
    """
    if starts.size == 0 or (starts.size, starts[0], starts[-1]) != (n_parts + 1, 0, n_all):
        raise ValueError(f"{what} and their starts do not belong together")
    if (np.diff(starts) < 0).any():
        raise ValueError(f"some of {what} end before they begin")


def check_numbers(what: str, numbers: NDArray[Any], n: int, *, least: int = 0) -> None:
    """Refuse numbers by which compiled loops would read outside of an array.

    Raises:
        ValueError: one is below ``least`` or not below ``n``.
    """
    if numbers.size and not least <= numbers.min() <= numbers.max() < n:
        raise ValueError(f"one of {what} is not from {least} to {n - 1}")


def _checked(name: str, array: Any, dtypes: tuple[str, ...], ndim: int) -> NDArray[Any]:
    if str(array.dtype) not in dtypes or array.ndim != ndim:
        raise ValueError(f"{name} holds {array.dtype} of shape {array.shape}")
    checked: NDArray[Any] = array
    return checked


class _MappedLines:
    """A mapped block of bytes, read at any time after a search too."""

    def __init__(self, file: Path, lines: mmap.mmap) -> None:
        self._maps = {file: lines}
        self._lines = lines

    def __getitem__(self, part: slice, /) -> bytes:
        require_whole(self._maps)
        return self._lines[part]


def require_whole(maps: Maps) -> None:
    """Refuse to go on if a mapped file was cut. Costs a system call a file.

    Raises:
        IndexFolderError: it was.
    """
    for file, mapped in maps.items():
        if mapped.size() < len(mapped):
            raise IndexFolderError(f"{file} {ALTERED}")
