"""Commands that read a store: a name that no store has is most likely mistyped."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from household import write_jsonl
from live_traffic import profile_of
from running import Run

from ctxguard.core.policies import RatioPolicy

COMMANDS: dict[str, Sequence[str]] = {
    "monitor": ("monitor", "--judge", "labels", "--labels", "truth.jsonl"),
    "monitor --once": ("monitor", "--judge", "labels", "--labels", "truth.jsonl", "--once"),
    "label export": ("label", "export", "--out", "out.csv"),
    "label import": ("label", "import", "rows.jsonl", "--annotator", "ann"),
    "label feedback": ("label", "feedback", "rows.jsonl"),
    "recalibrate": ("recalibrate", "--profile", "profile.json", "--out", "new.json"),
    "explain": ("explain", "some-request"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_store_that_is_not_there_is_refused_and_not_made(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    query = {"query_id": "q", "query": "q", "relevant": ["d"]}
    write_jsonl(tmp_path / "truth.jsonl", [query])
    write_jsonl(tmp_path / "rows.jsonl", [])
    profile_of(RatioPolicy(k=1)).save(tmp_path / "profile.json")
    before = sorted(tmp_path.iterdir())
    run.refused(
        *COMMANDS[name],
        "--store",
        "sqlite:///smaples.db",
        says=(f"there is no sample store {tmp_path / 'smaples.db'}", "`sample_to` makes it"),
    )
    assert sorted(tmp_path.iterdir()) == before
