"""The benchmark of memory, on a small corpus and few queries."""

import json
from pathlib import Path

from benchmarks.memory import main


def test_every_part_reports_its_peak(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    assert main(["--passages", "300", "--queries", "60", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    for part in ("index", "search", "calibration", "depth"):
        assert report[part]["peak_mb"] >= report[part]["libraries_mb"] > 0
    assert report["index"]["passages"] == 300
    assert report["calibration"]["routes"] == 3
