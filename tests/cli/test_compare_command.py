"""`ctxguard compare`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer
from household import write_jsonl
from running import Result
from typer.testing import CliRunner

from calibration.comparing.runstore import Commit, Run, RunStore
from calibration.evaluate import QueryMetrics
from ctxguard.cli import compare
from ctxguard.cli._console import Command
from ctxguard.metrics import DEFAULT_UTILITIES
from ctxguard.profile import Profile

Compare = Callable[..., Result]


@pytest.fixture(scope="module")
def run_compare() -> Compare:
    """The command in an application of its own, in this process; no traceback may be shown."""
    app = typer.Typer()
    app.callback()(lambda: None)
    compare.register(app)
    app.registered_commands[0].cls = Command

    def invoke(*arguments: object) -> Result:
        words = ["compare", *(str(argument) for argument in arguments)]
        result = CliRunner(env={"COLUMNS": "100"}).invoke(app, words)
        assert "Traceback" not in result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result

    return invoke


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "runs.sqlite"


def kept(store: Path, recall: float, *, commit: str = "c0ffee00", digest: str = "d") -> str:
    values = np.full(30, recall)
    run = Run(
        candidate="lexical",
        profile="0123456789ab",
        commit=Commit(commit, dirty=True),
        data="shelf/test",
        data_digest=digest,
        utilities=DEFAULT_UTILITIES,
        settings={},
        latency_ms=1.0,
        metrics=QueryMetrics(
            tuple(f"q{i}" for i in range(30)), {"recall": values, "udcg_strict": values - 0.5}
        ),
    )
    RunStore(store).keep([run])
    return run.run_id


def test_the_list_shows_each_run_with_its_commit_the_last_first(
    run_compare: Compare, store: Path
) -> None:
    first, second = kept(store, 0.5), kept(store, 0.75, commit="beef0000")
    shown = run_compare("--list", "--store", store).stdout
    assert shown.index(second) < shown.index(first)
    assert "beef000*" in shown
    assert "0.750" in shown
    document = json.loads(run_compare("--list", "--store", store, "--json").stdout)
    assert [run["run_id"] for run in document["runs"]] == [second, first]
    assert document["runs"][0]["metrics"] == {"recall": 0.75, "udcg_strict": 0.25}


def test_a_list_of_nothing_says_so_and_makes_no_file(run_compare: Compare, store: Path) -> None:
    result = run_compare("--list", "--store", store)
    assert result.exit_code == 0
    assert "holds no runs yet" in result.stdout
    assert not store.exists()


def test_a_diff_says_what_the_second_run_changed(run_compare: Compare, store: Path) -> None:
    first, second = kept(store, 0.5), kept(store, 0.75)
    result = run_compare("--diff", first, second, "--store", store, "--json")
    recall = json.loads(result.stdout)["differences"]["recall"]
    assert (recall["value"], recall["n"], recall["outcome"]) == (0.25, 30, "better")
    shown = run_compare("--diff", second, first, "--store", store).stdout
    assert "-0.250" in shown
    assert "worse" in shown


def test_runs_on_other_labels_cannot_be_diffed(run_compare: Compare, store: Path) -> None:
    first, second = kept(store, 0.5), kept(store, 0.5, digest="e")
    result = run_compare("--diff", first, second, "--store", store)
    assert result.exit_code == 2
    assert "only runs on the same queries and labels" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--diff", "aaaa", "bbbb"), "has no run 'aaaa'"),
        (("--list", "--diff", "aaaa", "bbbb"), "not both"),
        ((), "--index and --data"),
        (("--index", "i", "--data", "d", "--candidate", "x=lexicla"), "'lexicla' in the"),
        (("--index", "i", "--data", "d", "--regression-metric", "kept"), "can get worse"),
        (("--index", "i", "--data", "d", "--safe", "0.9"), "must rise within"),
        (("--index", "i", "--data", "d", "--against", "aaaa"), "has no run 'aaaa'"),
        (("--index", "i", "--data", "d", "--baseline", "nobody"), "'nobody' is no candidate"),
        (("--index", "i", "--data", "d", "-k", "200"), "more than the depth 100"),
        (("--index", "i", "--data", "d", "--profile", "none.json"), "cannot be read as a profile"),
    ],
)
def test_what_cannot_work_is_refused_with_what_mends_it(
    run_compare: Compare, store: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = run_compare(*arguments, "--store", store)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_a_damaged_store_is_told_before_any_work(run_compare: Compare, store: Path) -> None:
    store.write_text("no database at all, and long enough to look like one" * 30)
    result = run_compare("--list", "--store", store, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["type"] == "DataError"


@pytest.mark.model
def test_the_usual_candidates_stand_side_by_side(
    run_compare: Compare, index: Path, collection: Path, store: Path
) -> None:
    result = run_compare("--index", index, "--data", collection, "--store", store, "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    names = ["lexical", "dense", "reciprocal_rank", "convex:0.5"]
    assert [each["name"] for each in document["candidates"]] == names
    assert document["measured_queries"] == 13
    assert document["baseline"] == "lexical"
    assert set(document["differences"]) == set(names[1:])
    first = document["candidates"][0]
    assert first["metrics"]["kept"]["value"] == 5.0
    assert len(first["curve"]) == 20
    assert set(first["curve"][0]) == {"k", "udcg_strict", "gain", "harm"}
    assert first["optimal_k"] == 1
    assert first["verdict"] == "RISKY"
    assert first["latency_ms"] > 0.0
    assert len(document["rule"]) == 3
    assert any("fewer than 20 queries" in note for note in document["notes"])
    assert len(RunStore(store).runs()) == 4


@pytest.mark.model
def test_the_same_seed_gives_the_same_figures(
    run_compare: Compare, index: Path, collection: Path, store: Path
) -> None:
    arguments = ("--index", index, "--data", collection, "--candidate", "x=lexical", "--json")
    documents = [
        json.loads(run_compare(*arguments, "--store", store, "-k", 2).stdout) for _ in range(2)
    ]
    for document in documents:
        assert document["candidates"][0].pop("latency_ms") > 0.0
    assert documents[0] == documents[1]
    assert len(RunStore(store).runs()) == 1


@pytest.mark.model
def test_a_calibrated_profile_stands_beside_them_under_the_name_of_its_file(
    run_compare: Compare, index: Path, collection: Path, profile: Path
) -> None:
    copied = shutil.copy(profile, profile.with_name("calibrated.json"))
    result = run_compare(
        *("--index", index, "--data", collection, "--split", "train", "--profile", copied),
        *("--candidate", "five=lexical", "--no-keep", "--json"),
    )
    document = json.loads(result.stdout)
    five, calibrated = document["candidates"]
    assert calibrated["name"] == "calibrated"
    assert calibrated["profile_id"] == Profile.load(profile).profile_id
    assert document["differences"]["calibrated"]["udcg_strict"]["outcome"] == "better"
    assert calibrated["harm_share"]["value"] < five["harm_share"]["value"]
    assert any("calibrated on these very queries" in note for note in document["notes"])
    assert document["store"] is None


@pytest.mark.model
def test_the_tables_fit_100_columns_and_print_the_rule(
    run_compare: Compare, index: Path, collection: Path, store: Path
) -> None:
    long_name = "a name that is rather too long for a table=lexical,k=10"
    arguments = ("--index", index, "--data", collection, "--store", store)
    run_compare(*arguments, "--candidate", long_name)
    result = run_compare(*arguments, "--candidate", long_name, "--candidate", "x=lexical",
                         "--fail-on-regression")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert max(len(line) for line in result.stdout.splitlines()) <= 100
    for word in ("a name that is ra…", "SAFE:", "DANGEROUS:", "RISKY:", "within noise", "best k"):
        assert word in result.stdout
    assert "encoding the query is left out" in result.stdout


@pytest.mark.model
def test_a_regression_fails_until_it_is_accepted(
    run_compare: Compare, index: Path, collection: Path, store: Path
) -> None:
    common = ("--index", index, "--data", collection, "--store", store)
    check = (*common, "--fail-on-regression")
    first = run_compare(*check, "--candidate", "mine=lexical,k=3")
    assert first.exit_code == 0
    assert "no earlier run" in first.stdout
    worse = (*check, "--candidate", "mine=lexical,k=20")
    for _ in range(2):  # the failed run must not become what the second is measured against
        failed = run_compare(*worse)
        assert failed.exit_code == 1
        assert "finding: worse than the earlier run, beyond noise: mine" in failed.stderr
    assert run_compare(*worse, "--tolerance", 5).exit_code == 0
    assert run_compare(*worse, "--regression-metric", "recall").exit_code == 0
    assert run_compare(*common, "--candidate", "mine=lexical,k=20").exit_code == 0
    assert run_compare(*worse).exit_code == 0


@pytest.mark.model
def test_a_run_can_be_asked_for_by_its_id(
    run_compare: Compare, index: Path, collection: Path, store: Path
) -> None:
    common = ("--index", index, "--data", collection, "--store", store, "--json")
    before = json.loads(run_compare(*common, "--candidate", "mine=lexical,k=1").stdout)
    run_id = before["candidates"][0]["run_id"]
    run_compare(*common, "--candidate", "mine=lexical,k=9")
    result = run_compare(*common, "--candidate", "other=lexical,k=9", "--against", run_id)
    against = json.loads(result.stdout)["against"]["other"]
    assert result.exit_code == 0
    assert against["earlier"]["run_id"] == run_id
    assert against["regressed"]


@pytest.mark.model
def test_a_run_on_other_labels_is_refused_as_a_reference(
    run_compare: Compare, index: Path, collection: Path, store: Path
) -> None:
    run_id = kept(store, 0.5)
    result = run_compare(
        *("--index", index, "--data", collection, "--store", store),
        *("--candidate", "lexical=lexical", "--against", run_id),
    )
    assert result.exit_code == 2
    assert "only runs on the same queries and labels" in result.stderr


@pytest.mark.model
def test_labels_without_a_relevant_passage_are_a_finding(
    run_compare: Compare, index: Path, tmp_path: Path, store: Path
) -> None:
    data = write_jsonl(tmp_path / "q.jsonl", [{"id": "a", "text": "kettle", "relevant": []}])
    result = run_compare("--index", index, "--data", data, "--store", store)
    assert result.exit_code == 1
    assert "no passage is labelled relevant" in result.stderr
    assert not store.exists()


@pytest.mark.model
def test_a_candidate_that_reranks_needs_a_reranker(
    run_compare: Compare, index: Path, collection: Path, store: Path
) -> None:
    result = run_compare(
        *("--index", index, "--data", collection, "--store", store),
        *("--candidate", "x=hybrid+rerank"),
    )
    assert result.exit_code == 2
    assert "x reranks, and no reranker was given" in result.stderr
