"""`ctxguard index`."""

import json
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
from tests.documents import markdown, sheet, text, word

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


def test_only_json_on_standard_output(index_made: Result, index: Path) -> None:
    document = read(index_made)
    assert document["passages"] == N_PASSAGES
    assert document["fingerprint"] == HybridRetriever.load(index).fingerprint()
    assert document["size_bytes"] > 0
    assert document["passages_per_second"] > 0
    assert "encoding passages" in index_made.stderr
    found = HybridRetriever.load(index).retrieve("clean a violin").passage_ids
    assert found[0] == "clean-violin"


def test_copies_are_counted(run: Run, tmp_path: Path) -> None:
    """Those that a context would hold once: equal but for case, white space and Unicode form."""
    corpus = corpus_of(tmp_path, "a kettle", "A  kettle", "ａ kettle", "a piano", "A PIANO", "tea")
    result = run.ok("index", corpus, "--out", tmp_path / "i", "--json")
    assert read(result)["copies"] == 3
    assert "3 passages with the text of another: a context holds one of them" in result.stderr
    result = run.ok("index", corpus, "--out", tmp_path / "i", "--update", "--json")
    assert read(result)["copies"] == 3


def test_the_lexical_engine_can_be_chosen(rank_bm25: Any) -> None:
    assert rank_bm25["fingerprint"]["lexical"].startswith("rank-bm25")


def test_failed_build_replaces_nothing(run: Run, tmp_path: Path) -> None:
    """An index is replaced by a new one and not by a failed build."""
    for name in ("old", "new"):
        corpus = corpus_of(tmp_path, **{name: "a kettle"})
        run.ok("index", corpus, "--out", tmp_path / "i")
        assert HybridRetriever.load(tmp_path / "i").passage_ids == (name,)
    corpus.write_text("{broken")
    run.refused("index", corpus, "--out", tmp_path / "i")
    assert HybridRetriever.load(tmp_path / "i").passage_ids == ("new",)


def test_language_is_kept_foreign_told(run: Run, tmp_path: Path) -> None:
    """A language is kept with the index and letters of another are told."""
    corpus = corpus_of(tmp_path, JAPANESE)
    result = run("index", corpus, "--out", tmp_path / "i", "--language", "cjk", "--json")
    assert "give --model a multilingual model" in " ".join(result.stderr.split())
    retriever = HybridRetriever.load(tmp_path / "i").on_route(Route.LEXICAL)
    assert retriever.retrieve("東京タワー").passage_ids == ("p0",)
    corpus = corpus_of(tmp_path, JAPANESE, " ")
    notes = " ".join(run.ok("index", corpus, "--out", tmp_path / "i").stdout.split())
    assert "100% of the letters are in scripts" in notes
    assert "ctxguard index --language cjk" in notes
    assert "1 passage with neither title nor text left out" in notes


def test_help_says_what_is_read(run: Run, tmp_path: Path) -> None:
    text = " ".join(run("index", "--help").stdout.replace("│", " ").split())
    for code in LANGUAGES:
        assert re.search(rf"\b{code}\b", text), code
    assert "a JSONL file, one per line with _id" in text
    (tmp_path / "page.xml").write_text("<xml>")
    run.refused("index", tmp_path / "page.xml", "--out", tmp_path / "i", says="JSONL is read")


class TestUpdate:
    @pytest.fixture
    def folder(self, run: Run, tmp_path: Path) -> Path:
        texts = {"kettle": "clean a kettle", "violin": "tune a violin", "bicycle": "oil a bicycle"}
        run.ok("index", corpus_of(tmp_path, **texts), "--out", tmp_path / "i")
        return tmp_path / "i"

    def test_only_changes_are_encoded(self, run: Run, folder: Path, tmp_path: Path) -> None:
        """Only new and changed passages are encoded and the same again changes nothing."""
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
        update = run.read("index", "--update", corpus, "--out", folder)["update"]
        assert (update.pop("unchanged"), set(update.values())) == (3, {0})

    def test_needs_index_and_keeps_settings(self, run: Run, folder: Path) -> None:
        update, corpus = ("index", "--update"), folder.parent / "c.jsonl"
        for out, more, said in (
            (folder, ("--language", "de"), "again without --update"),
            (folder.with_name("absent"), (), "build an index with `ctxguard index`"),
        ):
            run.refused(*update, corpus, "--out", out, *more, says=said)


def test_long_passages_counted_and_split(run: Run, tmp_path: Path) -> None:
    """An update splits them alike, and labels of a whole document count for its chunks."""
    (tmp_path / "qrels").mkdir()
    rows: list[dict[str, object]] = [
        {"_id": "long", "title": "Kettles", "text": LONG, "metadata": {"tenant": 7}},
        {"_id": "violin", "text": "tune a violin"},
        {"_id": "drum", "text": "beat a drum"},
    ]
    corpus = write_jsonl(tmp_path / "corpus.jsonl", rows)
    notes = " ".join(run("index", corpus, "--out", tmp_path / "whole").stdout.split())
    assert "passages longer than 256 tokens: 1; their ends are not searched" in notes
    assert "--chunk" in notes
    pytest.importorskip("semantic_text_splitter")
    document = run.read("index", corpus, "--out", tmp_path / "i", "--chunk")
    n_chunks = document["window"]["chunks"]
    assert document["window"] == {"tokens": 256, "longer": 1, "chunks": n_chunks}
    retriever = HybridRetriever.load(tmp_path / "i")
    chunks = [f"long#{n}" for n in range(1, n_chunks + 1)]
    assert sorted(retriever.passage_ids) == ["drum", *sorted(chunks), "violin"]
    texts = [retriever.passage(each).text for each in chunks]
    assert " ".join(" ".join(texts).split()) == LONG.strip()
    first = retriever.passage("long#1")
    assert (first.title, first.metadata) == ("Kettles", {"tenant": 7, "chunk_of": "long"})
    again = run.read("index", corpus, "--out", tmp_path / "i", "--update")["update"]
    assert (again["deleted"], again["encoded"]) == (0, 0)
    assert again["unchanged"] > 2

    asked = {"q1": "how to clean a kettle", "q2": "tune a violin"}
    write_jsonl(tmp_path / "queries.jsonl", [{"_id": n, "text": t} for n, t in asked.items()])
    (tmp_path / "qrels" / "test.tsv").write_text("q1\tlong\t1\nq2\tviolin\t1\n")
    data = ("--index", tmp_path / "i", "--data", tmp_path)
    assert figures(run.read("evaluate", *data, "-k", "2"))["recall"]["mean"]["value"] == 1


def test_model_without_a_limit(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SentenceTransformerEmbedder, "passage_window", None)
    document = run.read("index", corpus_of(tmp_path, LONG), "--out", tmp_path / "i")
    assert document["window"] == {"tokens": None, "longer": 0, "chunks": None}


def test_documents_are_cut_at_headings(run: Run, tmp_path: Path) -> None:
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
    metadata = {"path": "kettle.md", "heading": "repair a kettle"}
    assert retriever.passage(best).metadata == metadata
    chunk = retriever.passage("long.txt#1")
    assert chunk.text.startswith("How to clean a kettle")
    assert chunk.text.endswith(".")

    markdown(documents / "kettle.md", {"clean a kettle": "use vinegar"})
    updated = run.read("index", "--update", documents, *made)["update"]
    assert (updated["changed"], updated["deleted"], updated["encoded"]) == (1, 2, 1)


def test_update_keeps_the_unreadable(run: Run, tmp_path: Path) -> None:
    """And says so: by name, with the reason, and by its exit code."""
    for module in ("mammoth", "openpyxl", "semantic_text_splitter"):
        pytest.importorskip(module)
    documents, out, away = tmp_path / "handbook", tmp_path / "i", tmp_path / "away"
    made = (documents, "--out", out)
    (documents / "sub").mkdir(parents=True)
    word(documents / "lease.docx", {"Rent": "The rent is 1200 francs."})
    sheet(documents / "prices.xlsx", {"Prices": "A kettle costs 40 francs."})
    for name in ("empty", "sub/gone", "link", "noise", "deleted", "changed"):
        markdown(documents / f"{name}.md", {name: f"What {name} says."})
    text(documents / "long.txt", {"": LONG})
    run.ok("index", *made)
    before = {each.passage_id: each for each in HybridRetriever.load(out).stored_passages()}

    lease, long = (documents / "lease.docx").read_bytes(), (documents / "long.txt").read_bytes()
    (documents / "lease.docx").write_bytes(lease[: len(lease) // 2])
    (documents / "prices.xlsx").write_bytes(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 600)
    (documents / "empty.md").write_bytes(b"")
    (documents / "noise.md").write_bytes(bytes(range(256)))
    (documents / "long.txt").write_bytes(b"\xff\xfe" + long)
    (documents / "link.md").unlink()
    (documents / "link.md").symlink_to("nowhere.md")
    (documents / "sub").rename(away)
    (documents / "sub").symlink_to(away)
    (documents / "deleted.md").unlink()
    markdown(documents / "changed.md", {"changed": "It says something new."})
    document = json.loads(run.finding("index", "--update", *made, "--json").stdout)
    after = {each.passage_id: each for each in HybridRetriever.load(out).stored_passages()}
    assert {name for name in before if before[name] != after.get(name)} == {
        "changed.md:changed",
        "deleted.md:deleted",
    }
    assert document["update"]["deleted"] == document["update"]["changed"] == 1
    kept = {each["path"]: each["kept"] for each in document["left_out"] if each["kept"]}
    assert {name: n for name, n in kept.items() if name != "long.txt"} == dict.fromkeys(
        ("lease.docx", "prices.xlsx", "empty.md", "noise.md", "link.md", "sub"), 1
    )
    assert kept["long.txt"] > 1
    assert "password" in str(document["left_out"])

    says = "lease.docx is truncated, or not what its name says; as indexed before, 1 passage"
    run.finding("index", "--update", *made, says=says)
    (documents / "sub").unlink()
    away.rename(documents / "sub")
    for name in ("empty", "link", "noise"):
        (documents / f"{name}.md").unlink()
        markdown(documents / f"{name}.md", {name: f"What {name} says."})
    (documents / "lease.docx").write_bytes(lease)
    (documents / "long.txt").write_bytes(long)
    (documents / "prices.xlsx").unlink()
    mended = run.read("index", "--update", *made)
    assert (mended["update"]["deleted"], mended["left_out"]) == (1, [])


def test_ten_left_out_are_shown(run: Run, tmp_path: Path) -> None:
    """The rest is in the JSON document; documents come before files of other kinds."""
    documents = tmp_path / "handbook"
    documents.mkdir()
    markdown(documents / "a.md", {"A": "A kettle."})
    for n in range(12):
        (documents / f"a{n}.png").touch()
    (documents / "z.txt").touch()
    made = (documents, "--out", tmp_path / "i")
    shown = run.ok("index", *made).output
    assert "left out: z.txt is empty" in shown
    assert shown.count("a kind that is not read") == 9
    assert "left out: 3 more, which --json lists" in shown
    left_out = run.read("index", *made)["left_out"]
    assert len(left_out) == 13
    assert {"path": "z.txt", "reason": "is empty", "unread": True, "kept": 0} in left_out


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
        def encode(self: Any, texts: Sequence[str]) -> Any:
            if len(encoded) + len(texts) > most:
                raise KeyboardInterrupt
            encoded.extend(texts)
            return own(self, texts)

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
