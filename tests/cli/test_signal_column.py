"""The key `signal-columns`: from the metadata of an index through the profile to what is served."""

from pathlib import Path

import pytest
from household import SUBJECTS, TASKS, write_jsonl
from running import Run

from ctxguard.profile.schema import Profile

pytestmark = pytest.mark.model

EDITIONS = {"old": "2011-03-01", "new": "2023-11-20"}


@pytest.fixture(scope="module")
def editions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two editions of every page, of which the newer is right."""
    folder = tmp_path_factory.mktemp("data") / "editions"
    (folder / "qrels").mkdir(parents=True)
    pages = [(f"{task}-{subject}", task, subject) for subject in SUBJECTS for task in TASKS]
    write_jsonl(
        folder / "corpus.jsonl",
        (
            {
                "_id": f"{page}-{edition}",
                "text": f"To {task} the {subject}, {TASKS[task].format(subject)}. ({edition})",
                "metadata": {"updated_at": date, "edition": edition},
            }
            for page, task, subject in pages
            for edition, date in EDITIONS.items()
        ),
    )
    write_jsonl(
        folder / "queries.jsonl",
        ({"_id": page, "text": f"how do I {task} my {subject}"} for page, task, subject in pages),
    )
    rows = [f"{page}\t{page}-new\t1\n{page}\t{page}-old\t0\n" for page, _, _ in pages]
    qrels = "query-id\tcorpus-id\tscore\n" + "".join(rows)
    for split in ("train", "test"):
        (folder / "qrels" / f"{split}.tsv").write_text(qrels, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def index(run: Run, editions: Path) -> Path:
    run.ok("index", editions, "--out", editions.with_name("index"))
    return editions.with_name("index")


def test_named_column_serves_newer_edition(
    run: Run, index: Path, editions: Path, tmp_path: Path
) -> None:
    file = tmp_path / "profile.json"
    calibrated = ("calibrate", "--index", index, "--data", editions)
    keys = {"signal-columns": ["updated_at"], "tolerance": 0.3, "max-loss": 0.5}
    run.ok(*calibrated, "--context", "leaner", "--out", file, system={"calibrate": keys})
    (column,) = Profile.load(file).signal_columns
    assert (column.name, column.kind) == ("updated_at", "time")

    request = ("query", "--index", index, "--profile", file)
    answer = run.read(*request, "how do I clean my piano")
    assert "missing_signals" not in answer["flags"]
    assert answer["decisions"][0]["passage_id"] == "clean-piano-new"

    asked = ("--index", index, "--data", editions, "--profile", file, "--json")
    found = run.read("evaluate", *asked)["results"]
    own = [row for row in found["rows"] if row["policy"] != found["reference"]]
    assert next(row for row in own if row["metric"] == "precision")["mean"]["value"] > 0.95
    rows = run.read("evaluate", "--candidate", "all", *asked)["results"]["rows"]
    precision = {
        row["policy"]: row["mean"]["value"] for row in rows if row["metric"] == "precision"
    }
    assert max(precision.values()) > 0.95 > min(precision.values())


def test_unheld_column_is_refused(run: Run, index: Path, editions: Path, tmp_path: Path) -> None:
    asked = ("calibrate", "--index", index, "--data", editions, "--out", tmp_path / "p.json")
    says = "no candidate has the signal column 'authors' in its metadata"
    run.refused(*asked, system={"calibrate": {"signal-columns": ["authors"]}}, says=says)
