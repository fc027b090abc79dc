"""`ctxguard query`."""

import json
from pathlib import Path
from typing import Any

import pytest
from household import write_jsonl
from running import Run

from ctxguard.core.policies import RatioPolicy
from ctxguard.core.relevance import RelevanceModel
from ctxguard.core.signals import feature_names
from ctxguard.core.types import Route
from ctxguard.profile.schema import Profile
from tests.profiles import sufficiency_with

pytestmark = pytest.mark.model

QUESTION = "how do I clean a violin"


def on_route(name: str) -> dict[str, Any]:
    return {"query": {"route": name}}


def test_drops_show_reason_and_remedy(run: Run, index: Path) -> None:
    """Kept and dropped stand with the reason and what would have kept them."""
    result = run.ok("query", "--index", index, "--k", "2", QUESTION)
    words = " ".join(result.stdout.split())
    assert "kept 2 of 36 candidates" in words
    assert "clean-violin" in words
    assert "beyond k; kept if k ≥ 3" in words
    assert "31 more dropped; --all shows them" in words
    assert "note: uncalibrated: no profile" in words
    everything = run("query", "--index", index, "--all", QUESTION).stdout
    assert everything.count("kept if") == 31
    assert "more dropped" not in everything
    text = run("query", "--index", index, "--k", "1", "--text", QUESTION)
    assert "wipe the violin with a damp cloth" in text.stdout
    assert "dropped" not in text.stdout
    assert "uncalibrated" in text.stderr
    for option in ((), ("--json",), ("--text",)):
        assert run("query", "--index", index, "clean \udcff violin", *option).exit_code == 0


def test_candidate_shows_what_compared_it(run: Run, index: Path, profile: Path) -> None:
    def figures(*options: object, **system: Any) -> list[str]:
        lines = run("query", "--index", index, QUESTION, *options, **system).stdout.splitlines()
        first = next(line for line in lines if line.startswith("    score "))
        return [part.split()[0] for part in first.strip().split(" · ")]

    assert figures() == ["score", "r"]
    assert figures(system=on_route("lexical")) == ["score", "r"]
    assert figures("--profile", profile)[:2] == ["score", "r"]
    unknown = ("query", "--index", index, "zzqx wvkj")
    assert "empty_retrieval" in run.ok(*unknown, system=on_route("lexical")).stdout
    assert run.read(*unknown, system=on_route("dense"))["route"] == "dense"


def test_candidate_shows_its_texts_beginning(run: Run, tmp_path: Path) -> None:
    filler = "nothing to see here, " * 60
    rows: list[dict[str, object]] = [
        {"_id": "a", "title": "Care", "text": f"wipe the violin with a cloth. {filler}"},
        {"_id": "b", "text": f"tune a \x1b[31mpiano\x07 with a fork. {filler}"},
    ]
    run("index", write_jsonl(tmp_path / "c.jsonl", rows), "--out", tmp_path / "i")
    for columns in ("60", "100"):
        question = "how to tune a piano or violin"
        result = run("query", "--index", tmp_path / "i", "-k", "1", question, columns=columns)
        words = " ".join(result.stdout.split())
        assert "…" in words
        assert "wipe the violin" in words
        assert "tune a [31mpiano" in words
        assert not {"\x1b", "\x07"} & set(result.stdout)
        assert max(map(len, result.stdout.splitlines())) <= int(columns)


def test_json_is_the_context(run: Run, index: Path, profile: Path) -> None:
    document = run.read("query", "--index", index, "--profile", profile, QUESTION)
    assert document["query"] == QUESTION
    assert document["flags"] == []
    assert document["candidates"] == len(document["decisions"]) == 36
    # So few labels enforce nothing: today's five are served.
    assert document["mode"] == "shadow"
    assert len(document["passages"]) == 5
    assert document["passages"][0]["passage_id"] == "clean-violin"


def test_foreign_profile_gives_only_k(run: Run, profile: Path, tmp_path: Path) -> None:
    """A profile of another index is a finding and only its k applies."""
    corpus = write_jsonl(tmp_path / "c.jsonl", [{"_id": "a", "text": "clean a violin"}])
    run("index", corpus, "--out", tmp_path / "i")
    asked = ("query", "--index", tmp_path / "i", "--profile", profile, QUESTION, "--json")
    result = run.finding(*asked, says="corpus: none of the 36 passages is in this one")
    assert json.loads(result.stdout)["flags"] == ["profile_mismatch"]


def test_control_characters_never_reach_terminal(run: Run, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"_id": "a\x1b]0;owned\x07", "title": "violin \x1b[31mred", "text": "[bold]\u202eevil"},
        {"_id": "[red]b[/red]", "text": "violin \x1b[2J [/] [link=x]"},
    ]
    corpus = write_jsonl(tmp_path / "c.jsonl", rows)
    run("index", corpus, "--out", tmp_path / "i")
    for options in ((), ("--text",), ("--k", "1")):
        result = run.ok("query", "--index", tmp_path / "i", "violin \x1b[5m", *options)
        assert not {"\x1b", "\x07", "\u202e"} & set(result.output)
    assert "[red]b[/red]" in run("query", "--index", tmp_path / "i", "violin").stdout


def test_insufficient_context_is_said(run: Run, index: Path, profile: Path, tmp_path: Path) -> None:
    calibrated = Profile.load(profile)
    route = calibrated.routes[Route.HYBRID]
    n = len(feature_names(("dense", "lexical")))
    model = RelevanceModel(("dense", "lexical"), (0.0,) * n, (0.0,) * n, (1.0,) * n, -2.0)
    certified = sufficiency_with(threshold=0.5).model_copy(update={"model": model})
    update = {"sufficiency": certified, "verdict": None, "policy": RatioPolicy(k=5)}
    doubting = route.model_copy(update=update)
    file = tmp_path / "doubting.json"
    calibrated.model_copy(update={"routes": {Route.HYBRID: doubting}}).save(file)
    asked = ("query", "--index", index, "--profile", file, QUESTION)
    words = " ".join(run(*asked).stdout.split())
    assert "sufficient no: P(the best kept passage is relevant) = 0.119" in words
    assert "note: insufficient: probably no passage that was kept is relevant" in words
    assert run.read(*asked)["sufficient"] is False
