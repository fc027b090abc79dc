"""The benchmark of updating an index, on a small one."""

import json
from pathlib import Path

from benchmarks.index_update import main


def test_timed_update_agrees_with_building(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    size = ("--passages", "300", "--queries", "5")
    assert main([*size, "--folder", str(tmp_path), "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["changed"] == 6
    assert report["update_seconds"] > 0.0
    assert report["rankings_shared"] == {"lexical": 1.0, "hybrid": 1.0}
