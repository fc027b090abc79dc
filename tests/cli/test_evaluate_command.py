"""`ctxguard evaluate`."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from household import write_collection, write_jsonl
from running import Run, figures

from ctxguard.profile.schema import Profile

pytestmark = pytest.mark.model

LEXICAL = {"evaluate": {"route": "lexical"}}
METRICS = {
    *("recall", "precision", "mrr", "ndcg", "udcg", "udcg_strict", "harm", "distractor_rate"),
    *("harm_undiscounted", "precision_judged", "tokens"),
    *("kept", "recall_loss", "recall_at_depth", "ndcg_at_10", "judged"),
    *("hit_rate", "average_precision", "context_precision"),
}


def test_json_has_every_metric_with_its_interval_and_n(
    run: Run, index: Path, collection: Path
) -> None:
    result = run("evaluate", "--index", index, "--data", collection, "--k", "3", "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 0
    found = {name: row["mean"] for name, row in figures(document).items()}
    assert document["results"]["reference"] == "first 3"
    assert set(found) == METRICS
    assert set(found["recall"]) == {"value", "lower", "upper", "n"}
    assert found["recall"]["n"] == 12
    assert (found["kept"]["value"], found["kept"]["n"]) == (3.0, 13)
    assert found["recall_at_depth"]["value"] == 1.0
    assert (document["queries"], document["split"]) == (13, "test")
    assert (document["profile_id"], document["route"], document["k"]) == (None, "hybrid", 3)


def test_a_profile_brings_its_policy_and_its_fusion(
    run: Run, index: Path, collection: Path, profile: Path
) -> None:
    document = run.read(
        *("evaluate", "--index", index, "--data", collection, "--profile", profile, "--json")
    )
    calibrated = Profile.load(profile)
    assert document["profile_id"] == calibrated.profile_id
    assert document["fusion"]["method"] == calibrated.fusion.method == "ranker"
    assert document["depth"] == calibrated.provenance.depth


def shown_metrics(printed: str) -> set[str]:
    """The metrics that stand in the first column of a table."""
    return {words[0] for line in printed.splitlines() if (words := line.split())} & METRICS


def test_the_table_shows_five_metrics_and_on_request_each(
    run: Run, index: Path, collection: Path
) -> None:
    arguments = ("evaluate", "--index", index, "--data", collection)
    result = run.ok(*arguments, system=LEXICAL)
    assert "route       lexical, 100 candidates a query" in result.stdout
    assert "the first 5 passages" in result.stdout
    assert shown_metrics(result.stdout) == {"recall", "mrr", "udcg_strict", "harm", "kept"}
    assert "14 more metrics: all-metrics = true in [evaluate]" in result.stdout
    assert "\x1b" not in result.stdout
    result = run.ok(*arguments, system={"evaluate": {"all-metrics": True}})
    assert shown_metrics(result.stdout) == METRICS
    assert "recall loss" in result.stdout
    assert len(result.stdout.splitlines()) <= 40


def test_queries_that_the_profile_was_calibrated_on_are_told(
    run: Run, index: Path, collection: Path, profile: Path
) -> None:
    arguments = (*("evaluate", "--index", index, "--profile", profile), *("--json", "--data"))
    on_train = json.loads(run(*arguments, collection / "qrels/train.tsv", system=LEXICAL).stdout)
    assert any("calibrated on these queries" in note for note in on_train["notes"])
    assert run.read(*arguments, collection / "qrels/test.tsv", system=LEXICAL)["notes"] == []


@pytest.mark.parametrize(("added", "notes"), [(1, []), (40, ["corpus: 53% has changed"])])
def test_a_profile_holds_for_a_corpus_that_has_changed_a_little(
    run: Run, profile: Path, tmp_path: Path, added: int, notes: list[str]
) -> None:
    other = write_collection(tmp_path / "other")
    with (other / "corpus.jsonl").open("a") as corpus:
        for n in range(added):
            corpus.write(json.dumps({"_id": f"more {n}", "text": "one more passage"}) + "\n")
    assert run("index", other, "--out", tmp_path / "i").exit_code == 0
    result = run.ok(
        *("evaluate", "--index", tmp_path / "i", "--data", other, "--profile", profile, "--json")
    )
    said = [note for note in json.loads(result.stdout)["notes"] if note.startswith("corpus")]
    assert [note[: len(expected)] for note, expected in zip(said, notes, strict=True)] == notes


def test_a_profile_of_another_index_is_a_finding_that_says_what_differs(
    run: Run, collection: Path, profile: Path, tmp_path: Path
) -> None:
    run("index", collection, "--lexical", "rank-bm25", "--out", tmp_path / "i")
    result = run(
        *("evaluate", "--index", tmp_path / "i", "--data", collection, "--profile", profile),
        "--json",
    )
    assert result.exit_code == 1
    assert "lexical is 'rank-bm25" in result.stderr
    error = json.loads(result.stdout)["error"]
    assert error["type"] == "ProfileMismatchError"
    assert len(error["differences"]) == 1


def test_keywords_measure_passages_that_have_no_labels(
    run: Run, index: Path, tmp_path: Path
) -> None:
    row = {"query_id": "1", "text": "how to clean a kettle", "keywords": ["kettle", "submarine"]}
    data = write_jsonl(tmp_path / "q.jsonl", [row])
    result = run("evaluate", "--index", index, "--data", data, "--json")
    found = {name: row["mean"]["value"] for name, row in figures(json.loads(result.stdout)).items()}
    assert found == {"keyword_recall": 0.5, "keyword_mrr": 0.5}
    assert "keyword_mrr" in run("evaluate", "--index", index, "--data", data).stdout


def test_labelled_passages_that_the_index_lacks_are_counted(
    run: Run, index: Path, tmp_path: Path
) -> None:
    rows: list[dict[str, object]] = [
        {"query_id": "1", "text": "clean a piano", "relevant": ["clean-piano", "gone"]}
    ]
    data = write_jsonl(tmp_path / "q.jsonl", rows)
    document = run.read("evaluate", "--index", index, "--data", data, "--json")
    assert document["unknown_passages"] == 1
    assert figures(document)["recall_at_depth"]["mean"]["value"] == 0.5
    assert any("1 of 2 labelled passages are not in the index" in n for n in document["notes"])


def test_labels_whose_ids_collide_with_those_of_the_index_are_refused(
    run: Run, index: Path, collection: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(collection, tmp_path / "other")
    rows = [json.loads(line) for line in (other / "corpus.jsonl").read_text().splitlines()]
    texts = [row["text"] for row in rows]
    for row, text in zip(rows, reversed(texts), strict=True):
        row["text"] = text
    write_jsonl(other / "corpus.jsonl", rows)
    for command in (("evaluate",), ("compare",), ("golden", "coverage")):
        result = run(*command, "--index", index, "--data", other)
        assert result.exit_code == 2, command
        assert "12 of 12 passages that were compared have another text" in result.stderr
        assert "index the corpus of these labels" in result.stderr


def test_labels_without_a_corpus_that_find_nothing_say_so(
    run: Run, index: Path, tmp_path: Path
) -> None:
    rows: list[dict[str, object]] = [{"query_id": "1", "text": "zzqx", "relevant": ["clean-piano"]}]
    data = write_jsonl(tmp_path / "q.jsonl", rows)
    result = run("evaluate", "--index", index, "--data", data, system=LEXICAL)
    assert "no relevant passage is among the candidates of any query" in " ".join(
        result.stdout.split()
    )


def test_a_k_beyond_the_corpus_keeps_everything_and_says_so(
    run: Run, index: Path, collection: Path
) -> None:
    result = run("evaluate", "--index", index, "--data", collection, "--k", "500", "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert document["depth"] == 500
    assert figures(document)["kept"]["mean"]["value"] == 36.0
    assert document["notes"] == ["k = 500 is more than the index's 36 passages"]


def test_the_first_k_stand_beside_a_profile_under_the_same_fusion(
    run: Run, index: Path, collection: Path, profile: Path
) -> None:
    """The fitted fusion puts other passages first than the default one."""
    common = ("evaluate", "--index", index, "--data", collection, "--json")
    document = json.loads(run(*common, "--profile", profile, "--k", "3").stdout)
    alone = json.loads(run(*common, "--profile", profile).stdout)
    assert document["fusion"] == alone["fusion"]
    assert document["fusion"]["method"] == "ranker"
    own, beside = figures(document), figures(document, "first 3")
    assert {name: row["mean"] for name, row in own.items()} == {
        name: row["mean"] for name, row in figures(alone).items()
    }
    assert document["results"]["reference"] == "first 3"
    assert figures(alone)["recall"]["difference"] is None
    assert beside["kept"]["mean"]["value"] == 3.0
    # What the retriever ranks before any policy is the same for both.
    assert beside["ndcg_at_10"]["mean"] == own["ndcg_at_10"]["mean"]
    difference = own["recall"]["difference"]
    assert set(difference) == {"value", "lower", "upper", "n", "outcome"}
    expected = own["recall"]["mean"]["value"] - beside["recall"]["mean"]["value"]
    assert difference["value"] == pytest.approx(expected)
    lines = run(*common[:-1], "--profile", profile, "-k", "3").stdout.splitlines()
    head = ["metric", "first", "3", "profile", "difference", "n", "outcome"]
    assert head in [line.split() for line in lines]
    assert any(line.startswith("fusion") and "ranker" in line for line in lines)


def relabelled(collection: Path, folder: Path, *rows: str) -> Path:
    """The collection with these qrels of its test split."""
    shutil.copytree(collection, folder)
    text = "\n".join(["query-id\tcorpus-id\tscore", *rows, ""])
    (folder / "qrels" / "test.tsv").write_text(text, encoding="utf-8")
    return folder


RELEVANT = "q-clean-lantern-0\tclean-lantern\t2"
NOT_RELEVANT = "q-clean-lantern-0\tstore-lantern\t0"


GRADES = {"clean": 1, "store": 2}


class TestWorth:
    """What a passage is worth, and how a grade gains, is set by the keys of a file."""

    def measured(self, run: Run, index: Path, data: Path, *options: str, **keys: object) -> Any:
        arguments = ("--index", index, "--data", data, "--k", "3", *options, "--json")
        document = run.read("evaluate", *arguments, system=keys)
        return document["utilities"], {
            name: row["mean"]["value"] for name, row in figures(document).items()
        }

    def test_a_preset_and_single_values_make_the_utilities(
        self, run: Run, index: Path, collection: Path
    ) -> None:
        _, before = self.measured(run, index, collection)
        strict, harsh = self.measured(run, index, collection, preset="strict")
        assert (strict["irrelevant"], strict["score_ratio"]) == (-1.0, 0.5)
        assert harsh["harm"] > before["harm"]
        keys = {"preset": "relaxed", "utility": {"irrelevant": -0.3, "rank_limit": 1}}
        relaxed, _ = self.measured(run, index, collection, **keys)
        assert (relaxed["irrelevant"], relaxed["rank_limit"]) == (-0.3, 1)
        assert (relaxed["score_ratio"], relaxed["unjudged"]) == (0.9, -0.08)

    def test_exponential_gain_changes_ndcg_of_graded_labels_alone(
        self, run: Run, index: Path, collection: Path, tmp_path: Path
    ) -> None:
        grades = (f"q-clean-lantern-0\t{name}-lantern\t{n}" for name, n in GRADES.items())
        graded = relabelled(collection, tmp_path / "graded", *grades)
        _, linear = self.measured(run, index, graded)
        _, exponential = self.measured(run, index, graded, "--gain", "exponential")
        assert self.measured(run, index, graded, gain="exponential")[1] == exponential
        differs = {name for name in linear if linear[name] != exponential[name]}
        assert {"ndcg"} <= differs <= {"ndcg", "ndcg_at_10"}
        arguments = ("--index", index, "--data", graded, "--gain", "exponential")
        printed = run.ok("evaluate", *arguments).stdout
        assert shown_metrics(printed) == METRICS, "who changes a metric is shown it"
        assert "exponential gain in nDCG" in printed


class TestUnlabelled:
    """Of the first three passages one is relevant, and at most one other has a label."""

    def measured(self, run: Run, index: Path, data: Path, **utility: float) -> dict[str, float]:
        arguments = ("--index", index, "--data", data, "--k", "3", "--json")
        result = run.ok("evaluate", *arguments, system={"utility": utility})
        found = figures(json.loads(result.stdout))
        return {name: row["mean"]["value"] for name, row in found.items()}

    def test_where_labels_say_0_an_unlabelled_passage_has_a_utility_of_its_own(
        self, run: Run, index: Path, collection: Path, tmp_path: Path
    ) -> None:
        some = relabelled(collection, tmp_path / "some", RELEVANT, NOT_RELEVANT)
        preset = self.measured(run, index, some)
        free = self.measured(run, index, some, unjudged=0)
        assert preset["harm"] > free["harm"] >= 0.0
        assert preset["precision"] == pytest.approx(1 / 3)
        assert preset["precision_judged"] > preset["precision"]
        positives = relabelled(collection, tmp_path / "positives", RELEVANT)
        harsh = self.measured(run, index, positives)
        assert harsh["harm"] > preset["harm"]
        assert harsh["precision_judged"] is None

    def test_people_are_told_once_what_an_unlabelled_passage_counts_as(
        self, run: Run, index: Path, collection: Path, tmp_path: Path
    ) -> None:
        some = relabelled(collection, tmp_path / "some", RELEVANT, NOT_RELEVANT)
        positives = relabelled(collection, tmp_path / "positives", RELEVANT)
        for data, line in (
            (some, "a passage without a label is worth -0.2 (unjudged), one labelled not"),
            (positives, "the labels hold relevant passages only"),
        ):
            words = " ".join(run("evaluate", "--index", index, "--data", data).stdout.split())
            assert words.count(line) == 1
