"""The first profile, from judged requests alone."""

from pathlib import Path

from live_traffic import EVERYTHING, serve
from running import Run

from ctxguard import RatioPolicy, Route
from ctxguard.profile.schema import Profile


def test_judged_requests_give_the_first(run: Run, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'samples.db'}"
    serve(tmp_path, 200, rates=EVERYTHING).write_labels(tmp_path / "labels.jsonl")
    labels = ("--judge", "labels", "--labels", tmp_path / "labels.jsonl")
    assert run("monitor", "--store", url, *labels, "--once").exit_code == 0
    out = tmp_path / "first.json"
    found = run.read("calibrate", "--store", url, "--out", out)
    assert found["requests"] == 200
    made = Profile.load(out)
    assert made.routes[Route.EXTERNAL].safe_policy == RatioPolicy(k=5)
    assert made.provenance.depth == 12
    assert made.unverified
    assert any(note.startswith("unverified: no system was named") for note in found["notes"])
    assert made.verdict is not None
