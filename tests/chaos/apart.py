"""Each row in a process of its own, with a limit of time."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scene import Size

LIMIT_SECONDS = {Size.SMALL: 120.0, Size.FULL: 600.0}
_EXIT_SECONDS = 10.0
"""How long a process may take to end once it has told what it saw, hung stages and all."""


@dataclass(frozen=True)
class Told:
    """What came of one row.

    Attributes:
        observed: In words.
        requests: Their sum, in words.
        candidates: Theirs.
        samples: Theirs.
        wrong: Checks that failed and accounts that do not add up; empty where all is well.
        seconds: That it took.
    """

    name: str
    expected: str
    observed: str
    requests: str
    candidates: str
    samples: str
    wrong: tuple[str, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether all was as it should be."""
        return not self.wrong


def run_apart(name: str, expected: str, size: Size) -> Told:
    """Run a row in a process, and wait for it no longer than it may take."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ctxguard-chaos-") as folder:
        told = Path(folder) / "told.json"
        log = Path(folder) / "output.txt"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__)), name, size.value, folder],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A group of its own, so that what it starts ends with it.
                start_new_session=True,
                env={"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ},
            )
            try:
                wrong = _wait(process, told, LIMIT_SECONDS[size])
            finally:
                _kill(process)
        data: dict[str, Any] = {}
        if told.exists():
            data = json.loads(told.read_text())
        else:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            wrong += [f"it told nothing (exit status {process.returncode}): {' '.join(last)}"]
    return Told(
        name=name,
        expected=expected,
        observed=data.get("observed", ""),
        requests=data.get("requests", ""),
        candidates=data.get("candidates", ""),
        samples=data.get("samples", ""),
        wrong=(*data.get("wrong", ()), *wrong),
        seconds=time.monotonic() - started,
    )


def _wait(process: "subprocess.Popen[bytes]", told: Path, limit_seconds: float) -> list[str]:
    deadline = time.monotonic() + limit_seconds
    while process.poll() is None and not told.exists():
        if time.monotonic() > deadline:
            return [f"it did not end within {limit_seconds:g} s"]
        time.sleep(0.02)
    try:
        status = process.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        return [f"its process did not end within {_EXIT_SECONDS:g} s of its last word"]
    return [f"exit status {status}"] if status and told.exists() else []


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """End a row's process, and whatever of its own is left."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def main(name: str, size: Size, folder: Path) -> None:
    """Run a row here, and tell what it saw."""
    from bookkeeping import candidates_in_words, requests_in_words, samples_in_words
    from catalogue import ROWS

    work = folder / "work"
    work.mkdir()
    seen = ROWS[name].run(work, size)
    failed = [what for what, held in seen.checks.items() if not held]
    failed += [wrong for one in seen.books for wrong in one.wrong]
    data = {
        "observed": seen.observed,
        "requests": requests_in_words(seen.books),
        "candidates": candidates_in_words(seen.books),
        "samples": samples_in_words(seen.books),
        "wrong": failed,
    }
    part = folder / "told.part"
    part.write_text(json.dumps(data))
    part.rename(folder / "told.json")


if __name__ == "__main__":
    main(sys.argv[1], Size(sys.argv[2]), Path(sys.argv[3]))
