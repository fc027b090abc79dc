"""`ctxguard evaluate`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from household import read_rows, write_collection, write_jsonl
from running import Run, figures

from ctxguard.profile.schema import Profile

pytestmark = pytest.mark.model

Evaluate = Callable[..., Any]
Show = Callable[..., str]

LEXICAL = {"route": "lexical"}
METRICS = {
    *("recall", "precision", "mrr", "ndcg", "udcg", "harm", "misleading", "distractor_rate"),
    *("harm_undiscounted", "precision_judged", "tokens", "pooled_recall", "served_mrr"),
    *("kept", "recall_loss", "recall_at_depth", "ndcg_at_10", "judged"),
    *("hit_rate", "average_precision", "context_precision"),
}


@pytest.fixture
def evaluate(run: Run, index: Path, collection: Path) -> Evaluate:
    """The JSON of the command on the household index, with keys of a file."""

    def read(*options: object, data: Path = collection, **system: object) -> Any:
        arguments = ("--index", index, "--data", data, *options, "--json")
        return run.read("evaluate", *arguments, system=system or None)

    return read


@pytest.fixture
def show(run: Run, index: Path, collection: Path) -> Show:
    """The printed result of the command."""

    def printed(*options: object, data: Path = collection, **system: object) -> str:
        arguments = ("--index", index, "--data", data, *options)
        return run.ok("evaluate", *arguments, system=system or None).stdout

    return printed


def means(document: Any) -> dict[str, Any]:
    return {name: row["mean"]["value"] for name, row in figures(document).items()}


def asked(folder: Path, **row: object) -> Path:
    """A file of one question."""
    return write_jsonl(folder / "q.jsonl", [{"query_id": "1", **row}])


def test_json_has_intervals_and_n(evaluate: Evaluate) -> None:
    document = evaluate("--k", "3")
    found = {name: row["mean"] for name, row in figures(document).items()}
    assert document["results"]["reference"] == "first 3"
    assert set(found) == METRICS
    assert set(found["recall"]) == {"value", "lower", "upper", "n"}
    assert found["recall"]["n"] == 12
    assert (found["kept"]["value"], found["kept"]["n"]) == (3.0, 13)
    assert found["recall_at_depth"]["value"] == 1.0
    # A figure that is rounded for a person is not the figure.
    assert round(found["precision"]["value"], 4) != found["precision"]["value"]
    assert (document["queries"], document["split"]) == (13, "test")
    assert (document["profile_id"], document["route"], document["k"]) == (None, "hybrid", 3)


def test_a_file_names_the_profile(run: Run, index: Path, collection: Path, profile: Path) -> None:
    """That of the system is measured, unless an option names another or candidates are compared."""
    system = {"index": str(index), "profile": str(profile)}
    asked = ("evaluate", "--data", collection, "--json")
    assert run.read(*asked, system=system)["profile_id"] == Profile.load(profile).profile_id
    missing = {**system, "profile": "gone.json"}
    run.refused(*asked, system=missing, says="gone.json")
    assert run.read(*asked, "--profile", profile, system=missing)["profile_id"]
    compared = run.read(*asked, "--candidate", "x=lexical", system=missing)
    assert [each["name"] for each in compared["candidates"]] == ["x"]


def shown_metrics(printed: str) -> set[str]:
    """The metrics that stand in the first column of a table, which calls one another name."""
    first = {words[0] for line in printed.splitlines() if (words := line.split())}
    return (first | {"kept"} if "passages" in first else first) & METRICS


def test_table_shows_the_first_or_each(show: Show, tmp_path: Path) -> None:
    """Pooled recall stands beside recall only where a candidate is lacking."""
    printed = show(evaluate=LEXICAL)
    assert "route       lexical, 100 candidates a query" in printed
    assert "the first 5 passages" in printed
    assert shown_metrics(printed) == {
        *("recall", "mrr", "served_mrr", "udcg", "harm", "kept", "tokens"),
    }
    assert "14 more metrics; --all shows them" in printed
    missing = asked(tmp_path, query="clean a violin", relevant=["clean-violin", "gone"])
    assert "pooled_recall" in shown_metrics(show(data=missing))
    assert "\x1b" not in printed
    printed = show("--all")
    assert shown_metrics(printed) == METRICS
    assert "recall loss" in printed
    assert len(printed.splitlines()) <= 40


def test_choosing_queries_are_told(evaluate: Evaluate, profile: Path, collection: Path) -> None:
    """Queries that chose the policy are told and a difference on them is not a data."""
    outcomes = {}
    for split in ("train", "test"):
        data = collection / f"qrels/{split}.tsv"
        found = evaluate("--profile", profile, "-k", "3", data=data, evaluate=LEXICAL)
        rows = [row for row in found["results"]["rows"] if row["difference"] is not None]
        outcomes[split] = {
            (row["difference"]["value"] is None, row["difference"]["outcome"])
            for row in rows
            if row["metric"] == "recall"
        }
        said = " ".join(found["notes"])
        assert ("calibrated on these queries" in said) is (split == "train")
        assert ("differences are not shown" in said) is (split == "train")
        assert (found["notes"] == []) is (split == "test")
    assert outcomes["train"] == {(True, "no data")}
    assert not any(is_absent for is_absent, _ in outcomes["test"])


def test_slightly_changed_corpus_keeps_profile(
    run: Run, evaluate: Evaluate, profile: Path, tmp_path: Path
) -> None:
    other, made = write_collection(tmp_path / "other"), ("--out", tmp_path / "i")
    for more, update, notes in ((1, (), []), (39, ("--update",), ["corpus: 53% has changed"])):
        added = [{"_id": f"{more} {n}", "text": "one more passage"} for n in range(more)]
        write_jsonl(other / "corpus.jsonl", [*read_rows(other / "corpus.jsonl"), *added])
        run.ok("index", other, *made, *update)
        document = evaluate("--index", tmp_path / "i", "--profile", profile, data=other)
        said = [note for note in document["notes"] if note.startswith("corpus")]
        assert [note[: len(expected)] for note, expected in zip(said, notes, strict=True)] == notes


def test_foreign_profile_says_what_differs(
    run: Run, collection: Path, profile: Path, rank_bm25: Any
) -> None:
    """A profile of another index is a finding that says what differs."""
    arguments = ("--index", rank_bm25["index"], "--data", collection, "--profile", profile)
    result = run.finding("evaluate", *arguments, "--json")
    assert "lexical is 'rank-bm25" in result.stderr
    error = json.loads(result.stdout)["error"]
    assert error["type"] == "ProfileMismatchError"
    assert "lexical is 'rank-bm25" in error["message"]


def test_keywords_measure_unlabelled_passages(
    evaluate: Evaluate, show: Show, tmp_path: Path
) -> None:
    data = asked(tmp_path, text="how to clean a kettle", keywords=["kettle", "submarine"])
    assert means(evaluate(data=data)) == {"keyword_recall": 0.5, "keyword_mrr": 0.5}
    assert "keyword_mrr" in show(data=data)


def test_labelled_but_missing_is_counted(evaluate: Evaluate, tmp_path: Path) -> None:
    data = asked(tmp_path, text="clean a piano", relevant=["clean-piano", "gone"])
    document = evaluate(data=data)
    assert document["unknown_passages"] == 1
    assert means(document)["recall_at_depth"] == 0.5
    assert any("1 of 2 labelled passages are not in the index" in n for n in document["notes"])


def test_colliding_ids_are_refused(run: Run, index: Path, collection: Path, tmp_path: Path) -> None:
    other = shutil.copytree(collection, tmp_path / "other")
    rows = read_rows(other / "corpus.jsonl")
    swapped = [{**row, "text": twin["text"]} for row, twin in zip(rows, rows[::-1], strict=True)]
    write_jsonl(other / "corpus.jsonl", swapped)
    says = (
        "12 of 12 passages that were compared have a different",
        "search the corpus they were made for",
    )
    for several in ((), ("--candidate", "all")):
        run.refused("evaluate", "--index", index, "--data", other, *several, says=says)


def test_findless_labels_say_so(show: Show, tmp_path: Path) -> None:
    printed = show(data=asked(tmp_path, text="zzqx", relevant=["clean-piano"]), evaluate=LEXICAL)
    said = "no relevant passage is among the candidates of any query"
    assert said in " ".join(printed.split())


def test_k_beyond_corpus_keeps_everything(evaluate: Evaluate) -> None:
    document = evaluate("--k", "500")
    assert document["depth"] == 500
    assert means(document)["kept"] == 36.0


def test_first_k_stand_beside_profile(evaluate: Evaluate, show: Show, profile: Path) -> None:
    """The fitted fusion puts other passages first than the default one."""
    document, alone = evaluate("--profile", profile, "--k", "3"), evaluate("--profile", profile)
    calibrated = Profile.load(profile)
    assert document["profile_id"] == calibrated.profile_id
    assert document["depth"] == calibrated.provenance.depth
    assert document["fusion"] == alone["fusion"]
    assert document["fusion"]["method"] == calibrated.fusion.method == "ranker"
    own, beside = figures(document), figures(document, "first 3")
    assert means(document) == means(alone)
    assert document["results"]["reference"] == "first 3"
    assert alone["results"]["reference"] == f"first {alone['baseline_k']}, as today"
    assert beside["kept"]["mean"]["value"] == 3.0
    # What the retriever ranks before any policy is the same for both.
    assert beside["ndcg_at_10"]["mean"] == own["ndcg_at_10"]["mean"]
    difference = own["recall"]["difference"]
    assert set(difference) == {"value", "lower", "upper", "n", "outcome"}
    expected = own["recall"]["mean"]["value"] - beside["recall"]["mean"]["value"]
    assert difference["value"] == pytest.approx(expected)
    lines = show("--profile", profile, "-k", "3").splitlines()
    head = ["metric", "first", "3", "profile", "difference", "n", "outcome"]
    assert head in [line.split() for line in lines]
    assert any(line.startswith("fusion") and "ranker" in line for line in lines)


def test_profile_meets_its_first_k(evaluate: Evaluate, profile: Path, tmp_path: Path) -> None:
    """A profile is compared with the first k that it was calibrated beside."""
    made = json.loads(profile.read_text(encoding="utf-8"))
    for route in made["routes"].values():
        route["verdict"]["serving_k"], route["certificate"] = 2, None
    beside_two = tmp_path / "profile.json"
    beside_two.write_text(json.dumps(made), encoding="utf-8")
    assert evaluate("--profile", beside_two, evaluate=LEXICAL)["baseline_k"] == 2


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

    def test_preset_and_values_make_utilities(self, evaluate: Evaluate) -> None:
        before = evaluate("--k", "3")
        strict = evaluate("--k", "3", preset="strict")
        worth = strict["utilities"]
        assert (worth["irrelevant"], worth["score_ratio"]) == (-0.5, None)
        assert means(strict)["harm"] > means(before)["harm"]
        # Suspicions are counted by the preset that has them.
        assert means(before)["distractor_rate"] is means(strict)["distractor_rate"] is None
        keys = {"preset": "blog", "utility": {"irrelevant": -0.3, "rank_limit": 1}}
        blog = evaluate("--k", "3", **keys)
        worth = blog["utilities"]
        assert (worth["irrelevant"], worth["rank_limit"]) == (-0.3, 1)
        assert (worth["score_ratio"], worth["unjudged"]) == (0.7, -0.2)
        assert means(blog)["distractor_rate"] > 0.0

    def test_exponential_gain_changes_only_ndcg(
        self, evaluate: Evaluate, show: Show, collection: Path, tmp_path: Path
    ) -> None:
        grades = (f"q-clean-lantern-0\t{name}-lantern\t{n}" for name, n in GRADES.items())
        graded = relabelled(collection, tmp_path / "graded", *grades)
        linear = means(evaluate(data=graded))
        exponential = means(evaluate(data=graded, gain="exponential"))
        differs = {name for name in linear if linear[name] != exponential[name]}
        assert {"ndcg"} <= differs <= {"ndcg", "ndcg_at_10"}
        printed = show(data=graded, gain="exponential")
        assert shown_metrics(printed) == METRICS, "who changes a metric is shown it"
        assert "exponential gain in nDCG" in printed

    def test_unlabelled_has_its_own_utility(
        self, evaluate: Evaluate, show: Show, collection: Path, tmp_path: Path
    ) -> None:
        """Of the first three passages one is relevant, and at most one other has a label."""
        some = relabelled(collection, tmp_path / "some", RELEVANT, NOT_RELEVANT)
        preset = means(evaluate("--k", "3", data=some, preset="strict"))
        free = means(evaluate("--k", "3", data=some, preset="strict", utility={"unjudged": 0}))
        assert preset["harm"] > free["harm"] >= 0.0
        assert preset["precision"] == pytest.approx(1 / 3)
        assert preset["precision_judged"] > preset["precision"]
        positives = relabelled(collection, tmp_path / "positives", RELEVANT)
        harsh = means(evaluate("--k", "3", data=positives, preset="strict"))
        assert harsh["harm"] > preset["harm"]
        assert harsh["precision_judged"] is None
        for data, line in (
            (some, "a passage without a label is worth -0.2 (unjudged), one labelled not"),
            (positives, "the labels hold only relevant passages"),
        ):
            assert " ".join(show(data=data, preset="strict").split()).count(line) == 1
