"""`ctxguard index`."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from household import SUBJECTS, TASKS, write_jsonl
from running import Result, Run, figures, read

from ctxguard.core.types import Route
from ctxguard.retrieval.analysers import LANGUAGES
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder
from tests.documents import markdown, text

pytestmark = pytest.mark.model

N_PASSAGES = len(SUBJECTS) * len(TASKS)


JAPANESE = "東京タワーは一九五八年に完成した電波塔である。"
LONG = "How to clean a kettle: boil it with vinegar, wait and rinse it twice. " * 40


def corpus_of(folder: Path, *texts: str, **named: str) -> Path:
    """A corpus of passages p0, p1, …, or of names of their own."""
    rows = {f"p{n}": text for n, text in enumerate(texts)} | named
    return write_jsonl(
        folder / "c.jsonl", [{"_id": name, "text": text} for name, text in rows.items()]
    )


def test_json_is_the_only_thing_on_standard_output(index_made: Result, index: Path) -> None:
    document = read(index_made)
    assert document["passages"] == N_PASSAGES
    assert document["fingerprint"] == HybridRetriever.load(index).fingerprint()
    assert document["size_bytes"] > 0
    assert document["passages_per_second"] > 0
    assert "encoding passages" in index_made.stderr
    found = HybridRetriever.load(index).retrieve("clean a violin").passage_ids
    assert found[0] == "clean-violin"


def test_the_lexical_engine_can_be_chosen(rank_bm25: Any) -> None:
    assert rank_bm25["fingerprint"]["lexical"].startswith("rank-bm25")


def test_an_index_is_replaced_by_a_new_one_and_not_by_a_failed_build(
    run: Run, tmp_path: Path
) -> None:
    for name in ("old", "new"):
        corpus = corpus_of(tmp_path, **{name: "a kettle"})
        run.ok("index", corpus, "--out", tmp_path / "i")
        assert HybridRetriever.load(tmp_path / "i").passage_ids == (name,)
    corpus.write_text("{broken")
    run.refused("index", corpus, "--out", tmp_path / "i")
    assert HybridRetriever.load(tmp_path / "i").passage_ids == ("new",)


def test_a_language_is_kept_with_the_index_and_letters_of_another_are_told(
    run: Run, tmp_path: Path
) -> None:
    corpus = corpus_of(tmp_path, JAPANESE)
    result = run("index", corpus, "--out", tmp_path / "i", "--language", "cjk", "--json")
    assert "give --model a multilingual model" in " ".join(result.stderr.split())
    retriever = HybridRetriever.load(tmp_path / "i").on_route(Route.LEXICAL)
    assert retriever.retrieve("東京タワー").passage_ids == ("p0",)
    corpus = corpus_of(tmp_path, JAPANESE, " ")
    notes = " ".join(run.ok("index", corpus, "--out", tmp_path / "i").stdout.split())
    assert "100% of the letters are of scripts" in notes
    assert "ctxguard index --language cjk" in notes
    assert "1 passage with neither title nor text left out" in notes


def test_help_and_errors_say_what_can_be_read(run: Run, tmp_path: Path) -> None:
    text = " ".join(run("index", "--help").stdout.replace("│", " ").split())
    for code in LANGUAGES:
        assert re.search(rf"\b{code}\b", text), code
    assert "a JSONL file, one a line with _id" in text
    (tmp_path / "page.xml").write_text("<xml>")
    result = run.refused("index", tmp_path / "page.xml", "--out", tmp_path / "i")
    assert "JSONL is read" in " ".join(result.stderr.split())


class TestUpdate:
    @pytest.fixture
    def folder(self, run: Run, tmp_path: Path) -> Path:
        texts = {"kettle": "clean a kettle", "violin": "tune a violin", "bicycle": "oil a bicycle"}
        run.ok("index", corpus_of(tmp_path, **texts), "--out", tmp_path / "i")
        return tmp_path / "i"

    def test_only_new_and_changed_passages_are_encoded_and_the_same_again_changes_nothing(
        self, run: Run, folder: Path, tmp_path: Path
    ) -> None:
        now = {"kettle": "clean a kettle", "violin": "string a violin", "new": "a drum"}
        corpus = corpus_of(tmp_path, **now)
        result = run.ok("index", "--update", corpus, "--out", folder)
        assert "1 added, 1 changed, 1 deleted, 1 unchanged, 2 encoded" in result.stdout
        assert "2/2" in result.stderr
        retriever = HybridRetriever.load(folder)
        assert retriever.passage_ids == ("kettle", "new", "violin")
        assert retriever.retrieve("string").passage_ids[0] == "violin"
        run("index", corpus, "--out", tmp_path / "anew")
        assert retriever.fingerprint() == HybridRetriever.load(tmp_path / "anew").fingerprint()
        update = run.read("index", "--update", corpus, "--out", folder, "--json")["update"]
        assert (update.pop("unchanged"), set(update.values())) == (3, {0})

    def test_it_needs_an_index_and_keeps_its_settings(self, run: Run, folder: Path) -> None:
        update, corpus = ("index", "--update"), folder.parent / "c.jsonl"
        for out, more, said in (
            (folder, ("--language", "de"), "anew without --update"),
            (folder.with_name("absent"), (), "build an index with `ctxguard index`"),
        ):
            result = run.refused(*update, corpus, "--out", out, *more)
            assert said in " ".join(result.stderr.split())


class TestLongPassages:
    ROWS = (
        {"_id": "long", "title": "Kettles", "text": LONG, "metadata": {"tenant": 7}},
        {"_id": "short", "text": "tune a violin"},
    )

    @pytest.fixture
    def corpus(self, tmp_path: Path) -> Path:
        return write_jsonl(tmp_path / "c.jsonl", self.ROWS)

    def test_they_are_counted_and_can_be_split_as_an_update_goes_on_to(
        self, run: Run, corpus: Path, tmp_path: Path
    ) -> None:
        notes = " ".join(run("index", corpus, "--out", tmp_path / "whole").stdout.split())
        assert "passages longer than 256 tokens: 1; their ends are not searched" in notes
        assert "--chunk" in notes
        pytest.importorskip("semantic_text_splitter")
        document = run.read("index", corpus, "--out", tmp_path / "i", "--chunk", "--json")
        n_chunks = document["window"]["chunks"]
        assert document["window"] == {"tokens": 256, "longer": 1, "chunks": n_chunks}
        retriever = HybridRetriever.load(tmp_path / "i")
        chunks = [f"long#{n}" for n in range(1, n_chunks + 1)]
        assert sorted(retriever.passage_ids) == sorted([*chunks, "short"])
        texts = [retriever.passage(each).text for each in chunks]
        assert " ".join(" ".join(texts).split()) == LONG.strip()
        first = retriever.passage("long#1")
        assert (first.title, first.metadata) == ("Kettles", {"tenant": 7, "chunk_of": "long"})
        again = run.read("index", corpus, "--out", tmp_path / "i", "--update", "--json")["update"]
        assert (again["deleted"], again["encoded"]) == (0, 0)
        assert again["unchanged"] > 2


def test_labels_of_documents_count_over_an_index_of_chunks(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("semantic_text_splitter")
    (tmp_path / "qrels").mkdir()
    texts = {"long": LONG, "violin": "tune a violin", "drum": "beat a drum"}
    corpus_of(tmp_path, **texts).rename(tmp_path / "corpus.jsonl")
    queries = [
        {"_id": "q1", "text": "how to clean a kettle"},
        {"_id": "q2", "text": "tune a violin"},
    ]
    write_jsonl(tmp_path / "queries.jsonl", queries)
    (tmp_path / "qrels" / "test.tsv").write_text("q1\tlong\t1\nq2\tviolin\t1\n")
    run.ok("index", tmp_path, "--out", tmp_path / "i", "--chunk")
    data = ("--index", tmp_path / "i", "--data", tmp_path)
    assert figures(run.read("evaluate", *data, "-k", "2", "--json"))["recall"]["mean"]["value"] == 1


def test_documents_are_cut_at_headings_and_sentences_which_labels_name(
    run: Run, tmp_path: Path
) -> None:
    """And an update encodes the sections that have changed."""
    pytest.importorskip("semantic_text_splitter")
    documents, made = tmp_path / "handbook", ("--out", tmp_path / "i", "--json")
    documents.mkdir()
    for subject in SUBJECTS[:3]:
        sections = {f"{task} a {subject}": how.format(subject) for task, how in TASKS.items()}
        markdown(documents / f"{subject}.md", sections)
    text(documents / "long.txt", {"": LONG})
    document = run.read("index", documents, *made)
    retriever = HybridRetriever.load(tmp_path / "i")
    assert document["passages"] == len(retriever) > 10
    assert document["window"]["chunks"] > 1
    best = retriever.retrieve("how do I repair a kettle").passage_ids[0]
    assert best == "kettle.md:repair-a-kettle"
    metadata = retriever.passage(best).metadata
    assert metadata == {"path": "kettle.md", "heading": "repair a kettle"}
    chunk = retriever.passage("long.txt#1")
    assert chunk.text.startswith("How to clean a kettle")
    assert chunk.text.endswith(".")

    rows: list[dict[str, object]] = [
        {
            "query_id": f"{task}-{subject}",
            "text": f"how do I {task} my {subject}",
            "relevant": [f"{subject}.md:{task}-a-{subject}"],
        }
        for subject in SUBJECTS[:3]
        for task in TASKS
    ]
    labels = write_jsonl(tmp_path / "labels.jsonl", rows)
    measured = run.read("evaluate", "--index", tmp_path / "i", "--data", labels, "--json")
    assert (measured["queries"], measured["unknown_passages"]) == (9, 0)
    markdown(documents / "kettle.md", {"clean a kettle": "use vinegar"})
    updated = run.read("index", "--update", documents, *made)["update"]
    assert (updated["changed"], updated["deleted"], updated["encoded"]) == (1, 2, 1)


@pytest.mark.parametrize("update", [False, True])
def test_an_interrupted_run_goes_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, update: bool
) -> None:
    """What it encoded is kept beside the folder until an index is saved, which has all of it."""
    corpus, folder = corpus_of(tmp_path, "a kettle"), tmp_path / "i"
    if update:
        run.ok("index", corpus, "--out", folder)
    corpus_of(tmp_path, *[f"kettle number {n}" for n in range(600)])
    encoded, own = list[str](), SentenceTransformerEmbedder.encode_passages

    def until(most: int) -> Callable[..., Any]:
        def encode(self: Any, texts: Sequence[str], progress: Any = None) -> Any:
            if len(encoded) + len(texts) > most:
                raise KeyboardInterrupt
            encoded.extend(texts)
            return own(self, texts, progress)

        return encode

    arguments = ("index", corpus, "--out", folder, *(["--update"] if update else []))
    monkeypatch.setattr(SentenceTransformerEmbedder, "encode_passages", until(512))
    assert run(*arguments).exit_code == 130
    assert (tmp_path / "i.unfinished").is_file()
    assert folder.exists() is update
    monkeypatch.setattr(SentenceTransformerEmbedder, "encode_passages", until(600))
    done = run.ok(*arguments)
    assert "512 passages that an interrupted run encoded" in " ".join(done.output.split())
    assert "encoding passages: 0 of 600" in done.stderr
    assert sorted(encoded) == sorted(f"kettle number {n}" for n in range(600))
    assert not (tmp_path / "i.unfinished").exists()
    assert len(HybridRetriever.load(folder)) == 600
