"""An updated index answers as one built anew, encodes only what is new, and readers follow it."""

import random
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxguard.core.metadata_filter import Where
from ctxguard.core.types import Passage, Ranking, Route
from ctxguard.errors import DataError
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.index.hybrid_index import Changes
from tests.doubles import CountedEmbedder, WordHashEmbedder, WordTokenEmbedder

WORDS = ["red", "dog", "dogs", "fox", "foxes.", "rose", "wait_for", "sun", "sea", "the"]
QUERIES = ("red fox", "sun sun sea", "cat dog quagga")
NEAR = 1e-5
"""Below this, scores of sums in another order may differ."""

passage_ids = st.sampled_from([f"p{n}" for n in range(14)])
texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=9).map(" ".join)
corpora = st.dictionaries(passage_ids, texts, min_size=1, max_size=10)


def passages_of(corpus: dict[str, str]) -> list[Passage]:
    return [
        Passage(passage_id, text, metadata={"first": text.split()[0]})
        for passage_id, text in corpus.items()
    ]


def build(corpus: dict[str, str], **settings: Any) -> HybridRetriever:
    settings = {"embedder": WordTokenEmbedder(), **settings}
    return HybridRetriever.build(passages_of(corpus), **settings)


def load(folder: Path) -> HybridRetriever:
    return HybridRetriever.load(folder, embedder=WordTokenEmbedder())


def scores_by_id(ranking: Ranking) -> dict[str, float]:
    return dict(zip(ranking.passage_ids, ranking.scores, strict=True))


def assert_same_answers(updated: HybridRetriever, anew: HybridRetriever) -> None:
    assert (updated.passage_ids, updated.fingerprint()) == (anew.passage_ids, anew.fingerprint())
    assert updated.report == anew.report
    for query in QUERIES:
        for route in (Route.LEXICAL, Route.DENSE, Route.HYBRID):
            for depth, where in ((3, None), (100, None), (100, Where(first="red"))):
                one, other = (
                    each.on_route(route).retrieve(query, depth=depth, where=where)
                    for each in (updated, anew)
                )
                assert one.scores == pytest.approx(other.scores, abs=NEAR)
                if depth > len(anew):
                    assert scores_by_id(one) == pytest.approx(scores_by_id(other), abs=NEAR)
                    assert one.signals.keys() == other.signals.keys()
                if route is Route.LEXICAL:
                    assert one.passage_ids == other.passage_ids
                for at, passage_id in enumerate(one.passage_ids):
                    assert one.passages[at] == anew.passage(passage_id)


@given(first=corpora, then=st.lists(corpora, min_size=1, max_size=3))
@settings(max_examples=8, deadline=None)
def test_updates_equal_building_anew(first: dict[str, str], then: list[dict[str, str]]) -> None:
    retriever = build(first)
    for corpus in then:
        retriever.update(passages_of(corpus))
    assert_same_answers(retriever, build(then[-1]))


def test_saved_updates_equal_building_anew(tmp_path: Path) -> None:
    """Each is saved, and followed by a reader; the last into another folder too."""
    chance = random.Random(0)

    def some(n: int) -> dict[str, str]:
        return {
            f"p{chance.randrange(60):02}": " ".join(chance.choices(WORDS, k=chance.randint(1, 9)))
            for _ in range(n)
        }

    now = some(60)
    folder = tmp_path / "index"
    build(now).save(folder)
    writer, reader = load(folder), load(folder)
    for _ in range(3):
        now = {**dict(chance.sample(sorted(now.items()), len(now) - 3)), **some(6)}
        writer.update(passages_of(now))
        writer.save(folder)
        assert reader.reload()
        assert_same_answers(reader, build(now))
    writer.save(tmp_path / "other")
    assert_same_answers(load(tmp_path / "other"), build(now))


def test_update_keeps_codes_above_limit() -> None:
    corpus = {f"p{n:04}": f"word{n} word{n % 40} sun" for n in range(1100)}
    retriever = HybridRetriever.build(
        passages_of(corpus), embedder=WordHashEmbedder(), exact_limit=1
    ).on_route(Route.DENSE)
    best = retriever.retrieve("word7 sun", depth=20).passage_ids
    kept = {each: text for each, text in corpus.items() if each not in best}
    retriever.update(passages_of({**kept, "new": "word7 sun"}))
    assert retriever.generation.dense.codes is not None
    ranking = retriever.retrieve("word7 sun", depth=20)
    assert len(ranking) == 20
    assert not set(ranking.passage_ids) & set(best)
    assert ranking.passage_ids[0] == "new"


class TestUpdate:
    @pytest.fixture
    def embedder(self) -> CountedEmbedder:
        return CountedEmbedder()

    @pytest.fixture
    def retriever(self, embedder: CountedEmbedder) -> HybridRetriever:
        corpus = {"a": "red fox", "b": "sea", "c": "sun"}
        retriever = HybridRetriever.build(passages_of(corpus), embedder=embedder)
        embedder.encoded.clear()
        return retriever

    @pytest.mark.parametrize(
        ("given", "changes", "encoded"),
        [
            (
                passages_of({"a": "red fox", "b": "the sea", "d": "dog"}),
                Changes(added=1, changed=1, deleted=1, unchanged=1, encoded=2),
                ["dog", "the sea"],
            ),
            (
                [Passage("a", "red fox", metadata={"first": "x"}), *passages_of({"b": "sea"})],
                Changes(changed=1, unchanged=1, deleted=1),
                [],
            ),
            (passages_of({"c": "sun", "b": "sea", "a": "red fox"}), Changes(unchanged=3), []),
        ],
        ids=["other texts", "other metadata", "nothing new"],
    )
    def test_only_new_texts_are_encoded(
        self,
        given: list[Passage],
        changes: Changes,
        encoded: list[str],
        retriever: HybridRetriever,
        embedder: CountedEmbedder,
    ) -> None:
        before = retriever.generation
        assert retriever.update(given) == changes
        assert sorted(embedder.encoded) == encoded
        kept = sorted(given, key=lambda each: each.passage_id)
        assert list(retriever.stored_passages()) == kept
        assert (retriever.generation is before) == (changes == Changes(unchanged=3))
        assert_same_answers(retriever, HybridRetriever.build(given, embedder=CountedEmbedder()))

    @pytest.mark.parametrize(
        ("passages", "said"),
        [
            ([], "nothing to search"),
            ([Passage("x", "text", metadata={"when": object()})], "metadata of passage 'x'"),
        ],
    )
    def test_what_is_no_corpus_changes_nothing(
        self, retriever: HybridRetriever, passages: list[Passage], said: str
    ) -> None:
        before = retriever.generation
        with pytest.raises(DataError, match=said):
            retriever.update(passages)
        assert retriever.generation is before

    def test_report_is_of_what_exists(self, retriever: HybridRetriever) -> None:
        own = passages_of({"a": "red fox", "b": "sea", "c": "sun"})
        retriever.update([*own, Passage("j", "東京" * 100)])
        assert retriever.report.indexed == 4
        assert retriever.report.unhandled_letters > 0.5
        retriever.update(own)
        assert retriever.report.unhandled_letters == 0.0
        assert retriever.report.script_warning is None

    @pytest.mark.parametrize(
        "settings", [{"lexical": "rank-bm25"}, {"signals": "none"}, {"analyser": "de"}]
    )
    def test_index_stays_what_it_was(self, settings: dict[str, Any]) -> None:
        now = {"a": "dog", "c": "sun", "d": "red"}
        retriever = build({"a": "red fox", "b": "sea", "c": "sun"}, **settings)
        retriever.update(passages_of(now))
        assert_same_answers(retriever, build(now, **settings))


# Of writers that are killed, tests/chaos and test_concurrent_saves.py.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build({f"p{n}": f"red fox number{n}" for n in range(9)}).save(tmp_path / "index")
    return tmp_path / "index"


def test_generation_in_use_is_never_written(folder: Path) -> None:
    retriever = load(folder)
    (generation,) = folder.glob("generation-*")
    held = {file: file.open("rb") for file in generation.iterdir()}
    before = {file: open_file.read() for file, open_file in held.items()}
    retriever.update(passages_of({"new": "sea"}))
    retriever.save(folder)
    assert not generation.exists()
    for file, open_file in held.items():
        open_file.seek(0)
        assert open_file.read() == before[file]
        open_file.close()


def test_follower_reads_its_filters_fields(folder: Path) -> None:
    writer, reader = load(folder), load(folder)
    reader.warm_up(filter_fields=["first"])
    writer.update(passages_of({"new": "sea"}))
    writer.save(folder)
    assert reader.reload()
    assert reader.generation.passages.metadata_rows.fields == ("first",)
    assert reader.retrieve("sea", where=Where(first="sea")).passage_ids == ("new",)


def test_readers_see_one_generation_each(folder: Path) -> None:
    """Of each pair of passages that is added together, both are there or neither."""
    writer, reader = load(folder), load(folder)
    done = threading.Event()

    def write() -> None:
        corpus: dict[str, str] = {}
        for n in range(6):
            corpus |= {f"x{n}": f"pair number{n}", f"y{n}": f"pair number{n}"}
            writer.update(passages_of(corpus))
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
    assert seen == 6
