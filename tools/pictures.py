"""Make the pictures of the README: the demonstration in a terminal, and a calibration's report.

    python -m tools.pictures

Needs Chromium (Debian's package ``chromium``) for the report. Takes as long as the demonstration.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from calibration.report import report, write_html
from ctxguard._support.cache_folder import cache_folder
from ctxguard.demo.labelled_questions import questions
from ctxguard.demo.loop import calibrate_demo, open_index

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images"
COLUMNS = 100


def terminal() -> None:
    """What ``ctxguard demo`` prints, as SVG."""
    done = subprocess.run(
        [sys.executable, "-m", "ctxguard", "demo"],
        env={**os.environ, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, color_system="standard")
        console.print(Text.from_ansi(done.stdout.replace(str(Path.home()), "~")))
    console.save_svg(str(FOLDER / "terminal.svg"), title="ctxguard demo")


def first_screen() -> None:
    """The top of the report that calibrating the demonstration gives, as PNG."""
    retriever, _ = open_index(cache_folder() / "demo-index", _silent)
    calibration = calibrate_demo(retriever, questions(), _silent)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        write_html(report(calibration, retriever.passage), page)
        subprocess.run(  # noqa: S603
            [
                *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *("--disable-background-networking", "--virtual-time-budget=10000"),
                *("--window-size=1280,1000", f"--user-data-dir={folder}/browser"),
                *(f"--screenshot={FOLDER / 'report.png'}", page.as_uri()),
            ],
            check=True,
            capture_output=True,
        )


def _silent(_name: str, _total: int) -> Callable[[int], None]:
    return lambda _done: None


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    terminal()
    first_screen()
