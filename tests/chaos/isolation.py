"""Runs each fault in a process of its own, which is killed if it hangs."""

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

from serving import Size

LIMIT_SECONDS = 900.0
"""Only a hang takes as long. A process ends by itself, though stages still hang in it."""


@dataclass(frozen=True)
class Report:
    """The effect of one fault.

    Attributes:
        name: The fault.
        observed: The effect that it had, in words.
        accounts: The sums of requests, candidates and samples, as text.
        wrong: Checks that failed and accounts that do not add up; empty if it passed.
        seconds: How long it took.
    """

    name: str
    observed: str
    accounts: str
    wrong: tuple[str, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every check held and every account adds up."""
        return not self.wrong


def run_isolated(name: str, size: Size) -> Report:
    """Run a fault in a process of its own, and wait for its report."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ctxguard-chaos-") as folder:
        report = Path(folder) / "report.json"
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
                status = process.wait(LIMIT_SECONDS)
                wrong = [f"exit status {status}"] if status and report.exists() else []
            except subprocess.TimeoutExpired:
                wrong = [f"it did not end within {LIMIT_SECONDS:g} s"]
            finally:
                _kill(process)
        data: dict[str, Any] = {}
        if report.exists():
            data = json.loads(report.read_text())
        else:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            wrong += [f"it wrote no report (exit status {process.returncode}): {' '.join(last)}"]
    return Report(
        name=name,
        observed=data.get("observed", ""),
        accounts=data.get("accounts", ""),
        wrong=(*data.get("wrong", ()), *wrong),
        seconds=time.monotonic() - started,
    )


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """End the process of a fault, and every process that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def main(name: str, size: Size, folder: Path) -> None:
    """Run a fault in this process, and write its report into ``folder``."""
    from accounting import in_sums
    from faults import FAULTS

    work = folder / "work"
    work.mkdir()
    result = FAULTS[name][1](work, size)
    failed = [what for what, held in result.checks.items() if not held]
    failed += [wrong for one in result.accounts for wrong in one.wrong]
    data = {"observed": result.observed, "accounts": in_sums(result.accounts), "wrong": failed}
    (folder / "report.json").write_text(json.dumps(data))


if __name__ == "__main__":
    main(sys.argv[1], Size(sys.argv[2]), Path(sys.argv[3]))
