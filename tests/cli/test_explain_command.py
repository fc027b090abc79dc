"""`ctxguard explain`: what the store knows of one request."""

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from household import read_rows, write_jsonl
from live_traffic import EVERYTHING, ONLY_SERVED, Traffic, judge, profile_of, serve
from running import Run

from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Mode
from ctxguard.monitor.store import Limits, SampleStore

REQUEST = "which-shelf-holds-tool-{}".format


PROFILE = profile_of(RatioPolicy(k=5, min_ratio=0.85))
"""Keeps at most 5, and needs a score near the top."""


@pytest.fixture(scope="module")
def judged(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Traffic:
    folder = tmp_path_factory.mktemp("judged")
    made = serve(folder, 4, profile=PROFILE, relevant_ranks=[1], rates=EVERYTHING)
    assert judge(run, made).exit_code == 0
    return made


@pytest.fixture
def traffic(judged: Traffic, tmp_path: Path) -> Traffic:
    return judged.copied(tmp_path)


@pytest.fixture
def by_profile(tmp_path: Path) -> tuple[object, ...]:
    """The option that names the profile."""
    PROFILE.save(tmp_path / "profile.json")
    return ("--profile", tmp_path / "profile.json")


def explained(run: Run, traffic: Traffic, number: int, *options: object) -> list[dict[str, Any]]:
    found = run.read("explain", REQUEST(number), "--store", traffic.url, *options)
    assert found["request_id"] == REQUEST(number)
    samples: list[dict[str, Any]] = found["samples"]
    return samples


def test_candidates_have_scores_and_judgments(
    run: Run, traffic: Traffic, by_profile: tuple[object, ...]
) -> None:
    (found,) = explained(run, traffic, 2)
    assert found["query"] == "which shelf holds tool 2"
    assert (found["route"], found["mode"], found["state"]) == ("external", "enforce", "judged")
    assert found["probability"] == 1.0
    candidates = found["candidates"]
    assert [one["passage_id"] for one in candidates] == [f"d2-{rank}" for rank in range(12)]
    # Cosines of 0.9 at the top and 0.05 less with each rank: exp(-0.15) is above 0.85.
    assert [one["outcome"] for one in candidates] == ["served"] * 4 + ["dropped"] * 8
    assert candidates[3]["score"] == pytest.approx(0.75)
    assert [one["judge"]["grade"] for one in candidates] == [0, 1, *[0] * 10]
    assert all(one["reason"] is None for one in candidates)
    assert "with --profile" in found["notes"][0]
    for options in ((), by_profile, ("--all",)):
        shown = run.ok("explain", REQUEST(2), "--store", traffic.url, *options, columns="80").stdout
        assert max(map(len, shown.splitlines())) <= 80
        assert "Served, best first" in shown
        (line,) = [line for line in shown.splitlines() if line.startswith("tokens")]
        kept, retrieved, today = (int(n) for n in re.findall(r"\d+", line))
        assert 0 < kept < today < retrieved


def test_profile_gives_reasons_of_drops(
    run: Run, traffic: Traffic, by_profile: tuple[object, ...], tmp_path: Path
) -> None:
    (found,) = explained(run, traffic, 2, *by_profile)
    candidates = found["candidates"]
    assert candidates[3]["reason"] is None
    assert candidates[4]["reason"] == "scored too far below the best"
    assert candidates[4]["kept_if"] == ["min_ratio ≤ 0.818"]
    assert candidates[5]["reason"] == "beyond k"
    assert found["notes"] == []
    other = profile_of(RatioPolicy(k=2))
    other.save(tmp_path / "other.json")
    (found,) = explained(run, traffic, 2, "--profile", tmp_path / "other.json")
    assert any(other.profile_id in note for note in found["notes"])
    assert "this profile keeps 2; then 4 were kept" in found["notes"]


def test_labels_and_picks_are_shown(run: Run, traffic: Traffic, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert run("label", "export", "--store", traffic.url, "--out", out, "-n", "2").exit_code == 0
    rows = [{**row, "grade": 0, "negative": "distractor"} for row in read_rows(out)]
    name = rows[0]["request_id"]
    back = write_jsonl(tmp_path / "back.jsonl", rows[:1])
    run("label", "import", back, "--store", traffic.url, "--annotator", "ann")
    (found,) = explained(run, traffic, int(str(name).rsplit("-", 1)[1]))
    assert sum(found["picked"].values()) >= 1
    labelled = [one for one in found["candidates"] if one["labels"]]
    (label,) = labelled[0]["labels"]
    assert (label["annotator"], label["grade"], label["negative"]) == ("ann", 0, "distractor")
    shown = run("explain", name, "--store", traffic.url).stdout
    assert "ann 0 distractor" in shown
    assert "picked: " in shown


def test_twice_sampled_shows_both(run: Run, traffic: Traffic, tmp_path: Path) -> None:
    serve(tmp_path, 1, first=2, relevant_ranks=[1])
    first, second = explained(run, traffic, 2)
    assert (first["state"], second["state"]) == ("judged", "pending")
    assert second["state_in_words"] == "waits to be judged"
    assert all(one["judge"] is None for one in second["candidates"])


def test_unknown_request_names_likely_causes(run: Run, traffic: Traffic) -> None:
    says = ("no sample of request 'never-seen'", "not sampled", "not written yet", "expired")
    run.refused("explain", "never-seen", "--store", traffic.url, says=says)


def test_rest_is_shown_without_text(run: Run, traffic: Traffic, tmp_path: Path) -> None:
    with SampleStore.open(traffic.url, limits=Limits(max_bytes=1)) as store:
        store.clean()
    (found,) = explained(run, traffic, 2)
    assert (found["state"], found["has_text"], found["candidates"]) == ("judged", False, [])
    assert found["state_in_words"].startswith("judged by labels ")
    shown = run("explain", REQUEST(2), "--store", traffic.url).stdout
    assert "deleted to bound the store's size" in shown


def test_judges_failures_are_said(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("truststore")
    from chat_endpoint import Answer, ChatEndpoint

    made = serve(tmp_path, 1, rates=ONLY_SERVED)
    asked = ("monitor", "--store", made.url, "--judge", "llm", "--model", "m", "--once")
    with closing(ChatEndpoint()) as endpoint:
        endpoint.script.extend([Answer(content="seven")] * 60)
        run(*asked, system={"monitor": {"base-url": endpoint.url}})
    (found,) = explained(run, made, 0)
    assert found["state"] == "incomplete"
    assert "seven" in found["rejected"][0]["reply"]
    shown = run("explain", REQUEST(0), "--store", made.url).stdout
    assert "passages got no grade" in shown
    assert "seven" in shown


def test_shadow_shows_would_be_drops(
    run: Run, by_profile: tuple[object, ...], tmp_path: Path
) -> None:
    made = serve(tmp_path, 1, profile=PROFILE, mode=Mode.SHADOW, relevant_ranks=[1])
    (found,) = explained(run, made, 0, *by_profile)
    outcomes = [
        (one["outcome"], one["enforced"], one["reason"] is None) for one in found["candidates"]
    ]
    assert ("served", "kept", True) in outcomes
    n = outcomes.count(("served", "dropped", False))
    assert n > 0
    shown = run("explain", REQUEST(0), "--store", made.url, *by_profile).stdout
    assert f"{n} served passages would be dropped" in " ".join(shown.split())


@pytest.mark.parametrize("mode", [Mode.ENFORCE, Mode.SHADOW])
def test_first_candidates_unless_all(
    run: Run, by_profile: tuple[object, ...], tmp_path: Path, mode: Mode
) -> None:
    made = serve(tmp_path, 1, profile=PROFILE, mode=mode, ids=("a/long/path/" * 9 + "{}-{}").format)
    command = ("explain", REQUEST(0), "--store", made.url, *by_profile)
    few, every = (run.ok(*command, *more, columns="80").stdout for more in ((), ("--all",)))
    assert "--all shows them" in few
    assert few.count("a/long/path/" * 3) < every.count("a/long/path/" * 3)
