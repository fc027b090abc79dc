"""Conversion of files in a process of its own, with bounds on time and memory.

A file can make the libraries that read Office, PDF and HTML use any amount of time and memory. So
they run in a process that the system stops at a bound; it is then replaced, and the file is
reported as left out. One process converts file after file.
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any, cast

from calibration.data.documents.converters import Converted, UnreadableError, convert
from ctxguard._support.regular_file import read_regular

MAX_BYTES = 100 * 2**20
"""Larger files are not read."""

_SECONDS = 1.0
_SECONDS_A_MIB = 12.0
_MAX_SECONDS = 300.0
"""Processor time: the base of any file, the addition per MiB, and the maximum."""
_WALL_FACTOR, _WALL_SECONDS = 10, 30
"""Wall time before a file counts as hung: a multiple of its processor time, plus seconds."""
_MEMORY_BYTES = 384 * 2**20
"""Memory a file may use on top of the libraries' own."""
_FILES = 500
"""A process is replaced after this many files, so that memory a library keeps cannot add up."""

_START = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from calibration.data.documents.conversion import serve
serve()
"""


class Converter:
    """Converts files, one at a time; used as a context manager, which ends its process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._files = 0

    def __enter__(self) -> "Converter":
        return self

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
        if self._process is not None and (
            self._files >= _FILES or self._process.poll() is not None
        ):
            self._stop()
        process = self._started()
        self._files += 1
        answer: dict[str, Any] | None = None
        with suppress(BrokenPipeError):
            request, answers = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
            request.write(json.dumps([os.fsdecode(file), seconds]).encode() + b"\n")
            request.flush()
            answer = _answer(answers, seconds * _WALL_FACTOR + _WALL_SECONDS)
        if answer is None:
            ended = process.poll()
            if ended is None:
                with suppress(subprocess.TimeoutExpired):
                    ended = process.wait(1)
            self._stop()
            if ended is None or ended == -signal.SIGPROF:
                raise UnreadableError(f"takes longer than {seconds:.1f} s to read")
            raise MemoryError
        if "os_error" in answer:
            raise OSError(*answer["os_error"])
        if "unreadable" in answer:
            raise UnreadableError(answer["unreadable"])
        if "memory" in answer:
            raise MemoryError
        return Converted(**answer)

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            self._process = subprocess.Popen(  # noqa: S603  this interpreter, on its own module
                [sys.executable, "-c", _START, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            # Its libraries are loaded before the first file's time begins.
            _answer(cast(IO[bytes], self._process.stdout), _MAX_SECONDS)
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        self._files = 0
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with suppress(OSError):
                    cast(IO[bytes], stream).close()


def _seconds(n_bytes: int) -> float:
    return min(_SECONDS + _SECONDS_A_MIB * n_bytes / 2**20, _MAX_SECONDS)


def _answer(stream: IO[bytes], seconds: float) -> dict[str, Any] | None:
    """Read a line of JSON; None if it does not come, or not in time."""
    until = time.monotonic() + seconds
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([stream], [], [], max(0.0, until - time.monotonic()))
        part = os.read(stream.fileno(), 2**20) if ready else b""
        if not part:
            return None
        parts.append(part)
        if part.endswith(b"\n"):
            found: dict[str, Any] = json.loads(b"".join(parts))
            return found


def serve() -> None:
    """Convert the files named on standard input, one per line, until it ends."""
    # What a library prints must not come between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _load()
    _bound_memory()
    answers.write(b"{}\n")  # ready
    answers.flush()
    for line in sys.stdin.buffer:
        name, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = _converted(name)
        try:
            encoded = json.dumps(answer).encode()
        except MemoryError:
            encoded = b'{"memory": true}'
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(encoded + b"\n")
        answers.flush()


def _converted(name: str) -> dict[str, Any]:
    try:
        raw = read_regular(Path(name), MAX_BYTES)
        return convert(Path(name).suffix.lower(), raw)._asdict()
    except MemoryError:
        return {"memory": True}
    except OSError as error:
        return {"os_error": [error.errno, error.strerror]}
    except UnreadableError as error:
        return {"unreadable": str(error)}


def _load() -> None:
    """Import the libraries; a missing one is reported by the first file that needs it."""
    for name in ("bs4", "lxml.etree", "mammoth", "markdownify", "pptx", "pypdfium2"):
        with suppress(ImportError):
            import_module(name)
    with suppress(ImportError):
        import_module("calibration.data.documents.web_page")


def _bound_memory() -> None:
    """Bound this process's memory; where the system cannot, only time is bounded."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * resource.getpagesize() + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
