"""Bounds over requests where few questions are popular: ``benchmarks.recalibrate``, in small."""

import json
from pathlib import Path

import pytest

from benchmarks.recalibrate import TRAFFIC, Outcome, is_kept, level, main, through_store


@pytest.mark.parametrize("name", TRAFFIC)
def test_a_bound_over_requests_is_false_as_rarely_as_stated(name: str) -> None:
    requests, questions = level(name, 300, 60, seed=1)
    assert (requests.method, questions.method) == ("requests", "distinct questions")
    assert is_kept(requests)
    if "hard" in name:
        assert questions.false > 0.9


def test_a_profile_recalibrated_from_a_store_keeps_what_it_says() -> None:
    """Served, sampled under a rate limit, stored, judged, recalibrated: a repeat of each size."""
    for outcome in through_store(600, 2, seed=0):
        if outcome.method == "requests":
            assert is_kept(outcome)
            assert outcome.truth < outcome.bound


def test_a_bound_that_is_false_too_often_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "results.json"
    assert main(["--repeats", "2", "--requests", "300", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["guarantee_kept"]
    assert len(found["outcomes"]) == 2 * len(TRAFFIC)
    false = Outcome("any", "requests", 300, 100, 0.3, None, 1.0, 0.1, 0.2, 10.0)
    monkeypatch.setattr("benchmarks.recalibrate.level", lambda *_: [false])
    assert main(["--repeats", "2", "--requests", "300"]) == 1
