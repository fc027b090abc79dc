"""Runs each fault in a process of its own, which is killed if it hangs."""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter
from serving import Report, Size

_REPORT = TypeAdapter(Report)

LIMIT_SECONDS = 900.0
"""Only a hang takes as long. A process ends by itself, though stages still hang in it."""


def run_isolated(name: str, size: Size) -> Report:
    """Run a fault in a process of its own, and wait for its report."""
    with tempfile.TemporaryDirectory(prefix="ctxguard-chaos-") as folder:
        file, log = Path(folder) / "report.json", Path(folder) / "output.txt"
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
            ended = ""
            try:
                if status := process.wait(LIMIT_SECONDS):
                    ended = f"exit status {status}"
            except subprocess.TimeoutExpired:
                ended = f"it did not end within {LIMIT_SECONDS:g} s"
            finally:
                # And every process that it started.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if file.exists():
            report = _REPORT.validate_json(file.read_text())
        else:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            report = Report("", (f"it wrote no report: {' '.join(last)}",))
    return replace(report, wrong=(*report.wrong, ended)) if ended else report


def main(name: str, size: Size, folder: Path) -> None:
    """Run a fault in this process, and write its report into ``folder``."""
    from faults import FAULTS

    work = folder / "work"
    work.mkdir()
    (folder / "report.json").write_bytes(_REPORT.dump_json(FAULTS[name][1](work, size)))


if __name__ == "__main__":
    main(sys.argv[1], Size(sys.argv[2]), Path(sys.argv[3]))
