"""`ctxguard calibrate`."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from household import SUBJECTS, TASKS, write_collection, write_jsonl
from running import Run, figures

from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Route
from ctxguard.measure.worth import STRICT
from ctxguard.profile.schema import Profile

pytestmark = pytest.mark.model

Calibrate = Callable[..., tuple[Any, Profile]]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough questions for a certificate."""
    return write_collection(tmp_path_factory.mktemp("many") / "household", copies=2)


@pytest.fixture
def calibrate(run: Run, index: Path, collection: Path, tmp_path: Path) -> Calibrate:
    """What the command prints of the household index, in one line or as JSON, and the profile."""

    def calibrated(
        *options: object, data: Path = collection, system: Any = None, **keys: object
    ) -> tuple[Any, Profile]:
        out = tmp_path / "p.json"
        named = {k.replace("_", "-"): each for k, each in keys.items()}
        arguments = ("--index", index, "--data", data, "--out", out, *options)
        result = run.ok("calibrate", *arguments, system={**(system or {}), "calibrate": named})
        found = (
            json.loads(result.stdout) if "--json" in options else " ".join(result.stdout.split())
        )
        return found, Profile.load(out)

    return calibrated


def test_today_choice_certificate_in_words(calibrate: Calibrate, many: Path) -> None:
    keys = {"held_out": 0.3, "serving_k": 4, "false_alarms": 0.2}
    words, profile = calibrate("--alpha", "0.3", "--all", data=many, **keys)
    assert "metric first 4 chosen difference" in words
    table = words[words.index("context recall UDCG passages tokens") :]
    assert "difference" in words.removesuffix(table)
    assert re.search(r" 3 and 70% [\d.]+ ", table)
    for part in ("udcg", "expected_utility:", "when a stage is"):
        assert part in words
    assert "No context is called insufficient" in words or "AUROC" in words
    certificate = profile.routes[Route.HYBRID].certificate
    assert (certificate.alpha, certificate.baseline_k) == (0.3, 4)
    assert " ".join(certificate.statement.split()[:12]) in words


def test_evidence_is_page_and_json(calibrate: Calibrate, many: Path, tmp_path: Path) -> None:
    """The evidence is a page and JSON with today beside the choice."""
    page, evidence = tmp_path / "report.html", tmp_path / "report.json"
    reports = ("--report", page, "--report", evidence)
    document, _ = calibrate(*reports, "--json", data=many, serving_k=4)
    data = json.loads(evidence.read_text())
    assert document["profile"] == str(tmp_path / "p.json")
    assert document["reports"] == [str(page), str(evidence)]
    assert [route["route"] for route in data["routes"]] == ["hybrid", "lexical", "dense"]
    assert data["routes"][0]["summary"]["shown_by"] == "folds"
    assert data["dial"]["stops"]
    assert "How to clean a" in page.read_text(encoding="utf-8")
    summary = document["routes"]["hybrid"]["summary"]
    assert summary["serving_k"] == 4
    assert summary["results"]["reference"] == "first 4, as today"
    today, chosen = (figures(summary, name) for name in ("first 4, as today", "chosen"))
    assert today["tokens"]["mean"]["value"] >= chosen["tokens"]["mean"]["value"] > 0.0
    assert list(summary["keeps"])[:2] == ["first 4, as today", "chosen"]
    assert next(iter(summary["by_size"])).split(", ")[0] == "today"
    sizes = {size for part in summary["by_size"] for size in part.split(", ")}
    fixed = {size for size in sizes if size.startswith("first ")}
    assert sizes - fixed | {*summary["missing"]} == {"today", "leaner", "balanced", "richer"}
    for size, name in summary["by_size"].items():
        for metric in ("recall", "udcg", "kept", "tokens"):
            row = figures(summary, name)[metric]
            assert row["mean"]["lower"] <= row["mean"]["value"] <= row["mean"]["upper"], size
            assert (row["difference"] is None) == (size.split(", ")[0] == "today")


def test_context_may_be_leaner_or_richer(calibrate: Calibrate) -> None:
    kept = {}
    for size in ("leaner", "richer"):
        document, profile = calibrate("--context", size, "--json")
        assert profile.verdict.shown_by == "folds"
        kept[size] = figures(document["routes"]["hybrid"]["summary"], "chosen")["kept"]["mean"]
    assert kept["leaner"]["value"] <= kept["richer"]["value"]


def test_sparse_labels_keep_todays_recall(calibrate: Calibrate, tmp_path: Path) -> None:
    """About 40 questions with one relevant passage each, as a new user has."""
    rows: list[dict[str, object]] = [
        {
            "query_id": f"{task}-{subject}-{copy}",
            "text": f"how do I {task} the {subject}" + "?" * copy,
            "relevant": [f"{task}-{subject}"],
        }
        for copy in range(2)
        for subject in SUBJECTS[:7]
        for task in TASKS
    ]
    document, profile = calibrate("--json", data=write_jsonl(tmp_path / "q.jsonl", rows))
    assert (document["split"], document["queries"], document["held_out"]) == (None, 42, 0)
    assert set(document["routes"]) == {"hybrid", "lexical", "dense"}
    for route in document["routes"].values():
        assert route["verdict"]["shown_by"] == route["summary"]["shown_by"] == "folds"
        assert route["certificate"] is None
        recall = figures(route["summary"], "chosen")["recall"]
        if route["verdict"]["decision"] == "enforce":
            assert recall["difference"]["value"] >= -0.01
        assert any("were ever labelled" in line for line in route["summary"]["warnings"])
    assert profile.profile_id == document["profile_id"]


def test_verdict_leads_and_may_exit(
    run: Run, index: Path, collection: Path, tmp_path: Path
) -> None:
    """The verdict is the first line and a required one sets the exit code."""
    asked = ("calibrate", "--index", index, "--data", collection, "--out", tmp_path / "p.json")
    asked += ("--require", "enforce")
    required = run(*asked)
    verdict = Profile.load(tmp_path / "p.json").verdict
    words = " ".join(required.stdout.split())
    assert words.startswith(f"verdict {verdict.decision}:")
    assert required.exit_code == (0 if verdict.decision == "enforce" else 1)
    # Nothing may be lost: no number of queries this small shows that.
    run.finding(*asked, system={"calibrate": {"max-loss": 0.0001}})


def test_uncertified_keeps_first_k(calibrate: Calibrate, tmp_path: Path) -> None:
    """Where nothing is certified the first k is kept and that is said."""
    page = tmp_path / "report.html"
    words, profile = calibrate("--report", page, "--alpha", "0.01", "--all")
    # A route that stays as it is says so once.
    assert re.search(r"lexical \S+ passages, \S+ tokens, as today;", words)
    assert "the first 5 as today, since no other policy that gains utility is certified" in words
    assert "mean recall loss ≤ 0.01 with probability 0.9" in words
    assert "mean recall loss ≤ 0.01 with probability 0.9" in page.read_text(encoding="utf-8")
    for route in profile.routes.values():
        assert route.policy == RatioPolicy(k=5)
        assert route.certificate is None


def test_json_counts_queries_and_evidence(calibrate: Calibrate) -> None:
    document, profile = calibrate("--json", policy="ratio", held_out=0.5)
    assert document["split"] == "train"
    counts = {"queries": 25, "answerable": 24, "without_relevant": 1, "unknown_passages": 0}
    assert counts.items() <= document.items()
    assert 0 < document["held_out"] == document["routes"]["hybrid"]["summary"]["queries"] < 25
    assert document["profile_id"] == profile.profile_id
    route = document["routes"]["hybrid"]
    assert route["kind"] == "ratio"
    assert route["evidence"]["shown_by"] == "held_out"
    assert set(route["evidence"]["metrics"]["recall"]) == {"value", "lower", "upper", "n"}


def test_questions_of_another_split_are_told(calibrate: Calibrate, tmp_path: Path) -> None:
    data = write_collection(tmp_path / "d")
    with (data / "queries.jsonl").open("a") as queries:
        leaked = {"_id": "leaked", "text": "What is the right way to clean my  BICYCLE"}
        queries.write(json.dumps(leaked) + "\n")
    with (data / "qrels" / "test.tsv").open("a") as qrels:
        qrels.write("leaked\tclean-bicycle\t2\n")
    notes = calibrate("--json", data=data)[0]["notes"]
    assert any("1 of 25 questions are also in d/test" in note for note in notes)


def test_thread_count_does_not_show(
    index: Path, collection: Path, profile: Path, tmp_path: Path
) -> None:
    """With the real model, whose last bits depend on how many threads compute them."""
    out = tmp_path / "profile.json"
    asked = ("calibrate", "--index", index, "--data", collection, "--out", out)
    # This process, which made the other profile, has one in `make test`.
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    command = [sys.executable, "-m", "ctxguard", *asked]
    subprocess.run(command, check=True, capture_output=True, env=environment)
    assert out.read_bytes() == profile.read_bytes()
    assert b'"coefficients"' in out.read_bytes()


def test_worths_stand_in_the_profile(calibrate: Calibrate) -> None:
    """What passages are worth stands in the profile by which it is chosen."""
    worth = {"preset": "strict", "gain": "exponential", "utility": {"distractor": -0.9}}
    words, profile = calibrate(system=worth)
    expected = replace(STRICT, gain="exponential", distractor=-0.9)
    assert profile.utilities == expected
    said = "the preset strict; set by hand: distractor=-0.9; exponential gain in nDCG"
    assert profile.provenance.utilities_source == said
    assert "distractor -0.9 (the preset strict; set by hand" in words
