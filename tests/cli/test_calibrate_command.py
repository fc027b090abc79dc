"""`ctxguard calibrate`."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from household import SUBJECTS, TASKS, write_collection, write_jsonl
from running import Run, figures

from ctxguard.core.metrics import STRICT_UTILITIES
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Route
from ctxguard.profile.schema import Profile

pytestmark = pytest.mark.model


def keys(**settings: object) -> dict[str, dict[str, object]]:
    """A file with settings of ``calibrate``."""
    named = {name.replace("_", "-"): each for name, each in settings.items()}
    return {
        "calibrate": {
            name: str(each) if isinstance(each, Path) else each for name, each in named.items()
        }
    }


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough questions for a certificate."""
    return write_collection(tmp_path_factory.mktemp("many") / "household", copies=3)


def test_a_certificate_is_stated_in_words(
    run: Run, index: Path, many: Path, cache: Path, tmp_path: Path
) -> None:
    result = run.ok(
        *("calibrate", "--index", index, "--data", many, "--out", tmp_path / "p.json"),
        *("--alpha", "0.3"),
        system=keys(cache=cache, held_out=0.3),
    )
    words = " ".join(result.stdout.split())
    for part in ("chosen", "difference", "udcg_strict", "expected_utility:", "when a stage is"):
        assert part in words
    certificate = Profile.load(tmp_path / "p.json").routes[Route.HYBRID].certificate
    assert certificate.alpha == 0.3
    assert certificate.baseline == "k=5"
    assert " ".join(certificate.statement.split()[:12]) in words


def test_what_is_served_today_stands_first_beside_the_choice(
    run: Run, index: Path, many: Path, cache: Path, tmp_path: Path
) -> None:
    asked = ("calibrate", "--index", index, "--data", many, "--out", tmp_path / "p.json")
    asked += ("--objective", "utility")
    result = run.ok(*asked, "--all", system=keys(cache=cache, serving_k=4))
    lines = [line for line in result.stdout.splitlines() if "first 4, as today" in line]
    # The first table, and the first of the options.
    assert len(lines) == 2
    assert "chosen" in lines[0]
    assert "difference" in lines[0]
    document = run.read(*asked, "--json", system=keys(cache=cache, serving_k=4))
    summary = document["routes"]["hybrid"]["summary"]
    assert summary["serving_k"] == 4
    assert summary["results"]["reference"] == "first 4, as today"
    today, chosen = (figures(summary, name) for name in ("first 4, as today", "chosen"))
    assert today["tokens"]["mean"]["value"] > chosen["tokens"]["mean"]["value"] > 0.0
    assert list(summary["keeps"])[:2] == ["first 4, as today", "chosen"]


def test_sparse_labels_keep_the_recall_of_what_is_served_today(
    run: Run, index: Path, cache: Path, tmp_path: Path
) -> None:
    """About 40 questions with one relevant passage each, as a new user has: nothing is proved."""
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
    assert len(rows) == 42
    document = run.read(
        *("calibrate", "--index", index, "--data", write_jsonl(tmp_path / "q.jsonl", rows)),
        *("--out", tmp_path / "p.json", "--json"),
        system=keys(cache=cache),
    )
    assert (document["split"], document["chosen_on"], document["held_out"]) == (None, 42, 0)
    assert set(document["routes"]) == {"hybrid", "lexical", "dense"}
    assert document["verdict"] in ("keep", "shadow")
    for route in document["routes"].values():
        assert route["verdict"]["decision"] in ("keep", "shadow")
        recall = figures(route["summary"], "chosen")["recall"]
        assert recall["difference"]["value"] is None
        assert any("were ever labelled" in line for line in route["summary"]["warnings"])
    assert Profile.load(tmp_path / "p.json").profile_id == document["profile_id"]


def test_the_verdict_is_the_first_line_and_a_required_one_sets_the_exit_code(
    run: Run, index: Path, many: Path, cache: Path, tmp_path: Path
) -> None:
    out = tmp_path / "p.json"
    asked = ("calibrate", "--index", index, "--data", many, "--out", out)
    result = run.ok(*asked, system=keys(cache=cache))
    verdict = Profile.load(out).verdict
    assert result.stdout.split()[:2] == ["verdict", f"{verdict.decision}:"]
    required = run(*asked, "--require", "enforce", system=keys(cache=cache))
    assert required.exit_code == (0 if verdict.decision == "enforce" else 1)
    # Nothing may be lost: no number of queries this small shows that.
    strict = run(*asked, "--require", "enforce", system=keys(cache=cache, max_loss=0.0001))
    assert strict.exit_code == 1
    assert out.exists()


def test_where_nothing_is_certified_the_first_k_is_kept_and_that_is_said(
    run: Run, index: Path, collection: Path, cache: Path, tmp_path: Path
) -> None:
    out, page = tmp_path / "p.json", tmp_path / "report.html"
    result = run.ok(
        *("calibrate", "--index", index, "--data", collection, "--out", out, "--report", page),
        *("--alpha", "0.01"),
        system=keys(cache=cache, beta=0.01),
    )
    words = " ".join(result.stdout.split())
    assert "the first 5 as today, since no other policy that gains utility is certified" in words
    assert "mean recall loss ≤ 0.01 and mean harm ≤ 0.01 with probability 0.9" in words
    assert "mean recall loss ≤ 0.01 and mean harm" in page.read_text(encoding="utf-8")
    for route in Profile.load(out).routes.values():
        assert route.policy == RatioPolicy(k=5)
        assert route.certificate is None


def test_the_evidence_is_written_as_a_page_and_as_json(
    run: Run, index: Path, many: Path, cache: Path, tmp_path: Path
) -> None:
    page, figures = tmp_path / "report.html", tmp_path / "report.json"
    result = run.ok(
        *("calibrate", "--index", index, "--data", many, "--out", tmp_path / "p.json"),
        *("--objective", "utility", "--report", page, "--report", figures),
        "--json",
        system=keys(cache=cache),
    )
    document, data = json.loads(result.stdout), json.loads(figures.read_text())
    assert document["profile"] == str(tmp_path / "p.json")
    assert document["reports"] == [str(page), str(figures)]
    assert [route["route"] for route in data["routes"]] == ["hybrid", "lexical", "dense"]
    assert data["routes"][0]["certificate"]["delta"] == 0.1
    assert data["profile_id"] == document["profile_id"]
    families = {each["family"]: each for each in data["routes"][0]["families"]}
    assert families["stems"]["milliseconds"] >= 0.0
    assert families["ranker"]["milliseconds"] >= 0.0
    text = page.read_text(encoding="utf-8")
    assert data["profile_id"] in text
    assert "How to clean a" in text
    assert "ms per query" in text


def test_json_counts_the_queries_and_has_both_halves(
    run: Run, index: Path, collection: Path, cache: Path, tmp_path: Path
) -> None:
    document = run.read(
        *("calibrate", "--index", index, "--data", collection, "--out", tmp_path / "p.json"),
        *("--objective", "utility", "--json"),
        system=keys(cache=cache, policy="ratio", held_out=0.5),
    )
    assert document["split"] == "train"
    assert document["queries"] == 25
    assert document["answerable"] == 24
    assert document["without_relevant"] == 1
    assert document["unknown_passages"] == 0
    assert document["chosen_on"] + document["held_out"] == 25
    assert document["profile_id"] == Profile.load(tmp_path / "p.json").profile_id
    route = document["routes"]["hybrid"]
    assert route["kind"] == "ratio"
    for part in ("chosen_on", "held_out"):
        assert set(route[part]["metrics"]["recall"]) == {"value", "lower", "upper", "n"}


def test_questions_that_another_split_asks_too_are_told(
    run: Run, index: Path, cache: Path, tmp_path: Path
) -> None:
    data = write_collection(tmp_path / "d")
    with (data / "queries.jsonl").open("a") as queries:
        leaked = {"_id": "leaked", "text": "What is the right way to clean my  BICYCLE"}
        queries.write(json.dumps(leaked) + "\n")
    with (data / "qrels" / "test.tsv").open("a") as qrels:
        qrels.write("leaked\tclean-bicycle\t2\n")
    result = run(
        *("calibrate", "--index", index, "--data", data, "--out", tmp_path / "p.json"),
        "--json",
        system=keys(cache=cache),
    )
    notes = json.loads(result.stdout)["notes"]
    assert any("1 of 25 questions are also in d/test" in note for note in notes)


def test_segments_come_from_a_metadata_column(
    run: Run, index: Path, many: Path, cache: Path, tmp_path: Path
) -> None:
    result = run.ok(
        *("calibrate", "--index", index, "--data", many, "--out", tmp_path / "p.json"),
        *("--alpha", "0.4", "--json"),
        system=keys(cache=cache, delta=0.5, held_out=0.1, segment_by="task"),
    )
    assert Profile.load(tmp_path / "p.json").segment_by == "task"
    assert json.loads(result.stdout)["routes"]["hybrid"]["segments"]


def test_the_number_of_threads_does_not_show_in_the_profile(
    index: Path, collection: Path, profile: Path, tmp_path: Path
) -> None:
    """With the real model, whose last bits depend on how many threads compute them."""
    out, system = tmp_path / "profile.json", tmp_path / "system.toml"
    system.write_text('[calibrate]\ncache = "pools"', encoding="utf-8")
    subprocess.run(
        [
            *(sys.executable, "-m", "ctxguard", "calibrate"),
            *("--index", index, "--data", collection, "--out", out, "--system", system),
        ],
        check=True,
        capture_output=True,
        # This process, which made the other profile, has one in `make test`.
        env={**os.environ, "OMP_NUM_THREADS": "3"},
    )
    assert out.read_bytes() == profile.read_bytes()


class TestUtilities:
    """From a file of marked answers to the profile."""

    @pytest.fixture
    def fitted(self, run: Run, collection: Path, tmp_path: Path) -> Path:
        """Utilities of a reader whom one passage that is not relevant misleads in 1 of 4."""
        rows = []
        for n, line in enumerate((collection / "queries.jsonl").read_text().splitlines()):
            query_id = json.loads(line)["_id"]
            if query_id.startswith("q-none"):
                continue
            _, task, subject, _ = query_id.split("-")
            right, wrong = f"{task}-{subject}", [f"{task}-extra{i}" for i in range(3)]
            contexts = [[right], [right, *wrong[:2]], [*wrong[:2]], [right, *wrong], [wrong[0]]]
            corrects = [n % 9 > 0, n % 4 > 0, n % 11 == 0, n % 3 > 0, n % 10 == 0]
            rows += [
                {"query_id": query_id, "passage_ids": c, "correct": y, "reader": "small"}
                for c, y in zip(contexts, corrects, strict=True)
            ]
        answers = write_jsonl(tmp_path / "answers.jsonl", rows)
        out = tmp_path / "utilities.json"
        result = run.ok(
            *("fit", "utilities", "--answers", answers, "--data", collection / "qrels/train.tsv"),
            *("--out", out),
        )
        assert json.loads(out.read_text())["utilities"] is not None, result.stdout
        return out

    def test_the_profile_records_what_was_fitted_and_to_whom(
        self, run: Run, index: Path, collection: Path, cache: Path, fitted: Path
    ) -> None:
        out = fitted.with_name("p.json")
        result = run.ok(
            *("calibrate", "--index", index, "--data", collection, "--out", out),
            system={**keys(cache=cache, utilities=fitted), "utility": {"distractor": -0.9}},
        )
        profile, found = Profile.load(out), json.loads(fitted.read_text())["utilities"]
        assert profile.utilities.relevant == 1.0
        assert profile.utilities.unjudged == found["unjudged"] < 0.0
        assert profile.utilities.distractor == -0.9
        source = profile.provenance.utilities_source
        assert source is not None
        assert "answers of reader small to" in source
        assert "set by hand: distractor=-0.9" in source
        assert "answers of reader small to" in " ".join(result.stdout.split())

    def test_a_preset_is_what_the_policy_is_chosen_by(
        self, run: Run, index: Path, collection: Path, cache: Path, fitted: Path
    ) -> None:
        out = fitted.with_name("strict.json")
        arguments = ("calibrate", "--index", index, "--data", collection, "--out", out)
        chosen = {"preset": "strict", "gain": "exponential"}
        result = run.ok(*arguments, system={**keys(cache=cache), **chosen})
        profile = Profile.load(out)
        assert profile.utilities == replace(STRICT_UTILITIES, gain="exponential")
        assert profile.provenance.utilities_source == "the preset strict; exponential gain in nDCG"
        assert "distractor -1 (the preset strict; exponential" in " ".join(result.stdout.split())
        run.refused(
            *arguments,
            says="not both",
            system={**keys(cache=cache, utilities=fitted), "preset": "strict"},
        )


def test_it_says_whether_contexts_can_be_called_insufficient(
    run: Run, index: Path, collection: Path, cache: Path, tmp_path: Path
) -> None:
    calibrate = ("calibrate", "--index", index, "--data", collection, "--out", tmp_path / "p.json")
    result = run.ok(*calibrate, "--all", system=keys(cache=cache, false_alarms=0.2))
    words = " ".join(result.stdout.split())
    assert "No context is called insufficient" in words or "AUROC" in words
    run.refused(
        *calibrate, system=keys(false_alarms=1), says="false_alarms 1: should be less than 1"
    )
