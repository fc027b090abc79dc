"""`ctxguard index`."""

import json
import re
from pathlib import Path

import pytest
from household import SUBJECTS, TASKS, write_jsonl
from running import Run

from ctxguard.core.types import Route
from ctxguard.retrieval.analysers import LANGUAGES
from ctxguard.retrieval.hybrid.retriever import HybridRetriever

pytestmark = pytest.mark.model

N_PASSAGES = len(SUBJECTS) * len(TASKS)


def test_an_indexed_corpus_can_be_searched(index: Path) -> None:
    retriever = HybridRetriever.load(index)
    assert len(retriever) == N_PASSAGES
    assert retriever.retrieve("clean a violin").passage_ids[0] == "clean-violin"


def test_json_is_the_only_thing_on_standard_output(
    run: Run, collection: Path, index: Path, tmp_path: Path
) -> None:
    result = run("index", collection, "--out", tmp_path / "i", "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert document["passages"] == N_PASSAGES
    assert document["vectors"] == {"dimension": 384, "search": "exact"}
    assert document["fingerprint"] == HybridRetriever.load(index).fingerprint()
    assert document["size_bytes"] > 0
    assert document["passages_per_second"] > 0
    assert "encoding passages" in result.stderr


def test_passages_that_are_left_out_are_counted_with_the_reason(run: Run, tmp_path: Path) -> None:
    rows = [{"_id": "a", "text": "a kettle"}, {"_id": "b", "text": " "}]
    corpus = write_jsonl(tmp_path / "c.jsonl", rows)
    result = run("index", corpus, "--out", tmp_path / "i")
    assert result.exit_code == 0
    assert "1 (neither title nor text)" in result.stdout


def test_the_lexical_engine_can_be_chosen(run: Run, collection: Path, tmp_path: Path) -> None:
    pytest.importorskip("rank_bm25")
    result = run(
        *("index", collection, "--out", tmp_path / "i", "--lexical", "rank-bm25", "--json"),
    )
    document = json.loads(result.stdout)
    assert document["fingerprint"]["lexical"].startswith("rank-bm25")
    assert document["vectors"]["search"] == "exact"


def test_an_index_is_replaced_by_a_new_one(run: Run, tmp_path: Path) -> None:
    for passage_id in ("old", "new"):
        corpus = write_jsonl(tmp_path / "c.jsonl", [{"_id": passage_id, "text": "a kettle"}])
        assert run("index", corpus, "--out", tmp_path / "i").exit_code == 0
    assert HybridRetriever.load(tmp_path / "i").passage_ids == ("new",)


def test_a_failed_build_leaves_the_old_index_as_it_was(run: Run, tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "c.jsonl", [{"_id": "old", "text": "a kettle"}])
    run("index", corpus, "--out", tmp_path / "i")
    corpus.write_text("{broken")
    assert run("index", corpus, "--out", tmp_path / "i").exit_code == 2
    assert HybridRetriever.load(tmp_path / "i").passage_ids == ("old",)


JAPANESE = "東京タワーは一九五八年に完成した電波塔である。"


def test_a_language_is_kept_with_the_index(run: Run, tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "c.jsonl", [{"_id": "tower", "text": JAPANESE}])
    result = run("index", corpus, "--out", tmp_path / "i", "--language", "cjk", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["unhandled_letters"] == 0.0
    assert "give --model a multilingual model" in " ".join(result.stderr.split())
    retriever = HybridRetriever.load(tmp_path / "i").on_route(Route.LEXICAL)
    assert retriever.retrieve("東京タワー").passage_ids == ("tower",)


def test_a_corpus_that_does_not_fit_the_language_is_said_with_what_to_do(
    run: Run, tmp_path: Path
) -> None:
    corpus = write_jsonl(tmp_path / "c.jsonl", [{"_id": "tower", "text": JAPANESE}])
    result = run("index", corpus, "--out", tmp_path / "i")
    assert result.exit_code == 0
    notes = " ".join(result.stdout.split())
    assert "100% of the letters are of scripts" in notes
    assert "ctxguard index --language cjk" in notes


def test_an_unknown_language_is_refused_before_the_corpus_is_read(run: Run, tmp_path: Path) -> None:
    result = run("index", tmp_path / "absent", "--out", tmp_path / "i", "--language", "xx")
    assert result.exit_code == 2
    assert "no analyser for the language 'xx'" in result.stderr


def test_the_help_lists_every_language(run: Run) -> None:
    text = run("index", "--help").stdout
    for code in LANGUAGES:
        assert re.search(rf"\b{code}\b", text), code


def test_a_folder_with_other_files_is_refused_before_the_corpus_is_read(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    result = run("index", tmp_path / "absent", "--out", tmp_path)
    assert result.exit_code == 2
    assert "thesis.txt" in result.stderr


LONG = "How to clean a kettle: boil it with vinegar, wait and rinse it twice. " * 40


class TestUpdate:
    ROWS = (
        {"_id": "kettle", "text": "clean a kettle"},
        {"_id": "violin", "text": "tune a violin"},
        {"_id": "bicycle", "text": "oil a bicycle"},
    )

    @pytest.fixture
    def folder(self, run: Run, tmp_path: Path) -> Path:
        corpus = write_jsonl(tmp_path / "c.jsonl", self.ROWS)
        assert run("index", corpus, "--out", tmp_path / "i").exit_code == 0
        return tmp_path / "i"

    def test_only_what_changed_is_encoded(self, run: Run, folder: Path, tmp_path: Path) -> None:
        kettle, violin, _ = self.ROWS
        rows = [kettle, {**violin, "text": "string a violin"}, {"_id": "new", "text": "a drum"}]
        corpus = write_jsonl(tmp_path / "d.jsonl", rows)
        result = run("index", "--update", corpus, "--out", folder)
        assert result.exit_code == 0, result.stderr
        assert "1 added, 1 changed, 1 deleted, 1 unchanged, 2 encoded" in result.stdout
        retriever = HybridRetriever.load(folder)
        assert retriever.passage_ids == ("kettle", "new", "violin")
        assert retriever.retrieve("string").passage_ids[0] == "violin"
        run("index", corpus, "--out", tmp_path / "anew")
        assert retriever.fingerprint() == HybridRetriever.load(tmp_path / "anew").fingerprint()

    def test_the_same_corpus_changes_nothing(self, run: Run, folder: Path, tmp_path: Path) -> None:
        result = run("index", "--update", tmp_path / "c.jsonl", "--out", folder, "--json")
        update = json.loads(result.stdout)["update"]
        assert (update.pop("unchanged"), set(update.values())) == (3, {0})

    def test_settings_of_the_index_cannot_be_changed(
        self, run: Run, folder: Path, tmp_path: Path
    ) -> None:
        corpus = tmp_path / "c.jsonl"
        result = run("index", "--update", corpus, "--out", folder, "--language", "de")
        assert result.exit_code == 2
        assert "--language" in result.stderr
        assert "anew without --update" in " ".join(result.stderr.split())

    def test_there_must_be_an_index(self, run: Run, tmp_path: Path) -> None:
        corpus = write_jsonl(tmp_path / "c.jsonl", self.ROWS)
        result = run("index", "--update", corpus, "--out", tmp_path / "absent")
        assert result.exit_code == 2
        assert "build an index with `ctxguard index`" in " ".join(result.stderr.split())


class TestLongPassages:
    ROWS = (
        {"_id": "long", "title": "Kettles", "text": LONG, "metadata": {"tenant": 7}},
        {"_id": "short", "text": "tune a violin"},
    )

    @pytest.fixture
    def corpus(self, tmp_path: Path) -> Path:
        return write_jsonl(tmp_path / "c.jsonl", self.ROWS)

    def test_they_are_counted(self, run: Run, corpus: Path, tmp_path: Path) -> None:
        result = run("index", corpus, "--out", tmp_path / "i")
        notes = " ".join(result.stdout.split())
        assert "passages longer than 256 tokens: 1; their ends are not searched" in notes
        assert "--chunk" in notes

    def test_they_can_be_split(self, run: Run, corpus: Path, tmp_path: Path) -> None:
        pytest.importorskip("semantic_text_splitter")
        result = run("index", corpus, "--out", tmp_path / "i", "--chunk", "--json")
        document = json.loads(result.stdout)
        n_chunks = document["window"]["chunks"]
        assert document["window"] == {"tokens": 256, "longer": 1, "chunks": n_chunks}
        retriever = HybridRetriever.load(tmp_path / "i")
        chunks = [f"long#{n}" for n in range(1, n_chunks + 1)]
        assert sorted(retriever.passage_ids) == sorted([*chunks, "short"])
        texts = [retriever.passage(each).text for each in chunks]
        assert " ".join(" ".join(texts).split()) == LONG.strip()
        first = retriever.passage("long#1")
        assert (first.title, first.metadata) == ("Kettles", {"tenant": 7, "chunk_of": "long"})

    def test_an_update_splits_as_the_index_was_split(
        self, run: Run, corpus: Path, tmp_path: Path
    ) -> None:
        pytest.importorskip("semantic_text_splitter")
        run("index", corpus, "--out", tmp_path / "i", "--chunk")
        result = run("index", corpus, "--out", tmp_path / "i", "--update", "--json")
        update = json.loads(result.stdout)["update"]
        assert (update["deleted"], update["encoded"]) == (0, 0)
        assert update["unchanged"] > 2


def test_what_can_be_read_is_said_in_help_and_errors(run: Run, tmp_path: Path) -> None:
    text = " ".join(run("index", "--help").stdout.replace("│", " ").split())
    assert "a JSONL file, one passage a line" in text
    (tmp_path / "page.html").write_text("<html>")
    result = run("index", tmp_path / "page.html", "--out", tmp_path / "i")
    assert result.exit_code == 2
    assert "JSONL is read" in " ".join(result.stderr.split())


def test_labels_of_documents_count_over_an_index_of_chunks(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("semantic_text_splitter")
    rows = [
        {"_id": "long", "title": "Kettles", "text": LONG},
        {"_id": "violin", "text": "tune a violin"},
        {"_id": "drum", "text": "beat a drum"},
    ]
    (tmp_path / "qrels").mkdir()
    write_jsonl(tmp_path / "corpus.jsonl", rows)
    queries = [
        {"_id": "q1", "text": "how to clean a kettle"},
        {"_id": "q2", "text": "tune a violin"},
    ]
    write_jsonl(tmp_path / "queries.jsonl", queries)
    (tmp_path / "qrels" / "test.tsv").write_text("q1\tlong\t1\nq2\tviolin\t1\n")
    assert run("index", tmp_path, "--out", tmp_path / "i", "--chunk").exit_code == 0
    result = run("evaluate", "--index", tmp_path / "i", "--data", tmp_path, "-k", "2", "--json")
    assert result.exit_code == 0, result.stderr
    metrics = json.loads(result.stdout)["metrics"]
    assert metrics["recall"]["value"] == 1.0
