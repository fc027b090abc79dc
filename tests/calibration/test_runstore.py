"""The store of runs, and whether a new run is worse than an earlier one."""

import sqlite3
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from calibration.comparing.regression import Check, earlier_run, watched_metrics
from calibration.comparing.runstore import Commit, Run, RunStore, commit_of, diff_runs
from calibration.evaluate import QueryMetrics
from ctxguard.errors import ConfigurationError, DataError
from ctxguard.metrics import DEFAULT_UTILITIES, STRICT_UTILITIES, Utilities


def run(
    recall: list[float],
    *,
    candidate: str = "lexical",
    commit: str = "c0ffee00",
    digest: str = "d" * 64,
    utilities: Utilities = DEFAULT_UTILITIES,
) -> Run:
    values = np.array(recall)
    ids = tuple(f"q{i}" for i in range(len(recall)))
    return Run(
        candidate=candidate,
        profile="0123456789ab",
        commit=Commit(commit, dirty=False),
        data="shelf/test",
        data_digest=digest,
        utilities=utilities,
        settings={"route": "lexical", "policy": {"k": 5}},
        latency_ms=1.25,
        metrics=QueryMetrics(ids, {"recall": values, "udcg_strict": values - 0.5}),
    )


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path / "runs.sqlite")


def test_a_run_is_read_back_as_it_was_kept(store: RunStore) -> None:
    kept = replace(run([1.0, float("nan"), 1 / 3]), utilities=Utilities(by_grade={1: 0.25}))
    store.keep([kept])
    [found] = store.runs()
    assert found.run_id == kept.run_id
    assert found.metrics.query_ids == kept.metrics.query_ids
    np.testing.assert_array_equal(found.metrics.values["recall"], kept.metrics.values["recall"])
    assert found.kept_at.endswith("+00:00")
    without_values = {"metrics": kept.metrics, "kept_at": ""}
    assert replace(found, **without_values) == kept


def test_the_same_run_is_kept_once_and_becomes_the_last(store: RunStore) -> None:
    first, second = run([1.0, 1.0]), run([0.0, 1.0])
    store.keep([first, second])
    store.keep([replace(first, latency_ms=99.0)])
    assert [found.run_id for found in store.runs()] == [first.run_id, second.run_id]
    assert store.runs()[0].latency_ms == 99.0


def test_a_runs_id_follows_from_figures_settings_commit_and_labels() -> None:
    one = run([1.0, 0.5])
    others = [
        run([1.0, 0.6]),
        run([1.0, 0.5], commit="beef0000"),
        run([1.0, 0.5], digest="e" * 64),
        run([1.0, 0.5], candidate="dense"),
        replace(one, settings={}),
        replace(one, commit=Commit("c0ffee00", dirty=True)),
    ]
    assert len({one.run_id, *(other.run_id for other in others)}) == len(others) + 1
    assert run([1.0, 0.5 + 1e-16]).run_id == one.run_id


def test_a_store_in_a_folder_is_a_file_of_its_own(tmp_path: Path) -> None:
    assert RunStore(tmp_path).path == tmp_path / "runs.sqlite"
    assert RunStore(tmp_path / "new").path == tmp_path / "new" / "runs.sqlite"


def test_looking_into_a_store_that_is_not_there_makes_no_file(store: RunStore) -> None:
    assert store.runs() == ()
    assert store.last(run([1.0])) is None
    with pytest.raises(ConfigurationError, match="has no run 'abcd'"):
        store.find("abcd")
    assert not store.path.exists()


def test_runs_are_found_by_the_beginning_of_their_id_or_commit(store: RunStore) -> None:
    lexical, dense = run([1.0]), run([0.0], candidate="dense", commit="beef1234")
    store.keep([lexical, dense])
    assert store.one(lexical.run_id[:6]).candidate == "lexical"
    assert store.one("BEEF12").candidate == "dense"
    assert len(store.find("beef")) == 1


def test_a_reference_to_several_runs_names_them(store: RunStore) -> None:
    store.keep([run([1.0]), run([0.0], candidate="dense")])
    with pytest.raises(
        ConfigurationError, match=r"'c0ff' names 2 runs: .*\(dense\), .*\(lexical\)"
    ):
        store.one("c0ff")
    with pytest.raises(ConfigurationError, match="fewer than 4 characters"):
        store.one("c0")


def test_the_last_run_is_of_the_same_candidate_labels_and_utilities(store: RunStore) -> None:
    wanted = run([0.25])
    store.keep([run([0.0]), wanted])
    store.keep(
        [
            run([1.0], candidate="dense"),
            run([1.0], digest="e" * 64),
            run([1.0], utilities=STRICT_UTILITIES),
        ]
    )
    found = store.last(run([0.5], commit="beef"))
    assert found is not None
    assert found.run_id == wanted.run_id


def test_a_run_that_failed_the_check_is_not_what_the_next_is_measured_against(
    store: RunStore,
) -> None:
    good, bad = run([1.0] * 9), run([0.5] * 9)
    store.keep([good])
    store.keep([replace(bad, regressed=True)])
    found = store.last(bad)
    assert found is not None
    assert found.run_id == good.run_id
    assert Check(bad, found).regressed
    store.keep([bad])  # accepted by hand
    found = store.last(bad)
    assert found is not None
    assert found.run_id == bad.run_id


def test_a_regression_is_a_loss_beyond_noise_and_tolerance() -> None:
    before = run([1.0, 0.8, 0.9, 1.0, 0.7, 0.9])
    noise = run([0.9, 0.9, 1.0, 0.9, 0.8, 0.8])
    worse = run([0.8, 0.6, 0.7, 0.9, 0.5, 0.7])
    assert not Check(noise, before).regressed
    assert Check(worse, before).regressed
    assert not Check(worse, before, tolerance=0.3).regressed
    assert not Check(before, worse).regressed
    assert not Check(worse, None).regressed
    assert set(Check(worse, before).differences) == {"udcg_strict", "recall"}


@pytest.mark.parametrize("tolerance", [-0.1, float("nan"), float("inf")])
def test_a_tolerance_that_would_hide_every_loss_is_refused(tolerance: float) -> None:
    with pytest.raises(ConfigurationError, match="must be ≥ 0 and finite"):
        Check(run([1.0]), None, tolerance=tolerance)


def test_a_run_asked_for_serves_its_own_candidate_or_the_only_one(store: RunStore) -> None:
    new, lexical, dense = run([1.0]), run([0.0]), run([0.5], candidate="dense")
    assert earlier_run(new, store, [dense, lexical]) is lexical
    assert earlier_run(new, store, [dense]) is dense
    assert earlier_run(new, store, [dense, replace(dense, candidate="other")]) is None
    foreign = run([1.0], digest="e" * 64)
    assert earlier_run(new, store, [foreign, lexical]) is lexical


def test_runs_on_other_labels_or_other_utilities_cannot_be_paired() -> None:
    with pytest.raises(ConfigurationError, match="only runs on the same queries and labels"):
        diff_runs(run([1.0]), run([1.0], digest="e" * 64))
    with pytest.raises(ConfigurationError, match="no common unit"):
        diff_runs(run([1.0]), run([1.0], utilities=STRICT_UTILITIES))


def test_only_metrics_that_can_get_worse_are_watched() -> None:
    with pytest.raises(ConfigurationError, match="'kept' is no metric that can get worse"):
        watched_metrics(["kept"])


def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "notes.sqlite"
    file.write_text("not a database, but long enough to be mistaken for one" * 40)
    store = RunStore(file)
    with pytest.raises(DataError, match=r"notes\.sqlite: this is no store of runs, or a damaged"):
        store.runs()
    with pytest.raises(DataError):
        store.keep([run([1.0])])
    assert file.read_text().startswith("not a database")


def test_a_truncated_store_is_told_as_damaged(store: RunStore) -> None:
    store.keep([run([float(i % 2) for i in range(2000)], candidate=f"c{n}") for n in range(9)])
    whole = store.path.read_bytes()
    store.path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="damaged"):
        store.runs()


def test_a_run_whose_values_are_cut_short_is_told_as_damaged(store: RunStore) -> None:
    kept = run([1.0, 0.0])
    store.keep([kept])
    with sqlite3.connect(store.path) as connection:
        connection.execute("UPDATE metric_values SET packed = substr(packed, 1, 8)")
    connection.close()
    with pytest.raises(DataError, match=f"run {kept.run_id} lacks values"):
        store.runs()


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "app.sqlite"
    connection = sqlite3.connect(file)
    connection.execute("CREATE TABLE users (name TEXT)")
    connection.commit()
    connection.close()
    with pytest.raises(DataError, match="no store of runs; name another with --store"):
        RunStore(file).keep([run([1.0])])


def test_a_store_of_a_later_release_is_refused(store: RunStore) -> None:
    store.keep([run([1.0])])
    connection = sqlite3.connect(store.path)
    connection.execute("PRAGMA user_version = 9")
    connection.close()
    with pytest.raises(DataError, match="schema version 9, this release reads 1"):
        store.runs()


def test_a_store_where_no_folder_can_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="the folder cannot be made"):
        RunStore(tmp_path / "file" / "runs.sqlite").keep([run([1.0])])


def test_runs_kept_at_the_same_time_are_all_kept(store: RunStore) -> None:
    runs = [run([float(i)], candidate=f"c{i}") for i in range(12)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda each: store.keep([each]), runs))
    assert {found.candidate for found in store.runs()} == {each.candidate for each in runs}


def test_a_commit_is_told_with_whether_tracked_files_differ(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == Commit("none", dirty=False)

    def git(*arguments: str) -> None:
        who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True)  # noqa: S607

    git("init", "--quiet")
    assert commit_of(tmp_path) == Commit("none", dirty=False)
    (tmp_path / "a").write_text("one")
    git("add", "a")
    git("commit", "--quiet", "--no-gpg-sign", "-m", "first")
    clean = commit_of(tmp_path)
    assert len(clean.commit_id) >= 40
    assert not clean.dirty
    (tmp_path / "untracked").write_text("")
    assert commit_of(tmp_path) == clean
    (tmp_path / "a").write_text("two")
    assert commit_of(tmp_path) == replace(clean, dirty=True)
