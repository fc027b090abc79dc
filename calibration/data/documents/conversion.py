"""Converts files in a separate process, with bounds on time and memory.

A file can make the libraries that read Office, PDF and HTML use any amount of time and memory. So
they run in a process that the system stops at a bound; it is then replaced, and the file is
reported as left out. One process converts file after file. Starts and kills that process, which
reads the files; writes nothing.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from calibration.data.documents.converters import Converted, convert
from calibration.data.documents.encodings import UnreadableError
from ctxguard._support.regular_file import read_regular

MAX_BYTES = 100 * 2**20
"""Larger files are not read."""

_SECONDS = 1.0
_SECONDS_A_MIB = 12.0
_MAX_SECONDS = 300.0
"""Processor time: the base for any file, the addition per MiB, and the maximum."""
_WALL_FACTOR, _WALL_SECONDS = 10, 30
"""Wall time before a file counts as hung: a multiple of its processor time, plus seconds."""
_MEMORY_BYTES = 384 * 2**20
"""Memory that a file may use in addition to the libraries' own."""
_FILES = 500
"""A process is replaced after this many files, so that memory a library keeps cannot add up."""

# Not multiprocessing's own start, which would run the caller's script once more.
_START = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from calibration.data.documents.conversion import serve
serve(int(sys.argv[2]))
"""


class Converter(AbstractContextManager["Converter"]):
    """Converts files, one at a time; used as a context manager, which ends its process."""

    def __init__(self) -> None:
        self._running: tuple[subprocess.Popen[bytes], Connection[Any, Any]] | None = None
        self._files = 0

    def __exit__(self, *_: object) -> None:
        self._stop()

    def convert(self, file: Path) -> Converted:
        """Convert a file.

        Raises:
            UnreadableError: it cannot be read, or not within the bounds.
            OSError: it cannot be opened.
        """
        seconds = _seconds(file.stat().st_size)
        used = self._files
        try:
            return self._asked(file, seconds)
        except MemoryError:
            self._stop()
            with suppress(MemoryError):
                if used:  # what earlier files have left behind may be to blame
                    return self._asked(file, seconds)
            self._stop()
            raise UnreadableError(
                f"takes more than {_MEMORY_BYTES >> 20} MiB of memory to read"
            ) from None

    def _asked(self, file: Path, seconds: float) -> Converted:
        if self._running and (self._files >= _FILES or self._running[0].poll() is not None):
            self._stop()
        self._running = self._running or _start()
        process, connection = self._running
        self._files += 1
        answer: Converted | Exception | None = None
        with suppress(EOFError, OSError):
            connection.send((os.fspath(file), seconds))
            if connection.poll(seconds * _WALL_FACTOR + _WALL_SECONDS):
                answer = connection.recv()
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            return answer
        ended = process.poll()
        if ended is None:
            with suppress(subprocess.TimeoutExpired):
                ended = process.wait(1)
        self._stop()
        if ended is None or ended == -signal.SIGPROF:
            raise UnreadableError(f"takes longer than {seconds:.1f} s to read")
        raise MemoryError

    def _stop(self) -> None:
        self._files = 0
        if self._running:
            process, connection = self._running
            process.kill()
            process.wait()
            connection.close()
        self._running = None


def _start() -> "tuple[subprocess.Popen[bytes], Connection[Any, Any]]":
    connection, own = Pipe()
    process = subprocess.Popen(  # noqa: S603  this interpreter, on its own module
        [sys.executable, "-c", _START, json.dumps(sys.path), str(own.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[own.fileno()],
    )
    own.close()
    # Its libraries are loaded before the first file's time begins.
    with suppress(EOFError, OSError):
        if connection.poll(_MAX_SECONDS):
            connection.recv()
    return process, connection


def _seconds(n_bytes: int) -> float:
    return min(_SECONDS + _SECONDS_A_MIB * n_bytes / 2**20, _MAX_SECONDS)


def serve(descriptor: int) -> None:
    """Convert the files whose names arrive over a connection, until it is closed."""
    page = "calibration.data.documents.web_page"
    for name in ("bs4", "lxml.etree", "mammoth", "markdownify", "pptx", "pypdfium2", page):
        with suppress(ImportError):  # the first file that needs it reports it
            import_module(name)
    _bound_memory()
    connection: Connection[Any, Any] = Connection(descriptor)
    connection.send("ready")
    with suppress(EOFError):
        while True:
            name, seconds = connection.recv()
            signal.setitimer(signal.ITIMER_PROF, seconds)
            answer = _converted(Path(name))
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send(answer)


def _converted(file: Path) -> Converted | Exception:
    try:
        return convert(file.suffix.lower(), read_regular(file, MAX_BYTES))
    except (MemoryError, OSError, UnreadableError) as error:
        return error


def _bound_memory() -> None:
    """Bound this process's memory; if the system cannot, only time is bounded."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * resource.getpagesize() + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
