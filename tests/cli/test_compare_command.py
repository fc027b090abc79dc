"""`ctxguard evaluate` of several candidates."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from running import Result, Run, figures, ok, read, refused

from ctxguard.profile.schema import Profile

Compare = Callable[..., Result]


pytestmark = pytest.mark.model


@pytest.fixture
def compare(run: Run, index: Path, collection: Path) -> Compare:
    return partial(run, "evaluate", "--index", index, "--data", collection)


def test_usual_candidates_stand_together(compare: Compare) -> None:
    document = read(compare("--candidate", "all", "--json"))
    names = ["lexical", "dense", "reciprocal_rank", "convex:0.5", "ranker"]
    assert [each["name"] for each in document["candidates"]] == names
    assert document["measured_queries"] == 13
    assert document["results"]["reference"] == "lexical"
    assert figures(document, "lexical")["kept"]["mean"]["value"] == 5.0
    assert all(figures(document, name)["recall"]["difference"] for name in names[1:])
    first = document["candidates"][0]
    assert len(first["curve"]["udcg"]) == 20
    assert first["curve"]["optimal_k"] == 1
    assert first["risk"] == "RISKY"
    assert first["latency_ms"] > 0.0
    assert len(document["rule"]) == 3
    assert any("fewer than 20 queries" in note for note in document["notes"])
    assert document["against"] == {}


def test_same_seed_gives_same_figures(compare: Compare) -> None:
    arguments = ("--candidate", "x=lexical", "-k", 2, "--json")
    documents = [read(compare(*arguments)) for _ in range(2)]
    for document in documents:
        assert document["candidates"][0].pop("latency_ms") > 0.0
    assert documents[0] == documents[1]


def test_profile_stands_by_its_file(compare: Compare, collection: Path, profile: Path) -> None:
    """A calibrated profile stands beside them under the name of its file."""
    copied = shutil.copy(profile, profile.with_name("calibrated.json"))
    seen = ("--data", collection / "qrels/train.tsv", "--profile", copied)
    document = read(compare(*seen, "--candidate", "five=lexical", "--json"))
    five, calibrated = document["candidates"]
    assert calibrated["name"] == "calibrated"
    assert calibrated["profile_id"] == Profile.load(profile).profile_id
    # With this few labels the default objective may keep the first 5.
    assert figures(document, "calibrated")["udcg"]["difference"]["outcome"] != "worse"
    assert five["name"] == "five"
    assert any("calibrated on these queries" in note for note in document["notes"])


def test_tables_fit_100_columns(compare: Compare, tmp_path: Path) -> None:
    long_name = "a name that is rather too long for a table=lexical,k=10"
    base = tmp_path / "base.json"
    named = ("--candidate", long_name, "--candidate")
    assert "saved to" in ok(compare(*named, "y=dense", "--out", base)).stdout
    result = ok(compare(*named, "x=lexical", "--against", base, "--all"))
    assert max(len(line) for line in result.stdout.splitlines()) <= 100
    assert "…" not in result.stdout
    for word in ("a name that is", "SAFE:", "DANGEROUS:", "RISKY:", "within noise", "best k"):
        assert word in result.stdout
    assert "not saved" in result.stdout


def test_worse_than_saved_is_a_finding(compare: Compare, tmp_path: Path) -> None:
    """A candidate that is worse than the saved one is a finding."""
    base = tmp_path / "new" / "base.json"
    good, worse = ("--candidate", "mine=lexical,k=3"), ("--candidate", "mine=lexical,k=20")
    assert compare(*good, "--out", base).exit_code == 0
    assert compare(*good, "--against", base).exit_code == 0
    failed = compare(*worse, "--against", base)
    assert failed.exit_code == 1
    assert "finding: worse than the saved comparison, beyond noise: mine" in failed.stderr
    against = (*worse, "--against", base)
    for keys in ({"tolerance": 5}, {"regression-metrics": ["recall"]}):
        assert compare(*against, system={"evaluate": keys}).exit_code == 0
    refused(compare(*against, "--out", base), "a different file from --against")


def test_json_can_be_compared_with(
    compare: Compare, index: Path, collection: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What JSON prints can be compared with and nothing else is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def files() -> set[Path]:
        folders = (tmp_path, index, collection)
        return {file for folder in folders for file in folder.rglob("*") if file.is_file()}

    before = files()
    printed = compare("--json", "--candidate", "mine=lexical,k=1").stdout
    # The embedder that every command shares keeps its exported model there.
    new = [file for file in files() - before if file.parent.name != "models"]
    assert new == []
    Path("base.json").write_text(printed)
    result = compare("--json", "--candidate", "other=lexical,k=9", "--against", "base.json")
    against = json.loads(result.stdout)["against"]["other"]
    assert result.exit_code == 1
    assert against["saved"] == "mine"
    assert against["regressed"]
    assert set(against["differences"]) == {"udcg", "recall"}
