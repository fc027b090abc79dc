"""An edited index answers as one built anew, is saved in little time, and survives a kill."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxguard.core.fusion import Fusion
from ctxguard.core.metadata_filter import Where
from ctxguard.core.types import Passage, Ranking, Route
from ctxguard.errors import DataError, IndexFolderError
from ctxguard.retrieval import HybridRetriever
from ctxguard.retrieval.index import hybrid_index
from ctxguard.retrieval.index.hybrid_index import Changes, HybridIndex
from ctxguard.retrieval.protocols import Float32Array
from ctxguard.retrieval.signals.term_vectors import term_cosines
from tests.doubles import WordHashEmbedder, WordTokenEmbedder

WORDS = ["red", "dog", "dogs", "fox", "foxes.", "rose", "wait_for", "sun", "sea", "the"]
QUERIES = ("red fox", "sun sun sea", "rose", "cat dog quagga")
NEAR = 1e-5
"""Below this, scores of different compiled loops may differ."""

passage_ids = st.sampled_from([f"p{n}" for n in range(14)])
texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=9).map(" ".join)
corpora = st.dictionaries(passage_ids, texts, min_size=1, max_size=10)
edits = st.lists(
    st.tuples(st.sampled_from(["add", "delete", "upsert"]), corpora), min_size=1, max_size=5
)


def passages_of(corpus: dict[str, str]) -> list[Passage]:
    return [
        Passage(passage_id, text, metadata={"first": text.split()[0]})
        for passage_id, text in corpus.items()
    ]


def build(corpus: dict[str, str], **settings: Any) -> HybridRetriever:
    settings = {"embedder": WordTokenEmbedder(), "signals": "full", **settings}
    return HybridRetriever.build(passages_of(corpus), **settings)


def load(folder: Path) -> HybridRetriever:
    return HybridRetriever.load(folder, embedder=WordTokenEmbedder())


def edit(retriever: HybridRetriever, corpus: dict[str, str], kind: str, by: dict[str, str]) -> None:
    """Apply one edit to both; what it cannot do is left out of it."""
    if kind == "upsert":
        retriever.upsert(passages_of(by))
        corpus |= by
    elif kind == "add" and (new := {each: by[each] for each in by.keys() - corpus.keys()}):
        retriever.add(passages_of(new))
        corpus |= new
    elif kind == "delete" and (gone := by.keys() & corpus.keys()) and len(gone) < len(corpus):
        retriever.delete(gone)
        for passage_id in gone:
            del corpus[passage_id]


def scores_by_id(ranking: Ranking) -> dict[str, float]:
    return dict(zip(ranking.passage_ids, ranking.scores, strict=True))


def signals_of(index: HybridIndex) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The text family with the term cosines, and the sentence family, of all rows."""
    assert index.forward is not None
    rows, query = np.arange(len(index.passages))[::-1].copy(), "the red foxes wait for quagga"
    tokens = WordTokenEmbedder().token_encoder().encode_query(query)
    table = WordTokenEmbedder().token_encoder().token_table()
    words = index.forward.text_signals(query, rows)
    places = rows if index.rows.is_plain else np.arange(rows.size)
    of_rows, weights = index.forward.passage_words(rows), index.forward.stem_weights
    words["cosines"] = term_cosines(of_rows, weights, places)
    sentences = {} if index.sentences is None else index.sentences.signals(tokens, rows, table)
    return tuple({name: x.tolist() for name, x in found.items()} for found in (words, sentences))


def assert_same_signals(edited: HybridIndex, anew: HybridIndex) -> None:
    (words, sentences), (expected_words, expected_sentences) = map(signals_of, (edited, anew))
    assert words == expected_words
    for name, values in sentences.items():
        assert values == pytest.approx(expected_sentences[name], abs=NEAR, nan_ok=True), name


def assert_same_answers(edited: HybridRetriever, anew: HybridRetriever) -> None:
    assert_same_signals(edited.generation, anew.generation)
    assert edited.passage_ids == anew.passage_ids
    assert edited.fingerprint() == anew.fingerprint()
    for query in QUERIES:
        for route in (Route.LEXICAL, Route.DENSE, Route.HYBRID):
            for depth, where in ((3, None), (100, None), (100, Where(first="red"))):
                one, other = (
                    each.with_fusion(Fusion("convex"))
                    .on_route(route)
                    .retrieve(query, depth=depth, where=where)
                    for each in (edited, anew)
                )
                assert one.scores == pytest.approx(other.scores, abs=NEAR)
                if depth > len(anew):
                    assert scores_by_id(one) == pytest.approx(scores_by_id(other), abs=NEAR)
                if route is Route.LEXICAL:
                    assert one.passage_ids == other.passage_ids
                for at, passage_id in enumerate(one.passage_ids):
                    assert one.passages[at] == anew.passage(passage_id)


@given(corpus=corpora, edits=edits)
@settings(max_examples=40, deadline=None)
def test_any_edits_give_the_answers_of_an_index_built_anew(
    corpus: dict[str, str], edits: list[tuple[str, dict[str, str]]]
) -> None:
    now = dict(corpus)
    retriever = build(now)
    for kind, by in edits:
        edit(retriever, now, kind, by)
    assert_same_answers(retriever, build(now))


def test_edits_of_a_saved_index_give_the_answers_of_one_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many of them, each saved and followed, across several merges."""
    monkeypatch.setattr(hybrid_index, "MERGE_FROM", 12)
    chance = random.Random(0)

    def some(n: int) -> dict[str, str]:
        return {
            f"p{chance.randrange(60):02}": " ".join(chance.choices(WORDS, k=chance.randint(1, 9)))
            for _ in range(n)
        }

    now = some(60)
    build(now).save(tmp_path)
    writer, reader = load(tmp_path), load(tmp_path)
    merged = set()
    for _ in range(12):
        edit(writer, now, chance.choice(["add", "delete", "upsert"]), some(4))
        writer.save(tmp_path)
        reader.reload()
        merged.add(reader.generation.rows.is_plain)
        assert_same_answers(reader, build(now))
    assert merged == {True, False}


@pytest.mark.parametrize("n_deleted", [1, 150])
def test_deleted_passages_take_no_places_above_the_exact_limit(n_deleted: int) -> None:
    corpus = {f"p{n:04}": f"word{n} word{n % 40} sun" for n in range(1100)}
    retriever = HybridRetriever.build(
        passages_of(corpus), embedder=WordHashEmbedder(), exact_limit=1
    ).on_route(Route.DENSE)
    assert not retriever.generation.dense.is_exact
    best = retriever.retrieve("word7 sun", depth=n_deleted).passage_ids
    retriever.delete(best)
    ranking = retriever.retrieve("word7 sun", depth=20)
    assert len(ranking) == 20
    assert not set(ranking.passage_ids) & set(best)
    retriever.add(passages_of({"new": "word7 sun"}))
    assert retriever.retrieve("word7 sun", depth=20).passage_ids[0] == "new"


class Recording(WordHashEmbedder):
    """Remembers what it encoded."""

    def __init__(self) -> None:
        super().__init__()
        self.encoded: list[str] = []

    def encode_passages(self, texts: Sequence[str], progress: object = None) -> Float32Array:
        self.encoded.extend(texts)
        return super().encode_passages(texts)


class TestUpsert:
    @pytest.fixture
    def embedder(self) -> Recording:
        return Recording()

    @pytest.fixture
    def retriever(self, embedder: Recording) -> HybridRetriever:
        corpus = {"a": "red fox", "b": "sea", "c": "sun"}
        retriever = HybridRetriever.build(passages_of(corpus), embedder=embedder)
        embedder.encoded.clear()
        return retriever

    def test_it_adds_replaces_and_leaves_what_is_there(
        self, retriever: HybridRetriever, embedder: Recording
    ) -> None:
        changes = retriever.upsert(passages_of({"a": "red fox", "b": "the sea", "d": "dog"}))
        assert changes == Changes(added=1, changed=1, unchanged=1, encoded=2)
        assert sorted(embedder.encoded) == ["dog", "the sea"]
        assert retriever.passage_ids == ("a", "b", "c", "d")
        assert retriever.passage("b").text == "the sea"

    def test_others_can_be_deleted(self, retriever: HybridRetriever) -> None:
        changes = retriever.upsert(passages_of({"b": "sea", "d": "dog"}), delete_others=True)
        assert changes == Changes(added=1, deleted=2, unchanged=1, encoded=1)
        assert retriever.passage_ids == ("b", "d")

    def test_other_metadata_is_kept_without_encoding(
        self, retriever: HybridRetriever, embedder: Recording
    ) -> None:
        passage = Passage("a", "red fox", metadata={"first": "seen"})
        assert retriever.upsert([passage]) == Changes(changed=1)
        assert embedder.encoded == []
        assert retriever.passage("a") == passage
        assert retriever.retrieve("fox", where=Where(first="seen")).passage_ids == ("a",)
        assert "a" not in retriever.retrieve("fox", where=Where(first="red")).passage_ids

    def test_nothing_new_changes_nothing(self, retriever: HybridRetriever) -> None:
        before = retriever.generation
        assert retriever.upsert(passages_of({"a": "red fox"})) == Changes(unchanged=1)
        assert retriever.generation is before

    def test_undone_edits_leave_no_trace(self, retriever: HybridRetriever) -> None:
        before = retriever.fingerprint()
        retriever.add(passages_of({"d": "dog"}))
        assert retriever.fingerprint() != before
        retriever.delete(["d"])
        assert retriever.fingerprint() == before
        assert retriever.generation.rows.is_plain

    def test_a_broken_passage_changes_nothing(self, retriever: HybridRetriever) -> None:
        before = retriever.generation
        with pytest.raises(DataError, match="metadata of passage 'x'"):
            retriever.upsert([Passage("x", "text", metadata={"when": object()})])
        assert retriever.generation is before

    def test_every_passage_can_be_replaced(self, retriever: HybridRetriever) -> None:
        retriever.upsert(passages_of({"x": "dog", "y": "cat"}), delete_others=True)
        anew = build({"x": "dog", "y": "cat"}, embedder=WordHashEmbedder(), signals="text")
        assert_same_answers(retriever, anew)

    def test_the_report_is_that_of_what_is_there(self, retriever: HybridRetriever) -> None:
        retriever.upsert([Passage("j", "東京" * 100)])
        assert retriever.report.indexed == 4
        assert retriever.report.unhandled_letters > 0.5
        retriever.delete(["j"])
        assert retriever.report.unhandled_letters == 0.0
        assert retriever.report.script_warning is None

    def test_the_other_engine_can_be_edited_too(self) -> None:
        now = {"a": "red fox", "b": "sea", "c": "sun"}
        retriever = build(now, lexical="rank-bm25")
        for kind, by in (("upsert", {"a": "dog", "d": "red"}), ("delete", {"b": ""})):
            edit(retriever, now, kind, by)
        assert_same_answers(retriever, build(now, lexical="rank-bm25"))


class TestSaving:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        build({f"p{n}": f"red fox number{n}" for n in range(9)}).save(tmp_path / "index")
        return tmp_path / "index"

    def test_what_did_not_change_is_not_written_again(self, folder: Path) -> None:
        retriever = load(folder)
        (before,) = folder.glob("generation-*/segment_0/vectors.npy")
        inode = before.stat().st_ino
        retriever.add(passages_of({"new": "sea"}))
        retriever.save(folder)
        (after,) = folder.glob("generation-*/segment_0/vectors.npy")
        assert (after.stat().st_ino, after != before) == (inode, True)
        assert "new" in load(folder).passage_ids

    def test_where_files_cannot_be_linked_they_are_written(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(source: Path, target: Path) -> None:
            raise PermissionError("no links here")

        retriever = load(folder)
        monkeypatch.setattr(os, "link", refuse)
        retriever.delete(["p3"])
        retriever.save(folder)
        assert len(load(folder)) == 8

    def test_it_is_saved_whole_into_another_folder(self, folder: Path, tmp_path: Path) -> None:
        retriever = load(folder)
        retriever.upsert(passages_of({"p3": "sea", "new": "sun"}))
        retriever.save(tmp_path / "other")
        other = load(tmp_path / "other")
        assert_same_answers(retriever, other)

    def test_a_follower_opens_the_base_once(self, folder: Path) -> None:
        writer, reader = load(folder), load(folder)
        reader.warm_up(filter_fields=["first"])
        base = reader.generation.segments[0]
        writer.add(passages_of({"new": "sea"}))
        writer.save(folder)
        assert reader.reload()
        assert reader.generation.segments[0] is base
        assert reader.generation.passages.metadata_rows.fields == ("first",)
        assert reader.retrieve("sea", where=Where(first="sea")).passage_ids == ("new",)

    def test_a_tail_of_another_index_is_refused(self, folder: Path, tmp_path: Path) -> None:
        retriever = load(folder)
        retriever.add(passages_of({"new": "sea"}))
        retriever.save(folder)
        file = next(folder.glob("generation-*/rows/deleted.npy"))
        np.save(file, np.array([1, 2]))
        with pytest.raises(IndexFolderError, match=r"deleted\.npy"):
            load(folder)

    def test_readers_follow_a_writer_and_see_one_state_at_a_time(self, folder: Path) -> None:
        """Of each pair of passages that is added together, both are there or neither."""
        writer, reader = load(folder), load(folder)
        done = threading.Event()

        def write() -> None:
            for n in range(30):
                pair = {f"x{n}": f"pair number{n}", f"y{n}": f"pair number{n}"}
                writer.upsert(passages_of(pair))
                writer.save(folder)
            done.set()

        thread = threading.Thread(target=write)
        thread.start()
        seen = 0
        while not done.is_set() or reader.reload():
            reader.reload()
            found = reader.on_route(Route.LEXICAL).retrieve("pair", depth=100).passage_ids
            xs, ys = ({each[1:] for each in found if each[0] == side} for side in "xy")
            assert xs == ys
            assert len(xs) >= seen
            seen = len(xs)
        thread.join()
        assert seen == 30


PROGRAM = """
import sys
from pathlib import Path
from typing import Any
from ctxguard.core.types import Passage
from ctxguard.retrieval import HybridRetriever
from tests.doubles import WordHashEmbedder, WordTokenEmbedder

folder, first = Path(sys.argv[1]), int(sys.argv[2])
retriever = HybridRetriever.load(folder, embedder=WordHashEmbedder())
for n in range(first, 10_000):
    retriever.upsert([Passage(f"n{n:05}", f"text number {n}"), Passage("last", f"number {n}")])
    if n % 3 == 0:
        retriever.delete([f"n{n:05}"])
    retriever.save(folder)
    print(n, flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_a_writer_that_is_killed_leaves_the_old_or_the_new_index(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    HybridRetriever.build([Passage("last", "number 0")], embedder=WordHashEmbedder()).save(folder)
    chance, first = random.Random(0), 1
    for _ in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), str(folder), str(first)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        acknowledged = int(process.stdout.readline())
        time.sleep(chance.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        rest = process.communicate()[0].split()
        acknowledged = int(rest[-1]) if rest else acknowledged
        retriever = HybridRetriever.load(folder, embedder=WordHashEmbedder(), verify=True)
        last = int(retriever.passage("last").text.split()[1])
        # Whatever was reported as saved is there, and at most the edit that was being saved.
        assert acknowledged <= last <= acknowledged + 1
        expected = {f"n{n:05}" for n in range(1, last + 1) if n % 3}
        assert set(retriever.passage_ids) == expected | {"last"}
        first = last + 1
