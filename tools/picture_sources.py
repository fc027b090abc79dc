"""Digests of the files that the pictures of the documentation are made from.

``make pictures`` records them beside the pictures; a test compares them with the files of today.
"""

import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "images"
RECORD = PICTURES / "sources.json"
SOURCES = {
    "terminal.svg": ("ctxguard/cli/demo.py", "ctxguard/cli/demonstration"),
    "report.png": (
        "calibration/report/chart.py",
        "calibration/report/templates",
    ),
    "console.png": ("ctxguard/server/console/static", "ctxguard/server/console/templates"),
}
"""Files and folders that decide what a picture shows; not all code that runs to make it."""


def digest_of(root: Path, sources: tuple[str, ...]) -> str:
    """SHA-256 of the names and contents of files, and of all files in folders.

    Raises:
        FileNotFoundError: a source is missing.
    """
    found = hashlib.sha256()
    for source in sources:
        path = root / source
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_dir() or "__pycache__" in file.parts:
                continue
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            found.update(f"{file.relative_to(root).as_posix()}\n{content}\n".encode())
    return found.hexdigest()


def current() -> dict[str, str]:
    """The digest of each picture's sources, as they are now."""
    return {picture: digest_of(ROOT, sources) for picture, sources in SOURCES.items()}


def record() -> None:
    """Record that the pictures show the sources of now."""
    RECORD.write_text(json.dumps(current(), indent=2) + "\n", encoding="utf-8")
