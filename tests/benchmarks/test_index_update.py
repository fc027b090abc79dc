"""The benchmark of changes to an index, on a small one."""

import json
from pathlib import Path

from benchmarks.index_update import main


def test_every_change_is_timed_and_the_edited_index_agrees_with_one_built_anew(
    tmp_path: Path,
) -> None:
    file = tmp_path / "report.json"
    size = ("--passages", "300", "--turns", "3", "--queries", "5")
    assert main([*size, "--folder", str(tmp_path), "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert {kind: each["changes"] for kind, each in report["changes"].items()} == {
        "add": 2,
        "delete": 2,
        "upsert": 2,
    }
    assert all(each["durable_p50"] > 0.0 for each in report["changes"].values())
    assert report["rankings_shared"]["lexical"] == 1.0
    assert set(report["searches"]) == {"built", "edited", "built anew"}
